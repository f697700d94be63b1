"""Do prompts have what they are scored by?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from executor.prompts import Record, read_prompts
from executor.verifier.scorers import SCORERS
from streamrl.runfile.config import Run

SHOWN = 3
"""Lines of a prompts file that are named."""


class Lack(NamedTuple):
    """Lines of a prompts file that have none of some fields."""

    fields: tuple[str, ...]
    lines: list[int]
    """Their numbers, from 1."""

    def say(self, path: str) -> str:
        """Say which lines of the file at `path` have no such field."""
        names = " or ".join(map(repr, self.fields))
        more = ", ..." if len(self.lines) > SHOWN else ""
        shown = ", ".join(map(str, self.lines[:SHOWN])) + more
        return (
            f"workload.prompts: {len(self.lines)} lines of {path} have no {names} (lines {shown})"
        )


def find_lacks(records: list[Record], wanted: Iterable[tuple[str, ...]]) -> Iterator[Lack]:
    """Yield what `records` lack, where each should have one field of every tuple."""
    for fields in wanted:
        numbered = enumerate(records, start=1)
        lines = [n for n, record in numbered if all(record.get(name) is None for name in fields)]
        if lines:
            yield Lack(fields, lines)


def check_prompts(run: Run) -> None:
    """Raise `ValueError` where the run's scorer could not score every rollout of some prompts."""
    path, scorer = run.workload.prompts, run.verifier.scorer
    assert path is not None and scorer is not None, "check_executable wants both"
    records, by = read_prompts(Path(path)), SCORERS[scorer]
    for lack in find_lacks(records, by.fields):
        raise ValueError(f"{lack.say(path)}: verifier.scorer {scorer!r} needs it")
    check = by.make_check()
    for number, record in enumerate(records[: by.most_checked], start=1):
        if (complaint := check(record)) is not None:
            raise ValueError(f"workload.prompts: {path}:{number}: {complaint}")
