"""Parts of the GPU-seconds in which replicas generate: prefill, and decoding that full batches would not have needed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from streamrl.hardware.tables import Floats
from streamrl.record.decode_yield import DecodeYield
from streamrl.record.decoding import Decoding, DecodingReader
from streamrl.record.entries import Entry
from streamrl.record.ledger import Ledger
from streamrl.record.timeline import Span, Timeline, read_timeline
from streamrl.record.trace import Trace
from streamrl.record.underfilled import Lost, YieldSource, lost_of, observed_rates
from streamrl.runfile.config import Run

ENOUGH = 200_000
"""Stretches, of 48 bytes each, whose full batches tell what all of a run's yield, where no curve does."""

Part: TypeAlias = Literal["prefill", "underfilled"]


class Parts(NamedTuple):
    """GPU-seconds of all replicas of a kind together."""

    prefill: float
    underfilled: float
    source: YieldSource
    """Where it is known from what is underfilled."""


def read_parts(trace: Trace, window: tuple[float, float]) -> list[Parts]:
    """Return the parts of what replicas of each kind generated in a window."""
    reader = PartsReader(trace.run, trace.decode, window)
    reader.read(trace.entries)
    reader.finish(read_timeline(trace))
    return reader.between(*window)


class PartsReader:
    """Adds the parts up, block by block; without a decode curve stretches are kept until enough of them are known."""

    def __init__(
        self, run: Run, curves: Sequence[DecodeYield], marks: Sequence[float] = ()
    ) -> None:
        self._run = run
        self._curves = curves
        self._source: YieldSource = "curve" if curves else "unknown"
        self._degrees = [own.gpus_per_replica for own in run.rollout.kinds]
        self._kinds: Mapping[int, int] = {}
        """By replica: of which kind it is, where that is not the first."""
        self._ledger = Ledger[tuple[int, Part]](marks)
        self._decoding = DecodingReader()
        self._paused: dict[int, list[Span]] = defaultdict(list)
        """By replica: when it computed prefixes or loaded weights and decoded nothing."""
        self._kept: list[dict[int, Decoding]] = []
        self._rates: list[float | None] | None = None
        """Tokens/s of full batches of each kind of replica, once enough was seen without a curve."""

    def mark(self, times: Sequence[float]) -> None:
        """Enter instants between which sums may be asked for."""
        self._ledger.marks.extend(times)

    def read(self, entries: Sequence[Entry]) -> None:
        """Take the entries that come after those before."""
        self._decoding.read(entries)

    def take(self, timeline: Timeline) -> None:
        """Add up what can be known of the part of the run that a timeline is of."""
        self._see(timeline)
        decoding = self._decoding.take(timeline.end)
        if not self._curves and self._rates is None:
            self._kept.append(decoding)
            if sum(len(each.start) for part in self._kept for each in part.values()) < ENOUGH:
                return
            decoding, self._kept = _joined(self._kept), []
            self._rates = observed_rates(decoding, self._run, self._kinds)
        self._enter(decoding)
        for replica, spans in self._paused.items():
            began = self._decoding.began_at(replica)
            spans[:] = [span for span in spans if span.end > began]

    def finish(self, timeline: Timeline) -> None:
        """Add up what is left, of the last part of the run."""
        self._see(timeline)
        self._enter(_joined([*self._kept, self._decoding.finish()]))

    def between(self, start: float, end: float) -> list[Parts]:
        """Return the GPU-seconds of each kind of replica between two marks."""
        found = self._ledger.between(start, end)
        return [
            Parts(
                found.get((kind, "prefill"), 0.0) * degree,
                found.get((kind, "underfilled"), 0.0) * degree,
                self._source,
            )
            for kind, degree in enumerate(self._degrees)
        ]

    def _see(self, timeline: Timeline) -> None:
        """Enter prefills, which have no loads in them, and what pauses decoding."""
        self._kinds = timeline.kinds
        for kind in range(len(self._degrees)):
            own = [s for r, s in timeline.prefills.items() if self._kinds.get(r, 0) == kind]
            pieces = self._ledger.cut(*_edges([*chain.from_iterable(own)]).T)
            self._ledger.add_pieces((kind, "prefill"), pieces.slot, pieces.end - pieces.start)
        for replica in {**timeline.replicas, **timeline.prefills}:
            spans = timeline.replicas.get(replica, [])
            loads = [span for span in spans if span.activity == "sync"]
            self._paused[replica] += sorted([*timeline.prefills.get(replica, []), *loads])

    def _enter(self, decoding: dict[int, Decoding]) -> None:
        """Enter what was lost of stretches, what was paused left out."""
        source, replicas = lost_of(decoding, self._curves, self._run, self._kinds, self._rates)
        if decoding or self._rates is None:
            self._source = source
        for replica, lost in replicas.items():
            self._enter_lost(self._kinds.get(replica, 0), lost, _edges(self._paused[replica]))

    def _enter_lost(self, kind: int, lost: Lost, paused: Floats) -> None:
        pieces = self._ledger.cut(lost.start, lost.end)
        start, end = pieces.start, pieces.end
        decoded = (end - start) - (_paused_until(paused, end) - _paused_until(paused, start))
        seconds = lost.share[pieces.whole] * np.maximum(decoded, 0.0)
        self._ledger.add_pieces((kind, "underfilled"), pieces.slot, seconds)


def _joined(parts: list[dict[int, Decoding]]) -> dict[int, Decoding]:
    """Put the stretches of each replica together."""
    of_replicas: dict[int, list[Decoding]] = defaultdict(list)
    for part in parts:
        for replica, decoding in part.items():
            of_replicas[replica].append(decoding)
    return {
        replica: Decoding(*map(np.concatenate, zip(*found, strict=True)))
        for replica, found in of_replicas.items()
    }


def _edges(spans: Sequence[Span]) -> Floats:
    """Return start and end of each span as rows."""
    return np.array([(span.start, span.end) for span in spans], dtype=float).reshape(-1, 2)


def _paused_until(paused: Floats, times: Floats) -> Floats:
    """Return the paused seconds before each instant."""
    if not len(paused):
        return np.zeros_like(times)
    lengths = np.cumsum(paused[:, 1] - paused[:, 0])
    before = np.column_stack([lengths - (paused[:, 1] - paused[:, 0]), lengths])
    seconds: Floats = np.interp(times, paused.ravel(), before.ravel())
    return seconds
