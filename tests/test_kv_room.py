"""Memory that engines keep besides weights and KV cache, against their start-up logs."""

from __future__ import annotations

import pytest

from streamrl.hardware.engine_memory import EngineMemory, load_engine_memory
from streamrl.hardware.memory import kv_capacity, replica_workspace
from streamrl.hardware.profiles import PROFILES
from streamrl.hardware.resolved import resolve
from streamrl.runfile.files import make_run
from streamrl.sim.fidelity.kv_room import read_rooms, room_rows
from streamrl.sim.fidelity.published_rows import summarise
from streamrl.sim.fidelity.scorecard import partition_of
from tests.runs import make_table, small_run

NEMO = {"name": "nemo-rl"}


def test_logs_that_no_constant_comes_from_are_predicted_within_five_percent() -> None:
    others = [row for row in room_rows() if row.evidence != "in sample"]
    assert len(others) >= 9
    found = summarise(others)
    assert found.median < 0.01 and found.p90 < 0.06


def test_a_log_of_a_report_that_gave_constants_does_not_count_as_one_that_nothing_was_fitted_to() -> (
    None
):
    rows = room_rows()
    reports = {row.source.partition(" (")[0] for row in rows if row.evidence == "in sample"}
    assert all(
        (row.source.partition(" (")[0] in reports) is (row.evidence != "not fitted") for row in rows
    )
    free = [row for row in rows if row.evidence == "not fitted"]
    assert {partition_of("memory", row).rpartition(", ")[2] for row in free} == {"sglang-0.5"}


def test_every_log_has_an_engine_profile_and_a_source() -> None:
    named = {path.stem for path in (PROFILES / "engine_memory").glob("*.toml")}
    assert {row.engine for row in read_rooms()} <= named
    assert all(row.source for row in read_rooms())
    assert all(load_engine_memory(name).date for name in named)


def test_tensor_ranks_do_not_reduce_the_logits_that_sampling_holds() -> None:
    one, four = (
        small_run({"rollout.max_running": 2048, "rollout.tensor_parallel": degree})
        for degree in (1, 4)
    )
    engine = load_engine_memory("vllm-0.11")
    alone, split = (replica_workspace(resolve(run).replica) for run in (one, four))
    assert split - alone == pytest.approx(engine.ranks - engine.single)


def test_the_share_of_sglang_does_not_include_activations() -> None:
    run = small_run({"costs.engine": "sglang-0.5", "rollout.memory_utilization": 0.8})
    few, many = (
        kv_capacity(resolve(small_run({"costs.engine": name, "rollout.max_running": 2048})).replica)
        for name in ("vllm-0.11", "sglang-0.5")
    )
    assert many > few
    setup = 0.8 * load_engine_memory("sglang-0.5").single
    assert replica_workspace(resolve(run).replica) == pytest.approx(setup)


def test_an_engine_without_logs_has_the_assumed_memory() -> None:
    assert load_engine_memory("tensorrt-llm-1.0") == EngineMemory()
    with pytest.raises(ValueError, match="logit"):
        EngineMemory(logit=-1.0)


def test_nemo_rl_keeps_memory_for_the_rollouts_that_vllm_allows() -> None:
    table = make_table({})
    del table["rollout"]["max_running"]
    turns = {**table, "policies": {"system": "disaggregated"}}
    plain, nemo = (make_run({**turns, "framework": framework}) for framework in ({}, NEMO))
    assert (plain.rollout.max_running, nemo.rollout.max_running) == (256, 1024)
    ahead = make_run({**table, "policies": {"system": "one-step-async"}, "framework": NEMO})
    assert ahead.rollout.max_running == 128  # its asynchronous engine has another default
    assert small_run({"framework.name": "nemo-rl"}).rollout.max_running != 1024  # it states its own
    assert kv_capacity(resolve(nemo).replica) < kv_capacity(resolve(plain).replica)
