"""Values that contradict each other: what `load_run` would refuse, one check after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from streamrl.doctor.candidates import candidates_for
from streamrl.doctor.changes import changed, say
from streamrl.doctor.finding import Changes, Finding
from streamrl.hardware.precision import check_precision
from streamrl.hardware.profiles import check_profiles, load_model
from streamrl.runfile.checks import CHECKS
from streamrl.runfile.config import Run
from streamrl.runfile.errors import RunError

Check = Callable[[Run], None]
"""Raises `RunError`."""

MOST_FIXES = 50
"""Errors after which mending gives up."""
_BY_HAND = "change one of the keys that it names"
_NO_MODEL = "save a Hugging Face model there, or name a profile: model.name instead of model.path"


class Consistency(NamedTuple):
    """What the checks found."""

    run: Run | None
    """With what mends it; None where nothing was found that does."""
    findings: list[Finding]


def mend_contradictions(run: Run) -> Consistency:
    """Find every check that fails, with changes after which all of them pass together."""
    return _mend(run, CHECKS)


def mend_profiles(run: Run) -> Consistency:
    """Find GPUs, a model or lengths that there is no profile of, with the closest names; files are not made up."""
    mended, findings = _mend(run, (*CHECKS, check_profiles, check_precision))
    error = _error_of(_check_directory, run)
    if error is not None:
        findings.append(_finding(error, _NO_MODEL))
    return Consistency(mended or run, findings)


def _check_directory(run: Run) -> None:
    if run.model.path is not None:
        load_model(run.model)


def _mend(run: Run, checks: Sequence[Check]) -> Consistency:
    """Change a run, error by error, until all checks pass."""
    findings: list[Finding] = []
    seen: set[str] = set()
    for _ in range(MOST_FIXES):
        place, error = _first_error(run, checks)
        if error is None:
            return Consistency(run, findings)
        seen.add(str(error))
        changes = _find(run, checks, place, error, seen)
        if changes is None:
            return Consistency(None, [*findings, _finding(error, _BY_HAND)])
        findings.append(_finding(error, say(changes), changes))
        run = changed(run, changes)
    return Consistency(None, findings)


def _find(
    run: Run, checks: Sequence[Check], place: int, error: RunError, seen: set[str]
) -> Changes | None:
    """Return the change after which most checks pass; of several the first.

    Where the check fails again, it must be for another key, and not as it failed before.
    """
    best: Changes | None = None
    furthest = place
    for changes in candidates_for(run, error):
        try:
            after = changed(run, changes)
        except (ValueError, LookupError):  # not of the key's type, or its section is not there
            continue
        reached, again = _first_error(after, checks)
        if again is None:
            return changes
        is_new = again.key != error.key and str(again) not in seen
        if reached > furthest or (best is None and reached == place and is_new):
            best, furthest = changes, reached
    return best


def _first_error(run: Run, checks: Sequence[Check]) -> tuple[int, RunError | None]:
    """Return the number of checks that pass, and what the next one finds."""
    for place, check in enumerate(checks):
        if error := _error_of(check, run):
            return place, error
    return len(checks), None


def _error_of(check: Check, run: Run) -> RunError | None:
    try:
        check(run)
    except RunError as error:
        return error
    return None


def _finding(error: RunError, fix: str, changes: Changes | None = None) -> Finding:
    return Finding(
        level="error",
        topic="run file",
        name="contradiction",
        text=str(error),
        fix=fix,
        changes=changes or {},
    )
