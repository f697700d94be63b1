"""The legs of a run: each time that it was begun or resumed left a trace, and together they make its books."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from streamrl.record.balance import Balance
from streamrl.record.books import Books
from streamrl.record.trace import Trace, blaming_damage, read_trace


def trace_of_leg(directory: Path, leg: int) -> Path:
    """Return where the trace of a leg lies in a run directory once a later one has begun."""
    return directory / f"trace.{leg}.jsonl"


def balance_books(trace: Trace, directory: Path) -> Balance:
    """Say how the books of a run stand after a leg.

    Args:
        trace: the record of that leg.
        directory: where those of the legs before it are; unless all are there, the books begin with this one.

    Raises:
        ValueError: one of them cannot be read, or is damaged.
    """
    legs = _read_legs(trace, directory)
    first = next(legs)
    books = Books(first)
    for leg in chain((first,), legs):
        with blaming_damage(leg):
            books.begin_leg(leg)
            books.read(leg.entries)
    return books.balance()


def _read_legs(trace: Trace, directory: Path) -> Iterator[Trace]:
    """Yield the legs one by one, so that one at a time is in memory."""
    earlier = [trace_of_leg(directory, leg) for leg in range(1, trace.leg)]
    if all(path.exists() for path in earlier):
        yield from map(read_trace, earlier)
    yield trace
