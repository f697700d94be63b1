"""Split the GPU-seconds of generation into prefill, decode, and decode seconds that full batches would not need.

First, reconstruct the batch of each replica at each instant: the number of rollouts and their
lengths. Events tell when a rollout joined and left a batch, and its number of tokens. Between
events its context is assumed to grow evenly. An attempt without a reported running time, because
its replica was lost or the trace ends, counts as running since it was sent.

Then, count underfilled decode seconds. A replica that decodes only the last few rollouts of a step
reads all its weights for few tokens. The underfilled share of such a second is

    1 - (tokens/s of this batch) / (tokens/s of a full batch)

The throughput of a full batch comes from the first of these sources that is available:

- `curve`: the decode curve in the trace's header, at the largest batch that `rollout.max_running`
  and KV memory allow with the same mean context.
- `observed`: the median tokens/s of the trace's batches of `max_running`; a long trace uses only
  its first part.
- `unknown`: the trace has no such batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from streamrl.engine.trace import DecodeYield, Trace
from streamrl.hardware.measured_profile import check_fits, read_measured, scaled_to_mean_speed
from streamrl.hardware.operator_tables import Floats
from streamrl.hardware.profile_fit import fit_decode
from streamrl.record.attempts import Attempts, by_replica
from streamrl.record.interval_sums import IntervalSums
from streamrl.record.timeline import Timeline, read_timeline
from streamrl.runfile.config import Run
from streamrl.runfile.roles_config import RolloutConfig


def measured_yield(run: Run) -> list[DecodeYield]:
    """Return the decode curve of each kind of replica from `costs.profile`; none if it does not fit the run.

    Executed replicas have memory for the longest output of `max_running` rollouts, so memory does not
    limit the batch.
    """
    if run.costs.profile is None:
        return []
    path = Path(run.costs.profile)
    try:
        profile = scaled_to_mean_speed(read_measured(path))
        for kind in range(len(run.replica_kinds)):
            check_fits(profile, run.of_kind(kind), path)
    except ValueError:
        return []
    fits = [fit_decode(profile.decode, own.max_running) for own in run.replica_kinds]
    return [DecodeYield.of(fit.base, fit.per_context_token, None) for fit in fits]


class Decoding(NamedTuple):
    """Time ranges in which the batch of one replica did not change, as arrays in order of time."""

    start: Floats
    end: Floats
    num_running: Floats
    context: Floats
    """Mean tokens of a running rollout's prompt and output, in the middle of the range."""
    prompt: Floats
    """Mean tokens of a running rollout's prompt."""
    rate: Floats
    """Tokens per second of all running rollouts, each at the mean rate of its attempt."""

    @property
    def seconds(self) -> Floats:
        """The length of each time range."""
        return self.end - self.start


class DecodingReader:
    """Finds the decoding of each replica from its attempts, part by part of a timeline."""

    def __init__(self) -> None:
        self._stays: dict[int, Floats] = {}
        """By replica: rows of `_stays_of` that overlap time ranges that were not returned yet."""
        self._since: dict[int, float] = {}
        """By replica: the end of the last returned time range."""

    def take(self, timeline: Timeline, until: float | None = None) -> dict[int, Decoding]:
        """Return the time ranges of each replica that were not returned yet.

        Args:
            timeline: the next part of the timeline.
            until: the instant up to which they are returned: the end of the part if None, infinity for the last part.
        """
        for replica, own in _stays_of(timeline.ended).items():
            before = self._stays.get(replica)
            self._stays[replica] = own if before is None else np.concatenate([before, own])
        taken = {}
        for replica, stays in list(self._stays.items()):
            since = self._since.get(replica, -inf)
            decoding, last = _stretches(stays, since, timeline.end if until is None else until)
            if len(decoding.start):
                taken[replica] = decoding
            if len(later := stays[stays[:, 1] > last]):
                self._since[replica], self._stays[replica] = last, later
            else:
                self._since.pop(replica, None)
                del self._stays[replica]
        return taken

    def began_at(self, replica: int) -> float:
        """Return the instant at which the replica's next time range begins; infinity if it decodes nothing."""
        return self._since[replica] if replica in self._stays else inf


def _stays_of(ended: Attempts) -> dict[int, Floats]:
    """Return by replica a row for each attempt in its batch, from its first token to its end.

    The row has its start, its end, the tokens of its prompt, its tokens at the start, the tokens that it decoded, and 1
    if those were reported.
    """
    start = np.minimum(ended.end, ended.start + ended.transfer_time + ended.prefill_time)
    is_prefilled = ended.is_known * (ended.transfer_time == 0.0)  # which yields one token
    first = np.minimum(ended.tokens, ended.prefix + is_prefilled)
    stays = np.column_stack(
        [start, ended.end, ended.prompt, ended.prompt + first, ended.tokens - first, ended.is_known]
    )
    return by_replica(ended.replica, stays)


def _stretches(stays: Floats, since: float, until: float) -> tuple[Decoding, float]:
    """Cut a replica's time wherever a rollout joins or leaves its batch, and sum over the batch in between.

    Returns:
        The time ranges between two instants, and the end of the last one.
    """
    start, end, prompt, context, made, is_known = stays.T
    rate = np.divide(made, end - start, out=np.zeros_like(made), where=end > start)
    times = np.concatenate([np.maximum(start, since), np.maximum(end, since)])
    order = np.argsort(times, kind="stable")
    order = order[: np.searchsorted(times[order], until, "right")]
    times = times[order]

    def running(of_each: Floats) -> Floats:
        changes = np.concatenate([of_each, -of_each])[order]
        total: Floats = np.cumsum(changes)[:-1]
        return total

    num_running = np.rint(running(np.ones_like(start)))
    middle = (times[:-1] + times[1:]) / 2
    contexts = running(context - rate * start) + running(rate) * middle
    num_known = np.rint(running(is_known))
    shown = (times[1:] > times[:-1]) & (num_running > 0)
    count = num_running[shown]
    decoding = Decoding(
        start=times[:-1][shown],
        end=times[1:][shown],
        num_running=count,
        context=contexts[shown] / count,
        prompt=running(prompt)[shown] / count,
        rate=running(rate)[shown] * count / np.maximum(num_known[shown], 1.0),
    )
    return decoding, float(times[-1]) if len(times) else since


YieldSource = Literal["curve", "observed", "unknown"]
"""Source of the throughput of a full batch; see the module docstring."""
ROUNDING = 1e-9
"""Relative rounding error of the mean tokens of a rollout. It depends on the blocks in which a trace is read, so a batch
that fills memory exactly must still fit."""


class Lost(NamedTuple):
    """Time ranges of one replica, and the share of each that a full batch would not have needed."""

    start: Floats
    end: Floats
    share: Floats


class Underfilled(NamedTuple):
    """The decode seconds that full batches would not have needed."""

    source: YieldSource
    replicas: dict[int, Lost]
    """By replica; empty if the source is "unknown"."""


def read_underfilled(trace: Trace) -> Underfilled:
    """Return the underfilled decode seconds of a whole trace."""
    timeline = read_timeline(trace)
    return lost_of(DecodingReader().take(timeline, inf), FullBatches.of(trace), timeline.kinds)


class FullBatches(NamedTuple):
    """What is known of full batches before a trace's entries are read."""

    curves: Sequence[DecodeYield]
    """Decode curve of each kind of replica; empty if the trace has none."""
    rollouts: tuple[RolloutConfig, ...]
    """Section of each kind of replica."""
    siblings: int
    """Number of rollouts that share the KV cache of their prompt; 1 without sharing."""

    @classmethod
    def of(cls, trace: Trace) -> FullBatches:
        """Return what the header of a trace says about full batches."""
        return cls(trace.decode, trace.run.replica_kinds, trace.run.rollouts_per_prompt)


def lost_of(
    decoding: Mapping[int, Decoding],
    full: FullBatches,
    kinds: Mapping[int, int],
    rates: Sequence[float | None] | None = None,
) -> Underfilled:
    """Return the underfilled decode seconds.

    Args:
        decoding: decoding by replica.
        full: what the header says about full batches.
        kinds: kind by replica; a missing replica is of the first kind.
        rates: used only without curves: tokens/s of full batches from `observed_rates`. If None,
            they are taken from `decoding`, which must then be that of the whole run.
    """
    if full.curves:
        shares: dict[int, Floats] = {}
        for kind, curve in enumerate(full.curves):
            own = {r: each for r, each in decoding.items() if kinds.get(r, 0) == kind}
            shares |= _shares_by(curve, own, full.siblings)
        return Underfilled("curve", {r: _lost(each, shares[r]) for r, each in decoding.items()})
    if rates is None:
        rates = observed_rates(decoding, full.rollouts, kinds)
    lost = {}
    for replica, each in decoding.items():
        rate = rates[kinds.get(replica, 0)]
        if rate is None:
            return Underfilled("unknown", {})
        lost[replica] = _lost(each, np.clip(1 - each.rate / rate, 0.0, 1.0))
    return Underfilled("observed", lost)


def observed_rates(
    decoding: Mapping[int, Decoding], rollouts: tuple[RolloutConfig, ...], kinds: Mapping[int, int]
) -> list[float | None]:
    """Return the median tokens/s of the full batches of each kind of replica; None for a kind without full batches."""
    return [
        _observed(
            [each for replica, each in decoding.items() if kinds.get(replica, 0) == kind], most
        )
        for kind, most in enumerate(own.max_running for own in rollouts)
    ]


def _lost(decoding: Decoding, share: Floats) -> Lost:
    return Lost(decoding.start, decoding.end, share)


def _shares_by(
    curve: DecodeYield, decoding: Mapping[int, Decoding], siblings: int
) -> dict[int, Floats]:
    """Return the underfilled shares of replicas of one kind from their decode curve."""
    if not decoding:
        return {}
    together = Decoding(*map(np.concatenate, zip(*decoding.values(), strict=True)))
    ends = np.cumsum([len(each.start) for each in decoding.values()])
    shares = np.split(_share_by(curve, together, siblings), ends[:-1])
    return dict(zip(decoding, shares, strict=True))


def _share_by(curve: DecodeYield, decoding: Decoding, siblings: int) -> Floats:
    """Return the underfilled share from a decode curve. A prompt that a group shares is in memory once."""
    own = decoding.context - decoding.prompt * (1 - 1 / siblings)
    running = np.minimum(decoding.num_running, curve.most_running)
    return share_lost(curve, running, decoding.context, own)


def share_lost(curve: DecodeYield, num_running: Floats, context: Floats, own: Floats) -> Floats:
    """Return the share of each decode second that a full batch of the same mean context would not have needed.

    Args:
        curve: decode curve of one replica.
        num_running: rollouts in the batch.
        context: mean tokens to which a rollout attends.
        own: mean tokens in the KV cache for one rollout; a shared prompt counts by its fraction.
    """
    full = _full_batch(curve, num_running, own)
    here = num_running / _step_time(curve, num_running, context)
    best = full / _step_time(curve, full, context)
    return np.clip(1.0 - here / best, 0.0, 1.0)


def _full_batch(curve: DecodeYield, num_running: Floats, own: Floats) -> Floats:
    """Return the largest batch of rollouts with `own` tokens each in memory, and at least `num_running`."""
    most = np.full_like(own, curve.most_running)
    if curve.kv_capacity is not None:
        room = curve.kv_capacity / np.maximum(own, 1.0)
        most = np.minimum(most, np.floor(room * (1 + ROUNDING)))
    full: Floats = np.maximum(most, num_running)
    return full


def _step_time(curve: DecodeYield, num_running: Floats, context: Floats) -> Floats:
    base = np.interp(num_running, curve.batches, curve.base)
    slope = np.interp(num_running, curve.batches, curve.per_context_token)
    seconds: Floats = base + slope * num_running * context
    return seconds


def _observed(decoding: Sequence[Decoding], most: int) -> float | None:
    """Return the median tokens/s of full batches, weighted by seconds; None without full batches."""
    rates = [each.rate[each.num_running >= most] for each in decoding]
    seconds = [each.seconds[each.num_running >= most] for each in decoding]
    if not sum(map(len, rates)):
        return None
    rate, weight = np.concatenate(rates), np.concatenate(seconds)
    order = np.argsort(rate)
    below = np.cumsum(weight[order])
    middle = float(rate[order][np.searchsorted(below, below[-1] / 2)])
    return middle or None


NO_ROWS: Floats = np.empty((0, 2))
ENOUGH = 200_000
"""Without a curve, number of time ranges (48 bytes each) from which the throughput of full batches is taken for the
whole run."""

Part: TypeAlias = Literal["prefill", "recomputed", "underfilled"]


class Parts(NamedTuple):
    """GPU-seconds of prefill and of underfilled decoding, over all replicas of one kind."""

    prefill: float
    """Recomputed prefixes included."""
    recomputed: float
    underfilled: float
    source: YieldSource
    """Source of the throughput of a full batch."""


def read_parts(trace: Trace, window: tuple[float, float]) -> list[Parts]:
    """Return the parts of generation for each kind of replica in a window of seconds."""
    reader = PartsReader(FullBatches.of(trace), window)
    reader.finish(read_timeline(trace))
    return reader.between(*window)


class PartsReader:
    """Adds up the parts of a timeline. Without a decode curve it first collects `ENOUGH` time ranges."""

    def __init__(self, full: FullBatches, marks: Sequence[float] = ()) -> None:
        self._full = full
        self._source: YieldSource = "curve" if full.curves else "unknown"
        self._degrees = [own.gpus_per_replica for own in full.rollouts]
        self._kinds: Mapping[int, int] = {}
        """By replica: its kind, if it is not the first kind."""
        self._sums = IntervalSums[tuple[int, Part]](marks)
        self._decoding = DecodingReader()
        self._paused: dict[int, Floats] = {}
        """By replica: rows (start, end) of prefills and weight loads, which pause its decoding."""
        self._kept: list[dict[int, Decoding]] = []
        self._rates: list[float | None] | None = None
        """Without a curve: tokens/s of full batches of each kind, once `ENOUGH` time ranges were collected."""

    def mark(self, times: Sequence[float]) -> None:
        """Add instants for `between`. Call this before entries after these instants are read."""
        self._sums.marks.extend(times)

    def take(self, timeline: Timeline) -> None:
        """Add up the part of the run that a timeline covers. Call this with the parts in order."""
        self._see(timeline)
        decoding = self._decoding.take(timeline)
        if not self._full.curves and self._rates is None:
            self._kept.append(decoding)
            if sum(len(each.start) for part in self._kept for each in part.values()) < ENOUGH:
                return
            decoding, self._kept = _joined(self._kept), []
            self._rates = observed_rates(decoding, self._full.rollouts, self._kinds)
        self._enter(decoding)
        later = {
            replica: paused[paused[:, 1] > self._decoding.began_at(replica)]
            for replica, paused in self._paused.items()
        }
        self._paused = {replica: paused for replica, paused in later.items() if len(paused)}

    def finish(self, timeline: Timeline) -> None:
        """Add up the last part of the run."""
        self._see(timeline)
        self._enter(_joined([*self._kept, self._decoding.take(timeline, inf)]))

    def between(self, start: float, end: float) -> list[Parts]:
        """Return the GPU-seconds of each kind of replica between two marks."""
        seconds = self._sums.between(start, end)
        return [
            Parts(
                seconds.get((kind, "prefill"), 0.0) * degree,
                seconds.get((kind, "recomputed"), 0.0) * degree,
                seconds.get((kind, "underfilled"), 0.0) * degree,
                self._source,
            )
            for kind, degree in enumerate(self._degrees)
        ]

    def _see(self, timeline: Timeline) -> None:
        """Add prefill seconds, and record when prefills and loads pause decoding."""
        self._kinds = timeline.kinds
        for kind in range(len(self._degrees)):
            self._add_seconds(kind, "prefill", timeline.prefills)
            if timeline.recomputed:
                self._add_seconds(kind, "recomputed", timeline.recomputed)
        for replica in {**timeline.replicas, **timeline.prefills}:
            spans = timeline.replicas.get(replica, [])
            loads = [
                (span.start, span.end) for span in spans if span.activity in ("sync", "switch")
            ]
            paused = np.concatenate(
                [timeline.prefills.get(replica, NO_ROWS), np.array(loads).reshape(-1, 2)]
            )
            paused = paused[np.lexsort(paused.T[::-1])]
            self._paused[replica] = np.concatenate([self._paused.get(replica, NO_ROWS), paused])

    def _add_seconds(self, kind: int, part: Part, rows: Mapping[int, Floats]) -> None:
        """Add the seconds of rows (start, end) of the replicas of one kind."""
        own = [each for replica, each in rows.items() if self._kinds.get(replica, 0) == kind]
        pieces = self._sums.cut(*np.concatenate([NO_ROWS, *own]).T)
        self._sums.add_pieces((kind, part), pieces.slot, pieces.end - pieces.start)

    def _enter(self, decoding: dict[int, Decoding]) -> None:
        """Add the underfilled seconds of time ranges, without paused seconds."""
        source, replicas = lost_of(decoding, self._full, self._kinds, self._rates)
        if decoding or self._rates is None:
            self._source = source
        for replica, lost in replicas.items():
            self._enter_lost(self._kinds.get(replica, 0), lost, self._paused.get(replica, NO_ROWS))

    def _enter_lost(self, kind: int, lost: Lost, paused: Floats) -> None:
        pieces = self._sums.cut(lost.start, lost.end)
        start, end = pieces.start, pieces.end
        decoded = (end - start) - (_paused_until(paused, end) - _paused_until(paused, start))
        seconds = lost.share[pieces.whole] * np.maximum(decoded, 0.0)
        self._sums.add_pieces((kind, "underfilled"), pieces.slot, seconds)


def _joined(parts: list[dict[int, Decoding]]) -> dict[int, Decoding]:
    """Return the time ranges of all parts, joined by replica."""
    of_replicas: dict[int, list[Decoding]] = defaultdict(list)
    for part in parts:
        for replica, decoding in part.items():
            of_replicas[replica].append(decoding)
    return {
        replica: Decoding(*map(np.concatenate, zip(*each, strict=True)))
        for replica, each in of_replicas.items()
    }


def _paused_until(paused: Floats, times: Floats) -> Floats:
    """Return the paused seconds before each instant."""
    if not len(paused):
        return np.zeros_like(times)
    lengths = np.cumsum(paused[:, 1] - paused[:, 0])
    before = np.column_stack([lengths - (paused[:, 1] - paused[:, 0]), lengths])
    seconds: Floats = np.interp(times, paused.ravel(), before.ravel())
    return seconds
