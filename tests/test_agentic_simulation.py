"""Simulated episodes against closed forms: prefix cache, sandboxes, turns without tools, and the account of every second."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace as replace_fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.engine.messages import (
    Act,
    Close,
    Failed,
    Generate,
    Generated,
    Observed,
    Verified,
    WeightsLoaded,
)
from streamrl.engine.trace import Trace, read_trace, replay
from streamrl.record.attribution import attribute, attribute_sides
from streamrl.record.ledger import LedgerReader
from streamrl.record.metrics import measure
from streamrl.report.run_tables import metrics_table
from streamrl.runfile.config import Run
from streamrl.runfile.errors import RunError
from streamrl.sim.checkup import rehearsal
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.policy_estimates import fill_policies
from streamrl.sim.prefix_cache import PrefixCache
from streamrl.sim.world import SimWorld
from streamrl.workload.episodes import Episode, fitted_to_context
from streamrl.workload.workload import SimulatedWorkload
from tests.runs import (
    call_at,
    checked_world,
    lose_replica_at,
    lose_trainer_at,
    of,
    run_with_capacity,
    small_run,
)

AGENT: dict[str, Any] = {
    "max_turns": 8,
    "max_context": 4096,
    "turns": "mean 4, p95 7",
    "observation_tokens": "mean 60, p95 150",
    "action_time": "median 1 s, p99 8 s",
    "start_time": "2 s",
}


def agentic(changes: dict[str, Any] | None = None, **environment: Any) -> Run:
    """Return a small run with an environment."""
    return small_run({"environment": {**AGENT, **environment}, **(changes or {})})


def simulated(run: Run) -> Trace:
    """Return the trace of a checked simulation."""
    return checked_world(run).run()


def events(trace: Trace, kind: type) -> list[tuple[float, Any]]:
    """Return the events of one type with their times."""
    return [(entry.time, entry.event) for entry in trace.entries if isinstance(entry.event, kind)]


def commands(trace: Trace, kind: type) -> list[tuple[float, Any]]:
    """Return the commands of one type with their times."""
    found = [(e.time, command) for e in trace.entries for command in e.commands]
    return [(time, command) for time, command in found if isinstance(command, kind)]


# The whole run ------------------------------------------------------------------------------------

SYSTEMS = ["colocated", "stream-sync", "one-step-async", "stream-async", "fully-async"]


@pytest.mark.parametrize("system", SYSTEMS)
def test_an_agentic_run_replays_and_accounts_for_everything(system: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"policies.system": system}
    if system == "colocated":
        changes |= {"rollout.pool": "near", "rollout.tensor_parallel": 2}
    run = agentic(changes, sandboxes=3, action_time_limit="4 s", failed_share=0.05)
    trace = simulated(run)
    assert replay(trace, checks_invariants=True) is None
    reader = LedgerReader(trace)
    reader.read(trace.entries)
    assert reader.balance().is_balanced
    shares = attribute(trace)
    assert sum(shares.busy.values()) + sum(shares.idle.values()) == pytest.approx(1.0)
    path = tmp_path / "trace.jsonl"
    path.write_bytes(trace.encode())
    assert read_trace(path).entries == trace.entries


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 1000),
    system=st.sampled_from(SYSTEMS[1:]),
    after_loss=st.sampled_from(["restart", "replay"]),
    placement=st.sampled_from(["sticky", "cache-aware", "any"]),
    sync=st.sampled_from(["drain-then-load", "load-in-flight", "abort-and-resume", "barrier"]),
    losses=st.lists(st.floats(0.0, 30.0), max_size=3),
)
def test_losses_in_the_middle_of_episodes_lose_and_double_nothing(
    seed: int, system: str, after_loss: str, placement: str, sync: str, losses: list[float]
) -> None:
    changes = {
        "seed": seed,
        "policies.system": system,
        "policies.turn_placement": placement,
        "policies.turn_imbalance": 1,
        "policies.weight_sync": sync,
        "policies.max_restarts": 9,
    }
    limits = {"episode_time_limit": "15 s", "action_time_limit": "5 s", "sandboxes": 3}
    run = agentic(changes, after_loss=after_loss, failed_share=0.1, **limits)
    world = checked_world(run)
    for number, time in enumerate(losses):
        lose_replica_at(world, time, number % 2)
    lose_trainer_at(world, 20.0, 0)
    trace = world.run()
    assert replay(trace) is None
    reader = LedgerReader(trace)
    reader.read(trace.entries)
    ledger = reader.balance()
    assert ledger.is_balanced, ledger.faults


def test_the_same_run_file_and_seed_give_the_same_trace() -> None:
    run = agentic(failed_share=0.05, sandboxes=3)
    assert simulated(run).encode() == simulated(run).encode()


# Turns without tools ------------------------------------------------------------------------------


def test_episodes_of_one_turn_take_exactly_the_seconds_of_rollouts() -> None:
    own = {"policies.system": "stream-sync"}
    plain = simulated(small_run(own))
    quiet = {"turns": "1", "start_time": "0 s", "action_time": "0 s"}
    turned = simulated(agentic(own, max_context=2048 + 256, **quiet))
    for kind in (Generated, Verified):
        expected = [(time, event.rollout) for time, event in events(plain, kind)]
        assert [(time, event.rollout) for time, event in events(turned, kind)] == expected


def test_turns_without_tool_time_take_the_seconds_of_one_turn_with_the_same_tokens() -> None:
    scale: dict[str, Any] = {"workload.lengths.scale": 0.2, "rollout.max_tokens": 4096}
    scale["policies.system"] = "stream-sync"  # else replicas drain turns, which are shorter
    environment = {"max_context": 2048 + 4096, "start_time": "0 s", "action_time": "0 s"}
    quiet = {"observation_tokens": "0", "turns": "4", "max_turns": 4, **environment}
    plain, turned = simulated(small_run(scale)), simulated(agentic(scale, **quiet))
    lengths = [draw.lengths for draw in SimulatedWorkload(small_run(scale)).draw(0, 6)]
    assert [
        draw.lengths for draw in SimulatedWorkload(agentic(scale, **quiet)).draw(0, 6)
    ] == lengths
    assert turned.entries[-1].time == pytest.approx(plain.entries[-1].time, rel=0.01)


# The prefix cache ---------------------------------------------------------------------------------


def stack_distance_hits(accesses: list[int], size: int, capacity: int) -> int:
    """Return the accesses to items of equal size whose LRU stack distance fits a cache (Mattson 1970)."""
    stack: list[int] = []
    hits = 0
    for item in accesses:
        if item in stack:
            hits += (stack.index(item) + 1) * size <= capacity
            stack.remove(item)
        stack.insert(0, item)
    return hits


@given(
    accesses=st.lists(st.integers(0, 9), min_size=1, max_size=200),
    capacity=st.integers(100, 1000),
)
def test_prefix_cache_hits_are_those_of_an_lru_stack(accesses: list[int], capacity: int) -> None:
    size, cache, hits = 100, PrefixCache(), 0
    for item in accesses:
        hits += cache.take(item, item, 0) == size
        cache.keep_own(item, size)
        cache.shrink(capacity)
        assert cache.held <= capacity
    assert hits == stack_distance_hits(accesses, size, capacity)


def test_the_end_of_the_oldest_context_is_evicted_first() -> None:
    cache = PrefixCache()
    cache.keep_own(1, 100)
    cache.keep_prompt(1, 40)
    cache.keep_own(2, 100)
    cache.shrink(190)
    assert cache.take(1, 1, 40) == 40 + 50
    assert cache.take(2, 2, 0) == 100


def hit_tokens(trace: Trace) -> tuple[int, int]:
    """Return the cached tokens at the starts of second and later turns, and those computed before."""
    sent: dict[int, Generate] = {}
    last: dict[int, int] = {}
    hits = known = 0
    prompts = {r: 40 for _, e in events(trace, Verified) for r in (e.rollout,)}
    for entry in trace.entries:
        if isinstance(entry.event, Generated):
            rollout = entry.event.rollout
            command = sent.pop(rollout)
            if command.turn:
                hits += entry.event.cached_tokens
                known += last[rollout]
            last[rollout] = prompts[rollout] + command.observed + entry.event.tokens
        for command in entry.commands:
            if isinstance(command, Generate):
                sent[command.rollout] = command
    return hits, known


def test_a_large_cache_keeps_every_context_and_a_small_one_does_not() -> None:
    changes = {"policies.system": "stream-sync", "rollout.replicas": 1, "algorithm.steps": 1}
    run = agentic({**changes, "policies.turn_placement": "sticky"})
    hits, known = hit_tokens(simulated(run))
    assert hits == pytest.approx(known, rel=0.03), (
        "only a prompt that siblings share is not counted"
    )
    environment = {**AGENT, "max_context": 1400}
    more = {"algorithm.prompts_per_step": 8, "workload.max_prompt_tokens": 64}
    tight = simulated(run_with_capacity(1500, {"environment": environment, **changes, **more}))
    hits, known = hit_tokens(tight)
    assert 0 < hits < 0.9 * known
    replicas = attribute_sides(tight).sides["rollout"]
    assert replicas.busy["recomputed-prefix"] > 0
    generating = sum(replicas.busy.values()) + replicas.idle["skew"]
    found = measure(tight, (1, 1))
    assert found.stages["generation"] == pytest.approx(generating * found.step_time)


def test_evicted_tokens_are_loaded_from_host_memory_while_it_has_them() -> None:
    cache = PrefixCache(PrefixCache.in_host_memory(150))
    cache.keep_own(1, 100)
    cache.keep_own(2, 100)
    cache.shrink(120)  # 80 tokens of the older context leave GPU memory
    assert (cache.take(0, 2, 0), cache.loaded) == (100, 0)
    assert (cache.take(0, 1, 0), cache.loaded) == (50, 30)  # host memory kept half of it
    cache.keep_own(1, 100)
    cache.clear()
    assert (cache.take(0, 1, 0), cache.loaded) == (0, 0)


def test_host_memory_replaces_computing_by_loading() -> None:
    changes = {"policies.system": "stream-sync", "rollout.replicas": 1, "algorithm.steps": 1}
    changes |= {"environment": {**AGENT, "max_context": 1400}}
    changes |= {"algorithm.prompts_per_step": 8, "workload.max_prompt_tokens": 64}
    few, many = (
        simulated(run_with_capacity(1500, {**changes, **offload}))
        for offload in ({}, {"rollout.kv_offload": "10 GB"})
    )
    assert hit_tokens(many)[0] > 1.05 * hit_tokens(few)[0]
    busy = attribute(many).busy["recomputed-prefix"]
    assert busy < attribute(few).busy["recomputed-prefix"]


def test_host_memory_is_for_contexts_of_several_turns() -> None:
    with pytest.raises(RunError, match=r"rollout.kv_offload 10 GB .* add \[environment\]"):
        small_run({"rollout.kv_offload": "10 GB"})


def test_a_preempted_context_is_counted_once() -> None:
    changes = {"policies.system": "stream-sync", "rollout.replicas": 1, "algorithm.steps": 1}
    more = {"algorithm.prompts_per_step": 8, "workload.max_prompt_tokens": 64}
    more |= {"rollout.max_running": 16, "workload.lengths.scale": 0.05}
    environment = {**AGENT, "max_context": 1000, "action_time": "0 s", "start_time": "0 s"}
    world = checked_world(run_with_capacity(1000, {"environment": environment, **changes, **more}))
    most = 0

    def look() -> None:
        nonlocal most
        for replica in world.replicas.values():
            cache = replica._cache
            assert cache.unused is not None
            own = {rollout for what, rollout in cache.unused._kept if what == "own"}
            assert own.isdisjoint(replica._running)
            assert cache.held + cache.unused.held <= cache.capacity
            most = max(most, replica.num_preempted)

    for number in range(1, 3000):
        call_at(world, number * 0.01, look)
    world.run()
    assert most, "nothing was preempted"


def test_a_replica_without_prefix_caching_computes_every_context_again() -> None:
    changes = {"rollout.shares_prefixes": False, "policies.system": "stream-sync"}
    hits, known = hit_tokens(simulated(agentic(changes)))
    assert hits == 0 < known


def test_new_weights_invalidate_the_cache() -> None:
    trace = simulated(agentic({"policies.system": "fully-async", "policies.max_staleness": 1}))
    loaded: dict[int, float] = {}
    ended: dict[int, float] = {}
    sent: dict[int, tuple[float, Generate]] = {}
    num_before, num_after = 0, 0
    for time, event, answer in trace.entries:
        if isinstance(event, WeightsLoaded):
            loaded[event.replica] = time
        if isinstance(event, Generated):
            sent_at, command = sent.pop(event.rollout)
            if command.turn and ended[event.rollout] < loaded.get(command.replica, 0.0) <= sent_at:
                num_after += 1
                assert event.cached_tokens <= 40, "at most the prompt, which a sibling computed"
            elif command.turn:
                num_before += event.cached_tokens > 40
            ended[event.rollout] = time
        sent |= {c.rollout: (time, c) for c in answer if isinstance(c, Generate)}
    assert num_before and num_after


# Sandboxes ----------------------------------------------------------------------------------------


def test_throughput_with_few_sandboxes_is_that_of_a_closed_queue() -> None:
    """With all sandboxes in use, episodes per second are sandboxes / mean seconds that an episode holds one.

    An episode holds it for its start, its actions and its generation. Nothing else waits.
    """
    changes = {
        "policies.system": "fully-async",
        "policies.max_staleness": 4,
        "algorithm.prompts_per_step": 40,
        "rollout.max_running": 64,
    }
    run = agentic(changes, sandboxes=4, action_time="median 10 s, p99 60 s")
    trace = simulated(run)
    closed_at = [time for time, _ in commands(trace, Close)]
    drawn = [e for draw in SimulatedWorkload(run).draw(0, 120) for e in draw.episodes]
    assert len(closed_at) == len(drawn)
    generation = sum(event.run_time for _, event in events(trace, Generated)) / len(drawn)
    holding = 2.0 + np.mean([sum(episode.action_times) for episode in drawn]) + generation
    assert len(drawn) / closed_at[-1] == pytest.approx(4 / holding, rel=0.03)


def all_episodes(run: Run) -> list[Episode]:
    """Return the episodes of the first groups of a run."""
    return [each for draw in SimulatedWorkload(run).draw(0, 8) for each in draw.episodes]


def test_starts_share_their_limit_per_second() -> None:
    trace = simulated(agentic({"policies.system": "stream-sync"}, starts_per_second=2))
    opened: dict[int, float] = {}
    for time, event in events(trace, Observed):
        opened.setdefault(event.rollout, time)
    first = [opened[rollout] for rollout in range(4)]
    assert [b - a for a, b in pairwise(first)] == pytest.approx([0.5, 0.5, 0.5])


def test_prepared_environments_start_first_and_are_replaced() -> None:
    warm = {"warm": 2, "warm_start_time": "100 ms", "start_time": "4 s", "sandboxes": 2}
    trace = simulated(agentic({"policies.system": "stream-sync"}, **warm))
    took = [end - begun for begun, end, command in acts(trace) if command.starts]
    assert took[:2] == pytest.approx([0.1, 0.1])
    assert sum(each == pytest.approx(0.1) for each in took) > 2, "others were prepared"


def acts(trace: Trace) -> list[tuple[float, float, Act]]:
    """Return the beginning and the end of each action."""
    begun: dict[int, tuple[float, Act]] = {}
    found: list[tuple[float, float, Act]] = []
    for time, event, answer in trace.entries:
        if isinstance(event, Observed):
            began_at, command = begun.pop(event.rollout)
            found.append((began_at, time, command))
        begun |= {c.rollout: (time, c) for c in answer if isinstance(c, Act)}
    return found


def test_the_figures_of_episodes_are_those_of_their_messages() -> None:
    run = agentic({"policies.system": "stream-sync"}, sandboxes=3, failed_share=0.02)
    trace = simulated(run)
    found = measure(trace, (1, 3)).episodes
    assert found is not None
    ended = [event.rollout for _, event in events(trace, Verified)]
    turns = [e for _, e in events(trace, Generated) if e.finish != "aborted"]
    lost = {event.command.rollout for _, event in events(trace, Failed)}
    kept = set(ended) - lost
    assert lost and found.episodes == len(ended)
    whole = [end - start for start, end, each in acts(trace) if not each.starts]
    assert found.action_time == pytest.approx(np.mean(whole), rel=0.1)
    assert found.tool_time == pytest.approx(found.action_time * found.turns, rel=0.1)
    of_kept = sum(event.rollout in kept for event in turns) / len(kept)
    assert found.turns == pytest.approx(of_kept, rel=0.1)
    assert found.start_time == pytest.approx(2.0)
    assert 1.5 < found.in_flight <= 3
    cached = [event.cached_tokens for event in turns if event.cached_tokens]
    assert found.cached_share is not None and 0.5 < found.cached_share < 1 and cached
    table = "".join(metrics_table(measure(trace)).columns[0]._cells)  # type: ignore[arg-type]
    assert "turns" in table and "cached prefix" in table
    assert measure(simulated(small_run())).episodes is None


def test_episodes_in_flight_are_those_of_each_moment_also_over_a_short_time() -> None:
    steps = {"algorithm.steps": 12, "simulate.max_steps": 12}
    run = agentic({"policies.system": "stream-async", **steps}, sandboxes=5, failed_share=0.02)
    trace = simulated(run)
    found = [measure(trace, (step, step)).episodes for step in range(2, 13)]
    in_flight = [each.in_flight for each in found if each is not None]
    assert len(in_flight) > 6 and np.mean(in_flight) > 3 and max(in_flight) <= 5


def test_a_start_that_takes_too_long_loses_the_environment() -> None:
    run = agentic(start_time="median 2 s, p95 6 s", start_time_limit="3 s", starts_per_second=2)
    trace = simulated(run)
    begun = [(at, command.rollout) for at, command in commands(trace, Act) if command.starts]
    lost = [(time, event.command.rollout) for time, event in events(trace, Failed)]
    took = [time - max(at for at, own in begun if own == who and at < time) for time, who in lost]
    assert took and min(took) >= 3 - 1e-9
    opened = [end - start for start, end, command in acts(trace) if command.starts]
    assert len(opened) > len(took), "most starts succeed"


@pytest.mark.parametrize(("episode_time", "start_time"), [(0.5, 0.25), (0.25, 0.5)])
def test_the_controller_handles_one_turn_after_the_other(
    episode_time: float, start_time: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = agentic({"policies.system": "stream-sync"}, action_time="0 s", start_time="0 s")
    costs = replace_fields(
        Costs.load(run),
        handling_time=2.5,
        episode_time=episode_time,
        action_time=0.125,
        environment_start_time=start_time,
    )
    world, spent = SimWorld(fill_policies(run, costs), costs, SimulatedWorkload(run)), [0.0]
    then = world.handling.then

    def counted(go_on: Callable[[], None], seconds: float | None = None) -> None:
        spent.append(2.5 if seconds is None else seconds)
        then(go_on, seconds)

    monkeypatch.setattr(world.handling, "then", counted)
    trace = world.run()
    starts = [end for _, end, command in acts(trace) if command.starts]
    assert [b - a for a, b in pairwise(starts[:4])] == pytest.approx([0.5] * 3)
    further = len(commands(trace, Generate)) - len(starts)
    turns = sum(not command.starts for *_, command in acts(trace))
    assert 0 < further < turns, "the last action of an episode is no further turn"
    known = 2.5 * len(events(trace, Verified)) + episode_time * len(starts)
    assert sum(spent) == known + 0.125 * further
    assert trace.entries[-1].time >= sum(spent)


@pytest.mark.parametrize("own", [0.25, 3.0])
def test_an_action_takes_its_seconds_or_its_cpu_time_whichever_is_longer(own: float) -> None:
    episodes = {"max_episodes": 1, "action_time": "2 s", "start_time": "2 s"}
    run = agentic({"policies.system": "stream-sync"}, **episodes)
    costs = replace_fields(
        Costs.load(run),
        **dict.fromkeys(("environment_start_time", "environment_action_time"), own),
    )
    trace = SimWorld(fill_policies(run, costs), costs, SimulatedWorkload(run)).run()
    taken = {round(end - start, 6) for start, end, _ in acts(trace)}
    assert taken == {max(2.0, own), own}, "the last action of an episode has no seconds"


def test_an_action_ends_at_its_time_limit() -> None:
    trace = simulated(agentic(action_time="20 s", action_time_limit="3 s"))
    took = [end - begun for begun, end, command in acts(trace) if not command.starts]
    assert max(took) == pytest.approx(3.0)
    num_limited = sum(each == pytest.approx(3.0) for each in took)
    assert num_limited == sum(event.has_timed_out for _, event in events(trace, Observed)) > 0


def test_idle_replicas_wait_for_tools() -> None:
    slow = simulated(agentic({"policies.system": "stream-sync"}, action_time="60 s"))
    assert attribute(slow).idle["tool"] > 0.5
    cold = simulated(agentic({"policies.system": "stream-sync"}, start_time="300 s"))
    assert attribute(cold).idle["environment-start"] > 0.5


# The workload -------------------------------------------------------------------------------------


def test_episodes_have_the_stated_turns_and_the_tokens_of_the_lengths() -> None:
    draws = SimulatedWorkload(agentic()).draw(0, 500)
    episodes = [(length, e) for d in draws for length, e in zip(d.lengths, d.episodes, strict=True)]
    assert np.mean([e.num_turns for _, e in episodes]) == pytest.approx(4, rel=0.1)
    for length, episode in episodes:
        assert episode.ends[-1] == length
        assert all(a < b for a, b in pairwise((0, *episode.ends)))
        assert len(episode.observations) == len(episode.action_times) == episode.num_turns - 1
    observed = [tokens for _, e in episodes for tokens in e.observations]
    assert np.mean(observed) == pytest.approx(60, rel=0.1)
    times = [time for _, e in episodes for time in e.action_times]
    assert np.median(times) == pytest.approx(1.0, rel=0.1)
    assert np.quantile(times, 0.99) == pytest.approx(8.0, rel=0.2)


@given(
    turns=st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50)), min_size=1, max_size=8),
    room=st.integers(2, 300),
)
def test_an_episode_ends_within_its_context(turns: list[tuple[int, int]], room: int) -> None:
    ends = tuple(np.cumsum([tokens for tokens, _ in turns]).tolist())
    observations = tuple(tokens for _, tokens in turns[:-1])
    whole = Episode(ends, observations, (0.0,) * len(observations))
    cut = fitted_to_context(whole, room)
    assert cut.tokens <= room and (cut is whole or cut.tokens == room)
    assert len(cut.observations) in (cut.num_turns - 1, cut.num_turns)


def test_recorded_episodes_are_sampled_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "episodes.csv"
    path.write_text(
        "episode,output_tokens,observation_tokens,action_time,prompt_tokens\n"
        "a,10,30,1.5,50\na,20,0,0,50\nb,7,0,0,60\n"
    )
    lengths = {"kind": "episodes", "source": str(path)}
    run = agentic({"workload.lengths": lengths})
    found = {e for draw in SimulatedWorkload(run).draw(0, 50) for e in draw.episodes}
    assert found == {Episode((10, 30), (30,), (1.5,)), Episode((7,), (), ())}
    assert simulated(run).entries


def test_a_recorded_episode_takes_its_recorded_start_and_its_last_action(tmp_path: Path) -> None:
    path = tmp_path / "episodes.csv"
    path.write_text(
        "episode,output_tokens,observation_tokens,action_time,start_time\na,9,30,1.5,7\na,8,0,2.5,\n"
    )
    lengths = {"kind": "episodes", "source": str(path)}
    environment = {"max_turns": 4, "max_context": 4096}
    trace = simulated(small_run({"environment": environment, "workload.lengths": lengths}))
    began: dict[int, tuple[float, Act]] = {}
    seconds: dict[int, list[float]] = {}
    for entry in trace.entries:
        if isinstance(entry.event, Observed):
            at, act = began.pop(entry.event.rollout)
            seconds.setdefault(act.turn, []).append(entry.time - at)
        began |= {each.rollout: (entry.time, each) for each in of(Act, entry.commands)}
    for turn, expected in enumerate((7.0, 1.5, 2.5)):
        assert seconds[turn] == pytest.approx([expected] * len(seconds[turn]))


def test_recorded_episodes_need_an_environment(tmp_path: Path) -> None:
    lengths = {"kind": "episodes", "source": str(tmp_path / "episodes.csv")}
    with pytest.raises(RunError, match=r"workload.lengths.kind 'episodes' needs the section"):
        small_run({"workload.lengths": lengths})


def test_a_simulation_needs_the_distributions_of_episodes() -> None:
    run = small_run({"environment": {"max_turns": 4, "max_context": 4096}})
    with pytest.raises(RunError, match=r"environment\.turns is missing"):
        SimulatedWorkload(run)


@pytest.mark.parametrize("source", ["swe-agent", "search-agent", "terminal-agent"])
def test_a_profile_gives_the_distributions_that_are_absent(source: str) -> None:
    run = small_run({"environment": {"max_turns": 50, "max_context": 131072, "source": source}})
    assert any(e.num_turns > 1 for e in all_episodes(run))


def test_an_unknown_profile_is_refused_with_the_known_ones() -> None:
    run = small_run({"environment": {"max_turns": 4, "max_context": 4096, "source": "swe"}})
    with pytest.raises(RunError, match="swe-agent"):
        SimulatedWorkload(run)


def test_a_rehearsal_of_many_turns_finishes() -> None:
    changes = {"algorithm.prompts_per_step": 64, "algorithm.group_size": 8}
    run = agentic(changes, max_turns=400, turns="300", max_context=65536)
    assert not rehearsal.rehearse(run).problem
