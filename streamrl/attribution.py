"""Where the GPU-seconds of a run went: busy by activity, idle by cause, together all of them.

cause         who                 waits for
start-up      replica, trainer    itself, or the replicas that come up with it
failure       replica             its replacement
sync          replica, trainer    weights on their way or being loaded
skew          replica, trainer    the stragglers of the step, while replicas already stand idle
pipeline      replica             the trainer, which may not be overtaken (on-policy)
trainer             rollouts, while every replica works on them
staleness     replica             the trainer, which is max_staleness steps behind
verifier      replica, trainer    the rewards of generated rollouts
checkpoint    trainer             the disk
backpressure  replica             room for finished rollouts
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from streamrl.messages import (
    DrawnGroup,
    Drop,
    Failed,
    Generated,
    PromptsDrawn,
    ReplicaLost,
    StartReplica,
    Stepped,
    Take,
    Verified,
)
from streamrl.systems import choose_system
from streamrl.timeline import Timeline, read_timeline
from streamrl.trace import Trace

BUSY = ("prefill", "decode", "score", "train")
IDLE = (
    "start-up",
    "failure",
    "sync",
    "skew",
    "pipeline",
    "staleness",
    "verifier",
    "checkpoint",
    "backpressure",
)


class Attribution(NamedTuple):
    """Shares of all GPU-seconds; `busy` and `idle` sum to 1."""

    busy: dict[str, float]
    idle: dict[str, float]
    gpu_seconds: float


class Change(NamedTuple):
    """By how much the count of `what` changes at `time`."""

    time: float
    what: str
    by: int


def attribute(trace: Trace) -> Attribution:
    """Attribute every GPU-second between the first and the last entry of a trace."""
    timeline = read_timeline(trace)
    seconds = _sweep(trace, timeline)
    prefill = _prefill_seconds(trace)
    generating = seconds.pop("generate", 0.0)
    seconds["prefill"] = min(prefill, generating)
    seconds["decode"] = generating - seconds["prefill"]
    total = sum(seconds.values()) or 1.0
    return Attribution(
        busy={name: seconds.get(name, 0.0) / total for name in BUSY},
        idle={name: seconds.get(name, 0.0) / total for name in IDLE},
        gpu_seconds=total,
    )


def _sweep(trace: Trace, timeline: Timeline) -> dict[str, float]:
    """Add up GPU-seconds between each two instants at which anything changes."""
    run = trace.run
    is_on_policy = choose_system(run.policies).max_staleness == 0
    counts: dict[str, int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    before = 0.0
    for time, name, by in sorted(_changes(trace, timeline)):
        if time > before:
            for activity, replicas in _replica_shares(counts, run.rollout.replicas, is_on_policy):
                seconds[activity] += replicas * run.rollout.tensor_parallel * (time - before)
            seconds[_trainer_activity(counts)] += run.trainer.num_gpus * (time - before)
            before = time
        counts[name] += by
    return seconds


def _replica_shares(
    counts: dict[str, int], num_replicas: int, is_on_policy: bool
) -> Iterator[tuple[str, int]]:
    """Give how many replicas do, or wait for, what."""
    missing = num_replicas - counts["replicas"]
    starting = counts["replica start-up"]
    idle = counts["replicas"] - starting - counts["replica generate"] - counts["replica sync"]
    yield ("failure" if counts["lost"] else "start-up"), missing
    yield ("failure" if counts["lost"] else "start-up"), starting
    yield "generate", counts["replica generate"]
    yield "sync", counts["replica sync"]
    yield _replica_cause(counts, is_on_policy), idle


def _replica_cause(counts: dict[str, int], is_on_policy: bool) -> str:
    if not counts["has prompts"]:
        return "start-up"
    if counts["push"] or counts["replica sync"]:
        return "sync"
    if counts["ungenerated"]:
        return "skew" if counts["replica generate"] else "start-up"
    if counts["unverified"]:
        return "verifier"
    return "pipeline" if is_on_policy else "staleness"


def _trainer_activity(counts: dict[str, int]) -> str:
    for activity in ("start-up", "score", "train", "checkpoint"):
        if counts[f"trainer {activity}"]:
            return activity
    is_syncing = counts["push"] or counts["replica sync"]
    if not counts["has prompts"]:
        return "start-up"
    if counts["ungenerated"]:
        if counts["replica generate"]:
            return "pipeline" if counts["replica generate"] == counts["replicas"] else "skew"
        return "sync" if is_syncing else "start-up"
    if counts["unverified"]:
        return "verifier"
    return "sync" if is_syncing else "pipeline"


def _changes(trace: Trace, timeline: Timeline) -> Iterator[Change]:
    yield from _span_changes(timeline)
    yield from _step_changes(trace)
    yield Change(timeline.end, "end", 1)


def _span_changes(timeline: Timeline) -> Iterator[Change]:
    for spans in timeline.replicas.values():
        for span in spans:
            yield Change(span.start, f"replica {span.activity}", 1)
            yield Change(span.end, f"replica {span.activity}", -1)
    for span in timeline.trainer:
        yield Change(span.start, f"trainer {span.activity}", 1)
        yield Change(span.end, f"trainer {span.activity}", -1)
    for span in timeline.link:
        yield Change(span.start, "push", 1)
        yield Change(span.end, "push", -1)


def _step_changes(trace: Trace) -> Iterator[Change]:
    """Who is there, and what the rollouts of the coming step still lack."""
    step = _ComingStep()
    for time, event, commands in trace.entries:
        match event:
            case PromptsDrawn():
                step.draw(event.groups)
                yield Change(time, "has prompts", 1)
            case Generated() if event.finish != "aborted":
                step.advance(event.rollout)
            case Verified():
                step.advance(event.rollout)
            case Stepped():
                step.clear()
            case ReplicaLost():
                yield Change(time, "replicas", -1)
                yield Change(time, "lost", 1)
            case Failed(StartReplica()):
                yield Change(time, "replicas", -1)
            case _:
                pass  # changes neither
        for command in commands:
            match command:
                case StartReplica():
                    yield Change(time, "replicas", 1)
                case Take():
                    step.take(command.group)
                case Drop():
                    step.drop(command.group)
                case _:
                    pass  # changes neither
        for name, by in step.changes():
            yield Change(time, name, by)


class _ComingStep:
    """Counts the rollouts of taken groups that lack generation, or only their reward."""

    def __init__(self) -> None:
        self._rollouts: dict[int, tuple[int, ...]] = {}
        self._group: dict[int, int] = {}
        self._stage: dict[int, int] = {}
        self._taken: set[int] = set()
        self._lacking = [0, 0]
        self._told = [0, 0]

    def draw(self, groups: Iterable[DrawnGroup]) -> None:
        for drawn in groups:
            self._rollouts[drawn.group] = drawn.rollouts
            for rollout in drawn.rollouts:
                self._group[rollout] = drawn.group
                self._stage[rollout] = 0

    def advance(self, rollout: int) -> None:
        """Enter that a rollout was generated, or after that, verified."""
        is_counted = self._group[rollout] in self._taken
        self._count(rollout, -is_counted)
        self._stage[rollout] += 1
        self._count(rollout, is_counted)

    def take(self, group: int) -> None:
        self._taken.add(group)
        for rollout in self._rollouts[group]:
            self._count(rollout, 1)

    def drop(self, group: int) -> None:
        if group in self._taken:
            self._taken.remove(group)
            for rollout in self._rollouts[group]:
                self._count(rollout, -1)

    def clear(self) -> None:
        for group in list(self._taken):
            self.drop(group)

    def changes(self) -> Iterator[tuple[str, int]]:
        """Give by how much the counts changed since the last call."""
        for stage, name in enumerate(("ungenerated", "unverified")):
            if self._lacking[stage] != self._told[stage]:
                yield name, self._lacking[stage] - self._told[stage]
                self._told[stage] = self._lacking[stage]

    def _count(self, rollout: int, by: int) -> None:
        if self._stage[rollout] < len(self._lacking):
            self._lacking[self._stage[rollout]] += by


def _prefill_seconds(trace: Trace) -> float:
    degree = trace.run.rollout.tensor_parallel
    events = (entry.event for entry in trace.entries)
    return degree * sum(event.prefill_time for event in events if isinstance(event, Generated))
