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
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from math import inf
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from streamrl.engine.messages import Drop, Failed, Generate, Generated, PromptsDrawn, Step
from streamrl.engine.trace import DecodeYield, Entry, Trace
from streamrl.hardware.measured_profile import check_fits, read_measured, scaled_to_mean_speed
from streamrl.hardware.operator_tables import Floats
from streamrl.hardware.profile_fit import fit_decode
from streamrl.record.interval_sums import IntervalSums
from streamrl.record.timeline import Span, Timeline, read_timeline
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
        for kind in range(run.rollout.num_kinds):
            check_fits(profile, run.of_kind(kind), path)
    except ValueError:
        return []
    fits = [fit_decode(profile.decode, own.max_running) for own in run.rollout.kinds]
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


class _Stay(NamedTuple):
    """A rollout in a replica's batch, from its first token to its end."""

    start: float
    end: float
    prompt: float
    context: float
    """Tokens of prompt and output at the start."""
    made: float
    """Tokens that it decoded."""
    is_known: bool
    """Whether its running time and its tokens were reported."""


def read_decoding(trace: Trace) -> dict[int, Decoding]:
    """Return the decoding of each replica by its id, without replicas that never decoded."""
    reader = DecodingReader()
    reader.read(trace.entries)
    return reader.finish()


class DecodingReader:
    """Reads the decoding of each replica from a trace, block by block."""

    def __init__(self) -> None:
        self._stays: dict[int, list[_Stay]] = defaultdict(list)
        """By replica: finished stays that overlap time ranges that were not returned yet."""
        self._since: dict[int, float] = {}
        """By replica: the end of the last returned time range."""
        self._prompts: dict[int, int] = {}
        self._groups: dict[int, tuple[int, ...]] = {}
        self._sent: dict[int, tuple[Generate, float, int]] = {}
        self._now = 0.0

    def read(self, entries: Iterable[Entry]) -> None:
        """Read the next entries of the trace."""
        for now, event, commands in entries:
            self._now = now
            match event:
                case Generated():
                    command, _, prompt = self._sent.pop(event.rollout)
                    self._stays[command.replica].append(_stay(command, event, now, prompt))
                case Failed(Generate(rollout)):
                    self._end_unknown(rollout)
                case PromptsDrawn():
                    for drawn in event.groups:
                        self._groups[drawn.group] = drawn.rollouts
                        self._prompts.update(dict.fromkeys(drawn.rollouts, drawn.prompt_tokens))
                case _:
                    pass  # does not concern decoding
            for each in commands:
                if isinstance(each, Generate):
                    self._sent[each.rollout] = each, now, self._prompts[each.rollout]
                elif isinstance(each, Step):
                    self._forget(each.groups)
                elif isinstance(each, Drop):
                    self._forget((each.group,))

    def take(self, until: float) -> dict[int, Decoding]:
        """Return the time ranges of each replica up to `until` that were not returned yet.

        No later entry may report anything before `until`; see `TimelineReader.known_until`.
        """
        taken = {}
        for replica, stays in self._stays.items():
            since = self._since.get(replica, -inf)
            decoding, last = _stretches(stays, since, until)
            if len(decoding.start):
                taken[replica] = decoding
            self._since[replica] = last
            stays[:] = [stay for stay in stays if stay.end > last]
        for replica in [replica for replica, stays in self._stays.items() if not stays]:
            del self._stays[replica]
        return taken

    def began_at(self, replica: int) -> float:
        """Return the instant at which the replica's next time range begins; infinity if it decodes nothing."""
        return self._since[replica] if replica in self._stays else inf

    def finish(self) -> dict[int, Decoding]:
        """Return the remaining time ranges. Running attempts are assumed to run until the last entry."""
        for rollout in list(self._sent):
            self._end_unknown(rollout)
        return self.take(inf)

    def _end_unknown(self, rollout: int) -> None:
        command, sent_at, prompt = self._sent.pop(rollout)
        stay = _Stay(sent_at, self._now, prompt, prompt + command.prefix, 0.0, is_known=False)
        self._stays[command.replica].append(stay)

    def _forget(self, groups: tuple[int, ...]) -> None:
        """Forget groups that are trained on or dropped."""
        for group in groups:
            for rollout in self._groups.pop(group, ()):
                del self._prompts[rollout]


def _stay(command: Generate, event: Generated, now: float, prompt: int) -> _Stay:
    start = min(now, now - event.run_time + event.prefill_time)
    first = min(event.tokens, command.prefix + 1)  # prefill yields one token
    return _Stay(start, now, prompt, prompt + first, event.tokens - first, is_known=True)


def _stretches(stays: list[_Stay], since: float, until: float) -> tuple[Decoding, float]:
    """Cut a replica's time wherever a rollout joins or leaves its batch, and sum over the batch in between.

    Returns:
        The time ranges between two instants, and the end of the last one.
    """
    start, end, prompt, context, made, is_known = np.array(stays, dtype=float).T
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
    return lost_of(read_decoding(trace), FullBatches.of(trace), read_timeline(trace).kinds)


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
        return cls(trace.decode, trace.run.rollout.kinds, trace.run.rollouts_per_prompt)


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
        shares = {
            replica: _share_by(full.curves[kinds.get(replica, 0)], each, full.siblings)
            for replica, each in decoding.items()
        }
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


ENOUGH = 200_000
"""Without a curve, number of time ranges (48 bytes each) from which the throughput of full batches is taken for the
whole run."""

Part: TypeAlias = Literal["prefill", "underfilled"]


class Parts(NamedTuple):
    """GPU-seconds of prefill and of underfilled decoding, over all replicas of one kind."""

    prefill: float
    underfilled: float
    source: YieldSource
    """Source of the throughput of a full batch."""


def read_parts(trace: Trace, window: tuple[float, float]) -> list[Parts]:
    """Return the parts of generation for each kind of replica in a window of seconds."""
    reader = PartsReader(FullBatches.of(trace), window)
    reader.read(trace.entries)
    reader.finish(read_timeline(trace))
    return reader.between(*window)


class PartsReader:
    """Adds up the parts block by block. Without a decode curve it first collects `ENOUGH` time ranges."""

    def __init__(self, full: FullBatches, marks: Sequence[float] = ()) -> None:
        self._full = full
        self._source: YieldSource = "curve" if full.curves else "unknown"
        self._degrees = [own.gpus_per_replica for own in full.rollouts]
        self._kinds: Mapping[int, int] = {}
        """By replica: its kind, if it is not the first kind."""
        self._sums = IntervalSums[tuple[int, Part]](marks)
        self._decoding = DecodingReader()
        self._paused: dict[int, list[Span]] = defaultdict(list)
        """By replica: when prefills or weight loads paused its decoding."""
        self._kept: list[dict[int, Decoding]] = []
        self._rates: list[float | None] | None = None
        """Without a curve: tokens/s of full batches of each kind, once `ENOUGH` time ranges were collected."""

    def mark(self, times: Sequence[float]) -> None:
        """Add instants for `between`. Call this before entries after these instants are read."""
        self._sums.marks.extend(times)

    def read(self, entries: Sequence[Entry]) -> None:
        """Read the next entries of the trace."""
        self._decoding.read(entries)

    def take(self, timeline: Timeline) -> None:
        """Add up the part of the run that a timeline covers. Call this with the parts in order."""
        self._see(timeline)
        decoding = self._decoding.take(timeline.end)
        if not self._full.curves and self._rates is None:
            self._kept.append(decoding)
            if sum(len(each.start) for part in self._kept for each in part.values()) < ENOUGH:
                return
            decoding, self._kept = _joined(self._kept), []
            self._rates = observed_rates(decoding, self._full.rollouts, self._kinds)
        self._enter(decoding)
        for replica, spans in self._paused.items():
            began = self._decoding.began_at(replica)
            spans[:] = [span for span in spans if span.end > began]

    def finish(self, timeline: Timeline) -> None:
        """Add up the last part of the run."""
        self._see(timeline)
        self._enter(_joined([*self._kept, self._decoding.finish()]))

    def between(self, start: float, end: float) -> list[Parts]:
        """Return the GPU-seconds of each kind of replica between two marks."""
        seconds = self._sums.between(start, end)
        return [
            Parts(
                seconds.get((kind, "prefill"), 0.0) * degree,
                seconds.get((kind, "underfilled"), 0.0) * degree,
                self._source,
            )
            for kind, degree in enumerate(self._degrees)
        ]

    def _see(self, timeline: Timeline) -> None:
        """Add prefill seconds, and record when prefills and loads pause decoding."""
        self._kinds = timeline.kinds
        for kind in range(len(self._degrees)):
            own = [s for r, s in timeline.prefills.items() if self._kinds.get(r, 0) == kind]
            pieces = self._sums.cut(*_edges([*chain.from_iterable(own)]).T)
            self._sums.add_pieces((kind, "prefill"), pieces.slot, pieces.end - pieces.start)
        for replica in {**timeline.replicas, **timeline.prefills}:
            spans = timeline.replicas.get(replica, [])
            loads = [span for span in spans if span.activity == "sync"]
            self._paused[replica] += sorted([*timeline.prefills.get(replica, []), *loads])

    def _enter(self, decoding: dict[int, Decoding]) -> None:
        """Add the underfilled seconds of time ranges, without paused seconds."""
        source, replicas = lost_of(decoding, self._full, self._kinds, self._rates)
        if decoding or self._rates is None:
            self._source = source
        for replica, lost in replicas.items():
            self._enter_lost(self._kinds.get(replica, 0), lost, _edges(self._paused[replica]))

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


def _edges(spans: Sequence[Span]) -> Floats:
    """Return an array with a row (start, end) for each span."""
    return np.array([(span.start, span.end) for span in spans], dtype=float).reshape(-1, 2)


def _paused_until(paused: Floats, times: Floats) -> Floats:
    """Return the paused seconds before each instant."""
    if not len(paused):
        return np.zeros_like(times)
    lengths = np.cumsum(paused[:, 1] - paused[:, 0])
    before = np.column_stack([lengths - (paused[:, 1] - paused[:, 0]), lengths])
    seconds: Floats = np.interp(times, paused.ravel(), before.ravel())
    return seconds
