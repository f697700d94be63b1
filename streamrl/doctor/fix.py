"""Fixes that were tried: a change is proposed only after the run with it has passed the same examination."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import msgspec

from streamrl.doctor.changes import changed, say
from streamrl.doctor.finding import Changes, Finding, is_error
from streamrl.runfile.checks import check_run
from streamrl.runfile.config import Run

Examine = Callable[[Run], Iterable[Finding]]
"""What is found in a run, without fixes; raises nothing."""

MOST_TRIALS = 400
"""Candidates tried for one finding: a few milliseconds each, so that the command stays quick."""


class Fix(NamedTuple):
    """What may mend a kind of finding."""

    candidates: Callable[[Run], Iterator[Changes]]
    """Yields changes to try, the most welcome first."""
    otherwise: str
    """What to do where none of them helps."""
    effect: Callable[[Run], str] = lambda run: ""
    """Says in a few words what the changed run is like."""


def fix_of_part(
    fix: Fix, see: Callable[[Run], Run], own_key: Callable[[str], str], otherwise: str
) -> Fix:
    """Return what mends a part of a run as another fix mends the run that has that part alone.

    Args:
        fix: of the run that has it alone.
        see: gives that run.
        own_key: gives the key that stands for one of that run's in the whole run.
        otherwise: what to do where nothing helps.
    """

    def candidates(run: Run) -> Iterator[Changes]:
        for changes in fix.candidates(see(run)):
            yield {own_key(key): value for key, value in changes.items()}

    def effect(run: Run) -> str:
        return fix.effect(see(run))

    return Fix(candidates, otherwise, effect)


def treat(run: Run, finding: Finding, fix: Fix, examine: Examine) -> Finding:
    """Return a finding with the first candidate that makes it go and brings nothing new.

    A candidate that brings new warnings is taken only where all others fail; new errors never.
    """
    mended = _first_that_works(run, finding, fix, examine)
    if mended is None:
        return msgspec.structs.replace(finding, fix=fix.otherwise)
    changes, after = mended
    effect = fix.effect(after)
    said = say(changes) + (f": {effect}" if effect else "")
    return msgspec.structs.replace(finding, fix=said, changes=changes)


def passes(run: Run) -> bool:
    """Whether `load_run` would take the run."""
    try:
        check_run(run)
    except ValueError:
        return False
    return True


def _first_that_works(
    run: Run, finding: Finding, fix: Fix, examine: Examine
) -> tuple[Changes, Run] | None:
    before = list(examine(run))
    second_best: tuple[Changes, Run] | None = None
    for number, changes in enumerate(fix.candidates(run)):
        if number == MOST_TRIALS:
            break
        after = changed(run, changes)
        if not passes(after):
            continue
        found = list(examine(after))
        if finding.name in _bad(found):
            continue
        if not _bad(filter(is_error, found)) <= _bad(filter(is_error, before)):
            continue
        if _bad(found) < _bad(before):
            return changes, after
        second_best = second_best or (changes, after)
    return second_best


def _bad(findings: Iterable[Finding]) -> set[str]:
    return {finding.name for finding in findings if finding.level != "ok"}
