"""What only a simulation tells of a run file: whether it comes to an end, and what its link is used for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from streamrl.doctor.diagnosis import diagnose
from streamrl.doctor.finding import Finding, is_error
from streamrl.doctor.fix import treat
from streamrl.record.metrics import Metrics, measure
from streamrl.runfile.config import Run
from streamrl.sim.checkup import format_pace, link_use, progress
from streamrl.sim.checkup.rehearsal import Rehearsal, rehearse, shortened
from streamrl.sim.costs.costs import Costs


class Checkup(NamedTuple):
    """What a rehearsal of a run showed."""

    findings: list[Finding]
    metrics: Metrics | None
    """Of the rehearsal; None where it made no step, or was not the run's own."""


def examine(run: Run) -> list[Finding]:
    """Return what a rehearsal shows, with fixes that were rehearsed too."""
    findings, metrics = check_up(run)
    fixes = {**progress.fixes(metrics), **link_use.FIXES, **format_pace.FIXES}
    return [
        finding if finding.level == "ok" else treat(run, finding, fixes[finding.name], _all)
        for finding in findings
    ]


def check_up(run: Run) -> Checkup:
    """Rehearse a run and return what that shows, without fixes."""
    rehearsal = rehearse(run)
    metrics = _measure(rehearsal)
    found = list(progress.find(run, rehearsal, metrics))
    if not any(map(is_error, found)):
        found += _find_link_use(run, None if rehearsal.is_stand_in else metrics)
        found += _find_slow_format(run)
    return Checkup(found, metrics)


def _all(run: Run) -> Iterator[Finding]:
    yield from diagnose(run)
    yield from check_up(run).findings


def _find_link_use(run: Run, metrics: Metrics | None) -> list[Finding]:
    try:
        return list(link_use.find(run, Costs.load(shortened(run)), metrics))
    except ValueError:
        return []  # what does not fit is a finding of memory


def _find_slow_format(run: Run) -> list[Finding]:
    try:
        return list(format_pace.find(run))
    except ValueError:
        return []  # what does not fit is a finding of memory


def _measure(rehearsal: Rehearsal) -> Metrics | None:
    return measure(rehearsal.trace) if rehearsal.version else None
