"""Where the GPU-seconds of a run went: busy by activity, idle by cause, together all of them.

cause         who                 waits for
start-up      replica, trainer    itself, or the replicas that come up with it
failure       replica, trainer    the replacement of a replica
sync          replica, trainer    weights on their way or being loaded
skew          replica, trainer    the stragglers of the step, while replicas already stand idle
pipeline      replica             the trainer, which may not be overtaken (on-policy)
              trainer             rollouts, while no replica stands idle
staleness     replica             the trainer, which is max_staleness steps behind
verifier      replica, trainer    the rewards of generated rollouts, while the trainer does nothing
checkpoint    trainer             the disk
backpressure  replica             room for finished rollouts
wind-down     replica             the end of the run: every prompt is drawn (off-policy)

GPUs that replicas and trainer share count once: what works on them says what they do, generation before
training; while neither does, they wait for what their replica waits for. Trained on while others stand
idle, those others wait for the pipeline.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from math import inf
from operator import itemgetter
from typing import NamedTuple, TypeAlias

from streamrl.engine.messages import (
    DrawnGroup,
    Drop,
    Failed,
    Generate,
    Generated,
    PromptsDrawn,
    ReplicaLost,
    ReplicaStopped,
    Resize,
    StartReplica,
    Stepped,
    StopReplica,
    Take,
    Verified,
)
from streamrl.engine.systems import choose_system
from streamrl.record.timeline import Timeline, read_timeline
from streamrl.record.trace import Trace
from streamrl.runfile.config import Run

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
    "wind-down",
)


class Attribution(NamedTuple):
    """Shares of all GPU-seconds; `busy` and `idle` sum to 1, or to 0 where there are none."""

    busy: dict[str, float]
    idle: dict[str, float]
    gpu_seconds: float


class CountChange(NamedTuple):
    """By how much the count of `what` changes at `time`."""

    time: float
    what: str
    by: int


def attribute(trace: Trace, window: tuple[float, float] = (0.0, inf)) -> Attribution:
    """Attribute every GPU-second between the first and the last entry of a trace, or within `window`."""
    timeline = read_timeline(trace)
    seconds = _sweep(trace, timeline, window)
    prefill = _prefill_seconds(trace, timeline, window)
    generating = seconds.pop("generate", 0.0)
    seconds["prefill"] = min(prefill, generating)
    seconds["decode"] = generating - seconds["prefill"]
    total = sum(seconds.values())
    return Attribution(
        busy={name: seconds.get(name, 0.0) / (total or 1.0) for name in BUSY},
        idle={name: seconds.get(name, 0.0) / (total or 1.0) for name in IDLE},
        gpu_seconds=total,
    )


def _sweep(trace: Trace, timeline: Timeline, window: tuple[float, float]) -> dict[str, float]:
    """Add up GPU-seconds between each two instants at which anything changes."""
    run = trace.run
    is_on_policy = choose_system(run.policies).max_staleness == 0
    counts: dict[str, int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    before = 0.0
    for time, name, by in sorted(_changes(trace, timeline), key=itemgetter(0)):
        if time > before:
            shares = _shared_shares if run.shares_gpus else _separate_shares
            lasted = _within(window, before, time)
            for activity, num_gpus in shares(counts, run, is_on_policy):
                seconds[activity] += num_gpus * lasted
            before = time
        counts[name] += by
    return seconds


Shares: TypeAlias = Iterator[tuple[str, int]]
"""How many GPUs do, or wait for, what."""


def _separate_shares(counts: dict[str, int], run: Run, is_on_policy: bool) -> Shares:
    """Return what the GPUs of the replicas do, and those of the trainer."""
    for activity, replicas in _replica_shares(counts, is_on_policy):
        yield activity, replicas * run.rollout.tensor_parallel
    yield _trainer_activity(counts), run.trainer.num_gpus


def _shared_shares(counts: dict[str, int], run: Run, is_on_policy: bool) -> Shares:
    """Return what the GPUs do that are both the replicas' and the trainer's."""
    generating = counts["replica generate"] * run.rollout.tensor_parallel
    work = _trainer_work(counts)
    if work in ("score", "train"):
        training = min(run.trainer.num_gpus, run.num_gpus - generating)
        yield "generate", generating
        yield work, training
        yield "pipeline", run.num_gpus - generating - training
        return
    for activity, replicas in _replica_shares(counts, is_on_policy):
        cause = work if work and activity == "pipeline" else activity
        yield cause, replicas * run.rollout.tensor_parallel
    yield _trainer_activity(counts), run.num_gpus - run.rollout.num_gpus


def _replica_shares(counts: dict[str, int], is_on_policy: bool) -> Iterator[tuple[str, int]]:
    """Yield how many replicas do, or wait for, what."""
    missing = max(0, counts["wanted"] - counts["replicas"])
    yield _coming_up(counts), missing + counts["replica start-up"]
    yield "generate", counts["replica generate"]
    yield "sync", counts["replica sync"]
    yield _replica_cause(counts, is_on_policy), _num_idle(counts)


def _replica_cause(counts: dict[str, int], is_on_policy: bool) -> str:
    is_syncing = _is_syncing(counts)
    if not counts["has prompts"]:
        return "start-up"
    if counts["waiting"] and is_syncing:
        return "sync"
    if counts["ungenerated"]:
        if counts["replica generate"]:
            return "skew"
        return "sync" if is_syncing else _coming_up(counts)
    if counts["unverified"] and _trainer_work(counts) is None:
        return "verifier"
    if is_on_policy:
        return "pipeline"
    return "wind-down" if counts["has last prompts"] else "staleness"


def _trainer_activity(counts: dict[str, int]) -> str:
    work = _trainer_work(counts)
    if work is not None:
        return work
    if not counts["has prompts"]:
        return "start-up"
    if counts["ungenerated"]:
        if counts["replica generate"]:
            return "skew" if _num_idle(counts) else "pipeline"
        return "sync" if _is_syncing(counts) else _coming_up(counts)
    if counts["unverified"]:
        return "verifier"
    return "sync" if _is_syncing(counts) else "pipeline"


def _trainer_work(counts: dict[str, int]) -> str | None:
    for activity in ("start-up", "score", "train", "checkpoint"):
        if counts[f"trainer {activity}"]:
            return activity
    return None


def _num_idle(counts: dict[str, int]) -> int:
    """Replicas that are up and do nothing."""
    is_up = counts["replicas"] - counts["replica start-up"]
    return is_up - counts["replica generate"] - counts["replica sync"]


def _is_syncing(counts: dict[str, int]) -> bool:
    return bool(counts["push"] or counts["replica sync"])


def _coming_up(counts: dict[str, int]) -> str:
    """Say why replicas come up: once one was lost, each that starts is a replacement."""
    return "failure" if counts["lost"] else "start-up"


def _changes(trace: Trace, timeline: Timeline) -> Iterator[CountChange]:
    yield from _span_changes(timeline)
    yield from _run_changes(trace)
    yield from _rollout_changes(trace)
    yield CountChange(timeline.end, "end", 1)


def _span_changes(timeline: Timeline) -> Iterator[CountChange]:
    for spans in timeline.replicas.values():
        for span in spans:
            yield CountChange(span.start, f"replica {span.activity}", 1)
            yield CountChange(span.end, f"replica {span.activity}", -1)
    for span in timeline.trainer:
        yield CountChange(span.start, f"trainer {span.activity}", 1)
        yield CountChange(span.end, f"trainer {span.activity}", -1)
    for span in timeline.link:
        yield CountChange(span.start, "push", 1)
        yield CountChange(span.end, "push", -1)


def _run_changes(trace: Trace) -> Iterator[CountChange]:
    """Which replicas there are, and whether there is anything to generate yet, or ever again."""
    yield CountChange(0.0, "wanted", trace.run.rollout.replicas)
    wanted = trace.run.rollout.replicas
    for time, event, commands in trace.entries:
        match event:
            case PromptsDrawn():
                yield CountChange(time, "has prompts", 1)
                if event.step == trace.run.algorithm.steps:
                    yield CountChange(time, "has last prompts", 1)
            case ReplicaLost() | Failed(StartReplica()):
                yield CountChange(time, "replicas", -1)
                yield CountChange(time, "lost", 1)
            case ReplicaStopped() | Failed(StopReplica()):
                yield CountChange(time, "replicas", -1)
            case _:
                pass  # changes neither
        for command in commands:
            if isinstance(command, StartReplica):
                yield CountChange(time, "replicas", 1)
            elif isinstance(command, Resize):
                yield CountChange(time, "wanted", command.num_replicas - wanted)
                wanted = command.num_replicas


def _rollout_changes(trace: Trace) -> Iterator[CountChange]:
    """How many rollouts wait for a replica, and how many the coming step lacks."""
    rollouts = _Rollouts(trace.run.algorithm.prompts_per_step)
    for time, event, commands in trace.entries:
        match event:
            case PromptsDrawn():
                for drawn in event.groups:
                    rollouts.draw(drawn)
            case Generated():
                is_aborted = event.finish == "aborted"
                rollouts.move(event.rollout, WAITING if is_aborted else UNVERIFIED)
            case Failed(Generate(rollout)):
                rollouts.move(rollout, WAITING)
            case Verified():
                rollouts.move(event.rollout, READY)
            case Stepped():
                rollouts.end_step()
            case _:
                pass  # says nothing of rollouts
        for command in commands:
            match command:
                case Generate():
                    rollouts.move(command.rollout, GENERATING)
                case Take():
                    rollouts.take(command.group)
                case Drop():
                    rollouts.forget(command.group)
                case _:
                    pass  # says nothing of rollouts
        for name, by in rollouts.changes():
            yield CountChange(time, name, by)


WAITING, GENERATING, UNVERIFIED, READY = range(4)


class _Rollouts:
    """Counts rollouts by how far they are, those of the coming step apart from the others."""

    def __init__(self, groups_per_step: int) -> None:
        self._groups_per_step = groups_per_step
        self._groups: dict[int, DrawnGroup] = {}
        self._group: dict[int, int] = {}
        self._stage: dict[int, int] = {}
        self._taken: dict[int, None] = {}
        self._coming, self._other = [0] * 4, [0] * 4
        self._told = {"waiting": 0, "ungenerated": 0, "unverified": 0}

    def draw(self, drawn: DrawnGroup) -> None:
        self._groups[drawn.group] = drawn
        for rollout in drawn.rollouts:
            self._group[rollout] = drawn.group
            self._stage[rollout] = WAITING
        self._other[WAITING] += len(drawn.rollouts)

    def move(self, rollout: int, stage: int) -> None:
        if rollout not in self._stage:
            return  # its group was dropped
        counts = self._coming if self._group[rollout] in self._taken else self._other
        counts[self._stage[rollout]] -= 1
        counts[stage] += 1
        self._stage[rollout] = stage

    def take(self, group: int) -> None:
        self._taken[group] = None
        for rollout in self._groups[group].rollouts:
            self._other[self._stage[rollout]] -= 1
            self._coming[self._stage[rollout]] += 1

    def forget(self, group: int) -> None:
        counts = self._coming if group in self._taken else self._other
        self._taken.pop(group, None)
        for rollout in self._groups.pop(group).rollouts:
            counts[self._stage.pop(rollout)] -= 1
            del self._group[rollout]

    def end_step(self) -> None:
        for group in list(self._taken):
            self.forget(group)

    def changes(self) -> Iterator[tuple[str, int]]:
        """Yield by how much the counts changed since the last call.

        A step that takes groups only once they are complete lacks whatever is under way.
        """
        lacking = list(self._coming)
        if len(self._taken) < self._groups_per_step:
            lacking = [a + b for a, b in zip(self._coming, self._other, strict=True)]
        counts = {
            "waiting": self._coming[WAITING] + self._other[WAITING],
            "ungenerated": lacking[WAITING] + lacking[GENERATING],
            "unverified": lacking[UNVERIFIED],
        }
        for name, count in counts.items():
            if count != self._told[name]:
                yield name, count - self._told[name]
        self._told = counts


def _prefill_seconds(trace: Trace, timeline: Timeline, window: tuple[float, float]) -> float:
    spans = (span for spans in timeline.prefills.values() for span in spans)
    lasted = sum(_within(window, span.start, span.end) for span in spans)
    return trace.run.rollout.tensor_parallel * lasted


def _within(window: tuple[float, float], start: float, end: float) -> float:
    """Return the seconds from `start` to `end` that lie in `window`."""
    return max(0.0, min(end, window[1]) - max(start, window[0]))
