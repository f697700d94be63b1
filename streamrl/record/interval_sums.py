"""Sum amounts by key between marks in time, so that the sum over any range of marks can be read later.

Marks are the ends of steps. Which steps count is known only at the end of a run, so the sums are kept
for each step: one number for each key and mark.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from math import inf
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from streamrl.hardware.operator_tables import Floats
from streamrl.record.long_column import LongColumn

Key = TypeVar("Key")


class Pieces(NamedTuple):
    """Time ranges cut at the marks, as arrays with one element for each piece."""

    whole: npt.NDArray[np.intp]
    """Index of the range that the piece was cut from."""
    slot: npt.NDArray[np.intp]
    start: Floats
    end: Floats


class IntervalSums(Generic[Key]):
    """Sums by key and slot. Slot 0 ends at the first mark, and the last slot begins at the last mark."""

    def __init__(self, marks: Iterable[float] = ()) -> None:
        self.marks = LongColumn[float]("d", marks)
        self._columns: dict[Key, LongColumn[float]] = {}

    def slot_of(self, time: float) -> int:
        """Return the slot that contains an instant; a mark belongs to the slot before it."""
        return bisect_left(self.marks, time)

    def add(self, slot: int, amounts: Mapping[Key, float]) -> None:
        """Add amounts to the sums of one slot."""
        for key, amount in amounts.items():
            column = self._columns.get(key)
            if column is None:
                column = self._columns[key] = LongColumn("d")
            if len(column) <= slot:
                column.extend([0.0] * (slot + 1 - len(column)))
            column[slot] += amount

    def add_pieces(self, key: Key, slots: npt.NDArray[np.intp], amounts: Floats) -> None:
        """Add one amount for each piece to the sum of its slot."""
        if len(slots):
            first = int(slots.min())
            for slot, amount in enumerate(np.bincount(slots - first, amounts).tolist(), first):
                self.add(slot, {key: amount})

    def cut(self, start: Floats, end: Floats) -> Pieces:
        """Return the pieces of time ranges, cut at the marks."""
        base = bisect_right(self.marks, start.min(initial=inf))
        marks = np.array(self.marks[base:])
        first = np.searchsorted(marks, start, "right")
        num = np.maximum(np.searchsorted(marks, end, "left") - first, 0) + 1
        whole = np.repeat(np.arange(len(start)), num)
        slot = np.arange(len(whole)) - np.repeat(np.cumsum(num) - num, num) + first[whole]
        edges = np.concatenate([[-inf], marks, [inf]])
        return Pieces(
            whole,
            base + slot,
            np.maximum(start[whole], edges[slot]),
            np.minimum(end[whole], edges[slot + 1]),
        )

    def until(self, marks: Iterable[float]) -> Iterator[tuple[Key, Floats]]:
        """Yield each key with its sums up to each of some marks."""
        slots = np.array([self.slot_of(mark) for mark in marks])
        num_slots = slots.max(initial=0) + 1
        for key, column in self._columns.items():
            yield key, np.cumsum(column[:num_slots])[np.minimum(slots, len(column) - 1)]

    def between(self, start: float, end: float) -> dict[Key, float]:
        """Return the sums between two marks. A `start` of 0 includes the time before the first mark."""
        first = self.slot_of(start) + 1 if start > 0 else 0
        last = self.slot_of(end)
        return {key: sum(column[first : last + 1], 0.0) for key, column in self._columns.items()}
