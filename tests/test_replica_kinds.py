"""Replicas of several kinds: other GPUs or other degrees beside those that `[rollout]` names first."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from streamrl.doctor.diagnosis import diagnose, examine
from streamrl.engine.estimates import Latency
from streamrl.engine.messages import Generate, ReplicaLost, StartReplica, WeightsPushed
from streamrl.engine.trace import Trace, read_trace, replay
from streamrl.executor.launchers.local_launcher import LocalLauncher
from streamrl.executor.launchers.placement import PlacedRoles, Placement, gpus_needed
from streamrl.executor.launchers.role_configs import RoleConfigs
from streamrl.executor.record import RunDirectory
from streamrl.hardware.memory import kv_capacity
from streamrl.hardware.resolved import resolve
from streamrl.hardware.side_memory import memory_of
from streamrl.record.charges import PaidGpus, egress_dollars
from streamrl.record.metrics import measure
from streamrl.runfile.config import Run
from streamrl.runfile.errors import RunError
from streamrl.runfile.files import load_run, write_run
from streamrl.sim.batch_generation import DrawnBatch, generate_batch
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.policy_estimates import even_shares, fill_policies
from streamrl.sim.world import simulate
from streamrl.targets.execute_limits import check_back_ends
from streamrl.workload.workload import SimulatedWorkload
from tests.runs import checked_world, of, script, small_run

WIDE = {"pool": "near", "replicas": 2, "tensor_parallel": 2}
"""Two replicas on H800, beside two on one H20 each."""


def run_of(*others: dict[str, Any], **changes: Any) -> Run:
    """Return the small run with further kinds of replicas; `__` stands for the dot of a key."""
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    return small_run({"rollout.others": list(others or [WIDE]), **keys})


def traced(run: Run) -> Trace:
    return checked_world(fill_policies(run, Costs.load(run))).run()


# The run file -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "changes", "key", "says"),
    [
        ({"pool": "nowhere"}, {}, "rollout.others.0.pool", "'nowhere' is not one of the pools"),
        ({"replicas": 0}, {}, "rollout.others.0.replicas", "at least 1, got 0"),
        ({"share": 0.0}, {}, "rollout.others.0.share", "above 0, got 0.0"),
        ({"latency": [[4, 0.1], [1, 0.1]]}, {}, "rollout.others.0.latency", "in ascending order"),
        ({"latency": [[1, 0.0]]}, {}, "rollout.others.0.latency", "at batch 1 must be above 0"),
        ({"tensor_parallel": 3}, {}, "rollout.others.0.tensor_parallel", "must divide the 8 GPUs"),
        ({"expert_parallel": 4}, {}, "rollout.others.0.expert_parallel", "1 or tensor_parallel 2"),
        ({"replicas": 3}, {}, "rollout.others.0.replicas", "pool 'near' has 8 GPUs"),
        ({"max_tokens": 9}, {}, "rollout.others.0.max_tokens", "is not a key of a run file"),
        ({}, {"cluster.links": []}, "cluster.links", "no link between 'far' and 'near'"),
        ({}, {"policies.resize": "adjust"}, "policies.resize", "supports one kind of replica"),
        ({}, {"policies.migration": "consolidate"}, "policies.migration", "one kind of replica"),
    ],
)
def test_a_kind_that_cannot_be_is_refused_by_its_own_key(
    other: dict[str, Any], changes: dict[str, Any], key: str, says: str
) -> None:
    with pytest.raises(RunError, match=says) as found:
        small_run({"rollout.others": [{**WIDE, **other}], **changes})
    assert found.value.key == key


def test_a_kind_that_its_memory_does_not_hold_is_refused_by_its_own_key() -> None:
    run = run_of(
        {**WIDE, "tensor_parallel": 1},
        model__name="qwen2.5-72b",
        cluster__pools={"far": {"gpu": "h20"}, "near": {"gpu": "h800", "nodes": 5}},
        rollout__tensor_parallel=4,
        trainer={"pool": "near", "tensor_parallel": 8, "pipeline_parallel": 4},
    )
    with pytest.raises(
        RunError, match=r"rollout\.others\.0\.tensor_parallel=1: Qwen2\.5-72B"
    ) as found:
        Costs.load(run)
    assert found.value.key == "rollout.others.0.tensor_parallel"


def test_several_kinds_are_written_and_read_again(tmp_path: Path) -> None:
    run = run_of(WIDE, {"pool": "far", "replicas": 1, "max_running": 7})
    write_run(run, tmp_path / "run.toml")
    assert load_run(tmp_path / "run.toml").rollout == run.rollout
    changed = load_run(tmp_path / "run.toml", ["rollout.others.1.max_running=9"])
    assert changed.rollout.others[1].max_running == 9


def test_a_kind_has_from_rollout_what_it_does_not_say_itself() -> None:
    run = run_of(WIDE, {"pool": "far", "replicas": 1, "max_running": 7})
    wide, few = run.of_kind(1).rollout, run.of_kind(2).rollout
    assert (wide.pool, wide.tensor_parallel, wide.max_running) == ("near", 2, 4)
    assert (few.pool, few.tensor_parallel, few.max_running) == ("far", 1, 7)
    assert wide.max_tokens == few.max_tokens == run.rollout.max_tokens
    assert run.num_gpus == 2 + 4 + 1 + run.trainer.num_gpus


# The engine ---------------------------------------------------------------------------------------


def test_replicas_come_up_kind_by_kind_and_a_lost_one_is_replaced_by_its_own_kind() -> None:
    s = script(rollout__others=[{**WIDE, "share": 1.0}])
    started = of(StartReplica, s.draw(s.begin()) or s.commands)
    assert s.tell(ReplicaLost(2, "gone")) == [StartReplica(4, 0, 1)]
    assert s.tell(ReplicaLost(0, "gone"))[:1] == [StartReplica(5, 0, 0)]
    assert not started or [c.kind for c in started] == [0, 0, 1, 1]


@pytest.mark.parametrize("dispatch", ["least-loaded", "random"])
def test_rollouts_are_dealt_out_by_share(dispatch: str) -> None:
    run = run_of(
        {**WIDE, "share": 3.0}, policies__dispatch=dispatch, algorithm__prompts_per_step=40
    )
    trace = traced(run)
    first = [c for entry in trace.entries[:20] for c in of(Generate, entry.commands)][:80]
    assert Counter(command.replica for command in first) == {0: 10, 1: 10, 2: 30, 3: 30}


def test_even_shares_give_every_kind_the_same_time() -> None:
    slow, quick = ((1, 0.01), (64, 0.0415)), ((1, 0.005), (256, 0.0305))
    shares = even_shares((slow, quick), (4, 2), 200)
    assert 4 * shares[0] + 2 * shares[1] == pytest.approx(200)
    seconds = [
        Latency(points).step_time(n) for points, n in zip((slow, quick), shares, strict=True)
    ]
    assert seconds[0] == pytest.approx(seconds[1])


def test_even_shares_of_more_than_runs_at_once_are_by_tokens_a_second() -> None:
    slow, quick = ((1, 0.01), (8, 0.02)), ((1, 0.01), (64, 0.04))
    shares = even_shares((slow, quick), (1, 1), 10_000)
    assert shares[1] / shares[0] == pytest.approx((64 / 0.04) / (8 / 0.02))


# Simulation ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", ["stream-sync", "one-step-async", "stream-async"])
def test_replicas_of_another_kind_that_are_just_alike_change_nothing(system: str) -> None:
    alike = {"pool": "far", "replicas": 2}
    of_two = run_of(alike, policies__system=system, algorithm__prompts_per_step=8)
    of_one = small_run(
        {"rollout.replicas": 4, "policies.system": system, "algorithm.prompts_per_step": 8}
    )
    first, second = measure(traced(of_two)), measure(simulate(of_one))
    assert first.step_times == pytest.approx(second.step_times, rel=1e-9)
    assert first.cost_per_step == pytest.approx(second.cost_per_step)
    assert first.busy == pytest.approx(second.busy) and first.idle == pytest.approx(second.idle)


def test_every_kind_decodes_as_fast_as_alone() -> None:
    run = run_of(algorithm__prompts_per_step=8)
    costs = Costs.load(run)
    run = fill_policies(run, costs)
    batch = DrawnBatch(SimulatedWorkload(run).draw(0, 8))
    finishes = generate_batch(run, costs, batch)
    alone = {
        kind: {
            f.tokens: f
            for f in generate_batch(run.of_kind(kind), costs.of_kind(kind), DrawnBatch(batch[:1]))
        }
        for kind in (0, 1)
    }
    assert {finish.replica for finish in finishes} == {0, 1, 2, 3}
    assert costs.of_kind(1).decode.step_time(4, 800) < costs.decode.step_time(4, 800)
    assert max(f.time for f in alone[1].values()) < max(f.time for f in alone[0].values())
    assert costs.of_kind(1).kv_capacity == kv_capacity(resolve(run.of_kind(1)).replica)


def test_the_gpu_seconds_of_every_kind_are_all_accounted_for() -> None:
    found = measure(traced(run_of(algorithm__prompts_per_step=8, policies__system="stream-sync")))
    assert found.num_gpus == {"rollout": 2, "rollout-2": 4, "trainer": 4}
    for side in found.sides.values():
        assert sum(side.busy.values()) + sum(side.idle.values()) == pytest.approx(1)
    weighted = {
        name: found.num_gpus[name] / 10 * side.busy.get("decode", 0.0)
        for name, side in found.sides.items()
    }
    assert sum(weighted.values()) == pytest.approx(found.busy["decode"])
    assert found.sides["rollout-2"].busy["decode"] != found.sides["rollout"].busy["decode"]


def test_a_trace_of_several_kinds_replays_and_is_read_as_it_was_written(tmp_path: Path) -> None:
    trace = traced(run_of())
    (tmp_path / "trace.jsonl").write_bytes(trace.encode())
    again = read_trace(tmp_path / "trace.jsonl")
    assert replay(again) is None and len(again.decode) == 2
    assert measure(again) == measure(trace)


def test_weights_go_to_every_pool_once_and_each_link_has_its_price() -> None:
    link = {"between": ["far", "near"], "bandwidth": "80 Gbps", "price_per_gb": 0.1}
    run = run_of(cluster__links=[link])
    pushed = of(WeightsPushed, [entry.event for entry in traced(run).entries])
    alone = Costs.load(run.of_kind(0)).sync.wire_bytes
    assert {push.num_bytes for push in pushed} == {2 * alone}
    assert egress_dollars(
        run.cluster.links, run.rollout.kinds, run.trainer.pool, 2 * alone
    ) == pytest.approx(alone / 1e9 * 0.1)


def test_every_kind_is_paid_for_in_its_own_pool() -> None:
    prices = {"far": 1.0, "near": 3.0}
    pools = {
        name: {"gpu": gpu, "price": prices[name]}
        for name, gpu in (("far", "h20"), ("near", "h800"))
    }
    run = run_of(cluster__pools=pools)
    assert PaidGpus.of(run).dollars_per_second * 3600 == pytest.approx(2 * 1.0 + (4 + 4) * 3.0)


def test_a_spot_pool_takes_away_its_own_kind_alone() -> None:
    spot = {"gpu": "h800", "spot_failures_per_gpu_day": 500.0}
    run = run_of(
        cluster__pools={"far": {"gpu": "h20"}, "near": spot},
        algorithm__steps=30,
        failures__trainers=False,
        policies__max_restarts=1000,
    )
    trace = traced(run)
    lost = of(ReplicaLost, [entry.event for entry in trace.entries])
    started = [c for entry in trace.entries for c in of(StartReplica, entry.commands)]
    kinds = {command.replica: command.kind for command in started}
    assert lost and {kinds[event.replica] for event in lost} == {1}


# Doctor and executor ------------------------------------------------------------------------------


def test_the_doctor_looks_at_every_kind() -> None:
    run = run_of({**WIDE, "tensor_parallel": 8, "replicas": 1}, trainer={"pool": "far"})
    assert [side.side for side in memory_of(resolve(run))] == ["rollout", "rollout-2", "trainer"]
    found = {finding.name: finding for finding in diagnose(run)}
    assert found["rollout-2-fits"].level == "ok"
    assert "rollout.others.0.tensor_parallel=8 must divide" in found["rollout-2-heads"].text
    mended = next(each for each in examine(run) if each.name == "rollout-2-heads")
    assert mended.changes is not None and "rollout.others.0.tensor_parallel" in mended.changes


def test_each_kind_is_placed_in_its_own_pool() -> None:
    placement = Placement(PlacedRoles.of(run_of()))
    assert placement.replica(1, 0).pool == "far"
    assert [len(placement.replica(n, 1).gpus) for n in (2, 3)] == [2, 2]
    assert {place.pool for place in placement.trainers[0]} == {"near"}


def test_a_run_needs_the_gpus_of_all_kinds_and_back_ends_refuse_degrees_of_each() -> None:
    run = run_of(trainer={"pool": "near"})
    assert gpus_needed(PlacedRoles.of(run)) == 2 + 4 + 1
    with pytest.raises(ValueError, match=r"rollout\.others\.0\.tensor_parallel must be 1"):
        check_back_ends(run)


def test_a_replica_is_launched_as_its_kind_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[dict[str, object]] = []

    async def start(
        self: LocalLauncher, role: str, config: dict[str, object], name: str, place: object
    ) -> None:
        started.append({**config, "place": place})

    monkeypatch.setattr(LocalLauncher, "_start", start)
    run = run_of({"pool": "near", "replicas": 1, "max_running": 7})
    launcher = LocalLauncher(RoleConfigs(run), PlacedRoles.of(run), RunDirectory(tmp_path))
    for replica, kind in enumerate(run.rollout.kind_of_each):
        asyncio.run(launcher.replica(replica, kind, "model"))
    assert [config["max_running"] for config in started] == [4, 4, 7]
    assert [config["place"].pool for config in started] == ["far", "far", "near"]  # type: ignore[attr-defined]
