"""Keys of an algorithm that nothing reads: each is refused in a line, of whichever trainer it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from streamrl.doctor.diagnosis import examine
from streamrl.doctor.staleness import find_idle_clips
from streamrl.runfile.algorithm_config import AlgorithmConfig
from streamrl.runfile.algorithms import ALGORITHMS, algorithm_named
from streamrl.runfile.errors import RunError
from streamrl.runfile.field_checks import READ_BY_CORRECTION, find_unused
from streamrl.runfile.files import change_run, make_run
from streamrl.runfile.roles_config import AlgorithmChanges
from tests.command_line import streamrl
from tests.patients import bad
from tests.runs import make_table, small_run


def refusal(*trainers: dict[str, Any], **algorithm: Any) -> str:
    """Return the line that a run file gets of an algorithm, and of those of trainers that follow; none if it is taken."""
    table = make_table({f"algorithm.{key}": value for key, value in algorithm.items()})
    if trainers:
        own = [
            {**table["trainer"], "name": f"t{n}", "algorithm": t} for n, t in enumerate(trainers)
        ]
        table["trainer"] = [table["trainer"], *own]
        table["cluster"]["pools"]["near"]["nodes"] = 1 + len(own)
    try:
        make_run(table)
    except RunError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("algorithm", "key", "chosen"),
    [
        ({"clip": 0.1}, "clip", "correction 'token-tis' (the default)"),
        ({"clip": 0.2}, "clip", "correction 'token-tis' (the default)"),
        ({"clip_high": 0.28, "correction": "token-tis"}, "clip_high", "correction 'token-tis'"),
        ({"clip": 0.1, "correction": "m2po"}, "clip", "correction 'm2po'"),
        ({"clip": 0.1, "name": "raft"}, "clip", "name 'raft', which has no correction"),
        ({"correction_cap": 3.0, "correction": "none"}, "correction_cap", "correction 'none'"),
        ({"second_moment": 0.04}, "second_moment", "correction 'token-tis' (the default)"),
        ({"beta": 0.1}, "beta", "name 'grpo'"),
        ({"gae_lambda": 0.9}, "gae_lambda", "name 'grpo'"),
        ({"critic_learning_rate": 1e-5, "name": "rloo"}, "critic_learning_rate", "name 'rloo'"),
        ({"loss_mean": "rollout", "name": "dpo"}, "loss_mean", "name 'dpo'"),
    ],
    ids=str,
)
def test_a_key_that_says_nothing_to_what_is_chosen_is_refused(
    algorithm: dict[str, Any], key: str, chosen: str
) -> None:
    line = f"algorithm.{key} has no effect with {chosen}, got {algorithm[key]!r}"
    assert refusal(**algorithm).startswith(line)
    follower = {"correction": "token-tis", **algorithm}
    if follower.get("name") in ("raft", "dpo"):
        del follower["correction"]
    found = refusal(follower)
    assert found.startswith(f"trainer.1.{line.replace(' (the default)', '')}")


@pytest.mark.parametrize(
    "algorithm",
    [
        *({"correction": each, "clip_high": 0.28} for each in READ_BY_CORRECTION["clip_high"]),
        *(
            {"correction": each, "correction_cap": 3.0}
            for each in READ_BY_CORRECTION["correction_cap"]
        ),
        {"correction": "m2po", "second_moment": 0.1},
        {"name": "dpo", "beta": 0.2},
        {"name": "ppo", "gae_lambda": 0.9, "critic_learning_rate": 1e-5, "loss_mean": "rollout"},
    ],
    ids=str,
)
def test_a_key_that_is_read_is_taken(algorithm: dict[str, Any]) -> None:
    assert refusal(**algorithm) == ""
    assert refusal(algorithm) == ""


def test_what_a_trainer_that_follows_reads_may_stand_in_the_algorithm_of_all() -> None:
    assert refusal({"name": "ppo"}, gae_lambda=0.9) == ""
    assert "algorithm.gae_lambda" in refusal({"name": "ppo", "gae_lambda": 1.0}, gae_lambda=0.9)
    assert "algorithm.gae_lambda" in refusal({"name": "rloo"}, gae_lambda=0.9)
    assert refusal({"correction": "none"}, clip_high=0.28) == ""
    assert refusal({"clip_high": 0.28}, correction="none") == ""


def test_keys_that_only_some_read_are_keys_that_a_trainer_that_follows_has_too() -> None:
    read_by_name = {key for name in ALGORITHMS.own for key in algorithm_named(name).reads}
    for key in (*read_by_name, *READ_BY_CORRECTION):
        assert key in AlgorithmConfig.__struct_fields__
        assert key in AlgorithmChanges.__struct_fields__


def test_what_an_older_run_recorded_in_vain_is_left_out_of_it() -> None:
    run = small_run()
    algorithm = msgspec.structs.replace(run.algorithm, clip_high=0.28, beta=0.2)
    recorded = msgspec.structs.replace(run, algorithm=algorithm)
    assert change_run(recorded, ()) == run
    with pytest.raises(RunError, match=r"algorithm\.clip_high has no effect"):
        change_run(recorded, ["algorithm.clip_high=0.3"])


def test_execute_refuses_it_before_anything_is_written(tmp_path: Path) -> None:
    changes = ("algorithm.clip_high=0.28", f"execute.output={tmp_path / 'run'}")
    sets = [word for change in changes for word in ("--set", change)]
    done = streamrl("execute", "examples/quickstart.toml", *sets)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("streamrl: algorithm.clip_high has no effect with correction")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


# Clips that cannot act ----------------------------------------------------------------------------

STALE = {"policies.system": "fully-async", "policies.max_staleness": 1}
FRESH = {"policies.system": "stream-sync"}


@pytest.mark.parametrize(
    ("changes", "is_idle"),
    [
        ({**FRESH, "algorithm.correction": "none"}, True),
        ({**STALE, "algorithm.correction": "none"}, False),
        ({**STALE, "algorithm.correction": "decoupled"}, True),
        ({**STALE, "algorithm.correction": "decoupled", "framework.optimizer_steps": 2}, False),
        ({**FRESH, "algorithm.correction": "gspo", "framework.optimizer_steps": 2}, False),
        ({**STALE, "algorithm.correction": "cispo"}, False),
    ],
    ids=str,
)
def test_a_clip_that_is_set_and_cannot_act_is_told(changes: dict[str, Any], is_idle: bool) -> None:
    assert not list(find_idle_clips(small_run(changes)))
    found = find_idle_clips(small_run({**changes, "algorithm.clip_high": 0.28}))
    assert [finding.text.split(" cannot act")[0] for finding in found] == [
        "algorithm.clip_high=0.28"
    ] * is_idle


@pytest.mark.parametrize(
    ("changes", "correction"),
    [
        ({}, "token-tis"),
        ({"algorithm.clip_high": 0.28}, "decoupled"),
        ({"framework.optimizer_steps": 2}, "decoupled"),
    ],
    ids=str,
)
def test_the_correction_that_doctor_proposes_turns_no_clip_off(
    changes: dict[str, Any], correction: str
) -> None:
    run = small_run({**STALE, "algorithm.correction": "none", **changes})
    assert bad(examine(run))["uncorrected"].changes == {"algorithm.correction": correction}
    assert not list(find_unused(make_table({**changes, "algorithm.correction": correction})))


def test_of_a_trainer_that_follows_only_its_own_clip_is_looked_at() -> None:
    def lines(**own: Any) -> list[str]:
        follower = {"name": "other", "pool": "near", "tensor_parallel": 4, "algorithm": own}
        changes = {"followers": [follower], "cluster.pools.near.nodes": 2}
        run = small_run({**FRESH, "algorithm.correction": "none", **changes})
        return [finding.text for finding in find_idle_clips(run)]

    assert lines() == lines(correction="decoupled") == lines(clip_high=0.28) == []
    (line,) = lines(correction="decoupled", clip_high=0.28)
    assert line.startswith("trainer.1.algorithm.clip_high=0.28 cannot act")
