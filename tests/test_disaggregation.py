"""Prefill and decode on different replicas: both sides and the transfer of KV caches in closed form, and whole runs."""

from __future__ import annotations

from concurrent.futures import Executor, Future
from dataclasses import replace
from typing import Any, cast

import msgspec
import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.engine.messages import (
    Drop,
    Event,
    Generate,
    Generated,
    LoadWeights,
    Observed,
    ReplicaLeaving,
    ReplicaLost,
    RunStarted,
    StartReplica,
    Truncate,
    WeightsLoaded,
    Woke,
)
from streamrl.engine.trace import Trace, replay
from streamrl.hardware.memory import PREFILL_CHUNK
from streamrl.hardware.profiles import load_model
from streamrl.hardware.resolved import resolve
from streamrl.record.attribution import attribute, attribute_sides
from streamrl.record.metrics import measure
from streamrl.record.timeline import read_timeline
from streamrl.report.plan_report import disaggregation_text
from streamrl.runfile.cluster_config import ModelConfig
from streamrl.runfile.config import Run
from streamrl.runfile.errors import RunError
from streamrl.runfile.files import decode_run
from streamrl.sim.costs.cache_transfer import CacheRoute
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.policy_estimates import fill_policies
from streamrl.sim.costs.sync_profiles import load_transport
from streamrl.sim.cpu_contention import Cores
from streamrl.sim.handling import Handling
from streamrl.sim.kv_transfer import Handover, Network, Port, Transfer
from streamrl.sim.planner.disaggregation import (
    num_prefill,
    planned_disaggregation,
    with_prefill_replicas,
    without_prefill_replicas,
)
from streamrl.sim.replica import Replica
from streamrl.sim.world import SimWorld
from streamrl.sim.world_interface import Disruptions, Reached, SimRollout
from streamrl.targets.execute_limits import check_back_ends
from streamrl.workload.episodes import Episode
from tests.runs import (
    Script,
    checked_world,
    lose_replica_at,
    lose_trainer_at,
    of,
    script,
    singles,
    small_run,
)
from tests.traces import (
    check_every_command_ends_once,
    check_every_rollout_is_accounted_for,
)

PREFILL = {"pool": "far", "replicas": 1, "disaggregation_mode": "prefill"}
"""A prefill replica on one H20, beside two decode replicas on one each."""
BYTES = 28 * 2 * 4 * 128 * 2
"""Of a token in the KV cache of Qwen2.5-7B: 28 layers x (keys, values) x 4 heads x 128 channels x 2 bytes."""
EPISODES = {
    "max_turns": 4,
    "max_context": 4096,
    "turns": "mean 3, p95 4",
    "observation_tokens": "mean 20, p95 40",
    "action_time": "mean 1 s, p95 2 s",
    "start_time": "mean 1 s, p95 2 s",
}


def apart(*others: dict[str, Any], **changes: Any) -> Run:
    """Return the small run with prefill replicas; `__` stands for the dot of a key."""
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    return small_run({"rollout.others": list(others or [PREFILL]), **keys})


RUN = apart(rollout__max_running=8)
COSTS = Costs.load(RUN)
ROUTE = COSTS.cache_routes[1, 0]
NVLINK = resolve(RUN).replica.gpu.nvlink


# The transfer -------------------------------------------------------------------------------------


def test_within_a_node_a_token_takes_its_bytes_over_nvlink() -> None:
    assert ROUTE.send_rate == ROUTE.receive_rate == pytest.approx(NVLINK / BYTES)
    assert (ROUTE.latency, ROUTE.link) == (0.0, None)


def test_between_nodes_each_gpu_of_the_decode_replica_reads_its_shard() -> None:
    pools = {"far": {"gpu": "h20", "nodes": 2}, "near": {"gpu": "h800"}}
    wide = apart({**PREFILL, "tensor_parallel": 2}, cluster__pools=pools)
    route = Costs.load(wide).cache_routes[1, 0]
    network = resolve(wide).replica.gpu.network * 0.97
    assert route.receive_rate == pytest.approx(network / BYTES)
    assert route.send_rate == pytest.approx(2 * network / BYTES)
    assert route.latency == pytest.approx(5e-6)


def test_between_pools_all_transfers_share_the_link() -> None:
    route = Costs.load(apart({**PREFILL, "pool": "near"})).cache_routes[1, 0]
    assert route.link_rate == pytest.approx(80e9 / 8 * load_transport("tcp").efficiency / BYTES)
    assert route.latency == pytest.approx(0.01 + 42e-6)
    assert route.link == ("far", "near")


def test_a_latent_cache_crosses_once_for_each_gpu_that_reads_it() -> None:
    kinds = resolve(apart({**PREFILL, "tensor_parallel": 2}, rollout__tensor_parallel=2)).replicas
    latent = load_model(ModelConfig(name="deepseek-v3"))
    decode, prefill = (msgspec.structs.replace(kind, model=latent) for kind in kinds)
    route = CacheRoute.of(prefill, decode, None)
    token = 61 * (512 + 64) * 2
    assert route.receive_rate == route.send_rate == pytest.approx(NVLINK / token)


def arrivals(
    sends: list[tuple[float, float, tuple[int, ...]]], rates: list[float], latency: float = 0.0
) -> list[float]:
    """Return when transfers end: each begins at an instant, and has tokens and the numbers of its ports."""
    env, ends = simpy.Environment(), [0.0] * len(sends)
    network, ports = Network(env), [Port(rate) for rate in rates]
    for number, (at, tokens, used) in enumerate(sends):

        def end(number: int = number) -> None:
            ends[number] = env.now

        transfer = Transfer(tuple(ports[n] for n in used), tokens, end)
        event = env.timeout(at)
        assert event.callbacks is not None
        event.callbacks.append(lambda _, own=transfer: network.send(own, latency))
    env.run()
    assert not any(port.transfers for port in ports)
    return ends


@pytest.mark.parametrize("num", [1, 3, 10])
def test_concurrent_transfers_share_the_port_of_their_prefill_replica(num: int) -> None:
    # every one has a decode replica of its own, at a rate that never binds
    sends = [(0.0, 500.0, (0, 1 + n)) for n in range(num)]
    ends = arrivals(sends, [100.0, *[1e6] * num], latency=0.25)
    assert ends == pytest.approx([0.25 + num * 500 / 100] * num)


def test_a_transfer_is_as_fast_as_its_slowest_port() -> None:
    assert arrivals([(0.0, 600.0, (0, 1, 2))], [100.0, 300.0, 60.0]) == pytest.approx([10.0])


def test_a_transfer_that_begins_later_slows_the_first_one_while_both_run() -> None:
    # 400 tokens alone, then both at 50 a second: the second has 250 left when the first ends
    ends = arrivals([(0.0, 600.0, (0,)), (4.0, 450.0, (0,))], [100.0])
    assert ends == pytest.approx([8.0, 4.0 + 4.0 + 250 / 100])


def test_a_cancelled_transfer_leaves_its_bandwidth_to_the_others() -> None:
    env = simpy.Environment()
    network, port, ends = Network(env), Port(100.0), list[float]()
    kept, other = (Transfer((port,), 600.0, lambda: ends.append(env.now)) for _ in range(2))
    network.send(kept, 0.0)
    network.send(other, 0.0)
    env.run(until=4.0)
    network.cancel(other)
    env.run()
    assert ends == pytest.approx([4.0 + 400 / 100])


# Replicas -----------------------------------------------------------------------------------------


class Pair:
    """A prefill replica and a decode replica alone; what the first one ends is sent to the second."""

    def __init__(self, run: Run = RUN, costs: Costs = COSTS) -> None:
        self.run_file, self.costs = run, costs
        self.env = simpy.Environment()
        self.cores, self.disruptions = Cores(self.env), Disruptions()
        self.handling = Handling(self.env, self.cores.time_of("handling"), 0.0)
        self.events: list[tuple[float, Event]] = []
        self.rollouts: dict[int, SimRollout] = {}
        self.handover = Handover(self.env, costs.cache_routes)
        self.decode = Replica(self, 0, 0, 0, self.emit, self.handover)
        self.prefill = Replica(self, 1, 0, 1, self.emit, self.handover)
        self.holds = False
        """Whether prefilled rollouts are sent to no decode replica."""

    def emit(self, event: Event) -> None:
        """Note an event, and let a prefilled rollout be decoded."""
        self.events.append((self.env.now, event))
        if isinstance(event, Generated) and event.finish == "prefilled" and not self.holds:
            self.decode.generate(Generate(event.rollout, 0, event.rollout, prefilled_on=1))

    def send(self, rollout: int, prompt: int, length: int, group: int | None = None) -> None:
        """Send a rollout to the prefill replica."""
        self.rollouts[rollout] = SimRollout(rollout if group is None else group, prompt, length)
        self.prefill.generate(Generate(rollout, 1, rollout))

    def ends(self, finish: str) -> dict[int, tuple[float, Generated]]:
        """Return each rollout that ended so, with the instant."""
        return {
            event.rollout: (time, event)
            for time, event in self.events
            if isinstance(event, Generated) and event.finish == finish
        }


def chunk_time(of_context: int, tokens: int = PREFILL_CHUNK) -> float:
    """Return the seconds of a pass of `tokens`, after the context that is already computed."""
    return COSTS.prefill_time(tokens, tokens * (of_context + tokens / 2), 0)


def test_a_prefill_replica_is_a_queue_of_prefills() -> None:
    pair = Pair()
    pair.holds = True
    for rollout in range(5):
        pair.send(rollout, PREFILL_CHUNK, 30)
    pair.env.run()
    ends = pair.ends("prefilled")
    each = chunk_time(0)
    assert [ends[r][0] for r in range(5)] == pytest.approx([each * (n + 1) for n in range(5)])
    assert all(event.tokens == 0 for _, event in ends.values())
    assert sum(event.run_time for _, event in ends.values()) == pytest.approx(5 * each)


def test_a_long_context_is_prefilled_chunk_by_chunk() -> None:
    pair = Pair()
    pair.holds = True
    pair.send(0, 3 * PREFILL_CHUNK, 30)
    pair.env.run()
    ((time, event),) = pair.ends("prefilled").values()
    whole = sum(chunk_time(part * PREFILL_CHUNK) for part in range(3))
    assert time == event.run_time == event.prefill_time == pytest.approx(whole)


def test_siblings_find_the_prompt_on_their_prefill_replica() -> None:
    pair = Pair()
    for rollout in range(4):
        pair.send(rollout, 2 * PREFILL_CHUNK, 30, group=0)
    pair.env.run()
    first = chunk_time(0) + chunk_time(PREFILL_CHUNK)
    assert max(time for time, _ in pair.ends("prefilled").values()) < 1.05 * first


def test_contexts_that_nobody_received_keep_their_room() -> None:
    pair = Pair(costs=replace_kind(COSTS, 1, kv_capacity=1000))
    pair.holds = True
    for rollout in range(3):
        pair.send(rollout, 400, 30)
    pair.env.run()
    assert list(pair.ends("prefilled")) == [0, 1]
    pair.handover.drop(0)
    pair.env.run()
    assert list(pair.ends("prefilled")) == [0, 1, 2]


def replace_kind(costs: Costs, kind: int, **changes: Any) -> Costs:
    """Return costs with other figures of one kind of replica."""
    others = list(costs.others)
    others[kind - 1] = replace(others[kind - 1], **changes)
    return replace(costs, others=tuple(others))


@pytest.mark.parametrize("num", [1, 2, 8])
def test_a_decode_replica_receives_contexts_and_then_makes_every_token(num: int) -> None:
    pair = Pair()
    for rollout in range(num):
        pair.send(rollout, 400, 30)
    pair.env.run()
    prefilled = pair.ends("prefilled")[0][0]
    received = num * 400 / ROUTE.send_rate + ROUTE.latency
    decode = sum(COSTS.decode.step_time(num, num * (400 + done)) for done in range(30))
    for time, event in pair.ends("stop").values():
        assert time == pytest.approx(prefilled + received + decode, rel=1e-9)
        assert event.transfer_time == pytest.approx(received)
        assert event.prefill_time == 0.0
    for replica in (pair.decode, pair.prefill):
        assert replica._cache.num_rollouts == replica._cache.held == 0


def test_latency_passes_before_the_first_byte() -> None:
    route = replace(ROUTE, latency=0.5)
    pair = Pair(costs=replace(COSTS, cache_routes={(1, 0): route}))
    pair.send(0, 400, 30)
    pair.env.run()
    ((_, event),) = pair.ends("stop").values()
    assert event.transfer_time == pytest.approx(0.5 + 400 / ROUTE.send_rate)


def test_rollouts_that_are_received_take_slots() -> None:
    pair = Pair(run=apart(rollout__max_running=2))
    for rollout in range(5):
        pair.send(rollout, 400, 30)
    most = 0
    while pair.env.peek() < float("inf"):
        pair.env.step()
        most = max(most, len(pair.decode._running) + len(pair.decode._receiving))
    assert most == 2 and sorted(pair.ends("stop")) == [0, 1, 2, 3, 4]


def test_a_replica_that_drains_decodes_what_it_has_begun_to_receive() -> None:
    pair = Pair()
    pair.send(0, 400, 30)
    while not pair.decode._receiving:
        pair.env.step()
    pair.decode.load(LoadWeights(0, 1, drain=True))
    pair.env.run()
    assert pair.ends("stop")[0][1].version == 0
    assert isinstance(pair.events[-1][1], WeightsLoaded)


def test_a_prefill_replica_keeps_the_prompt_of_a_sibling_that_comes_later() -> None:
    pair = Pair()
    pair.send(0, PREFILL_CHUNK, 30, group=0)
    pair.env.run()
    pair.send(1, PREFILL_CHUNK, 30, group=0)
    pair.env.run()
    first, second = (event for _, event in pair.ends("prefilled").values())
    assert second.run_time < 0.05 * first.run_time


def test_a_later_turn_is_prefilled_and_received_from_its_last_observation_on() -> None:
    run = apart(environment={"max_turns": 2, "max_context": 20_000}, rollout__max_running=8)
    pair = Pair(run, Costs.load(run))
    episode = Episode(ends=(20, 50), observations=(300,), action_times=(1.0,))
    pair.rollouts[0] = SimRollout(0, 4000, 50, episode, Reached())
    pair.prefill.generate(Generate(0, 1, 0))
    pair.env.run()
    pair.holds = True
    pair.prefill.generate(Generate(0, 1, 0, prefix=20, turn=1, observed=300))
    pair.env.run()
    computed = pair.ends("prefilled")[0][1]
    # its own output was decoded elsewhere, so it is computed again beside the observation
    assert computed.cached_tokens == 4000
    part = COSTS.prefill_time(320, 320 * (4000 + 320 / 2), 0)
    assert computed.run_time == pytest.approx(part)
    pair.decode.generate(Generate(0, 0, 0, prefix=20, turn=1, observed=300, prefilled_on=1))
    pair.env.run()
    decoded = pair.ends("stop")[0][1]
    assert decoded.cached_tokens == 4020
    assert decoded.transfer_time == pytest.approx(300 / ROUTE.send_rate)


@pytest.mark.parametrize("is_in_pass", [True, False])
def test_an_aborted_context_is_not_kept(is_in_pass: bool) -> None:
    pair = Pair()
    pair.holds = True
    pair.send(0, 400, 30)
    if is_in_pass:
        pair.env.run(until=0.5 * chunk_time(0, 400))
    else:
        pair.env.run()
    pair.prefill.abort(0)
    pair.env.run()
    assert list(pair.ends("aborted" if is_in_pass else "prefilled")) == [0]
    assert not pair.handover.has(0, 1) and pair.prefill._cache.held == 0


def test_a_prefill_elsewhere_does_not_slow_running_rollouts_down() -> None:
    pair = Pair()
    pair.send(0, 400, 200)
    pair.env.run(until=0.9 * sum(COSTS.decode.step_time(1, 400 + done) for done in range(200)))
    pair.send(1, 8 * PREFILL_CHUNK, 30)
    pair.env.run()
    prefilled = pair.ends("prefilled")[0][0]
    received = 400 / ROUTE.send_rate + ROUTE.latency
    alone = sum(COSTS.decode.step_time(1, 400 + done) for done in range(200))
    assert pair.ends("stop")[0][0] == pytest.approx(prefilled + received + alone, rel=1e-9)


def test_only_the_first_sibling_brings_the_prompt() -> None:
    pair = Pair()
    for rollout in range(4):
        pair.send(rollout, 400, 30, group=0)
    pair.env.run()
    received = 400 / ROUTE.send_rate + ROUTE.latency
    times = [event.transfer_time for _, event in pair.ends("stop").values()]
    assert times == pytest.approx([received] * 4)


def test_a_decode_replica_computes_a_context_that_is_gone() -> None:
    pair = Pair()
    pair.holds = True
    pair.send(0, 400, 30)
    pair.env.run()
    pair.handover.drop(0)
    began_at = pair.env.now
    pair.decode.generate(Generate(0, 0, 0, prefilled_on=1))
    pair.env.run()
    time, event = pair.ends("stop")[0]
    decode = sum(COSTS.decode.step_time(1, 400 + done) for done in range(1, 30))
    computed = COSTS.prefill_time(400, 400 * 200, 0)
    assert time == pytest.approx(began_at + computed + decode)
    assert (event.transfer_time, event.prefill_time) == (0.0, pytest.approx(computed))


def test_new_weights_flush_contexts_unless_rollouts_go_on_with_theirs() -> None:
    for drain in (True, False):
        pair = Pair()
        pair.holds = True
        pair.send(0, 400, 30)
        pair.env.run()
        pair.prefill.load(LoadWeights(1, 1, drain=drain))
        pair.env.run()
        assert pair.handover.has(0, 1) is not drain
        assert (pair.prefill._cache.held == 0) is drain


@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
def test_a_prefill_replica_that_dies_during_a_transfer_lets_the_context_be_computed(
    share: float,
) -> None:
    pair = Pair()
    for rollout in range(2):
        pair.send(rollout, 4000, 30, group=0)
    prefilled = pair.prefill
    while not pair.ends("prefilled"):
        pair.env.step()
    pair.env.run(until=pair.env.now + share * 4000 / ROUTE.send_rate)
    prefilled.stop()
    pair.handover.lose(1)
    pair.env.run()
    ends = pair.ends("stop")
    assert sorted(ends) == [0, 1]
    assert all(event.prefill_time > 0 and not event.transfer_time for _, event in ends.values())
    assert pair.decode._cache.num_rollouts == pair.decode._cache.held == 0


def test_an_aborted_rollout_leaves_its_prompt_to_be_computed_for_its_sibling() -> None:
    pair = Pair()
    for rollout in range(2):
        pair.send(rollout, 4000, 30, group=0)
    while not pair.ends("prefilled"):
        pair.env.step()
    pair.env.run(until=pair.env.now + 0.5 * 4000 / ROUTE.send_rate)
    pair.decode.abort(0)
    pair.env.run()
    assert list(pair.ends("aborted")) == [0]
    assert list(pair.ends("stop")) == [1]
    for replica in (pair.decode, pair.prefill):
        assert replica._cache.num_rollouts == replica._cache.held == 0


def test_a_rollout_that_was_aborted_in_the_queue_is_received_once() -> None:
    pair = Pair()
    pair.send(0, 400, 200)
    while not pair.decode._running:
        pair.env.step()
    pair.decode.load(LoadWeights(0, 1, drain=True))
    pair.send(1, 400, 30)
    while 1 not in pair.decode._queued:
        pair.env.step()
    pair.decode.abort(1)
    while 1 not in pair.ends("aborted"):
        pair.env.step()
    pair.send(1, 400, 30)
    pair.env.run()
    ends = [e for _, e in pair.events if isinstance(e, Generated) and e.rollout == 1]
    assert [event.finish for event in ends] == ["prefilled", "aborted", "prefilled", "stop"]
    assert ends[-1].transfer_time > 0.0 == ends[-1].prefill_time
    assert pair.decode._cache.num_rollouts == pair.decode._cache.held == 0


# The engine ---------------------------------------------------------------------------------------


def begun(num_prompts: int = 2, **changes: Any) -> Script:
    """Return a script whose first groups wait for their prefill."""
    changes = {"policies__system": "stream-sync", "rollout__others": [PREFILL], **changes}
    s = singles(num_prompts, **changes)
    s.draw(s.begin())
    return s


def prefilled(rollout: int, tokens: int = 0) -> Generated:
    return Generated(rollout, tokens, "prefilled", 0, 1.0, 1.0)


def test_a_rollout_is_prefilled_and_then_decoded_from_there() -> None:
    s = begun()
    assert [r.replica.id for r in s.state.rollouts.values() if r.replica is not None] == [2, 2]
    assert s.tell(prefilled(0)) == [Generate(0, 0, 0, prefilled_on=2)]
    assert s.tell(prefilled(1)) == [Generate(1, 1, 1, prefilled_on=2)]


def test_a_rollout_that_is_interrupted_is_prefilled_again() -> None:
    s = begun()
    s.tell(prefilled(0))
    assert s.tell(Generated(0, 7, "aborted", 0, 1.0, 0.0)) == [Generate(0, 2, 0, prefix=7)]
    assert s.tell(prefilled(0, 7)) == [Generate(0, 0, 0, prefix=7, prefilled_on=2)]


def test_prefills_wait_while_enough_rollouts_are_under_way() -> None:
    # two decode replicas run one each, and a quarter more is rounded down
    s = begun(4, rollout__max_running=1)
    assert s.state.num_generating == 2
    s.tell(prefilled(0))
    assert s.state.num_generating == 2
    sent = of(Generate, s.tell(Generated(0, 5, "stop", 0, 1.0, 0.0)))
    assert sent == [Generate(2, 2, 2)]


def test_a_prefilled_rollout_waits_for_a_decode_replica() -> None:
    s = begun()
    lost = [s.tell(ReplicaLost(replica, "gone")) for replica in (0, 1)]
    assert [c.kind for commands in lost for c in of(StartReplica, commands)] == [0, 0]
    assert s.tell(prefilled(0)) == []
    assert list(s.state.prefilled) == [0]


def test_an_episode_whose_time_is_over_waits_for_no_decode_replica() -> None:
    limits = {"max_turns": 4, "max_context": 4096, "episode_time_limit": "20 s"}
    s = begun(1, environment=limits)
    s.tell(Observed(0, 0), ReplicaLost(0, "gone"), ReplicaLost(1, "gone"), prefilled(0))
    assert list(s.state.prefilled) == [0]
    s.now = 100.0
    assert of(Truncate, s.tell(Woke(s.state.next_wake or 0.0))) == [Truncate(0)]
    assert not s.state.prefilled


def test_siblings_share_a_prefill_replica() -> None:
    s = script(
        rollout__others=[{**PREFILL, "replicas": 2}],
        policies__system="stream-sync",
        algorithm__prompts_per_step=2,
        algorithm__group_size=3,
    )
    s.draw(s.begin())
    places = [r.replica.id for r in s.state.rollouts.values() if r.replica is not None]
    assert places == [2, 2, 2, 3, 3, 3]


# Whole runs ---------------------------------------------------------------------------------------


def traced(run: Run) -> tuple[SimWorld, Trace]:
    world = checked_world(fill_policies(run, Costs.load(run)))
    return world, world.run()


def check(world: SimWorld, trace: Trace) -> None:
    check_every_rollout_is_accounted_for(trace)
    check_every_command_ends_once(trace)
    assert replay(trace) is None
    shares = attribute(trace)
    assert sum(shares.busy.values()) + sum(shares.idle.values()) == pytest.approx(1.0)
    open_rollouts = world.engine.state.rollouts
    handover = world._handover
    assert handover is not None and set(handover._kept) <= set(open_rollouts)


SLOW: dict[str, Any] = {
    "cluster__pools": {"far": {"gpu": "h20"}, "near": {"gpu": "h800"}, "third": {"gpu": "h20"}},
    "cluster__links": [
        {"between": ["far", "near"], "bandwidth": "80 Gbps", "latency": "10 ms"},
        {"between": ["third", "near"], "bandwidth": "80 Gbps", "latency": "10 ms"},
        {"between": ["third", "far"], "bandwidth": "20 Mbps", "latency": "10 ms"},
    ],
}
"""Prefill replicas in a third pool, from which a token of context takes 25 ms."""
SYSTEMS = ("stream-sync", "stream-async", "fully-async", "disaggregated")


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_rollout_is_prefilled_and_decoded_on_different_replicas(system: str) -> None:
    world, trace = traced(apart(policies__system=system))
    check(world, trace)
    sent = of(Generate, [c for entry in trace.entries for c in entry.commands])
    assert {c.replica for c in sent if c.prefilled_on is None} == {2}
    assert {c.replica for c in sent if c.prefilled_on is not None} == {0, 1}
    ends = [e.event for e in trace.entries if isinstance(e.event, Generated)]
    computed = sum(event.prefill_time > 0 for event in ends if event.finish != "prefilled")
    if system == "stream-sync":
        assert sum(world.steps.num_generated) == 3 * 2 * 2
    # weights that a prefill replica loads while its contexts wait make decode replicas compute them
    assert computed == 0 if system in ("stream-sync", "disaggregated") else computed < len(ends) / 4


def test_transfers_over_a_slow_link_are_idle_time_of_their_own() -> None:
    world, trace = traced(apart({**PREFILL, "pool": "third"}, **SLOW))
    check(world, trace)
    sides = attribute_sides(trace).sides
    assert sides["rollout"].idle["kv-transfer"] > 0.02
    # prefill replicas and the trainer wait for the same transfers
    assert sides["rollout-2"].idle["kv-transfer"] > 0.02 < sides["trainer"].idle["kv-transfer"]
    assert sides["trainer"].idle["verifier"] == 0.0
    assert sides["rollout-2"].busy["prefill"] > 0.0 < sides["rollout"].busy["decode"]
    assert sides["rollout-2"].busy["decode"] == pytest.approx(0.0, abs=1e-9)
    assert sides["rollout"].busy["prefill"] == 0.0
    spans = [span for spans in read_timeline(trace).replicas.values() for span in spans]
    assert any(span.activity == "kv-transfer" for span in spans)


def test_prefill_replicas_that_wait_for_decoding_wait_for_the_pipeline() -> None:
    _, trace = traced(apart(policies__system="stream-sync"))
    idle = attribute_sides(trace).sides["rollout-2"].idle
    assert idle["pipeline"] > 0.02 and idle["skew"] == 0.0


def under_way(world: SimWorld) -> tuple[dict[int, Any], Handover]:
    """Run until contexts are on their way to both decode replicas; return the caches that are kept."""
    world.emit(RunStarted(0, 0))
    handover = world._handover
    assert handover is not None
    ports = handover._ports
    while not all(("to", n) in ports and ports["to", n].transfers for n in (0, 1)):
        world.env.step()
    return handover._kept, handover


def slow_world() -> SimWorld:
    run = apart({**PREFILL, "pool": "third"}, policies__system="stream-sync", **SLOW)
    return checked_world(fill_policies(run, Costs.load(run)))


def test_a_lost_replica_sends_and_receives_nothing_any_more() -> None:
    for which in (0, 1, 2):
        world = slow_world()
        kept, handover = under_way(world)
        world.lose(which, "gone")
        for side in ("from", "to"):
            port = handover._ports.get((side, which))
            assert port is None or not port.transfers
        assert all(each.replica != which for each in kept.values())


def test_contexts_of_dropped_and_overdue_rollouts_are_freed() -> None:
    world = slow_world()
    kept, _ = under_way(world)
    first = next(iter(kept))
    world.start(Truncate(first))
    assert first not in kept
    group = world.rollouts[next(iter(kept))].group
    world.start(Drop(group, "not wanted"))
    assert not [each for each in kept if world.rollouts[each].group == group]


def cached_share(trace: Trace, replicas: set[int]) -> float:
    """Return the share of the contexts of later turns that the prefix caches of some replicas had."""
    sent, cached, context = dict[int, Generate](), 0, 0
    for entry in trace.entries:
        event = entry.event
        command = sent.get(event.rollout) if isinstance(event, Generated) else None
        if (
            isinstance(event, Generated)
            and command
            and command.turn
            and command.replica in replicas
        ):
            whole = 40 + command.prefix + command.observed
            cached, context = cached + min(event.cached_tokens, whole), context + whole
        sent.update({c.rollout: c for c in of(Generate, entry.commands)})
    return cached / context


def test_each_turn_of_an_episode_is_prefilled_and_only_what_is_new_is_received() -> None:
    world, trace = traced(apart(environment=EPISODES, policies__turn_placement="sticky"))
    check(world, trace)
    ends = [e.event for e in trace.entries if isinstance(e.event, Generated)]
    turns = sum(event.finish in ("stop", "length") for event in ends)
    assert turns == sum(event.finish == "prefilled" for event in ends) > 12
    found = measure(trace).episodes
    assert found is not None and 1.0 <= found.turns <= 4.0
    on_prefill, on_all = (cached_share(trace, sides) for sides in ({2}, {0, 1, 2}))
    assert on_prefill < on_all
    assert found.cached_share == pytest.approx(on_prefill, abs=(on_all - on_prefill) / 4)
    commands = [c for entry in trace.entries for c in entry.commands]
    later = {c.rollout for c in of(Generate, commands) if c.turn and c.prefilled_on is not None}
    moved = [e for e in ends if e.rollout in later and e.finish == "stop" and e.cached_tokens]
    assert moved
    shortest = min(event.transfer_time for event in moved)
    assert shortest < 60 / ROUTE.send_rate + ROUTE.latency  # an observation, not the context


@settings(max_examples=60, deadline=None)
@given(
    system=st.sampled_from(SYSTEMS),
    losses=st.lists(st.tuples(st.floats(0.0, 60.0), st.integers(0, 5)), max_size=6),
    trainer_at=st.none() | st.floats(0.0, 60.0),
    has_turns=st.booleans(),
    is_far=st.booleans(),
)
def test_nothing_is_lost_or_trained_twice_whichever_replicas_are_lost(
    system: str,
    losses: list[tuple[float, int]],
    trainer_at: float | None,
    has_turns: bool,
    is_far: bool,
) -> None:
    changes: dict[str, Any] = {"policies__max_restarts": 20, "policies__system": system}
    if has_turns:
        changes["environment"] = {**EPISODES, "episode_time_limit": "6 s"}
    if is_far:
        changes |= SLOW
    run = apart({**PREFILL, "pool": "third" if is_far else "far", "replicas": 2}, **changes)
    world = checked_world(fill_policies(run, Costs.load(run)))
    for time, which in losses:
        lose_replica_at(world, time, which)
    if trainer_at is not None:
        lose_trainer_at(world, trainer_at, 0)
    check(world, world.run())


def test_spot_notices_empty_prefill_and_decode_replicas() -> None:
    spot = {
        "cluster__pools__far__spot_failures_per_gpu_day": 30000.0,
        "cluster__pools__far__spot_warning": "2 s",
        "policies__max_restarts": 1000,
    }
    world, trace = traced(apart(**spot))
    check(world, trace)
    assert any(isinstance(entry.event, ReplicaLeaving) for entry in trace.entries)


# Plans --------------------------------------------------------------------------------------------


def test_a_plan_keeps_its_gpus_and_the_share_of_prefill_replicas() -> None:
    wanted = apart({**PREFILL, "replicas": 2}, rollout__replicas=6).rollout
    planned = small_run({"rollout.replicas": 8}).rollout
    assert num_prefill(planned, wanted) == 2
    rollout = with_prefill_replicas(planned, 2)
    assert [kind.replicas for kind in rollout.kinds] == [6, 2]
    assert rollout.prefill_kinds == (1,)
    assert without_prefill_replicas(rollout).others == ()


class Simulates:
    """An executor that computes a task at once, and notes the runs."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.runs = seconds, list[Run]()

    def submit(self, _task: Any, run: bytes) -> Future[float]:
        """Return the given seconds."""
        self.runs.append(decode_run(run))
        future = Future[float]()
        future.set_result(self.seconds)
        return future


@pytest.mark.parametrize(("seconds", "is_taken"), [(9.0, True), (9.95, False), (12.0, False)])
def test_a_plan_takes_prefill_replicas_only_if_a_step_becomes_faster(
    seconds: float, is_taken: bool
) -> None:
    pool = Simulates(seconds)
    planned, executor = small_run(), cast(Executor, pool)
    assert planned_disaggregation(planned, planned.rollout, 10.0, executor) is None
    found = planned_disaggregation(planned, RUN.rollout, 10.0, executor)
    assert found is not None and found.is_taken is is_taken
    assert [kind.replicas for kind in pool.runs[0].rollout.kinds] == [1, 1]
    assert "only prefill" in disaggregation_text(found)


def test_a_plan_that_cannot_split_says_why() -> None:
    alone, executor = small_run({"rollout.replicas": 1}), cast(Executor, Simulates(1.0))
    found = planned_disaggregation(alone, RUN.rollout, 10.0, executor)
    assert found is not None and found.reason == "the plan has a single replica"
    shared = small_run({"policies.system": "colocated", "rollout.replicas": 4})
    found = planned_disaggregation(shared, RUN.rollout, 10.0, executor)
    assert found is not None and "policies.system 'colocated'" in found.reason
    assert found.reason in disaggregation_text(found)


# Refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "changes", "key", "says"),
    [
        ({"disaggregation_mode": "decode"}, {}, "rollout.others.0.disaggregation_mode", "prefill"),
        ({"share": 2.0}, {}, "rollout.others.0.share", "must be left out"),
        ({"latency": [[1, 0.1]]}, {}, "rollout.others.0.latency", "must be left out"),
        ({}, {"policies.dispatch": "random"}, "policies.dispatch", "must be 'least-loaded'"),
        ({}, {"policies.weight_sync": "between-batches"}, "policies.weight_sync", "another one"),
        ({}, {"rollout.admission": "reserve"}, "rollout.admission", "must be 'on-demand'"),
        ({}, {"lending": {}}, "lending", "must be left out"),
        ({}, {"costs.profile": "x.toml"}, "costs.profile", "must be left out"),
    ],
)
def test_what_prefill_replicas_cannot_be_combined_with_is_refused_by_its_key(
    other: dict[str, Any], changes: dict[str, Any], key: str, says: str
) -> None:
    with pytest.raises(RunError, match=says) as found:
        small_run({"rollout.others": [{**PREFILL, **other}], **changes})
    assert found.value.key == key


def test_caches_need_a_link_between_their_pools() -> None:
    pools = {"far": {"gpu": "h20"}, "near": {"gpu": "h800"}, "third": {"gpu": "h20"}}
    links = [
        {"between": ["far", "near"], "bandwidth": "80 Gbps"},
        {"between": ["third", "near"], "bandwidth": "80 Gbps"},
    ]
    with pytest.raises(RunError, match="no link between 'third' and 'far', which KV caches cross"):
        apart({**PREFILL, "pool": "third"}, cluster__pools=pools, cluster__links=links)


def test_prefill_replicas_are_not_executed() -> None:
    with pytest.raises(RunError, match=r"rollout\.others\.0\.disaggregation_mode") as found:
        check_back_ends(RUN)
    assert found.value.value == "prefill"
    assert found.value.key == "rollout.others.0.disaggregation_mode"


def test_a_link_is_named_in_the_sources_of_the_transfer() -> None:
    found = Costs.load(apart({**PREFILL, "pool": "near"})).provenance["cache_transfer"]
    assert "profiles/transports/tcp.toml" in found.sources
    assert COSTS.facts["cache_transfer"] == {"roofline": 1.0}
