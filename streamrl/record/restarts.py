"""Read the traces of a run and of its restarts in order, and balance the ledger over all of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import chain, zip_longest
from operator import attrgetter
from pathlib import Path

from streamrl.engine.trace import Trace, blaming_damage, read_trace
from streamrl.record.ledger import Ledger, LedgerReader

KEPT_BY_A_RESUME = (
    "seed",
    "workload.order",
    "workload.source_weights",
    "algorithm.prompts_per_step",
    "algorithm.group_size",
    "policies.tail_batching",
    "policies.tail_every",
    "secondary_trainer_names",
)
"""What says which rollouts a group has, which prompt it is of and who trains on it: with another value a checkpoint means
other ones."""
KEYS_OF_EACH = {
    "workload.source_weights": (0, "workload.source.{}.weight"),
    "secondary_trainer_names": (1, "trainer.{}.name"),
}
"""Of those that are a value for each table of a list: the number of the first table, and the key in a run file."""


EARLIER_TRACE = re.compile(r"trace\.(\d+)\.jsonl")
"""Names of traces of legs that others followed: what else lies there is not the run's."""


def first_difference(name: str, one: object, other: object) -> tuple[str, str, str]:
    """Return the key of a run file in which two runs differ in what a resume keeps, and what each has there."""
    if name not in KEYS_OF_EACH:
        return name, repr(one), repr(other)
    assert isinstance(one, tuple) and isinstance(other, tuple), "of each table of a list"
    first, key = KEYS_OF_EACH[name]
    places = enumerate(zip_longest(one, other), start=first)
    place, pair = next((place, pair) for place, pair in places if pair[0] != pair[1])
    ours, theirs = ("none" if value is None else repr(value) for value in pair)
    return key.format(place), ours, theirs


def earlier_trace_path(directory: Path, leg: int) -> Path:
    """Return the path of an earlier restart's trace in a run directory."""
    return directory / f"trace.{leg}.jsonl"


def earlier_trace_numbers(directory: Path) -> list[int]:
    """Return the legs of a run directory whose traces a later one has put aside, in order."""
    found = (EARLIER_TRACE.fullmatch(path.name) for path in directory.glob("trace.*.jsonl"))
    return sorted(int(match[1]) for match in found if match is not None)


def ledger_of_run(trace: Trace, directory: Path) -> Ledger:
    """Say how the books of a run stand after a leg.

    Args:
        trace: the record of that leg.
        directory: where those of the legs before it are; where it has none, the books begin with this one.

    Raises:
        ValueError: one of them is missing, cannot be read, is damaged, or is of another leg or another run.
    """
    return ledger_of_traces(_read_all_traces(trace, directory))


def ledger_of_traces(legs: Iterable[Trace]) -> Ledger:
    """Say how the books of a run stand of which these are the legs, in order.

    Raises:
        ValueError: one of them is damaged, or cannot be read.
    """
    rest = iter(legs)
    first = next(rest)
    books = LedgerReader(first)
    for leg in chain((first,), rest):
        with blaming_damage(leg):
            books.begin_trace(leg)
            for block in leg.blocks():
                books.read(block)
    return books.balance()


def _read_all_traces(trace: Trace, directory: Path) -> Iterator[Trace]:
    """Yield the legs one by one, so that one at a time is in memory."""
    _check_last(trace, earlier_trace_path(directory, trace.leg))
    earlier = [earlier_trace_path(directory, leg) for leg in range(1, trace.leg)]
    if any(path.exists() for path in earlier):
        for number, path in enumerate(earlier, start=1):
            leg = read_trace(path)
            if leg.leg != number:
                raise ValueError(f"{path}: is leg {leg.leg} of a run, expected leg {number}")
            _check_same_run(path, leg, trace)
            yield leg
    yield trace


def _check_last(trace: Trace, path: Path) -> None:
    """Refuse a last leg whose place among the earlier ones another trace has."""
    if trace.path == path or not path.exists():
        return
    leg = read_trace(path).leg
    if leg > 1:  # earlier versions of this program wrote no number, which reads as 1
        raise ValueError(f"{path}: is leg {leg} of a run, but the last one is leg {trace.leg}")


def _check_same_run(path: Path, leg: Trace, last: Trace) -> None:
    for key in ("world", *(f"run.{key}" for key in KEPT_BY_A_RESUME)):
        one, other = (attrgetter(key)(each) for each in (leg, last))
        if one != other:
            name, here, there = first_difference(key.removeprefix("run."), one, other)
            raise ValueError(
                f"{path}: is a leg of another run: {name} is {here}, the last leg has {there}"
            )
