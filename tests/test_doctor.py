"""The doctor: each finding with a run that has it and one that has not, and fixes that mend it."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from streamrl.cli.doctor import examine
from streamrl.doctor.diagnosis import diagnose
from streamrl.doctor.diagnosis import examine as examine_run
from streamrl.hardware.resolved import resolve
from streamrl.hardware.side_memory import memory_of
from streamrl.runfile.checks import check_run
from streamrl.runfile.config import Run
from streamrl.runfile.files import load_run, make_run
from streamrl.runfile.findings import changed
from streamrl.workload.replica_batch import mean_lengths
from tests.command_line import streamrl
from tests.patients import NOWHERE, bad, doctor, full_run, full_table, local_table
from tests.tiny_model import save_tiny_reward_model

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.toml"))


def test_a_run_with_nothing_wrong_has_no_errors_and_no_warnings() -> None:
    report = doctor({})
    assert bad(report.findings) == {} and not report.not_examined and not report.assumed
    topics = {finding.topic for finding in report.findings}
    assert topics == {"memory", "divisibility", "batch", "staleness", "link", "versions", "files"}


# What a run file says by itself -------------------------------------------------------------------

SELF_EVIDENT: list[tuple[dict[str, Any], str, str]] = [
    ({"model.name": "qwen2.5-72b", "trainer.pipeline_parallel": 1}, "rollout-memory", "error"),
    ({"model.name": "qwen2.5-32b", "rollout.replicas": 1}, "trainer-memory", "error"),
    (
        {
            "trainer.tensor_parallel": 2,
            "cluster.pools.near.gpus_per_node": 2,
            "trainer.micro_batch": 8,
            "trainer.max_tokens_per_pass": 40000,
            "trainer.logits": "fused",
        },
        "trainer-tight",
        "warning",
    ),
    (
        {"trainer.tensor_parallel": 8, "cluster.pools.near.gpus_per_node": 8},
        "trainer-heads",
        "error",
    ),
    (
        {
            "rollout.tensor_parallel": 8,
            "rollout.replicas": 1,
            "cluster.pools.far.gpus_per_node": 8,
            "model.name": "qwen2.5-7b",
        },
        "rollout-heads",
        "error",
    ),
    (
        {
            "trainer.pipeline_parallel": 3,
            "trainer.tensor_parallel": 1,
            "cluster.pools.near.gpus_per_node": 3,
        },
        "trainer-layers",
        "warning",
    ),
    (
        {"rollout.tensor_parallel": 2, "rollout.expert_parallel": 2, "rollout.replicas": 1},
        "rollout-experts",
        "error",
    ),
    ({"trainer.expert_parallel": 2}, "trainer-experts", "error"),
    ({"rollout.replicas": 1}, "pool-far", "warning"),
    ({"cluster.pools.near.nodes": 3}, "pool-near", "warning"),
    (
        {
            "trainer.data_parallel": 3,
            "cluster.pools.near.nodes": 3,
            "algorithm.prompts_per_step": 4,
        },
        "uneven-ranks",
        "warning",
    ),
    ({"trainer.micro_batch": 3}, "partial-fill", "warning"),
    (
        {"trainer.pipeline_parallel": 4, "trainer.tensor_parallel": 1, "trainer.micro_batch": 4},
        "pipeline-bubble",
        "warning",
    ),
    (
        {"rollout.replicas": 12, "cluster.pools.far.nodes": 6, "policies.max_staleness": 0},
        "idle-replicas",
        "warning",
    ),
    ({"policies.consumption": "greedy"}, "unbounded-staleness", "warning"),
    ({"algorithm.correction": "none"}, "uncorrected", "warning"),
    ({"policies.max_staleness": 3}, "all-at-once", "warning"),
    ({"policies.sync_every": 3}, "all-at-once", "warning"),
    ({"policies.left_over": "keep"}, "nothing-left-over", "warning"),
    (
        {
            "policies.system": "stream-sync",
            "policies.consumption": "greedy",
            "policies.over_staleness": "drop",
            "policies.oversampling": 1.5,
            "policies.left_over": "keep",
        },
        "kept-in-vain",
        "warning",
    ),
]


WITHOUT_CHANGES = ("rollout-memory", "pipeline-bubble")
"""Findings above that no key of their run file mends: the fix says what else would."""


@pytest.mark.parametrize(
    ("changes", "name", "level"), SELF_EVIDENT, ids=lambda value: str(value)[:40]
)
def test_a_run_has_its_finding_with_the_numbers(
    changes: dict[str, Any], name: str, level: str
) -> None:
    found = bad(diagnose(full_run(changes)))
    assert name not in bad(diagnose(full_run()))
    assert found[name].level == level
    assert any(character.isdigit() for character in found[name].text)


@pytest.mark.parametrize(
    ("changes", "name", "level"), SELF_EVIDENT, ids=lambda value: str(value)[:40]
)
def test_a_fix_that_names_keys_mends_its_finding_and_breaks_nothing(
    changes: dict[str, Any], name: str, level: str
) -> None:
    run = full_run(changes)
    finding = bad(examine_run(run))[name]
    assert finding.fix
    if not finding.changes:
        assert name in WITHOUT_CHANGES
        return
    mended = changed(run, finding.changes)
    check_run(mended)
    after = bad(diagnose(mended))
    assert name not in after
    errors = {name for name, each in after.items() if each.level == "error"}
    assert errors <= set(bad(diagnose(run)))


@pytest.fixture
def few_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try few fixes of what none of them mends."""
    monkeypatch.setattr("streamrl.runfile.findings.MOST_TRIALS", 20)


def test_memory_is_told_by_part_and_adds_up_also_where_it_does_not_fit(few_trials: None) -> None:
    rollout, trainer = doctor({"model.name": "qwen2.5-72b"}).memory
    assert rollout.parts["weights"] == pytest.approx(145.4e9, rel=1e-3)
    assert rollout.need > rollout.usable == pytest.approx(0.9 * rollout.capacity)
    assert set(trainer.parts) == {"weights", "gradients", "optimizer", "activations", "logits"}
    assert trainer.need == pytest.approx(sum(trainer.parts.values()))


def test_what_does_not_fit_is_simulated_as_mended() -> None:
    report = doctor({"model.name": "qwen2.5-32b", "cluster.pools.near.nodes": 8})
    assert bad(report.findings)["trainer-memory"].level == "error"
    assert "trainer." in report.assumed
    link_use = next(finding for finding in report.findings if finding.topic == "link")
    assert "% of a rehearsed step" in link_use.text


def test_a_mean_rollout_is_as_long_as_its_lengths_say(tmp_path: Path) -> None:
    source = tmp_path / "lengths.csv"
    source.write_text("output_tokens\n100\n300\n900\n")
    lengths = {"kind": "empirical", "source": str(source), "prompt_tokens": 40}
    every = {"algorithm.group_size": 3, "rollout.max_tokens": 500, "workload.lengths": lengths}
    mean = mean_lengths(full_run(every))
    assert mean is not None and mean.prompt == 40
    assert mean.output == pytest.approx((100 + 300 + 500) / 3)
    assert mean.context == pytest.approx(40 + (100**2 + 300**2 + 500**2) / (100 + 300 + 500) / 2)
    halves = mean_lengths(full_run({**every, "workload.lengths": {**lengths, "scale": 0.5}}))
    assert halves is not None and halves.output == pytest.approx((50 + 150 + 450) / 3)


def test_idle_gpus_are_told_in_dollars_an_hour() -> None:
    finding = bad(diagnose(full_run({"rollout.replicas": 1, "cluster.pools.far.price": 2.5})))[
        "pool-far"
    ]
    assert "1 are idle and cost $2.50 an hour" in finding.text


def followed(second: dict[str, Any], **changes: Any) -> Run:
    """Return the full run with a trainer that follows on a pool of eight GPUs."""
    table = full_table(changes)
    table["cluster"]["pools"]["aside"] = {"gpu": "h800"}
    micro = {"micro_batch": 1, "max_tokens_per_pass": 4096}
    table["trainer"] = [table["trainer"], {"name": "second", "pool": "aside", **micro, **second}]
    return make_run(table)


@pytest.mark.parametrize(
    ("second", "name", "words", "fix"),
    [
        ({"data_parallel": 2}, "memory", "second: 98.3 of 85 GB a GPU", "set trainer.1."),
        ({"tensor_parallel": 4, "data_parallel": 2, "pipeline_parallel": 1}, None, "", ""),
        (
            {"tensor_parallel": 2, "data_parallel": 3},
            "uneven-ranks",
            "second: 4 rollouts a step do not divide by trainer.1.data_parallel=3",
            "set trainer.1.algorithm.prompts_per_step=",
        ),
        (
            {"tensor_parallel": 2, "pipeline_parallel": 3},
            "layers",
            "second: trainer.1.pipeline_parallel=3 does not divide the 28 layers",
            "set trainer.1.",
        ),
        ({"tensor_parallel": 8}, "heads", "second: trainer.1.tensor_parallel=8 must divide", "set"),
    ],
)
def test_a_trainer_that_follows_has_its_findings_under_its_own_keys(
    second: dict[str, Any], name: str | None, words: str, fix: str
) -> None:
    run = followed(second)
    found = bad(examine_run(run))
    mine = {key for key in found if key.startswith("trainer")}
    if name is None:
        assert mine == set()
    else:
        finding = found[f"trainer.1-{name}"]
        assert finding.text.startswith(words) and finding.fix.startswith(fix)
        after = changed(run, finding.changes)
        check_run(after)
        assert finding.name not in bad(diagnose(after))


def test_memory_names_every_trainer_and_idle_gpus_those_that_follow() -> None:
    run = followed({"tensor_parallel": 2})
    sides = {side.side: side.num_gpus for side in memory_of(resolve(run))}
    assert sides == {"rollout": 2, "trainer": 4, "second": 2}
    finding = bad(diagnose(run))["pool-aside"]
    assert "2 of 8 GPUs used" in finding.text
    judged = followed(
        {"tensor_parallel": 4}, verifier={"pool": "aside", "workers": 4, "gpus_per_worker": 1}
    )
    assert bad(diagnose(judged)) == {}


def test_pools_that_plan_is_offered_are_not_called_idle() -> None:
    assert bad(diagnose(full_run({"cluster.pools.near.nodes": 3, "plan": {"unit": 1}}))) == {}


# Run files that `load_run` refuses ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        ({"rollout.replica": 3}, "rename rollout.replica to rollout.replicas"),
        ({"algorithm.steps": "100"}, "set algorithm.steps=100"),
        ({"policies.system": "disagregated"}, "set policies.system=disaggregated"),
        ({"rollout.tensor_parallel": 3}, "set rollout.tensor_parallel=1"),
        ({"rollout.replicas": 9}, "set rollout.replicas=2"),
        ({"rollout.pool": "moon"}, "set rollout.pool=far"),
        ({"model.name": "qwen2.5-8b"}, "set model.name=qwen2.5-7b"),
        ({"seed": -1}, "set seed=0"),
        ({"sync.mode": "delta", "model.dtype": "float32"}, "set sync.mode=full"),
    ],
)
def test_a_run_file_that_is_refused_is_examined_as_mended(
    changes: dict[str, Any], fix: str
) -> None:
    report = doctor(changes)
    assert fix in [finding.fix for finding in report.findings if finding.topic == "run file"]
    assert report.assumed and {"memory", "link"} <= {finding.topic for finding in report.findings}


def test_every_wrong_key_is_found_at_once() -> None:
    report = doctor(
        {"rollout.max_runing": 8, "algorithm.steps": "3", "rollout.tensor_parallel": 3, "seed": -1}
    )
    assert len([finding for finding in report.findings if finding.topic == "run file"]) >= 4


def test_a_table_that_no_change_makes_a_run_is_one_error_with_nothing_examined() -> None:
    report = examine({"cluster": 3}, NOWHERE)
    assert report.count("error") and "memory" in report.not_examined


def test_fixes_of_errors_go_together() -> None:
    table = full_table(
        {"model.name": "qwen2.5-32b", "rollout.replicas": 1, "cluster.pools.near.nodes": 8}
    )
    report = examine(table, NOWHERE)
    run = make_run(table)
    for finding in report.findings:
        if finding.level == "error":
            run = changed(run, finding.changes)
    check_run(run)
    assert [finding for finding in diagnose(run) if finding.level == "error"] == []


# The command --------------------------------------------------------------------------------------


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_no_example_has_an_error(example: Path, tmp_path: Path) -> None:
    table = tomllib.loads(example.read_text())
    if "path" in table["model"]:  # what it names is made by a script: anything stands in for it
        here = local_table(tmp_path)
        table["model"]["path"] = here["model"]["path"]
        table["workload"]["prompts"] = here["workload"]["prompts"]
        verifier = table.setdefault("verifier", {})
        if "reward" in verifier:
            judge = save_tiny_reward_model(tmp_path / "judge", ["<pad>", "<eos>"])
            of_model = {"scorer": "reward-model", "model": str(judge)}
            kinds = [each["scorer"] for each in verifier["reward"]]
            stand_ins = {"reward-model": of_model}
            verifier["reward"] = [stand_ins.get(k, {"scorer": "exact"}) for k in kinds]
        elif "implementation" not in table.get("environment", {}):  # else that gives rewards
            verifier["scorer"] = "exact"
        table["workload"].pop("fields", None)
        table["workload"]["lengths"] = here["workload"]["lengths"]
    report = examine(table, example)
    assert [finding for finding in report.findings if finding.level == "error"] == []


def test_a_model_directory_without_its_config_is_one_error_with_its_remedy(tmp_path: Path) -> None:
    table = local_table(tmp_path)
    (tmp_path / "model").mkdir(exist_ok=True)
    (tmp_path / "model" / "config.json").unlink(missing_ok=True)
    table["model"] = {"path": str(tmp_path / "model")}
    told = [each for each in examine(table, NOWHERE).findings if "config.json" in each.text]
    assert [each.fix[:26] for each in told] == ["save a Hugging Face model "], told


def test_exit_status_is_0_without_errors_1_with_errors_and_2_where_nothing_can_be_read(
    tmp_path: Path,
) -> None:
    example = ROOT / "examples" / "h20-h800.toml"
    degrees = ["--set=trainer.tensor_parallel=8", "--set=trainer.data_parallel=2"]
    wrong = streamrl("doctor", example, *degrees, "--json")
    assert wrong.returncode == 1 and wrong.stderr == ""
    figures = json.loads(wrong.stdout)
    assert figures["errors"] == 1 and figures["memory"][1]["parts"]["optimizer"] > 0
    heads = next(each for each in figures["findings"] if each["name"] == "trainer-heads")
    mended = [f"--set={key}={value}" for key, value in heads["changes"].items()]
    sound = streamrl("doctor", example, *mended)
    assert sound.returncode == 0 and "no errors" in sound.stdout and "✓" in sound.stdout
    assert "next: streamrl simulate" in sound.stdout
    broken = tmp_path / "broken.toml"
    broken.write_text("[model\n")
    done = streamrl("doctor", broken)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and done.stdout == ""


def test_heads_that_are_kept_on_several_gpus_are_told_and_nothing_is_wrong_with_it() -> None:
    changes = {"rollout.tensor_parallel": 4, "rollout.replicas": 1, "model.name": "qwen2.5-1.5b"}
    found = {
        f.name: f for f in diagnose(full_run({**changes, "cluster.pools.far.gpus_per_node": 4}))
    }
    assert found["rollout-kv-heads"].level == "ok" and "on 2 GPUs" in found["rollout-kv-heads"].text


@pytest.mark.parametrize(
    ("tokens", "level", "words"),
    [(20_000, None, ""), (17_000, "ok", "4% of the outputs"), (4000, "warning", "41% of the out")],
)
def test_outputs_that_would_be_longer_than_they_may_are_told_of(
    tokens: int, level: str | None, words: str
) -> None:
    run = load_run(ROOT / "examples/streamrl-32b.toml", [f"rollout.max_tokens={tokens}"])
    found = [finding for finding in diagnose(run) if finding.name == "cut-off"]
    assert [finding.level for finding in found] == ([] if level is None else [level])
    assert all(words in f.text and f"max_tokens={tokens:,}" in f.text for f in found)
