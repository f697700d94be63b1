"""Read the traces of a run and of its restarts in order, and balance the ledger over all of them.

trace.jsonl is the trace of the last start. Each resume renames the previous one to trace.N.jsonl, where N
counts the starts from 1. A trace's header has the same number as `leg`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import chain, zip_longest
from mmap import ACCESS_READ, mmap
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from streamrl.engine.messages import RunStarted
from streamrl.engine.trace import Trace, blaming_damage, read_trace
from streamrl.engine.trainer_side import LEADER
from streamrl.record.ledger import Ledger, LedgerReader
from streamrl.record.run_directory import TRACE

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
"""Keys that a resume must not change. They decide the rollouts, the prompt and the trainers of each group
number. With another value, the group numbers in a checkpoint would mean other groups."""
KEYS_OF_EACH = {
    "workload.source_weights": (0, "workload.source.{}.weight"),
    "secondary_trainer_names": (1, "trainer.{}.name"),
}
"""Of those keys, the ones with a value for each table of a list: the number of the first table, and the key in
a run file."""


EARLIER_TRACE = re.compile(r"trace\.(\d+)\.jsonl")
"""Names of traces of earlier starts. Other files in the directory are ignored."""


def first_difference(name: str, one: object, other: object) -> tuple[str, str, str]:
    """Return the first run file key at which two values of a kept key differ, and both values there."""
    if name not in KEYS_OF_EACH:
        return name, repr(one), repr(other)
    assert isinstance(one, tuple) and isinstance(other, tuple), "of each table of a list"
    first, key = KEYS_OF_EACH[name]
    numbered = enumerate(zip_longest(one, other), start=first)
    number, pair = next((number, pair) for number, pair in numbered if pair[0] != pair[1])
    ours, theirs = ("none" if value is None else repr(value) for value in pair)
    return key.format(number), ours, theirs


def earlier_trace_path(directory: Path, leg: int) -> Path:
    """Return the path of the trace of start number `leg` in a run directory."""
    return directory / f"trace.{leg}.jsonl"


def earlier_trace_numbers(directory: Path) -> list[int]:
    """Return the numbers of the earlier starts whose traces are in a run directory, in order."""
    matches = (EARLIER_TRACE.fullmatch(path.name) for path in directory.glob("trace.*.jsonl"))
    return sorted(int(match[1]) for match in matches if match is not None)


def traces_up_to(file: Path) -> list[Path]:
    """Return the traces of all starts of a run that are in the directory of its last one, in order, and that one.

    A trace of another name, or of an earlier start, stands for itself.
    """
    if file.name != TRACE:
        return [file]
    return [*(earlier_trace_path(file.parent, n) for n in earlier_trace_numbers(file.parent)), file]


def ledger_of_run(trace: Trace, directory: Path) -> Ledger:
    """Return the ledger of a run up to the end of one start.

    Args:
        trace: the trace of that start.
        directory: the directory with the traces of earlier starts. If it has none, the ledger
            begins with `trace`.

    Raises:
        ValueError: an earlier trace is missing, unreadable or damaged, or belongs to another start
            or another run.
    """
    return ledger_of_traces(_read_all_traces(trace, directory))


def ledger_of_traces(traces: Iterable[Trace]) -> Ledger:
    """Return the ledger of a run from the traces of all its starts, in order.

    Raises:
        ValueError: a trace is damaged or unreadable.
    """
    rest = iter(traces)
    first = next(rest)
    ledger = LedgerReader(first)
    for trace in chain((first,), rest):
        with blaming_damage(trace):
            ledger.begin_trace(trace)
            for block in trace.blocks():
                ledger.read(block)
    return ledger.balance()


class RecordedStarts(NamedTuple):
    """What the traces of all starts of a run say about the state that a resume needs."""

    saved: dict[tuple[int, int], set[int]]
    """By trainer and version: the groups from which its checkpoint continues (`groups_done`), one for each time that
    it was saved."""
    prompts: str
    """The digest of the prompts; empty in traces of earlier versions of this program."""


def read_starts(directory: Path) -> RecordedStarts | None:
    """Read all traces before a resume; return None if there is none.

    The resume renames trace.jsonl, so it counts as the last of the numbered traces. Every line is decoded, because a
    damaged one would end the run after its last step, when the ledger is balanced.

    Raises:
        ValueError: a trace is missing, unreadable or damaged, belongs to another start or another run, or ends before
            the checkpoint from which a later start resumed.
    """
    numbers = earlier_trace_numbers(directory)
    paths = {number: earlier_trace_path(directory, number) for number in numbers}
    if has_first_line(directory / TRACE):
        paths[1 + max(numbers, default=0)] = directory / TRACE
    found = RecordedStarts({}, "")
    last: Trace | None = None
    for number in range(1, 1 + max(paths, default=0)):
        path = paths.get(number, earlier_trace_path(directory, number))
        trace = read_trace(path)
        if trace.leg != number:
            missing = earlier_trace_path(directory, number)
            what = (
                f"but {missing.name} is missing"
                if trace.leg > number
                else f"expected start {number}"
            )
            raise ValueError(f"{path}: its header says start {trace.leg} of a run, {what}")
        if last is not None and last.path is not None:
            _check_same_run(last.path, last, trace)
        begun = trace.entries[0].event if trace.entries else None
        if isinstance(begun, RunStarted) and begun.version:
            if last is None:  # traces of earlier starts were moved away
                found.saved[LEADER, begun.version] = {begun.groups_done}
            elif (LEADER, begun.version) not in found.saved:
                raise ValueError(
                    f"{path}: resumes from step {begun.version}, which no earlier trace saved: one was cut"
                )
        for trainer, version, groups_done in _commanded_saves(path):
            found.saved.setdefault((trainer, version), set()).add(groups_done)
        found = found._replace(prompts=found.prompts or trace.prompts)
        last = trace
    return found if paths else None


_SAVE = re.compile(rb'"SaveCheckpoint","version":(\d+),"groups_done":(\d+),"trainer":(\d+)')


def _commanded_saves(path: Path) -> Iterator[tuple[int, int, int]]:
    """Yield trainer, version and `groups_done` of each checkpoint that a trace commands or resumes from."""
    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
        for match in _SAVE.finditer(data):
            version, groups_done, trainer = map(int, match.groups())
            yield trainer, version, groups_done


def has_first_line(path: Path) -> bool:
    """Return whether a trace exists and has a complete header."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.readline().endswith(b"\n")


def _read_all_traces(trace: Trace, directory: Path) -> Iterator[Trace]:
    """Yield the traces of all starts, one at a time to save memory."""
    _check_last(trace, earlier_trace_path(directory, trace.leg))
    paths = [earlier_trace_path(directory, number) for number in range(1, trace.leg)]
    if any(path.exists() for path in paths):
        for number, path in enumerate(paths, start=1):
            earlier = read_trace(path)
            if earlier.leg != number:
                raise ValueError(
                    f"{path}: its header says start {earlier.leg} of a run, expected start {number}"
                )
            _check_same_run(path, earlier, trace)
            yield earlier
    yield trace


def _check_last(trace: Trace, path: Path) -> None:
    """Raise `ValueError` if another file has the name that the last trace gets at the next resume."""
    if trace.path == path or not path.exists():
        return
    number = read_trace(path).leg
    if number > 1:  # earlier versions of this program wrote no number, which reads as 1
        raise ValueError(
            f"{path}: its header says start {number} of a run, but trace.jsonl is start {trace.leg}"
        )


def _check_same_run(path: Path, earlier: Trace, last: Trace) -> None:
    for key in ("world", *(f"run.{key}" for key in KEPT_BY_A_RESUME)):
        one, other = (attrgetter(key)(each) for each in (earlier, last))
        if one != other:
            name, here, there = first_difference(key.removeprefix("run."), one, other)
            later = TRACE if last.path is None else last.path.name
            raise ValueError(
                f"{path}: belongs to another run: {name} is {here} there, and {there} in {later}"
            )
