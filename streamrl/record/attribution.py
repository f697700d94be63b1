"""Attribute every GPU-second of a run: busy time by activity, and idle time by cause.

Decode seconds that full batches would not need are "underfilled": they count as busy, but they are
wasted (`streamrl.record.decode_efficiency`). So does "recomputed-prefix": the prefill of a context
that was evicted from the prefix cache between two turns of an episode. "evaluate" is generation on
held-out prompts by a replica that generates nothing for training meanwhile.

| cause        | who waits                  | for                                                     |
|--------------|----------------------------|---------------------------------------------------------|
| start-up     | replica, trainer, verifier | its own start, or that of replicas that start with it   |
| failure      | replica, trainer, verifier | a replacement replica, or the restart of a lost trainer |
| sync         | replica, trainer, verifier | weights that are pushed or loaded                       |
| switch       | replica                    | its GPUs, which it gets from the trainer or gives to it |
| kv-transfer  | replica, trainer           | KV caches from prefill replicas, while nothing decodes  |
| skew         | replica, trainer           | stragglers of the step, while other replicas are idle   |
| pipeline     | replica                    | the trainer (on-policy: generation cannot run ahead)    |
|              | prefill or decode replica  | the others of the two, while none of its kind works     |
|              | trainer                    | rollouts, while no replica is idle                      |
|              | replica, trainer           | a message about rollouts that crosses a link            |
|              | secondary trainer          | complete groups, until the primary trainer has stepped  |
|              | verifier                   | rollouts to be generated                                |
| staleness    | replica, verifier          | the trainer, which is as far behind as the bound allows |
| tool         | replica, trainer, verifier | actions of environments, which rollouts wait for        |
| environment- | replica, trainer, verifier | environments that start, while none acts                |
| start        |                            |                                                         |
| verifier     | replica, trainer           | rewards, while the trainer is idle                      |
| checkpoint   | trainer                    | the disk                                                |
| resize       | trainer                    | data-parallel ranks that are added or removed, borrowed |
|              |                            | ones too                                                |
| backpressure | replica                    | space for finished rollouts                             |
| evaluation   | replica, trainer, verifier | an evaluation on held-out prompts, while training waits |
| wind-down    | replica, verifier          | the end of the run: all prompts are drawn (off-policy)  |
|              | secondary trainer          | the end of the run: no groups are left for it           |

The primary trainer decides what replicas wait for, because secondary trainers delay nobody.
Verifiers are a side only where they have GPUs. Each worker computes one reward at a time. A worker
without a reward to compute waits for rollouts, or for the same cause as replicas.

GPUs of the primary trainer that are lent to replicas count as the trainer's. Their activity is that of the replica.
GPUs of replicas that the trainer borrows count as the trainer's while they are among its ranks.

GPUs that replicas and the primary trainer share count once, as one side. Their activity is that of
the role that works, generation before training. While neither works, they wait for the same cause
as their replica. If some of them train while others are idle, the others wait for the pipeline.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import inf
from typing import NamedTuple, TypeAlias

import numpy as np

from streamrl.engine.presets import choose_system
from streamrl.engine.trace import Trace
from streamrl.engine.trainer_side import LEADER
from streamrl.hardware.operator_tables import Floats
from streamrl.record.decode_efficiency import FullBatches, Parts, PartsReader, YieldSource
from streamrl.record.interval_sums import IntervalSums
from streamrl.record.message_reader import Handlers, MessageReader
from streamrl.record.state_counts import OF_ROLLOUTS, ChangeReader, Counts
from streamrl.record.timeline import Timeline, TimelineReader
from streamrl.runfile.gpu_pools import kind_name
from streamrl.runfile.roles_config import RolloutConfig, TrainerConfig, VerifierConfig

UNDERFILLED, RECOMPUTED = "underfilled", "recomputed-prefix"
TOOL, ENVIRONMENT_START = "tool", "environment-start"
KV_TRANSFER = "kv-transfer"
EVALUATE, EVALUATION = "evaluate", "evaluation"
BUSY = ("prefill", RECOMPUTED, "decode", UNDERFILLED, EVALUATE, "score", "train", "verify")
IDLE = (
    "start-up",
    "failure",
    "sync",
    "switch",
    KV_TRANSFER,
    "skew",
    "pipeline",
    "staleness",
    TOOL,
    ENVIRONMENT_START,
    "verifier",
    "checkpoint",
    "resize",
    "backpressure",
    EVALUATION,
    "wind-down",
)
TRAINER, SHARED, VERIFIER = "trainer", "shared", "verifier"
"""Names of sides, as in `streamrl.runfile.gpu_pools`. Kinds of replicas and secondary trainers have their own names."""


class Attribution(NamedTuple):
    """Shares of GPU-seconds; `busy` and `idle` together sum to 1, or to 0 if there are no GPU-seconds."""

    busy: dict[str, float]
    """Share by activity. "decode" excludes "underfilled". If "underfilled" is unknown, it is missing, and "decode" is
    all decode time."""
    idle: dict[str, float]
    """Share by cause."""
    gpu_seconds: float
    underfilled_from: YieldSource
    """Source of the throughput of a full batch."""


class SidesAttribution(NamedTuple):
    """The attribution of all GPU-seconds, and that of each side."""

    whole: Attribution
    sides: dict[str, Attribution]
    """By name. GPUs that replicas and the primary trainer share are one side, "shared"."""


def attribute(trace: Trace, window: tuple[float, float] = (0.0, inf)) -> Attribution:
    """Return the attribution of every GPU-second of a trace, or of those in `window` (seconds)."""
    return attribute_sides(trace, window).whole


def attribute_sides(trace: Trace, window: tuple[float, float] = (0.0, inf)) -> SidesAttribution:
    """Return the attribution of all sides together and of each side; see `attribute`."""
    reader = AttributionReader(trace)
    reader.mark(window)
    reader.read(trace.entries)
    reader.finish()
    return reader.between(*window)


class AttributionReader(MessageReader):
    """Attributes GPU-seconds block by block.

    A GPU-second is attributed once no later event can change what its GPU did: some events report an
    activity only at its end.
    """

    def __init__(self, trace: Trace) -> None:
        """Read the header of a trace; pass its entries to `read`."""
        run = trace.run
        self._run = run
        self._timeline = TimelineReader(has_verifier=False)
        self._changes = ChangeReader(trace)
        self._parts = PartsReader(FullBatches.of(trace))
        self._seconds = IntervalSums[tuple[str, str]]()
        """GPU-seconds of each side by activity or cause."""
        self._here: dict[tuple[str, str], float] = defaultdict(float)
        """GPU-seconds of the current slot, by side and by activity or cause."""
        self._known: dict[tuple[bool, ...], SharesByKey] = {}
        """By the rollouts that trainers lack: the shares of GPUs, while all other counts are the same."""
        self._counts = Counts(
            len(run.replica_kinds),
            run.num_trainers,
            is_disaggregated=bool(run.rollout.prefill_kinds),
        )
        self._swept_until = 0.0
        self._slot = 0
        self._is_on_policy = choose_system(run.policies).staleness_bound == 0
        self._degrees = [
            (kind_name(kind), own.gpus_per_replica) for kind, own in enumerate(run.rollout.kinds)
        ]
        """Name of each kind of replica, and the GPUs of one."""
        self._rank_degree = run.trainer.num_gpus // run.trainer.data_parallel
        """GPUs of one data-parallel rank of the primary trainer."""
        self._lent_degree = 0 if run.lent is None else run.lent.gpus_per_replica

    def mark(self, times: Sequence[float]) -> None:
        """Add instants for `between`. Call this before entries after these instants are read."""
        self._seconds.marks.extend(times)
        self._parts.mark(times)

    def handlers(self) -> Iterator[Handlers]:
        """Yield the handlers of all messages that the attribution depends on."""
        yield from self._timeline.handlers()
        yield from self._changes.handlers()

    def end_block(self, now: float) -> None:
        """Set the instant of the last entry."""
        super().end_block(now)
        self._timeline.end_block(now)

    def settle(self) -> None:
        """Attribute the GPU-seconds that no later entry can change, and free their memory."""
        timeline = self._timeline.take(self._timeline.known_until)
        self._parts.take(timeline)
        self._sweep(timeline)

    def finish(self) -> None:
        """Attribute the remaining GPU-seconds up to the last entry."""
        timeline = self._timeline.finish()
        self._parts.finish(timeline)
        self._sweep(timeline)
        self._end_slot()

    def between(self, start: float, end: float) -> SidesAttribution:
        """Return the shares of the GPU-seconds between two marks."""
        parts = self._parts.between(start, end)
        sides: dict[str, dict[str, float]] = {}
        whole: dict[str, float] = defaultdict(float)
        for (side, activity), seconds in self._seconds.between(start, end).items():
            sides.setdefault(side, {})[activity] = seconds
            whole[activity] += seconds
        together = Parts(
            sum(each.prefill for each in parts),
            sum(each.recomputed for each in parts),
            sum(each.underfilled for each in parts),
            parts[0].source,
        )
        own = {kind_name(kind): each for kind, each in enumerate(parts)} | {SHARED: parts[0]}
        if self._lent_degree:
            own[TRAINER] = parts[self._run.rollout.num_kinds]
        none = Parts(0.0, 0.0, 0.0, parts[0].source)
        return SidesAttribution(
            whole=_shares(whole, together),
            sides={name: _shares(each, own.get(name, none)) for name, each in sides.items()},
        )

    def idle_of_steps(self, stepped_at: Sequence[float]) -> dict[str, Floats]:
        """Return the idle GPU-seconds of each side in each step, for all causes together.

        Args:
            stepped_at: instant at which each step ended; each must be a mark.
        """
        idle: dict[str, Floats] = {}
        for (side, activity), seconds in self._seconds.until(stepped_at):
            until = idle.setdefault(side, np.zeros(len(stepped_at)))
            if activity in IDLE:
                until += seconds
        return {side: np.diff(until, prepend=0.0) for side, until in idle.items()}

    def _sweep(self, timeline: Timeline) -> None:
        """Add up GPU-seconds between consecutive changes of the counts."""
        counts = self._counts
        for change in self._changes.take(timeline):
            if change.time > self._swept_until:
                self._go_on(change.time)
            counts.enter(change)
            if change.what not in OF_ROLLOUTS:
                self._known.clear()
        self._go_on(timeline.end)

    def _go_on(self, time: float) -> None:
        """Advance to an instant, and close each slot that ends before it."""
        marks = self._seconds.marks
        while self._slot < len(marks) and marks[self._slot] <= time:
            self._add_until(marks[self._slot])
            self._end_slot()
            self._slot += 1
        self._add_until(time)

    def _add_until(self, time: float) -> None:
        lasted = time - self._swept_until
        if lasted <= 0:
            return
        lacks = self._counts.lacks()
        shares = self._known.get(lacks)
        if shares is None:
            shares = self._known[lacks] = [
                ((side, what), num) for side, what, num in self._shares_now()
            ]
        for key, num_gpus in shares:
            self._here[key] += num_gpus * lasted
        self._swept_until = time

    def _shares_now(self) -> Shares:
        """Yield the activity or cause of idle time of each side's GPUs at the current instant."""
        run, counts, is_on_policy = self._run, self._counts, self._is_on_policy
        if run.policies.shares_gpus:
            yield from _shared_shares(counts, run.rollout, run.trainer, run.num_gpus, is_on_policy)
        else:
            for kind, (name, degree) in enumerate(self._degrees):
                if counts.kinds[kind]["borrowed"]:
                    continue  # its GPUs are ranks of the trainer
                for activity, replicas in _replica_shares(counts, kind, is_on_policy):
                    yield name, activity, replicas * degree
            num_lent = 0
            if self._lent_degree:
                own, degree = counts.kinds[run.rollout.num_kinds], self._lent_degree
                num_lent = own["replicas"] * degree
                for activity, replicas in _replica_shares(
                    counts, run.rollout.num_kinds, is_on_policy
                ):
                    yield TRAINER, activity, replicas * degree
            num_added = counts.trainers[LEADER]["added ranks"] * self._rank_degree
            num_gpus = run.trainer.num_gpus + num_added - num_lent
            yield TRAINER, _primary_trainer_activity(counts), num_gpus
        for number, secondary in enumerate(run.followers, start=1):
            num_gpus = 0 if counts.trainers[number]["away"] else secondary.num_gpus
            yield secondary.name, _secondary_trainer_activity(counts, number), num_gpus
        if run.verifier.num_gpus:
            yield from _verifier_shares(counts, run.verifier, is_on_policy)

    def _end_slot(self) -> None:
        self._seconds.add(self._slot, self._here)
        self._here.clear()


def _shares(by_activity: dict[str, float], parts: Parts) -> Attribution:
    """Return the shares of GPU-seconds, with generation divided into prefill, decode and underfilled."""
    seconds = dict(by_activity)
    generating = seconds.pop("generate", 0.0)
    seconds["prefill"] = min(parts.prefill, generating)
    seconds["decode"] = generating - seconds["prefill"]
    seconds[RECOMPUTED] = min(parts.recomputed, seconds["prefill"])
    seconds["prefill"] -= seconds[RECOMPUTED]
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


Shares: TypeAlias = Iterator[tuple[str, str, int]]
"""Side, activity or cause, and number of GPUs."""
SharesByKey: TypeAlias = list[tuple[tuple[str, str], int]]
"""The same, with side and activity or cause as a key."""


def _shared_shares(
    counts: Counts,
    rollout: RolloutConfig,
    trainer: TrainerConfig,
    num_gpus: int,
    is_on_policy: bool,
) -> Shares:
    """Yield the activities of the GPUs that replicas and the primary trainer share."""
    generating = counts.run["replica generate"] * rollout.gpus_per_replica
    work = _work(counts, LEADER)
    if work in ("score", "train"):
        training = min(trainer.num_gpus, num_gpus - generating)
        yield SHARED, "generate", generating
        yield SHARED, work, training
        yield SHARED, "pipeline", num_gpus - generating - training
        return
    for activity, replicas in _replica_shares(counts, 0, is_on_policy):
        cause = work if work and activity == "pipeline" else activity
        yield SHARED, cause, replicas * rollout.gpus_per_replica
    yield SHARED, _primary_trainer_activity(counts), num_gpus - rollout.num_gpus


# Replicas -----------------------------------------------------------------------------------------


def _replica_shares(counts: Counts, kind: int, is_on_policy: bool) -> Iterator[tuple[str, int]]:
    """Yield each activity or cause of idle time with the number of replicas of this kind."""
    own = counts.kinds[kind]
    missing = max(0, own["wanted"] - own["replicas"])
    yield _start_cause(counts), missing + own["replica start-up"]
    yield "generate", own["replica generate"]
    yield "sync", own["replica sync"]
    yield "switch", own["replica switch"]
    yield KV_TRANSFER, own["replica kv-transfer"]
    yield EVALUATE, _num_evaluating(own)
    yield _replica_cause(counts, is_on_policy, own), _num_idle(own)


def _replica_cause(counts: Counts, is_on_policy: bool, own: dict[str, int] | None = None) -> str:
    """Return why replicas are idle: those of one kind if `own` has their counts."""
    run, leader = counts.run, counts.trainers[LEADER]
    is_syncing = _is_syncing(counts)
    if run[EVALUATION]:
        return EVALUATION
    if not run["has prompts"]:
        return "start-up"
    if leader["waiting"] and is_syncing:
        return "sync"
    if leader["ungenerated"]:
        if (cause := _environment_cause(counts)) is not None:
            return cause
        if run["replica generate"]:
            waits = counts.is_disaggregated and own is not None and not own["replica generate"]
            return "pipeline" if waits else "skew"
        return "sync" if is_syncing else _cause_of_no_generation(counts)
    if leader["failure"]:
        return "failure"
    if leader["unverified"] and _work(counts, LEADER) is None:
        return "verifier"
    if is_on_policy:
        return "pipeline"
    return "wind-down" if run["has last prompts"] else "staleness"


# Trainers -----------------------------------------------------------------------------------------


def _primary_trainer_activity(counts: Counts) -> str:
    work = _work(counts, LEADER)
    if work is not None:
        return work
    if counts.run[EVALUATION]:
        return EVALUATION
    return _lack(counts, LEADER) or ("sync" if _is_syncing(counts) else "pipeline")


def _secondary_trainer_activity(counts: Counts, trainer: int) -> str:
    """Return the activity of a secondary trainer, or the cause of its idle time.

    It gets complete groups only after the primary trainer has stepped.
    """
    activity = _work(counts, trainer) or _lack(counts, trainer)
    if activity is not None:
        return activity
    if counts.run["has last prompts"]:
        return "wind-down"
    if counts.trainers[LEADER]["failure"]:
        return "failure"
    return "sync" if _is_syncing(counts) else "pipeline"


def _lack(counts: Counts, trainer: int) -> str | None:
    """Return why a trainer has no rollouts to train on; None if no rollouts for it are in progress."""
    own = counts.trainers[trainer]
    if not counts.run["has prompts"]:
        return "start-up"
    if own["ungenerated"]:
        is_idle = _num_idle(counts.run)
        if is_idle and (cause := _environment_cause(counts)) is not None:
            return cause
        if counts.run["replica generate"]:
            return "skew" if _num_idle(counts.run) else "pipeline"
        return "sync" if _is_syncing(counts) else _cause_of_no_generation(counts)
    return "verifier" if own["unverified"] else None


def _work(counts: Counts, trainer: int) -> str | None:
    for activity in ("start-up", "score", "train", "checkpoint", "resize", "failure"):
        if counts.trainers[trainer][activity]:
            return activity
    return None


# Verifiers ----------------------------------------------------------------------------------------


def _verifier_shares(counts: Counts, verifier: VerifierConfig, is_on_policy: bool) -> Shares:
    """Yield the activities of the verifiers' GPUs. Each worker computes one reward at a time."""
    busy = min(counts.run["verifying"], verifier.workers)
    yield VERIFIER, "verify", busy * verifier.gpus_per_worker
    idle = verifier.workers - busy
    yield VERIFIER, _verifier_cause(counts, is_on_policy), idle * verifier.gpus_per_worker


def _verifier_cause(counts: Counts, is_on_policy: bool) -> str:
    if counts.run["replica generate"]:
        return "pipeline"
    cause = _replica_cause(counts, is_on_policy)
    return "pipeline" if cause == "verifier" else cause


# Shared ------------------------------------------------------------------------------------------


def _num_idle(counts: dict[str, int]) -> int:
    """Return the number of started replicas without an activity, from the counts of all or of one kind."""
    return _num_not_training(counts) - _num_evaluating(counts)


def _num_not_training(counts: dict[str, int]) -> int:
    """Return the number of started replicas that do nothing for training."""
    is_up = counts["replicas"] - counts["replica start-up"]
    is_awake = is_up - counts["replica sync"] - counts["replica switch"]
    num_idle = is_awake - counts["replica generate"] - counts["replica kv-transfer"]
    return max(0, num_idle)  # one that leaves may still count as generating for an instant


def _num_evaluating(counts: dict[str, int]) -> int:
    """Return the number of replicas that evaluate and do nothing else."""
    return min(counts["replica evaluate"], _num_not_training(counts))


def _environment_cause(counts: Counts) -> str | None:
    """Return what environments do that rollouts wait for; None if they do nothing."""
    if counts.run["acting"]:
        return TOOL
    return ENVIRONMENT_START if counts.run["environments starting"] else None


def _is_syncing(counts: Counts) -> bool:
    return bool(counts.run["push"] or counts.run["replica sync"])


def _cause_of_no_generation(counts: Counts) -> str:
    """Return why no replica generates: KV caches or messages cross a network, or replicas start."""
    if counts.run["replica kv-transfer"]:
        return KV_TRANSFER
    starting = (own["wanted"] > own["replicas"] or own["replica start-up"] for own in counts.kinds)
    return _start_cause(counts) if any(starting) else "pipeline"


def _start_cause(counts: Counts) -> str:
    """Return why replicas start. After the first loss, every starting replica is a replacement."""
    return "failure" if counts.run["lost"] else "start-up"
