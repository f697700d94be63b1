"""Run all checks on a valid run file, and try a fix for each finding."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from streamrl.doctor import (
    batch,
    divisibility,
    every_side,
    framework,
    idle_gpus,
    memory,
    planned_faults,
    staleness,
)
from streamrl.runfile.config import Run
from streamrl.runfile.findings import Finding, Fix, Topic, propose_fix

PARTS: tuple[tuple[Topic, Callable[[Run], Iterator[Finding]]], ...] = (
    ("memory", memory.find),
    ("divisibility", divisibility.find),
    ("divisibility", idle_gpus.find),
    ("batch", batch.find),
    ("batch", every_side.find_secondary_trainers),
    ("memory", every_side.find_replica_kinds),
    ("staleness", staleness.find),
    ("staleness", staleness.find_idle_clips),
    ("run file", planned_faults.find),
    ("run file", framework.find),
)
FIXES = {
    **memory.MEMORY_FIXES,
    **divisibility.FIXES,
    **batch.FIXES,
    **staleness.FIXES,
    **staleness.CLIP_FIXES,
    **planned_faults.FIXES,
    **framework.FIXES,
}


def diagnose(run: Run) -> list[Finding]:
    """Return all findings of a run, without fixes. A check that raises becomes an error with its reason."""
    found: list[Finding] = []
    for topic, find in PARTS:
        try:
            found += find(run)
        except ValueError as error:
            name = f"{topic}-unexamined"
            found.append(Finding(level="error", topic=topic, name=name, text=str(error)))
    return found


def examine(run: Run) -> list[Finding]:
    """Return all findings of a run, each with a fix that was tried."""
    return [_with_fix(run, finding) for finding in diagnose(run)]


def _with_fix(run: Run, finding: Finding) -> Finding:
    if finding.level == "ok":
        return finding
    return propose_fix(run, finding, _fix_of(finding), diagnose)


def _fix_of(finding: Finding) -> Fix:
    if finding.name.startswith("pool-"):
        return idle_gpus.fix_of(finding.name.removeprefix("pool-"))
    if finding.name.endswith("-unexamined"):
        return Fix(lambda run: iter(()), "fix the other findings first")
    of_one = every_side.fix_of_secondary_trainer(
        finding.name, FIXES
    ) or every_side.fix_of_replica_kind(finding.name, FIXES)
    return of_one or FIXES[finding.name]
