"""Everything that a run file says by itself: memory, divisibility, batch arithmetic, staleness."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from streamrl.doctor import (
    batch,
    clipping,
    divisibility,
    followers,
    framework,
    idle,
    kinds,
    memory,
    planned_faults,
    room,
    staleness,
)
from streamrl.doctor.finding import Finding, Topic
from streamrl.doctor.fix import Fix, treat
from streamrl.runfile.config import Run

PARTS: tuple[tuple[Topic, Callable[[Run], Iterator[Finding]]], ...] = (
    ("memory", memory.find),
    ("divisibility", divisibility.find),
    ("divisibility", idle.find),
    ("batch", batch.find),
    ("batch", followers.find),
    ("memory", kinds.find),
    ("staleness", staleness.find),
    ("staleness", clipping.find),
    ("run file", planned_faults.find),
    ("run file", framework.find),
)
FIXES = {
    **room.FIXES,
    **divisibility.FIXES,
    **batch.FIXES,
    **staleness.FIXES,
    **clipping.FIXES,
    **planned_faults.FIXES,
    **framework.FIXES,
}


def diagnose(run: Run) -> list[Finding]:
    """Return all findings of a run without fixes; what cannot be examined is an error that says why."""
    found: list[Finding] = []
    for topic, find in PARTS:
        try:
            found += find(run)
        except ValueError as error:
            name = f"{topic}-unexamined"
            found.append(Finding(level="error", topic=topic, name=name, text=str(error)))
    return found


def examine(run: Run) -> list[Finding]:
    """Return all findings of a run, with fixes that were tried."""
    return [_treated(run, finding) for finding in diagnose(run)]


def _treated(run: Run, finding: Finding) -> Finding:
    if finding.level == "ok":
        return finding
    return treat(run, finding, _fix_of(finding), diagnose)


def _fix_of(finding: Finding) -> Fix:
    if finding.name.startswith("pool-"):
        return idle.fix_of(finding.name.removeprefix("pool-"))
    if finding.name.endswith("-unexamined"):
        return Fix(lambda run: iter(()), "mend the other findings first")
    of_one = followers.fix_of(finding.name, FIXES) or kinds.fix_of(finding.name, FIXES)
    return of_one or FIXES[finding.name]
