"""What a reward model costs in simulated time, where that comes from, and what a run file may not say of one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streamrl.doctor.memory import find
from streamrl.engine.messages import Verified, Verify
from streamrl.hardware.measured_profile import MeasuredModel, read_measured, write_measured
from streamrl.hardware.resolved import resolve
from streamrl.hardware.side_memory import memory_of
from streamrl.record.metrics import measure
from streamrl.runfile.config import Run
from streamrl.runfile.files import load_run, make_run, write_run
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.reward_model import ModelRewards, StatedRewards, reward_costs
from streamrl.sim.world import simulate
from tests.measured_profile import (
    ALONE,
    around,
    make_profile,
    measured_run,
    model_directory,
    prefix_time,
)
from tests.runs import checked_world, make_table, of, small_run

MODEL = {"scorer": "reward-model", "model": "hf://nobody/knows"}
POOL: dict[str, Any] = {
    "cluster.pools.third": {"gpu": "a100", "gpus_per_node": 4},
    "verifier.pool": "third",
    "verifier.gpus_per_worker": 1,
}


def costs_of(run: Run) -> StatedRewards | ModelRewards | None:
    return reward_costs(resolve(run).reward, run.costs)


def rewarded(**changes: Any) -> Run:
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    return small_run({**POOL, "verifier.reward": [MODEL], **keys})


# Run files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"verifier__pool": None, "verifier__gpus_per_worker": 0}, r"verifier\.pool is missing"),
        (
            {"verifier__reward": [MODEL, {**MODEL, "name": "b"}]},
            r"verifier\.reward\.1\.scorer .* has room for one",
        ),
        (
            {"verifier__reward": [{"scorer": "reward-model"}]},
            r"verifier\.reward\.0\.model is missing",
        ),
        (
            {"verifier__reward": [{"scorer": "exact", "step_end": ";"}]},
            r"verifier\.reward\.0\.step_end must be .* got ';' with scorer exact",
        ),
        (
            {"verifier__reward": [{**MODEL, "step_end": ""}]},
            r"verifier\.reward\.0\.step_end must be",
        ),
        (
            {"verifier__reward": [{**MODEL, "over_steps": "most"}]},
            r"over_steps must be one of min, mean",
        ),
        (
            {"verifier__max_rollouts_per_call": 0},
            r"max_rollouts_per_call must be at least 1, got 0",
        ),
    ],
)
def test_a_reward_model_that_cannot_be_is_refused_by_its_key(
    changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        rewarded(**changes)


def test_its_directory_is_found_from_the_run_file_and_a_name_of_the_hub_is_none(
    tmp_path: Path,
) -> None:
    rewards = [{**MODEL, "model": "../judge"}]
    table = make_table({**POOL, "verifier.reward": rewards})
    read = make_run(table, tmp_path / "runs")
    assert read.verifier.rewards[0].model == str(tmp_path / "judge")
    write_run(read, tmp_path / "other.toml")
    assert '"judge"' in (tmp_path / "other.toml").read_text()
    assert load_run(tmp_path / "other.toml").verifier == read.verifier
    assert rewarded().verifier.rewards[0].model == MODEL["model"]


# Seconds ------------------------------------------------------------------------------------------


def measured(directory: Path, *, pace: float = 1.0, **changes: Any) -> Run:
    """Return a run with a profile that has calls of a reward model, as long as those of its own prefill."""
    model = model_directory(directory / "model")
    profile = make_profile(model, pace=pace)
    rows = tuple(profile.prefill)
    rewards = MeasuredModel(name="judge", num_parameters=1, digest=profile.model.digest)
    passes = [
        {
            "rollouts": row.rollouts,
            "tokens": row.tokens,
            "seconds": around(ALONE + prefix_time(row.rollouts, row.tokens)),
        }
        for row in rows
    ]
    whole = msgspec.structs.replace(profile, reward_model=rewards, reward=())
    whole = msgspec.convert({**msgspec.to_builtins(whole), "reward": passes}, type(profile))
    write_measured(whole, directory / "profile.toml")
    assert len(read_measured(directory / "profile.toml").reward) == len(rows)
    keys = {
        "cluster": {
            "pools": {"local": {"gpu": "cpu", "gpus_per_node": 2}, "third": {"gpu": "cpu"}}
        },
        "verifier__pool": "third",
        "verifier__gpus_per_worker": 1,
        "verifier__reward": [{**MODEL, "model": str(model)}],
        **changes,
    }
    return measured_run(model, directory / "profile.toml", **keys)


def test_a_call_takes_what_a_profile_measured_of_its_passes_padding_included(
    tmp_path: Path,
) -> None:
    costs = costs_of(measured(tmp_path, verifier__max_tokens_per_pass=128))
    assert costs is not None
    assert costs.call_time([16] * 4) == pytest.approx(ALONE + prefix_time(4, 16), rel=1e-4)
    slower = costs_of(measured(tmp_path, pace=1.5))
    assert slower is not None
    assert slower.call_time([16]) == pytest.approx(1.5 * (ALONE + prefix_time(1, 16)), rel=1e-4)
    assert costs.call_time([10, 64]) == pytest.approx(ALONE + prefix_time(2, 64), rel=1e-4)
    three = costs.call_time([64, 64, 64])
    assert three == pytest.approx(2 * ALONE + prefix_time(2, 64) + prefix_time(1, 64), rel=1e-4)
    run = measured(tmp_path)
    run = msgspec.structs.replace(run, algorithm=msgspec.structs.replace(run.algorithm, steps=12))
    metrics = measure(simulate(run))
    assert metrics.tiers == pytest.approx({"measured": 1.0})
    assert metrics.sides["verifier"].busy["verify"] > 0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "has no reward model: streamrl profile MODELDIR --reward-model"),
        (
            {"digest": "0" * 16},
            r"was measured for the reward model judge, but verifier\.reward\.0\.model",
        ),
        ({"gpu": "h20"}, r"measured with 'cpu', but cluster\.pools\.third\.gpu is 'h20'"),
    ],
)
def test_a_profile_of_another_reward_model_is_refused(
    changes: dict[str, str], says: str, tmp_path: Path
) -> None:
    run = measured(tmp_path)
    path = tmp_path / "profile.toml"
    profile = read_measured(path)
    assert profile.reward_model is not None
    if not changes:
        write_measured(msgspec.structs.replace(profile, reward=(), reward_model=None), path)
    elif "digest" in changes:
        other = msgspec.structs.replace(profile.reward_model, **changes)
        write_measured(msgspec.structs.replace(profile, reward_model=other), path)
    else:
        third = msgspec.structs.replace(run.cluster.pools["third"], **changes)
        pools = {**run.cluster.pools, "third": third}
        run = msgspec.structs.replace(
            run, cluster=msgspec.structs.replace(run.cluster, pools=pools)
        )
    with pytest.raises(ValueError, match=says):
        Costs.load(run)


def test_without_a_profile_they_are_composed_or_stated_or_refused(tmp_path: Path) -> None:
    here = {"verifier__reward": [{**MODEL, "model": str(model_directory(tmp_path / "model"))}]}
    composed = costs_of(rewarded(**here))
    assert composed is not None and composed.provenance is not None
    assert (
        0
        < composed.call_time([100])
        < composed.call_time([100] * 64)
        < 64 * composed.call_time([100])
    )
    stated = costs_of(rewarded(verifier__time="50 ms"))
    assert stated is not None and stated.call_time([7, 9, 11]) == pytest.approx(0.15)
    with pytest.raises(ValueError, match=r"verifier\.time is missing: the shape of hf://nobody"):
        costs_of(rewarded())
    metrics = measure(simulate(rewarded(**here)))
    assert sum(metrics.tiers.values()) == pytest.approx(1.0)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_replica_takes_what_waits_as_much_as_a_call_has_room_for(workers: int) -> None:
    run = rewarded(
        verifier__time="2 s",
        verifier__max_rollouts_per_call=3,
        verifier__workers=workers,
        algorithm__group_size=8,
    )
    trace = checked_world(run).run()
    ends = Counter(entry.time for entry in trace.entries if isinstance(entry.event, Verified))
    assert max(ends.values()) in (3, 3 * workers)
    first = next(entry.time for entry in trace.entries if of(Verify, entry.commands))
    assert (max(ends) - first) * workers >= sum(ends.values()) * 2.0 * 0.99


def test_a_run_waits_for_reward_models_to_come_up() -> None:
    plain, late = (
        checked_world(rewarded(verifier__time="1 ms", verifier__start_time=start)).run()
        for start in ("0 s", "500 s")
    )
    first = next(e.time for e in late.entries if isinstance(e.event, Verified))
    assert first == pytest.approx(500.001, abs=0.01)
    assert late.entries[-1].time > plain.entries[-1].time + 400


# Memory -------------------------------------------------------------------------------------------


def test_doctor_knows_what_a_reward_model_takes_of_its_gpu(tmp_path: Path) -> None:
    model = model_directory(tmp_path / "model")
    here = {"verifier__reward": [{**MODEL, "model": str(model)}]}
    (side,) = [side for side in memory_of(resolve(rewarded(**here))) if side.side == "verifier"]
    assert 0 < side.parts["weights"] < side.capacity and "A100" in side.gpu
    assert any(finding.name == "verifier-fits" for finding in find(resolve(rewarded(**here))))
    assert any(finding.name == "verifier-unknown" for finding in find(resolve(rewarded())))
    text = (model / "config.json").read_text().replace('"hidden_size": 32', '"hidden_size": 65536')
    (model / "config.json").write_text(
        text.replace('"num_hidden_layers": 2', '"num_hidden_layers": 90')
    )
    assert any(finding.name == "verifier-memory" for finding in find(resolve(rewarded(**here))))
    with pytest.raises(ValueError, match=r"verifier: .* GB a GPU .* of the reward model"):
        Costs.load(rewarded(**here))
