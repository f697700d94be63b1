"""What no run may ever do, over seeds: every system with any dispatch and migration, whatever fails.

every rollout is trained exactly once, or dropped with a reason
no rollout is trained on past its system's bound on staleness, nor starts under a version older than it may
every command ends in exactly one event, and a fresh engine decides every event as this one did
every GPU-second is busy, or idle for one cause
no rollout ends before it could have decoded alone, so no makespan is below the longest one's decode time
GPUs that both sides share never generate while they train or change phase

A run is simulated once for all of them. How far longest-first order and skewness-aware dispatch may be from the
best is in `test_makespan`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.engine.messages import Drop, Generate, Generated, Postpone, PromptsDrawn
from streamrl.engine.presets import SYSTEMS, choose_system
from streamrl.engine.trace import Trace, replay
from streamrl.record.attribution import attribute
from streamrl.record.timeline import read_timeline
from streamrl.sim.costs.costs import Costs
from tests.random_runs import Losses, failures, has_stopped_early, losses, runs, simulate
from tests.runs import of
from tests.traces import (
    check_every_command_ends_once,
    check_every_rollout_is_accounted_for,
    staleness_of,
)

BOUNDS = {
    "colocated": 0,
    "disaggregated": 0,
    "stream-sync": 0,
    "one-step-async": 1,
    "stream-async": 1,
}
"""The bound of fully-async is a key of the run file."""

each_system = pytest.mark.parametrize("system", sorted(SYSTEMS))


@each_system
@settings(max_examples=8, deadline=None)
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
@settings(max_examples=20, deadline=None)
@given(st.data(), losses, failures)
def test_no_invariant_is_broken_whatever_fails(
    system: str, data: st.DataObject, lost: Losses, faults: frozenset[int]
) -> None:
    trace = simulate(data.draw(runs(None, system, late=True)), lost, faults)
    check_every_rollout_is_accounted_for(trace)
    check_every_command_ends_once(trace)
    check_staleness(trace)
    check_every_gpu_second_has_one_cause(trace)
    check_no_rollout_is_faster_than_alone(trace)
    check_shared_gpus_do_one_thing_at_a_time(trace)
    assert replay(trace) is None


def check_staleness(trace: Trace) -> None:
    """Raise `AssertionError` where a rollout is too stale when trained on, or begins under too old a version."""
    run, staleness = trace.run, staleness_of(trace)
    if not has_stopped_early(trace):
        assert len(staleness) == run.algorithm.steps * run.algorithm.rollouts_per_step
    system = choose_system(run.policies)
    if system.keeps_bound:
        bound = BOUNDS.get(run.policies.system, ceil(system.max_staleness)) + system.sync_every - 1
        assert all(0 <= each <= bound for each in staleness.values())
    oldest: dict[int, int] = {}
    made: dict[int, int] = {}
    asked: dict[int, int] = {}  # by rollout: the oldest version that its attempt may start under
    rollouts: dict[int, tuple[int, ...]] = {}
    for _, event, commands in trace.entries:
        if isinstance(event, PromptsDrawn):
            for group in event.groups:
                oldest.update(dict.fromkeys(group.rollouts, event.oldest_version))
                rollouts[group.group] = group.rollouts
        elif isinstance(event, Generated) and event.tokens > made.get(event.rollout, 0):
            made[event.rollout] = (
                event.tokens
            )  # of an attempt that made none the version says nothing
            assert event.version >= asked[event.rollout]
        for command in commands:
            if isinstance(command, Postpone):
                oldest.update(dict.fromkeys(rollouts[command.group], command.oldest_version))
            elif isinstance(command, Generate):
                asked[command.rollout] = oldest[command.rollout]


def check_every_gpu_second_has_one_cause(trace: Trace) -> None:
    """Raise `AssertionError` where shares of busy and idle are not all of the GPU-seconds."""
    shares = attribute(trace)
    assert shares.gpu_seconds == pytest.approx(trace.run.num_gpus * trace.entries[-1].time)
    total = sum(shares.busy.values()) + sum(shares.idle.values())
    assert total == pytest.approx(1 if shares.gpu_seconds else 0, abs=1e-9)
    assert min([*shares.busy.values(), *shares.idle.values()]) > -1e-9


def check_no_rollout_is_faster_than_alone(trace: Trace) -> None:
    """Raise `AssertionError` where a rollout took less time than its tokens decode in by themselves."""
    curve, lengths = Costs.load(trace.run).decode, trace.run.workload.lengths
    assert lengths is not None
    for life in _lives(trace):
        steps = life.tokens - life.attempts  # the prefill of each attempt makes a token
        context = steps * lengths.prompt_tokens + steps * (steps + 1) / 2
        alone = steps * curve.base[1] + curve.per_context_token[1] * context
        assert life.ended_at - life.drawn_at >= alone * (1 - 1e-9)


def check_shared_gpus_do_one_thing_at_a_time(trace: Trace) -> None:
    """Raise `AssertionError` where GPUs of both sides generate while they train or change phase."""
    if not trace.run.policies.shares_gpus:
        return
    timeline = read_timeline(trace)
    work = [span for span in timeline.trainers[0] if span.activity in ("score", "train")]
    generating = [span for spans in timeline.rollouts.values() for span in spans]
    for other in [*work, *timeline.link]:
        for span in generating:
            assert min(span.end, other.end) - max(span.start, other.start) < 1e-9


@dataclass
class Life:
    """What a trace says of a rollout."""

    drawn_at: float
    ended_at: float = 0.0
    tokens: int = 0
    attempts: int = 0
    """Those that made a token."""


def _lives(trace: Trace) -> list[Life]:
    """Return every rollout that was generated, as a whole or in part."""
    lives: dict[int, Life] = {}
    for time, event, _ in trace.entries:
        if isinstance(event, PromptsDrawn):
            lives.update({r: Life(time) for group in event.groups for r in group.rollouts})
        elif isinstance(event, Generated) and event.tokens > lives[event.rollout].tokens:
            life = lives[event.rollout]
            life.ended_at, life.tokens, life.attempts = time, event.tokens, life.attempts + 1
    return [life for life in lives.values() if life.tokens]
