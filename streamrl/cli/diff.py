"""`streamrl diff`: what differs between two plans or run files, and what that does to dollars, hours and idle time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from streamrl.cli.lazy_commands import OUTPUT
from streamrl.cli.output import echo
from streamrl.cli.shared import AsJson, Intervals, print_json, stdout_console
from streamrl.cli.simulate_against import compare
from streamrl.record.run_comparison import Against
from streamrl.report.diff_report import PlannedPair, changed_keys, diff_markdown, diff_report
from streamrl.runfile.config import Run
from streamrl.runfile.files import load_run
from streamrl.sim.planner.plan import PLAN_TOML, read_taken
from streamrl.sim.studies.comparable_runs import IncomparableError, check_same_work


def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A run file, or the directory of a plan.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The other one.")],
    as_markdown: Annotated[
        bool,
        typer.Option(
            "--markdown", help="Print Markdown, for a pull request.", rich_help_panel=OUTPUT
        ),
    ] = False,
    intervals: Intervals = False,
    as_json: AsJson = False,
) -> None:
    """Show what differs between two plans or run files.

    Figures are compared if both train the same model on the same work. Two frameworks may differ in optimizer steps,
    epochs and the passes for old log-probabilities: the table of keys names what differs. Figures of two unchanged plans are from their
    plan.json. Otherwise both are simulated on the same prompts, which may take minutes.

    Example: streamrl diff plans/7b plans/7b-cheaper --markdown
    """
    one, other = _load(a), _load(b)
    changes = changed_keys(one, other)
    planned = _planned(a, b)
    against, why_not = _figures(one, other, planned) if changes else (None, "")
    if as_json:
        print_json(
            {
                "changes": [each._asdict() for each in changes],
                "figures": None if isinstance(against, PlannedPair) else against,
                "from_plans": against._asdict() if isinstance(against, PlannedPair) else None,
                "no_figures": why_not,
            }
        )
    elif as_markdown:
        echo(diff_markdown(changes, against, why_not, intervals=intervals))
    else:
        stdout_console().print(diff_report(changes, against, why_not, intervals=intervals))


def _load(path: Path) -> Run:
    return load_run(path / PLAN_TOML if path.is_dir() else path)


def _planned(a: Path, b: Path) -> PlannedPair | None:
    """Return the figures of two plans whose run files are as they were planned by this version; None for others."""
    if not (a.is_dir() and b.is_dir()):
        return None
    ours, theirs = read_taken(a), read_taken(b)
    return None if ours is None or theirs is None else PlannedPair(ours, theirs)


def _figures(
    a: Run, b: Run, planned: PlannedPair | None
) -> tuple[Against | PlannedPair | None, str]:
    """Return the comparison of two runs, or the reason why they cannot be compared."""
    try:
        if planned is not None:
            check_same_work(a, b)
            return planned, ""
        return compare(a, b), ""
    except IncomparableError as error:
        return None, f"dollars and hours are not compared: {error}"
