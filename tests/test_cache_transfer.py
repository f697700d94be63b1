"""KV caches that move with their rollouts: what a move takes, and when the cache stays behind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streamrl.engine.messages import (
    Abort,
    Generate,
    Generated,
    LoadWeights,
    PushWeights,
    WeightsLoaded,
    WeightsPushed,
)
from streamrl.engine.trace import replay
from streamrl.executor.execute import check_executable
from streamrl.hardware.resolved import resolve
from streamrl.sim.costs.cache_transfer import CacheTransfer
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.policy_estimates import fill_policies
from streamrl.sim.world_interface import SimRollout
from tests.runs import checked_world, generated, of, singles, small_run
from tests.test_execute import real_run
from tests.test_migration import STEEP, begun
from tests.test_sim import COSTS, Bench
from tests.test_skew import BATCH
from tests.tiny_model import tiny_model

KV = {"policies.migration": "consolidate", "rollout.migration_transfer": "kv"}


def transfer(**changes: Any) -> CacheTransfer:
    run = small_run({key.replace("__", "."): v for key, v in changes.items()})
    return CacheTransfer.of(resolve(run).replica)


# Seconds ------------------------------------------------------------------------------------------


def test_each_gpu_sends_its_shard_at_its_share_of_the_network() -> None:
    # Qwen2.5-7B: 28 layers x (keys, values) x 4 heads x 128 channels x 2 bytes; H800: 25 GB/s a GPU
    one = transfer(rollout__pool="near", rollout__replicas=2, cluster__pools__near__nodes=2)
    assert one.token_time == pytest.approx(28 * 2 * 4 * 128 * 2 / (25e9 * 0.97))
    assert one.time(3000) == pytest.approx(3000 * one.token_time)
    four = transfer(rollout__pool="near", rollout__tensor_parallel=4, cluster__pools__near__nodes=2)
    assert four.token_time == pytest.approx(one.token_time / 4)


def test_within_a_node_caches_move_over_nvlink() -> None:
    inside = transfer(rollout__pool="near")
    assert inside.token_time == pytest.approx(28 * 2 * 4 * 128 * 2 / 200e9)
    assert inside.provenance.sources == ("profiles/gpus/h800.toml",)


def test_a_datasheets_bandwidth_is_no_measurement() -> None:
    costs = Costs.load(small_run({**KV, "cluster.pools.far.nodes": 2}))
    assert costs.facts["cache_transfer"] == {"roofline": 1.0}
    sources = costs.provenance["cache_transfer"].sources
    assert sources == ("profiles/gpus/h20.toml", "profiles/transports/rdma.toml")
    assert "cache_transfer" not in Costs.load(small_run()).facts


def test_a_policy_pays_for_the_transfer_and_not_for_prefill() -> None:
    changes = {"policies.migration": "consolidate"}
    prices = []
    for run in (small_run(changes), small_run(KV)):
        costs = Costs.load(run)
        prices.append(fill_policies(run, costs).policies.context_time)
    assert prices[1] == costs.cache_transfer.token_time < prices[0]


# A replica ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("done", [1, 7, 29])
def test_a_cache_that_arrives_costs_its_transfer_and_then_every_token_is_decoded(done: int) -> None:
    bench = Bench()
    bench.rollouts[5] = SimRollout(5, 40, 30)
    bench.replica.generate(Generate(5, 0, 5, done, brings_cache=True))
    bench.env.run()
    (end,) = bench.ends
    decode = sum(COSTS.decode.step_time(1, 40 + tokens) for tokens in range(done, 30))
    arrival = COSTS.cache_transfer.time(40 + done)
    assert (end.tokens, end.time) == (30, pytest.approx(arrival + decode, rel=1e-12))
    ((_, event),) = bench.events
    assert isinstance(event, Generated) and event.prefill_time == pytest.approx(arrival)
    assert bench.replica._cache.held == bench.replica._context == 0


def test_a_rollout_that_is_sent_again_without_its_cache_is_computed_again() -> None:
    bench = Bench()
    bench.rollouts[5] = SimRollout(5, 40, 30)
    bench.replica.generate(Generate(5, 0, 5, 7))
    bench.env.run()
    decode = sum(COSTS.decode.step_time(1, 40 + tokens) for tokens in range(8, 30))
    prefill = COSTS.prefill_time(47, 47 * 47 / 2, 0)
    assert bench.ends[0].time == pytest.approx(prefill + decode, rel=1e-12)


def test_a_cache_that_was_given_up_for_room_is_computed_again() -> None:
    bench = Bench(costs=replace(COSTS, kv_capacity=100))
    bench.rollouts[0] = SimRollout(0, 20, 60)
    bench.replica.generate(Generate(0, 0, 0, 0))
    bench.rollouts[1] = SimRollout(1, 20, 40)
    bench.replica.generate(Generate(1, 0, 1, 5, brings_cache=True))
    bench.env.run()
    assert bench.replica.num_preempted == 1
    assert [end.tokens for end in bench.ends] == [60, 40]
    (again,) = (e for _, e in bench.events if isinstance(e, Generated) and e.rollout == 1)
    assert again.prefill_time == pytest.approx(COSTS.cache_transfer.time(25))
    assert bench.replica._cache.held == 0


# The policy ---------------------------------------------------------------------------------------


def moved(**changes: Any) -> list[Generate]:
    """Move rollout 1, which has 70 tokens, to replica 0."""
    s = begun([10, 9000, 10, 5000], **changes)
    assert of(Abort, s.tell(generated(0), generated(2))) == [Abort(1, 1)]
    return of(Generate, s.tell(generated(1, tokens=70, finish="aborted")))


def test_a_rollout_takes_its_cache_along_where_the_run_says_so() -> None:
    assert moved(rollout__migration_transfer="kv") == [Generate(1, 0, 1, 70, brings_cache=True)]
    assert moved() == [Generate(1, 0, 1, 70, brings_cache=False)]


def test_nothing_but_a_move_brings_a_cache() -> None:
    s = begun([10, 9000, 10, 5000], rollout__migration_transfer="kv")
    assert not any(c.brings_cache for c in of(Generate, s.tell(generated(1, 5, "aborted"))))


def test_a_rollout_that_has_no_token_yet_brings_no_cache() -> None:
    s = begun([10, 9000, 10, 5000], rollout__migration_transfer="kv")
    s.tell(generated(0), generated(2))
    (sent,) = of(Generate, s.tell(generated(1, tokens=0, finish="aborted")))
    assert not sent.brings_cache


def test_a_cache_of_other_weights_stays_behind() -> None:
    s = singles(
        2,
        policies__system="fully-async",
        policies__latency=STEEP,
        policies__context_time=1e-6,
        algorithm__steps=9,
        **{key.replace(".", "__"): value for key, value in KV.items()},
    )
    s.draw(s.begin())
    assert of(PushWeights, s.finish(0, 1) + s.step(1))
    for _ in range(4):
        s.state.recent.add(9000)
    (abort,) = of(Abort, s.tell(generated(2, tokens=9000), generated(4, tokens=9000)))
    assert s.state.rollouts[abort.rollout].replica is s.state.fleet.replicas[1]
    assert of(LoadWeights, s.tell(WeightsPushed(1, 1)))  # while the rollout is on its way
    s.tell(WeightsLoaded(0, 1, 1.0))
    sent = of(Generate, s.tell(generated(abort.rollout, 70, "aborted")))
    assert [(c.rollout, c.replica, c.brings_cache) for c in sent] == [(abort.rollout, 0, False)]


# Runs ---------------------------------------------------------------------------------------------


def test_moves_with_their_caches_replay_and_take_no_longer_than_computing_again() -> None:
    spans = {}
    for how in ("recompute", "kv"):
        run = small_run(
            {
                **BATCH,
                **KV,
                "rollout.migration_transfer": how,
                "rollout.max_running": 64,
                "policies.dispatch": "skewness-aware",
                "workload.lengths.ranker": "recall",
            }
        )
        trace = checked_world(fill_policies(run, Costs.load(run))).run()
        assert replay(trace) is None
        sent = [c for entry in trace.entries for c in of(Generate, entry.commands)]
        assert any(c.brings_cache for c in sent) is (how == "kv")
        spans[how] = trace.entries[-1].time
    assert spans["kv"] <= spans["recompute"]


def test_a_backend_that_sends_no_cache_refuses_to(tmp_path: Path) -> None:
    tiny_model(50).save_pretrained(tmp_path / "model")
    local = {
        "model__path": str(tmp_path / "model"),
        "trainer__tensor_parallel": 1,
        "execute__device": "cpu",
    }
    check_executable(real_run(tmp_path, **local))
    with pytest.raises(ValueError, match=r"rollout.migration_transfer .*transformers.* got 'kv'"):
        check_executable(real_run(tmp_path, rollout__migration_transfer="kv", **local))
