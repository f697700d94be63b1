"""Amounts by what they are of, and by when: between each two marks, so that any stretch of time can be summed up later.

Marks are the ends of steps, of which only the end of a run tells which count. A number for each mark and key is all
that is kept.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from math import inf
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from streamrl.hardware.operator_tables import Floats

Key = TypeVar("Key")


FIRST_ROOM = 1 << 15
"""Slots of a new column: enough that the system maps pages for it, of which it takes those that are written."""


class Pieces(NamedTuple):
    """Stretches of time cut at the marks, as arrays."""

    whole: npt.NDArray[np.intp]
    """Place of the stretch that each is a piece of."""
    slot: npt.NDArray[np.intp]
    start: Floats
    end: Floats


class IntervalSums(Generic[Key]):
    """Sums by key and slot: the first slot lies before the first mark, the last after the last one."""

    def __init__(self, marks: Iterable[float] = ()) -> None:
        self.marks = array("d", marks)
        self._columns: dict[Key, Floats] = {}

    def slot_of(self, time: float) -> int:
        """Return the slot that contains an instant; a mark belongs to the slot before it."""
        return bisect_left(self.marks, time)

    def add(self, slot: int, amounts: Mapping[Key, float]) -> None:
        """Add amounts to those of a slot."""
        for key, amount in amounts.items():
            column = self._columns.get(key)
            if column is None or len(column) <= slot:
                column = self._columns[key] = _longer(column, slot)
            column[slot] += amount

    def add_pieces(self, key: Key, slots: npt.NDArray[np.intp], amounts: Floats) -> None:
        """Add an amount to that of each piece's slot."""
        if len(slots):
            first = int(slots.min())
            for slot, amount in enumerate(np.bincount(slots - first, amounts).tolist(), first):
                self.add(slot, {key: amount})

    def cut(self, start: Floats, end: Floats) -> Pieces:
        """Cut stretches of time at the marks."""
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
        """Yield each key with its sums before some of the marks."""
        slots = np.array([self.slot_of(mark) for mark in marks])
        num_slots = slots.max(initial=0) + 1
        for key, column in self._columns.items():
            yield key, np.cumsum(column[:num_slots])[np.minimum(slots, len(column) - 1)]

    def between(self, start: float, end: float) -> dict[Key, float]:
        """Return the sums between two marks; the time before the first mark belongs to 0."""
        first = self.slot_of(start) + 1 if start > 0 else 0
        last = self.slot_of(end)
        return {
            key: sum(column[first : last + 1].tolist()) for key, column in self._columns.items()
        }


def _longer(column: Floats | None, slot: int) -> Floats:
    """Return a column with room for a slot, in pages that take memory only once they are written."""
    room = FIRST_ROOM
    while room <= slot:
        room *= 2
    longer = np.zeros(room)
    if column is not None:
        longer[: len(column)] = column
    return longer
