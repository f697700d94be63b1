"""What the doctor finds on this machine: versions, GPUs, files that `execute` would miss."""

from __future__ import annotations

import importlib.metadata
import json
import tomllib
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from packaging.requirements import Requirement

from streamrl.cli.doctor import examine
from streamrl.doctor import files
from streamrl.executor.checkup import installed, readiness, run_paths
from streamrl.executor.launchers.placement import PlacedRoles
from streamrl.executor.launchers.role_configs import weights_room
from streamrl.executor.verifier import landlock, seccomp
from streamrl.executor.verifier.scorers import make_scorer
from streamrl.hardware.hugging_face import INDEX
from streamrl.runfile.backend_choice import (
    ENGINES,
    TRAINING_BACKENDS,
    engine_named,
    training_backend_named,
)
from streamrl.runfile.config import ExecuteConfig
from streamrl.runfile.files import make_run
from streamrl.runfile.findings import changed
from streamrl.runfile.roles_config import RewardConfig
from streamrl.runfile.scorer_choice import SCORERS
from tests.patients import NOWHERE, bad, full_run, local_table
from tests.verifying import score

ROOT = Path(__file__).parent.parent


def test_versions_outside_their_range_are_found_without_an_import(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not bad(list(installed.find(full_run())))
    versions = {"torch": "1.0", "transformers": None}

    def version(name: str) -> str | None:
        return versions.get(name, importlib.metadata.version(name))

    monkeypatch.setattr(installed, "installed_version", version)
    texts = [f.text for f in installed.find(full_run()) if f.level == "warning"]
    assert any("torch>=" in text and "1.0 is installed" in text for text in texts)
    assert any("transformers" in text and "not installed" in text for text in texts)


def test_ranges_are_those_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {Requirement(each).name for each in project["optional-dependencies"]["executor"]}
    run = full_run()
    found = installed.requirements(PlacedRoles.of(run), run.sync.mode)
    assert wanted <= {each.name for each in found}


def test_every_back_end_and_launcher_has_its_packages() -> None:
    assert set(get_args(get_type_hints(ExecuteConfig)["launcher"])) <= set(installed.EXTRA_OF)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    devices = ("cpu", "cuda")
    extras = {engine_named(name).extra_of(on) for name in ENGINES.own for on in devices}
    extras |= {training_backend_named(name).extra for name in TRAINING_BACKENDS.own}
    assert extras <= set(project["optional-dependencies"])


def test_a_run_that_can_be_executed_here_has_no_errors(tmp_path: Path) -> None:
    assert examine(local_table(tmp_path), NOWHERE).count("error") == 0


@pytest.mark.parametrize(
    ("changes", "name", "fix"),
    [
        ({"rollout.migration_transfer": "kv"}, "back-end", "rollout.migration_transfer=recompute"),
        (
            {
                "rollout.others": [
                    {"pool": "here", "replicas": 1, "disaggregation_mode": "prefill"}
                ],
                "cluster.pools.here.gpus_per_node": 3,
            },
            "back-end",
            "rollout.others=",
        ),
        ({"model.dtype": "float16"}, "back-end", "model.dtype=bfloat16"),
        ({"execute.device": "cuda:7"}, "gpus", "execute.device=cpu"),
        ({"verifier.scorer": "reasoning-gym"}, "prompts", "add the field"),
        ({"verifier.scorer": "none"}, "contradiction", "verifier.scorer=exact"),
        ({"workload.prompts": "/nowhere.jsonl"}, "prompts", "prompt"),
        ({"workload.max_prompt_tokens": 3}, "prompts", "workload.max_prompt_tokens"),
        ({"evaluation": {"prompts": "/nowhere.jsonl"}}, "held-out", "evaluation.prompts"),
        (
            {"trainer.data_parallel": 2, "cluster.pools.here.gpus_per_node": 3},
            "back-end",
            "trainer.zero=0",
        ),
        ({"rollout.max_tokens": 8192}, "positions", "rollout.max_tokens=2048"),
        ({"workload.lengths.source": "no.csv"}, "lengths", "file"),
        ({"costs.profile": "no.toml"}, "costs.profile", "streamrl profile"),
    ],
)
def test_what_execute_would_refuse_is_found_beforehand(
    changes: dict[str, Any], name: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "visible_gpus", lambda: 0)
    sound = bad(examine(local_table(tmp_path), NOWHERE).findings)
    assert name not in sound
    found = bad(examine(local_table(tmp_path, changes), NOWHERE).findings)
    assert fix in found[name].fix


@pytest.mark.parametrize(("device", "level"), [("auto", "warning"), ("cuda", "error")])
def test_missing_gpus_are_an_error_where_the_run_file_insists(
    device: str, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "visible_gpus", lambda: 1)
    pools = {"here": {"gpu": "h800", "gpus_per_node": 2}}
    table = local_table(tmp_path, {"cluster.pools": pools, "execute.device": device})
    run = make_run(table)
    assert bad(list(readiness.find(run)))["gpus"].level == level
    monkeypatch.setattr(readiness, "visible_gpus", lambda: 2)
    assert "gpus" not in bad(list(readiness.find(run)))


@pytest.mark.parametrize(
    ("free", "tensor_parallel", "level"),
    [(2**30, 2, ""), (1000, 1, "warning"), (64 * 2**20, 2, "error")],
)
def test_a_container_with_little_shared_memory_is_found(
    free: int, tensor_parallel: int, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "free_shared_memory", lambda: free)
    changes = {"rollout.tensor_parallel": tensor_parallel, "rollout.backend": "vllm"}
    changes |= {"cluster.pools.here.gpus_per_node": 4}
    found = bad(list(readiness.find(make_run(local_table(tmp_path, changes)))))
    assert (found["shared-memory"].level if level else "") == level
    assert not level or "--shm-size" in found["shared-memory"].fix


def test_each_replica_that_receives_weights_itself_needs_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"rollout.replicas": 3, "cluster.pools.here.gpus_per_node": 4}
    shared, received = (
        make_run(local_table(tmp_path, {**changes, **more}))
        for more in ({}, {"sync.wire": "broadcast"})
    )
    need = weights_room(shared.model, serves_adapters=False)
    monkeypatch.setattr(readiness, "free_shared_memory", lambda: 3 * need - 1)
    assert "shared-memory" not in bad(list(readiness.find(shared)))
    found = bad(list(readiness.find(received)))["shared-memory"]
    assert found.level == "warning" and "in 3 replicas" in found.text
    monkeypatch.setattr(readiness, "free_shared_memory", lambda: 3 * need)
    assert "shared-memory" not in bad(list(readiness.find(received)))


@pytest.mark.parametrize("scorer", ["exact", "math-verify", "reasoning-gym"])
def test_a_machine_without_a_sandbox_is_a_warning_where_answers_are_evaluated(
    scorer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(local_table(tmp_path, {"verifier.scorer": scorer}))
    monkeypatch.setattr(seccomp, "is_available", lambda: True)
    monkeypatch.setattr(landlock, "is_available", lambda: True)
    assert "verifier" not in bad(list(readiness.find(run)))
    for layer in (seccomp, landlock):
        with monkeypatch.context() as patch:
            patch.setattr(layer, "is_available", lambda: False)
            found = bad(list(readiness.find(run)))
        if scorer == "exact":
            assert "verifier" not in found
        else:
            assert found["verifier"].level == "warning" and "Linux" in found["verifier"].fix


@pytest.mark.parametrize("missing", ["tokenizer.json", "model.safetensors", "config.json"])
def test_a_model_directory_that_lacks_a_file_is_an_error(missing: str, tmp_path: Path) -> None:
    table = local_table(tmp_path)
    (tmp_path / "model" / missing).unlink()
    report = examine(table, NOWHERE)
    wrong = [f for f in report.findings if f.level == "error"]
    assert any(missing.partition(".")[2] in finding.text for finding in wrong)


def test_a_shard_that_the_index_names_must_be_there(tmp_path: Path) -> None:
    table = local_table(tmp_path)
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model" / INDEX).write_text(json.dumps(index))
    run = make_run(table)
    found = files.find(run.model, run.workload, run.costs, run.rollout.max_tokens)
    assert "lacks model-2.safetensors" in bad(list(found))["model"].text


def test_an_export_that_execute_would_refuse_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    table = local_table(tmp_path, {"execute.checkpoints.export": str(tmp_path / "full")})
    finding = bad(list(run_paths.find(make_run(table))))["export"]
    assert finding.level == "error" and "is not empty" in finding.text
    table = local_table(tmp_path, {"execute.checkpoints.export": str(tmp_path / "new" / "model")})
    assert "export" not in bad(list(run_paths.find(make_run(table))))


def test_a_run_directory_that_is_taken_says_how_to_go_on(tmp_path: Path) -> None:
    run = make_run(local_table(tmp_path))
    assert "output" not in bad(list(run_paths.find(run)))
    checkpoint = tmp_path / "run" / "checkpoints" / "v000007"
    checkpoint.mkdir(parents=True)
    (tmp_path / "run" / "trace.jsonl").touch()
    (checkpoint / "position.json").write_text('{"version": 7, "groups_done": 14}')
    finding = bad(list(run_paths.find(run)))["output"]
    assert finding.level == "warning" and "step 7" in finding.text and "--resume" in finding.fix
    assert "output" not in bad(list(run_paths.find(changed(run, finding.changes))))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"prompt": "1+1="}, "no 'answer'"),
        ({"prompt": "1+1=" * 2000, "answer": "2"}, "workload.max_prompt_tokens"),
        ({"prompt": "1+1=", "answer": "2"}, ""),
    ],
)
def test_doctor_reads_held_out_prompts_as_execute_does(
    tmp_path: Path, line: dict[str, str], says: str
) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(json.dumps(line) + "\n")
    table = local_table(tmp_path, {"evaluation": {"prompts": str(held_out)}})
    found = {each.name: each for each in run_paths.find(make_run(table))}["held-out"]
    assert (found.level == "error") == bool(says) and says in found.text


def test_the_scorer_of_evaluations_must_score_a_share_of_the_runs_own_prompts(
    tmp_path: Path,
) -> None:
    own = {"share": 0.4, "scorer": "reasoning-gym"}
    table = local_table(tmp_path, {"evaluation": own})
    finding = bad(list(run_paths.find(make_run(table))))["held-out"]
    assert "have no 'task'" in finding.text and finding.fix == run_paths.AS_IT_SAYS


def test_an_environment_that_gives_the_reward_needs_no_scorer(tmp_path: Path) -> None:
    table = local_table(tmp_path, {"verifier.scorer": None})
    table.get("verifier", {}).pop("scorer", None)
    assert "execute needs both" in bad(list(run_paths.find(make_run(table))))["prompts"].text
    table["environment"] = {"max_turns": 2, "max_context": 4096, "implementation": "game:Game"}
    table["evaluation"] = {"prompts": table["workload"]["prompts"]}
    assert not {"prompts", "held-out"} & bad(list(run_paths.find(make_run(table)))).keys()


def test_the_fields_of_each_scorer_are_those_that_it_reads() -> None:
    plain = {name for name, choice in SCORERS.items() if not choice.needs}
    for name in sorted(plain):
        needed = make_scorer(RewardConfig(scorer=name)).fields
        record = {fields[-1]: "2" for fields in needed}
        if "task" in record:
            record["task"] = "chain_sum"
        score(name, "2", record)
        for fields in needed:
            with pytest.raises(KeyError):
                score(name, "2", {key: v for key, v in record.items() if key not in fields})
