"""Where the GPU-seconds of a run went: busy by activity, idle by cause, together all of them.

Of the seconds in which replicas decode, those that full batches would not have needed are "underfilled": busy, not
idle, and lost all the same (`streamrl.record.underfilled`).

cause         who                           waits for
start-up      replica, trainer, verifier    itself, or the replicas that come up with it
failure       replica, trainer, verifier    the replacement of a replica, or a lost trainer to be up again
sync          replica, trainer, verifier    weights on their way or being loaded
skew          replica, trainer              the stragglers of the step, while replicas already stand idle
pipeline      replica                       the trainer, which may not be overtaken (on-policy)
              trainer                       rollouts, while no replica stands idle
              trainer that follows          complete groups, which come once the leader has made its step
              verifier                      rollouts to be generated
staleness     replica, verifier             the trainer, which is max_staleness steps behind
verifier      replica, trainer              the rewards of generated rollouts, while the trainer does nothing
checkpoint    trainer                       the disk
backpressure  replica                       room for finished rollouts
wind-down     replica, verifier             the end of the run: every prompt is drawn (off-policy)
              trainer that follows          the end of the run: every prompt is drawn, and nothing is left for it

What replicas wait for is told by the trainer that leads: the others hold nobody up. Verifiers are a side where
they have GPUs; each worker computes one reward at a time, and those without one wait for rollouts, or for what
replicas wait for.

GPUs that replicas and the leading trainer share count once, as one side: what works on them says what they do,
generation before training; while neither does, they wait for what their replica waits for. Trained on while
others stand idle, those others wait for the pipeline.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import inf
from typing import NamedTuple, TypeAlias

import numpy as np

from streamrl.engine.systems import choose_system
from streamrl.engine.trainer_side import LEADER
from streamrl.hardware.tables import Floats
from streamrl.record.counts import Counts, read_changes
from streamrl.record.timeline import Timeline, read_timeline
from streamrl.record.trace import Trace
from streamrl.record.underfilled import YieldSource, read_underfilled
from streamrl.runfile.config import Run

UNDERFILLED = "underfilled"
BUSY = ("prefill", "decode", UNDERFILLED, "score", "train", "verify")
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
ROLLOUT, TRAINER, SHARED, VERIFIER = "rollout", "trainer", "shared", "verifier"
"""Names of sides, as in `streamrl.runfile.sides`; a trainer that follows has its own."""


class Attribution(NamedTuple):
    """Shares of GPU-seconds; `busy` and `idle` sum to 1, or to 0 where there are none."""

    busy: dict[str, float]
    """What is underfilled is no part of "decode"; where it is not known it is left out, and "decode" is all of it."""
    idle: dict[str, float]
    gpu_seconds: float
    underfilled_from: YieldSource
    """Where it is known from what is underfilled."""


class SidesAttribution(NamedTuple):
    """Where the GPU-seconds of all sides went, and those of each."""

    whole: Attribution
    sides: dict[str, Attribution]
    """By name; all that a run shares among replicas and the leading trainer is one side, "shared"."""


def attribute(trace: Trace, window: tuple[float, float] = (0.0, inf)) -> Attribution:
    """Attribute every GPU-second between the first and the last entry of a trace, or within `window`."""
    return attribute_sides(trace, window).whole


def attribute_sides(trace: Trace, window: tuple[float, float] = (0.0, inf)) -> SidesAttribution:
    """Attribute every GPU-second as `attribute` does, of all sides together and of each."""
    timeline = read_timeline(trace)
    seconds = _sweep(trace, timeline, window)
    parts = _parts(trace, timeline, window)
    return SidesAttribution(
        whole=_shares(seconds.whole, parts),
        sides={name: _shares(of_side, parts) for name, of_side in seconds.sides.items()},
    )


class _Parts(NamedTuple):
    """Parts of the GPU-seconds that generate."""

    prefill: float
    underfilled: float
    source: YieldSource


def _parts(trace: Trace, timeline: Timeline, window: tuple[float, float]) -> _Parts:
    underfilled = read_underfilled(trace, timeline)
    lost = trace.run.rollout.tensor_parallel * underfilled.seconds(window)
    return _Parts(_prefill_seconds(trace, timeline, window), lost, underfilled.source)


def _shares(found: dict[str, float], parts: _Parts) -> Attribution:
    """Return the shares of GPU-seconds, those that generate divided into their parts."""
    seconds = dict(found)
    generating = seconds.pop("generate", 0.0)
    seconds["prefill"] = min(parts.prefill, generating)
    seconds["decode"] = generating - seconds["prefill"]
    total = sum(seconds.values())
    names = [name for name in BUSY if name != UNDERFILLED or parts.source != "unknown"]
    seconds[UNDERFILLED] = min(parts.underfilled, seconds["decode"])
    seconds["decode"] -= seconds[UNDERFILLED]
    return Attribution(
        busy={name: seconds.get(name, 0.0) / (total or 1.0) for name in names},
        idle={name: seconds.get(name, 0.0) / (total or 1.0) for name in IDLE},
        gpu_seconds=total,
        underfilled_from=parts.source,
    )


class _Seconds(NamedTuple):
    """GPU-seconds by activity or cause, of all sides and of each."""

    whole: dict[str, float]
    sides: dict[str, dict[str, float]]


def _sweep(trace: Trace, timeline: Timeline, window: tuple[float, float]) -> _Seconds:
    """Add up GPU-seconds between each two instants at which anything changes."""
    seconds = _Seconds(defaultdict(float), defaultdict(lambda: defaultdict(float)))
    for began, ended, shares in _stretches(trace, timeline):
        lasted = _within(window, began, ended)
        for side, activity, num_gpus in shares:
            seconds.whole[activity] += num_gpus * lasted
            seconds.sides[side][activity] += num_gpus * lasted
    return seconds


def idle_of_steps(trace: Trace, stepped_at: Sequence[float]) -> dict[str, Floats]:
    """Return the GPU-seconds of each side, by name, that stood idle in each of the leader's steps, for any cause.

    Args:
        trace: a record of a run.
        stepped_at: instant at which each step ended.
    """
    instants = [0.0]
    until: dict[str, list[float]] = defaultdict(lambda: [0.0] * len(instants))
    for began, ended, shares in _stretches(trace, read_timeline(trace)):
        waiting = [(side, num) for side, activity, num in shares if activity in IDLE]
        for side, _ in waiting:
            until[side]  # begins with nothing idle before
        instants.append(ended)
        for idle in until.values():
            idle.append(idle[-1])
        for side, num_gpus in waiting:
            until[side][-1] += num_gpus * (ended - began)
    ends = [0.0, *stepped_at]
    return {side: np.diff(np.interp(ends, instants, idle)) for side, idle in until.items()}


Shares: TypeAlias = Iterator[tuple[str, str, int]]
"""Of which side how many GPUs do, or wait for, what: side, activity or cause, GPUs."""


def _stretches(trace: Trace, timeline: Timeline) -> Iterator[tuple[float, float, Shares]]:
    """Yield begin and end of each stretch in which nothing changes, with what GPUs do; to be read at once."""
    run = trace.run
    is_on_policy = choose_system(run.policies).max_staleness == 0
    counts = Counts(run.num_trainers)
    before = 0.0
    for change in read_changes(trace, timeline):
        if change.time > before:
            yield before, change.time, _all_shares(counts, run, is_on_policy)
            before = change.time
        counts.enter(change)


def _all_shares(counts: Counts, run: Run, is_on_policy: bool) -> Shares:
    """Yield what the GPUs of every side do."""
    shares = _shared_shares if run.shares_gpus else _separate_shares
    yield from shares(counts, run, is_on_policy)
    for number, follower in enumerate(run.followers, start=1):
        yield follower.name, _follower_activity(counts, number), follower.num_gpus
    if run.verifier.num_gpus:
        yield from _verifier_shares(counts, run, is_on_policy)


def _separate_shares(counts: Counts, run: Run, is_on_policy: bool) -> Shares:
    """Yield what the GPUs of the replicas do, and those of the leading trainer."""
    for activity, replicas in _replica_shares(counts, is_on_policy):
        yield ROLLOUT, activity, replicas * run.rollout.tensor_parallel
    yield TRAINER, _leader_activity(counts), run.trainer.num_gpus


def _shared_shares(counts: Counts, run: Run, is_on_policy: bool) -> Shares:
    """Yield what the GPUs do that are both the replicas' and the leading trainer's."""
    generating = counts.run["replica generate"] * run.rollout.tensor_parallel
    work = _work(counts, LEADER)
    if work in ("score", "train"):
        training = min(run.trainer.num_gpus, run.num_gpus - generating)
        yield SHARED, "generate", generating
        yield SHARED, work, training
        yield SHARED, "pipeline", run.num_gpus - generating - training
        return
    for activity, replicas in _replica_shares(counts, is_on_policy):
        cause = work if work and activity == "pipeline" else activity
        yield SHARED, cause, replicas * run.rollout.tensor_parallel
    yield SHARED, _leader_activity(counts), run.num_gpus - run.rollout.num_gpus


# Replicas -----------------------------------------------------------------------------------------


def _replica_shares(counts: Counts, is_on_policy: bool) -> Iterator[tuple[str, int]]:
    """Yield how many replicas do, or wait for, what."""
    run = counts.run
    missing = max(0, run["wanted"] - run["replicas"])
    yield _coming_up(counts), missing + run["replica start-up"]
    yield "generate", run["replica generate"]
    yield "sync", run["replica sync"]
    yield _replica_cause(counts, is_on_policy), _num_idle(counts)


def _replica_cause(counts: Counts, is_on_policy: bool) -> str:
    run, leader = counts.run, counts.trainers[LEADER]
    is_syncing = _is_syncing(counts)
    if not run["has prompts"]:
        return "start-up"
    if leader["waiting"] and is_syncing:
        return "sync"
    if leader["ungenerated"]:
        if run["replica generate"]:
            return "skew"
        return "sync" if is_syncing else _coming_up(counts)
    if leader["failure"]:
        return "failure"
    if leader["unverified"] and _work(counts, LEADER) is None:
        return "verifier"
    if is_on_policy:
        return "pipeline"
    return "wind-down" if run["has last prompts"] else "staleness"


# Trainers -----------------------------------------------------------------------------------------


def _leader_activity(counts: Counts) -> str:
    work = _work(counts, LEADER)
    if work is not None:
        return work
    return _lack(counts, LEADER) or ("sync" if _is_syncing(counts) else "pipeline")


def _follower_activity(counts: Counts, trainer: int) -> str:
    """Return what a trainer that follows does, or waits for: complete groups, of which the leader decides."""
    found = _work(counts, trainer) or _lack(counts, trainer)
    if found is not None:
        return found
    if counts.run["has last prompts"]:
        return "wind-down"
    if counts.trainers[LEADER]["failure"]:
        return "failure"
    return "sync" if _is_syncing(counts) else "pipeline"


def _lack(counts: Counts, trainer: int) -> str | None:
    """Return why a trainer lacks rollouts that it could train on; None where nothing is under way for it."""
    own = counts.trainers[trainer]
    if not counts.run["has prompts"]:
        return "start-up"
    if own["ungenerated"]:
        if counts.run["replica generate"]:
            return "skew" if _num_idle(counts) else "pipeline"
        return "sync" if _is_syncing(counts) else _coming_up(counts)
    return "verifier" if own["unverified"] else None


def _work(counts: Counts, trainer: int) -> str | None:
    for activity in ("start-up", "score", "train", "checkpoint", "failure"):
        if counts.trainers[trainer][activity]:
            return activity
    return None


# Verifiers ----------------------------------------------------------------------------------------


def _verifier_shares(counts: Counts, run: Run, is_on_policy: bool) -> Shares:
    """Yield what the GPUs of the verifiers do: each worker has one reward at a time."""
    busy = min(counts.run["verifying"], run.verifier.workers)
    yield VERIFIER, "verify", busy * run.verifier.gpus_per_worker
    idle = run.verifier.workers - busy
    yield VERIFIER, _verifier_cause(counts, is_on_policy), idle * run.verifier.gpus_per_worker


def _verifier_cause(counts: Counts, is_on_policy: bool) -> str:
    if counts.run["replica generate"]:
        return "pipeline"
    cause = _replica_cause(counts, is_on_policy)
    return "pipeline" if cause == "verifier" else cause


# What several ask ---------------------------------------------------------------------------------


def _num_idle(counts: Counts) -> int:
    """Replicas that are up and do nothing."""
    run = counts.run
    is_up = run["replicas"] - run["replica start-up"]
    return is_up - run["replica generate"] - run["replica sync"]


def _is_syncing(counts: Counts) -> bool:
    return bool(counts.run["push"] or counts.run["replica sync"])


def _coming_up(counts: Counts) -> str:
    """Say why replicas come up: once one was lost, each that starts is a replacement."""
    return "failure" if counts.run["lost"] else "start-up"


def _prefill_seconds(trace: Trace, timeline: Timeline, window: tuple[float, float]) -> float:
    spans = (span for spans in timeline.prefills.values() for span in spans)
    lasted = sum(_within(window, span.start, span.end) for span in spans)
    return trace.run.rollout.tensor_parallel * lasted


def _within(window: tuple[float, float], start: float, end: float) -> float:
    """Return the seconds from `start` to `end` that lie in `window`."""
    return max(0.0, min(end, window[1]) - max(start, window[0]))
