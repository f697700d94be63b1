"""Show a calibration as a table: factors, their uncertainty, and the remaining errors."""

from __future__ import annotations

from rich.table import Table

from streamrl.hardware.calibration_file import STAGES, Calibration, StageErrors

UNKNOWN = "-"


def calibration_table(calibration: Calibration) -> Table:
    """Return a row for each stage; unknown values are dashes."""
    table = Table(box=None, pad_edge=False, title=_title(calibration), title_justify="left")
    table.add_column("stage")
    table.add_column("speed, of the profiles'")
    for name in ("error before", "after", "on steps held out"):
        table.add_column(name, justify="right")
    for name in STAGES:
        found = calibration.stage(name)
        if found is None:
            table.add_row(name, UNKNOWN, *[UNKNOWN] * 3)
        else:
            told = f"{found.factor:.3g}{_within(found.interval)} on {found.gpu}"
            table.add_row(name, told, *_errors(found.errors))
    overhead = calibration.overhead
    beside = (
        UNKNOWN
        if overhead is None
        else f"{overhead.seconds:.3g} s{_within(overhead.interval)} beside its stages"
    )
    table.add_row("whole step", beside, *_errors(calibration.step))
    return table


def _title(calibration: Calibration) -> str:
    title = f"{calibration.model}, {calibration.system}, from {calibration.source}"
    for what, steps in (
        ("fitted to", calibration.fitted_steps),
        ("held out", calibration.held_out_steps),
    ):
        if steps is not None:
            title += f"; {what} steps {steps[0]} to {steps[1]}"
    return title


def _within(interval: tuple[float, float] | None) -> str:
    return "" if interval is None else f" ({interval[0]:.3g} to {interval[1]:.3g})"


def _errors(errors: StageErrors) -> list[str]:
    known = (errors.before, errors.after, errors.held_out)
    return [UNKNOWN if error is None else f"{error:.1%}" for error in known]
