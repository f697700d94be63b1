"""Reconstruct from a trace the time span of each activity of each replica, trainer, link and verifier.

Figures draw these spans, and `attribution.py` adds them up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from math import inf
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from streamrl.engine.messages import (
    CheckpointSaved,
    Command,
    Failed,
    Lend,
    Lent,
    LoadWeights,
    PushWeights,
    ReplicaLost,
    ReplicaStarted,
    ResizeTrainer,
    SaveCheckpoint,
    Score,
    Scored,
    StartReplica,
    StartTrainer,
    Step,
    Stepped,
    StopTrainer,
    TakeBack,
    TakenBack,
    Train,
    Trained,
    TrainerLost,
    TrainerResized,
    TrainerStarted,
    TrainerStopped,
    Verified,
    Verify,
    WeightsLoaded,
    WeightsPushed,
)
from streamrl.engine.trace import Trace
from streamrl.engine.trainer_side import TrainerCommand
from streamrl.hardware.operator_tables import Floats
from streamrl.record.attempts import AttemptReader, Attempts, by_replica
from streamrl.record.message_reader import Handlers, MessageReader
from streamrl.runfile.formatting import counted, format_duration
from streamrl.runfile.notebook import frame_of, html_table

if TYPE_CHECKING:
    from pandas import DataFrame

TRAINER_WORK: dict[type, str] = {
    StartTrainer: "start-up",
    StopTrainer: "checkpoint",
    Score: "score",
    Train: "train",
    Step: "train",
    SaveCheckpoint: "checkpoint",
    ResizeTrainer: "resize",
}


class Span(NamedTuple):
    """One resource doing one thing from `start` to `end` seconds."""

    start: float
    end: float
    activity: str
    """start-up, generate, kv-transfer, sync, switch, score, train, checkpoint, resize, failure, push or verify."""
    label: str = ""


Spans: TypeAlias = dict[int, list[Span]]
"""By replica or trainer."""


class Timeline(NamedTuple):
    """Every span of a run, or of a part of it, by resource and in order of time."""

    replicas: dict[int, list[Span]]
    """By replica: "generate" while a rollout runs, "sync" while weights are loaded, "switch" while the trainer lends or
    takes back its GPUs, "kv-transfer" while it only receives KV caches, "start-up"; gaps are idle."""
    trainers: dict[int, list[Span]]
    """By trainer; gaps are idle. "failure" lasts from a loss until the trainer has restarted, or from a failure without
    a retry to the end of the trace."""
    link: list[Span]
    """"push" while weights are pushed."""
    verifier: list[Span]
    """"verify" while any reward is computed."""
    attempts: dict[int, Floats]
    """By replica: a row (start, end, rollout) for each attempt. Attempts overlap."""
    ended: Attempts
    """The whole attempts that ended since the part before."""
    prefills: dict[int, Floats]
    """By replica: a row (start, end) for each time in which prefixes were computed. These are parts of its "generate" spans."""
    recomputed: dict[int, Floats]
    """The same for the parts of these times in which tokens were computed again."""
    kinds: dict[int, int]
    """By replica: its kind, if it is not the first kind."""
    end: float

    def __repr__(self) -> str:
        counts = {"replica": len(self.replicas), "trainer": len(self.trainers)}
        sides = [f"{count} {name}{'s' * (count != 1)}" for name, count in counts.items()]
        return f"<Timeline of {' and '.join(sides)}: {format_duration(self.end)}>"

    def _repr_html_(self) -> str:
        """Return the seconds of each activity, added up over resources, as a table for a notebook."""
        seconds: dict[tuple[str, str], float] = defaultdict(float)
        for resource, span in self._spans():
            seconds[resource.split(" ")[0], span.activity] += span.end - span.start
        rows = [(*what, format_duration(spent)) for what, spent in seconds.items()]
        return html_table(repr(self).strip("<>"), rows, ("resource", "activity", "time of all"))

    def to_frame(self) -> DataFrame:
        """Return a row for each span: its resource, its activity, start, end and duration in seconds."""
        return frame_of(
            (
                {
                    "resource": resource,
                    **span._asdict(),
                    "seconds": span.end - span.start,
                }
                for resource, span in self._spans()
            ),
            ("resource", *Span._fields, "seconds"),
        )

    def _spans(self) -> Iterator[tuple[str, Span]]:
        """Yield the spans that do not overlap others of their resource."""
        for kind, by_number in (("replica", self.replicas), ("trainer", self.trainers)):
            for number, spans in by_number.items():
                yield from ((f"{kind} {number}", span) for span in spans)
        yield from (("link", span) for span in self.link)
        yield from (("verifier", span) for span in self.verifier)

    @property
    def rollouts(self) -> dict[int, list[Span]]:
        """Return by replica one span for each attempt, labelled with its rollout. These spans overlap."""
        return {
            replica: [
                Span(start, end, "generate", str(int(rollout)))
                for start, end, rollout in rows.tolist()
            ]
            for replica, rows in self.attempts.items()
        }

    def starts(self) -> dict[int, float]:
        """Return the instant at which each replica began to start."""
        return {replica: spans[0].start for replica, spans in self.replicas.items()}


def read_timeline(trace: Trace) -> Timeline:
    """Return the timeline of a whole trace."""
    reader = TimelineReader()
    reader.read(trace.entries)
    return reader.finish()


class TimelineReader(MessageReader):
    """Pairs commands with the events that end them, block by block."""

    def __init__(self, *, has_verifier: bool = True) -> None:
        """Start with no activity; without `has_verifier`, spans of the verifier are left out."""
        self._has_verifier = has_verifier
        self._since = -inf
        """Instant up to which spans were returned."""
        self._attempts = AttemptReader()
        self._loading: dict[tuple[int, int], float] = {}
        """By replica and version: the instant of the command to load it."""
        self._switching: dict[int, float] = {}
        """By replica: the instant of the command to lend it GPUs or to take them back."""
        self._generating: dict[int, Floats] = {}
        """By replica: a row (start, end, rollout) for each attempt, or part of one, that was not returned yet."""
        self._prefills: dict[int, Floats] = {}
        """The same for the prefills of attempts."""
        self._recomputed: dict[int, Floats] = {}
        """The same for the parts of prefills that computed tokens again."""
        self._transfers: dict[int, Floats] = {}
        """The same for the transfers of KV caches before attempts."""
        self._loads: Spans = defaultdict(list)
        self._starts: Spans = defaultdict(list)
        self._starting: dict[int, float] = {}
        self._kinds: dict[int, int] = {}
        self._lost: dict[int, float] = {}
        self._trainers: Spans = {}
        self._work: dict[int, Span] = {}
        self._link: list[Span] = []
        self._num_pushes = 0
        self._pushed_at = 0.0
        self._verifier: list[Span] = []
        self._num_verifying = 0
        self._verifying_since = 0.0

    def handlers(self) -> Iterator[Handlers]:
        """Yield the handler of each type of message that begins or ends an activity."""
        ends_work = (
            *(TrainerStarted, Scored, Trained, Stepped, CheckpointSaved, TrainerStopped),
            TrainerResized,
        )
        yield from self._attempts.handlers()
        yield {
            StartReplica: self._begin_start,
            ReplicaStarted: lambda event, now: self._end_start(event.replica, now),
            ReplicaLost: lambda event, now: self._lose_replica(event.replica, now),
            LoadWeights: self._begin_load,
            WeightsLoaded: self._end_load,
            **dict.fromkeys((Lend, TakeBack), self._begin_switch),
            **dict.fromkeys((Lent, TakenBack), self._end_switch),
            PushWeights: self._begin_push,
            WeightsPushed: lambda event, now: self._end_push(event.version, now),
            **dict.fromkeys(TRAINER_WORK, self._begin_work),
            **dict.fromkeys(ends_work, lambda event, now: self._end_work(event.trainer, now)),
            TrainerLost: lambda event, now: self._lose_trainer(event.trainer, event.reason, now),
            Failed: lambda event, now: self._end_failed(event.command, now),
        }
        if self._has_verifier:
            yield {Verify: self._begin_verify, Verified: self._end_verify}

    @property
    def known_until(self) -> float:
        """The instant before which no later entry adds a span.

        Attempts, loads and pushes are reported only at their end. So this is at most the command of the
        oldest one in progress.
        """
        pushes = [self._pushed_at] if self._num_pushes else []
        switches = [*self._loading.values(), *self._switching.values()]
        begun = [*self._attempts.sent_at(), *switches, *pushes]
        return max(self._since, min(begun, default=self.now))

    def take(self, until: float) -> Timeline:
        """Return the spans up to an instant that were not returned yet.

        A span that continues after the instant is cut there. The next call returns its rest.
        """
        for replica, start in self._starting.items():
            if start < until:
                self._starts[replica].append(Span(start, until, "start-up"))
        for trainer, work in self._work.items():
            if work.start < until:
                self._trainers[trainer].append(work._replace(end=until))
        if self._num_verifying and self._verifying_since < until:
            self._verifier.append(Span(self._verifying_since, until, "verify"))
        return self._take(until)

    def finish(self) -> Timeline:
        """Return the remaining spans. Activities without an end are assumed to end at the last entry."""
        self._attempts.end_all(self.now)
        for replica in list(self._starting):
            self._end_start(replica, self.now)
        for trainer in list(self._work):
            self._end_work(trainer, self.now)
        if self._num_verifying:
            self._verifier.append(Span(self._verifying_since, self.now, "verify"))
        return self._take(self.now)

    def _take(self, until: float) -> Timeline:
        """Return the parts of all spans before an instant that were not returned yet."""
        since, self._since = self._since, until
        starts, loads = (_take_each(spans, since, until) for spans in (self._starts, self._loads))
        ended = self._attempts.take()
        self._add_attempts(ended)
        running = self._attempts.replicas()
        self._lost = {replica: at for replica, at in self._lost.items() if replica in running}
        attempts, prefills, recomputed, transfers = (
            _take_rows(rows, since, until)
            for rows in (self._generating, self._prefills, self._recomputed, self._transfers)
        )
        return Timeline(
            replicas={
                replica: [
                    *starts.get(replica, ()),
                    *_activity(
                        attempts.get(replica), loads.get(replica, []), transfers.get(replica)
                    ),
                ]
                for replica in sorted({*starts, *attempts, *loads, *transfers})
            },
            trainers={t: _take(spans, since, until) for t, spans in self._trainers.items()},
            link=_take(self._link, since, until),
            verifier=_take(self._verifier, since, until),
            attempts=attempts,
            ended=ended,
            prefills={
                replica: _subtract_rows(_union(rows)[:, :2], loads.get(replica, []))
                for replica, rows in prefills.items()
            },
            recomputed={
                replica: _subtract_rows(_union(rows)[:, :2], loads.get(replica, []))
                for replica, rows in recomputed.items()
            },
            kinds=self._kinds,
            end=until,
        )

    # Replicas -------------------------------------------------------------------------------------

    def _add_attempts(self, ended: Attempts) -> None:
        """Add the rows of attempts, and of the prefills at their starts. None lasts after its replica was lost."""
        start, end = ended.start, ended.end
        if self._lost:
            end = np.minimum(end, [self._lost.get(replica, inf) for replica in ended.replica])
        if (moved := ended.transfer_time > 0).any():
            begun, start = start, np.minimum(start + ended.transfer_time, end)
            _add_rows(self._transfers, ended._replace(start=begun), start, moved)
            ended = ended._replace(start=start)
        prefilled = np.minimum(start + ended.prefill_time, end)
        _add_rows(self._generating, ended, end, end > start)
        _add_rows(self._prefills, ended, prefilled, ended.prefill_time > 0)
        if (again := ended.recompute_time > 0).any():
            recomputed = np.minimum(start + ended.recompute_time, end)
            _add_rows(self._recomputed, ended, recomputed, again)

    def _begin_start(self, command: StartReplica, now: float) -> None:
        self._starting[command.replica] = now
        if command.kind:
            self._kinds[command.replica] = command.kind

    def _lose_replica(self, replica: int, now: float) -> None:
        self._lost[replica] = now
        self._end_start(replica, now)

    def _end_start(self, replica: int, now: float) -> None:
        start = self._starting.pop(replica, None)
        if start is not None:
            self._starts[replica].append(Span(start, now, "start-up"))

    def _begin_load(self, command: LoadWeights, now: float) -> None:
        self._loading[command.replica, command.version] = now

    def _end_load(self, event: WeightsLoaded, now: float) -> None:
        self._loading.pop((event.replica, event.version), None)
        label = f"v{event.version}"
        self._loads[event.replica].append(Span(now - event.load_time, now, "sync", label))

    def _begin_switch(self, command: Lend | TakeBack, now: float) -> None:
        self._switching[command.replica] = now

    def _end_switch(self, event: Lent | TakenBack, now: float) -> None:
        self._switching.pop(event.replica, None)
        self._loads[event.replica].append(Span(now - event.switch_time, now, "switch"))

    # Links ----------------------------------------------------------------------------------------

    def _begin_push(self, _: PushWeights, now: float) -> None:
        self._num_pushes += 1
        self._pushed_at = now

    def _end_push(self, version: int, now: float) -> None:
        self._num_pushes -= 1
        self._link.append(Span(self._pushed_at, now, "push", f"v{version}"))

    # Trainers -------------------------------------------------------------------------------------

    def _begin_work(self, command: TrainerCommand, now: float) -> None:
        """Begin an activity of a trainer. The "failure" of a lost trainer continues until it has restarted."""
        self._trainers.setdefault(command.trainer, [])
        if command.trainer not in self._work:
            activity = TRAINER_WORK[type(command)]
            self._work[command.trainer] = Span(now, inf, activity, _label(command))

    def _end_work(self, trainer: int, now: float) -> None:
        self._trainers[trainer].append(self._work.pop(trainer)._replace(end=now))

    def _lose_trainer(self, trainer: int, reason: str, now: float) -> None:
        """End the activity of a lost trainer, and begin its failure. Later events about lost work change nothing."""
        work = self._work.get(trainer)
        if work is not None and work.activity == "failure":
            return
        if work is not None:
            self._end_work(trainer, now)
        self._work[trainer] = Span(now, inf, "failure", reason)

    # Verifiers ------------------------------------------------------------------------------------

    def _begin_verify(self, _: Verify, now: float) -> None:
        self._num_verifying += 1
        if self._num_verifying == 1:
            self._verifying_since = now

    def _end_verify(self, _: Verified | Verify, now: float) -> None:
        self._num_verifying -= 1
        if not self._num_verifying and now > self._verifying_since:
            self._verifier.append(Span(self._verifying_since, now, "verify"))

    # Failures -------------------------------------------------------------------------------------

    def _end_failed(self, command: Command, now: float) -> None:
        match command:
            case StartReplica(replica):
                self._lose_replica(replica, now)
            case LoadWeights(replica, version):
                self._loading.pop((replica, version), None)
            case Lend(replica) | TakeBack(replica):
                self._switching.pop(replica, None)
            case PushWeights(version):
                self._end_push(version, now)
            case Verify() if self._has_verifier:
                self._end_verify(command, now)
            case _ if isinstance(command, TrainerCommand):
                if command.trainer in self._work:  # else it was lost and has restarted
                    self._lose_trainer(command.trainer, type(command).__name__, now)
            case _:
                pass  # occupied no resource


def _label(command: TrainerCommand) -> str:
    match command:
        case Step(version):
            return f"step {version}"
        case Score(rollouts) | Train(rollouts):
            return f"{len(rollouts)} rollouts"
        case ResizeTrainer(_, data_parallel):
            return counted(data_parallel, "data-parallel rank")
        case _:
            return ""


def _take_each(spans: Spans, since: float, until: float) -> Spans:
    """Remove and return the parts of spans between two instants, without resources that have none."""
    taken = {key: _take(of_one, since, until) for key, of_one in spans.items()}
    for key in [key for key, of_one in spans.items() if not of_one]:
        del spans[key]
    return {key: of_one for key, of_one in taken.items() if of_one}


def _take(spans: list[Span], since: float, until: float) -> list[Span]:
    """Remove from `spans` the parts between two instants and return them; later parts remain in `spans`."""
    taken, left = [], []
    for span in spans:
        if since <= span.start and span.end <= until:
            taken.append(span)
            continue
        start, end = max(span.start, since), max(span.end, since)
        if end > until:
            left.append(span._replace(start=max(start, until)))
        if start < until or end <= until:
            taken.append(span._replace(start=start, end=min(end, until)))
    spans[:] = left
    return taken


def _add_rows(
    rows: dict[int, Floats], ended: Attempts, end: Floats, chosen: npt.NDArray[np.bool_]
) -> None:
    """Add the row (start, end, rollout) of each chosen attempt to those of its replica."""
    table = np.column_stack([ended.start, end, ended.rollout])[chosen]
    for replica, own in by_replica(ended.replica[chosen], table).items():
        rows[replica] = np.concatenate([rows[replica], own]) if replica in rows else own


def _take_rows(rows: dict[int, Floats], since: float, until: float) -> dict[int, Floats]:
    """Remove and return the parts of rows between two instants, without replicas that have none."""
    taken: dict[int, Floats] = {}
    for replica, table in list(rows.items()):
        start, end = np.maximum(table[:, :2], since).T
        goes_on = end > until
        begun = (start < until) | ~goes_on
        if begun.any():
            taken[replica] = np.column_stack([start, np.minimum(end, until), table[:, 2]])[begun]
        if goes_on.any():
            left = np.column_stack([np.maximum(start, until), end, table[:, 2]])
            rows[replica] = left[goes_on]
        else:
            del rows[replica]
    return taken


def _activity(
    attempts: Floats | None, loads: list[Span], transfers: Floats | None = None
) -> list[Span]:
    """Return when a replica loaded weights, when else a rollout ran on it, and when else it received a KV cache."""
    found = sorted(loads)
    for activity, rows in (("generate", attempts), ("kv-transfer", transfers)):
        if rows is not None:
            spans = [
                Span(start, end, activity, str(int(rollout)) if num == 1 else "")
                for start, end, rollout, num in _union(rows).tolist()
            ]
            found = sorted([*found, *_subtract(spans, found)])
    return found


def _union(rows: Floats) -> Floats:
    """Merge rows (start, end, rollout) that overlap.

    Returns:
        Rows (start, end, rollout, number of merged rows); the rollout is that of the first row.
    """
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    ends = np.maximum.accumulate(rows[:, 1])
    first = np.flatnonzero(np.append(True, rows[1:, 0] > ends[:-1]))
    last = np.append(first[1:], len(rows)) - 1
    return np.column_stack([rows[first, 0], ends[last], rows[first, 2], last - first + 1])


def _subtract_rows(rows: Floats, holes: list[Span]) -> Floats:
    """Return the parts of rows (start, end) between holes, which do not overlap each other."""
    start, end = rows.T
    opens = np.array([-inf, *(hole.end for hole in holes)])
    closes = np.array([*(hole.start for hole in holes), inf])
    first = np.searchsorted(closes, start, "right")
    num = np.maximum(np.searchsorted(opens, end, "left") - first, 0)
    whole = np.repeat(np.arange(len(rows)), num)
    gap = np.arange(len(whole)) - np.repeat(np.cumsum(num) - num, num) + first[whole]
    parts = np.column_stack(
        [np.maximum(start[whole], opens[gap]), np.minimum(end[whole], closes[gap])]
    )
    return parts[parts[:, 0] < parts[:, 1]]


def _subtract(spans: list[Span], holes: list[Span]) -> list[Span]:
    """Cut `holes`, which do not overlap each other, out of `spans`; both are in order of time."""
    rest: list[Span] = []
    first = 0
    for span in spans:
        start = span.start
        while first < len(holes) and holes[first].end <= start:
            first += 1
        for hole in holes[first:]:
            if hole.start >= span.end:
                break
            if hole.start > start:
                rest.append(span._replace(start=start, end=hole.start))
            start = max(start, hole.end)
        if start < span.end:
            rest.append(span._replace(start=start))
    return rest
