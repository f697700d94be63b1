"""What no run may ever do, over seeds: every system with any dispatch and migration, whatever fails.

every rollout is trained exactly once, or dropped with a reason
no rollout is trained on past its system's bound on staleness
every GPU-second is busy, or idle for one cause
no rollout ends before it could have decoded alone, so no makespan is below the longest one's decode time

How far longest-first order and skewness-aware dispatch may be from the best is in `test_makespan`.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.costs.costs import Costs
from streamrl.engine.messages import Drop, Generated, PromptsDrawn
from streamrl.engine.systems import SYSTEMS, choose_system
from streamrl.record.attribution import attribute
from streamrl.record.trace import Trace
from tests.random_runs import Losses, failures, has_stopped_early, losses, runs, simulate
from tests.runs import of
from tests.traces import check_every_rollout_is_accounted_for, staleness_of

BOUNDS = {
    "colocated": 0,
    "disaggregated": 0,
    "stream-sync": 0,
    "one-step-async": 1,
    "stream-async": 1,
}
"""The bound of fully-async is a key of the run file."""

some_seeds = settings(max_examples=12, deadline=None)
each_system = pytest.mark.parametrize("system", sorted(SYSTEMS))


@each_system
@some_seeds
@given(st.data())
def test_every_rollout_is_trained_exactly_once_where_nothing_fails(
    system: str, data: st.DataObject
) -> None:
    run = data.draw(runs(None, system))
    trace = simulate(run)
    check_every_rollout_is_accounted_for(trace)
    assert not any(of(Drop, entry.commands) for entry in trace.entries)
    assert len(staleness_of(trace)) == run.algorithm.steps * run.algorithm.rollouts_per_step


@each_system
@some_seeds
@given(st.data(), losses, failures)
def test_every_rollout_is_trained_once_or_dropped_with_a_reason_whatever_fails(
    system: str, data: st.DataObject, lost: Losses, faults: frozenset[int]
) -> None:
    run = data.draw(runs(None, system))
    trace = simulate(run, lost, faults)
    check_every_rollout_is_accounted_for(trace)
    if not has_stopped_early(trace):
        assert len(staleness_of(trace)) == run.algorithm.steps * run.algorithm.rollouts_per_step


@each_system
@some_seeds
@given(st.data(), losses, failures)
def test_no_rollout_is_trained_on_past_the_staleness_bound(
    system: str, data: st.DataObject, lost: Losses, faults: frozenset[int]
) -> None:
    run = data.draw(runs(only_system=system))
    bound = BOUNDS.get(system, choose_system(run.policies).max_staleness)
    staleness = staleness_of(simulate(run, lost, faults)).values()
    assert all(0 <= each <= bound for each in staleness)


@each_system
@some_seeds
@given(st.data(), losses, failures)
def test_every_gpu_second_is_busy_or_idle_for_one_cause(
    system: str, data: st.DataObject, lost: Losses, faults: frozenset[int]
) -> None:
    run = data.draw(runs(None, system))
    trace = simulate(run, lost, faults)
    shares = attribute(trace)
    assert shares.gpu_seconds == pytest.approx(run.num_gpus * trace.entries[-1].time)
    total = sum(shares.busy.values()) + sum(shares.idle.values())
    assert total == pytest.approx(1 if shares.gpu_seconds else 0, abs=1e-9)
    assert min([*shares.busy.values(), *shares.idle.values()]) > -1e-9


@each_system
@some_seeds
@given(st.data(), losses, failures)
def test_no_rollout_ends_before_it_could_have_decoded_alone(
    system: str, data: st.DataObject, lost: Losses, faults: frozenset[int]
) -> None:
    trace = simulate(data.draw(runs(None, system)), lost, faults)
    curve, lengths = Costs.load(trace.run).decode, trace.run.workload.lengths
    assert lengths is not None
    for life in _lives(trace):
        steps = life.tokens - life.attempts  # the prefill of each attempt makes a token
        context = steps * lengths.prompt_tokens + steps * (steps + 1) / 2
        alone = steps * curve.base[1] + curve.per_context_token[1] * context
        assert life.ended_at - life.drawn_at >= alone * (1 - 1e-9)


@dataclass
class Life:
    """What a trace says of a rollout."""

    drawn_at: float
    ended_at: float = 0.0
    tokens: int = 0
    attempts: int = 0
    """Those that made a token."""


def _lives(trace: Trace) -> list[Life]:
    """Give every rollout that was generated, as a whole or in part."""
    lives: dict[int, Life] = {}
    for time, event, _ in trace.entries:
        if isinstance(event, PromptsDrawn):
            lives.update({r: Life(time) for group in event.groups for r in group.rollouts})
        elif isinstance(event, Generated) and event.tokens > lives[event.rollout].tokens:
            life = lives[event.rollout]
            life.ended_at, life.tokens, life.attempts = time, event.tokens, life.attempts + 1
    return [life for life in lives.values() if life.tokens]
