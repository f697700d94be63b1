"""`streamrl validate`: compare predictions with published measurements."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from streamrl.cli.lazy_commands import OUTPUT
from streamrl.cli.output import echo
from streamrl.cli.progress import make_progress
from streamrl.cli.shared import AsJson, claim_directory, print_json, stdout_console
from streamrl.hardware.profiles import PROFILES
from streamrl.hardware.step_errors import CHECKED_PATH, PATH
from streamrl.report.fidelity import (
    ASYNCHRONY,
    EXECUTED,
    LENDING,
    fidelity_page,
    figure_picture,
    figure_table,
    section_of,
    slug,
    with_section,
)
from streamrl.runfile.result_files import write_file
from streamrl.sim.fidelity.bands import (
    RESIDUALS,
    checked_of,
    derive,
    errors_text,
    residuals_of,
    with_bands,
    write_checked,
    write_residuals,
)
from streamrl.sim.fidelity.constants import write_constants
from streamrl.sim.fidelity.gate import (
    PARTITIONS,
    RISE,
    Partitions,
    read_partitions,
    worsened,
    write_partitions,
)
from streamrl.sim.fidelity.kv_room import room_rows
from streamrl.sim.fidelity.paper_figure import PaperFigure
from streamrl.sim.fidelity.paper_generation import constants, decode_curve, dispatch
from streamrl.sim.fidelity.paper_scaling import adjustment, divisions, scaling
from streamrl.sim.fidelity.paper_throughput import (
    ablation,
    cells_in_band,
    end_to_end,
    heterogeneous,
    ratios,
    verl,
)
from streamrl.sim.fidelity.published_rows import Row, group_table, grouped, row_table, summarise
from streamrl.sim.fidelity.ratios import doubled_of, pairs_of, ratio_rows
from streamrl.sim.fidelity.rl_steps import steps_rows
from streamrl.sim.fidelity.scorecard import (
    HISTORY,
    sections,
    stamp,
    with_scorecard,
    write_history,
)
from streamrl.sim.fidelity.served import known_rows, range_rows
from streamrl.sim.fidelity.serving import serving_rows
from streamrl.sim.fidelity.training_steps import training_rows

ROWS: dict[str, Callable[[], list[Row]]] = {
    "serving": serving_rows,
    "served": known_rows,
    "served-ranges": range_rows,
    "training": training_rows,
    "steps": steps_rows,
    "ratios": ratio_rows,
    "memory": room_rows,
}
"""Sets of published rows by name."""
STEPS, TRAINING, RATIOS, PAPER = "steps", "training", "ratios", "paper"
FIGURES: dict[str, tuple[Callable[[], PaperFigure], ...]] = {
    "fig2": (scaling,),
    "fig6": (decode_curve,),
    "fig8": (end_to_end, ratios, verl),
    "table3": (ablation,),
    "fig9": (dispatch,),
    "fig10": (divisions,),
    "fig11": (adjustment,),
    "fig12": (heterogeneous,),
}
"""Figures of the StreamRL paper."""
PICTURES = "fidelity"


def validate(
    what: Annotated[
        str | None,
        typer.Argument(help=f"One of {', '.join((*ROWS, PAPER))}. Default: all."),
    ] = None,
    figure: Annotated[
        list[str] | None,
        typer.Option(help=f"Only this figure of the paper: {', '.join(FIGURES)}. Repeat for more."),
    ] = None,
    rows: Annotated[
        bool,
        typer.Option(
            "--rows", help="Print each published row with its prediction.", rich_help_panel=OUTPUT
        ),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write fidelity.md and its pictures to this directory.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            help=f"A {PARTITIONS} that an earlier version wrote: exit with 1 if an error rose by more than {RISE:.0%}. "
            "The paper is left out."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare predictions with published measurements.

    Serving, training, steps and memory are compared row by row, the StreamRL paper figure by figure.

    Example: streamrl validate paper --figure fig8 --figure table3
    """
    _check(what, figure)
    if rows and what == PAPER:
        raise ValueError(
            "--rows applies to serving, training and steps; use --figure for the paper"
        )
    before = None if against is None else _read_before(against, what)
    if output is not None:
        claim_directory(output)
    names = [name for name in ROWS if what == name or (what is None and not figure)]
    sets = {name: ROWS[name]() for name in names}
    if STEPS in sets:
        sets[STEPS] = with_bands(sets[STEPS], sets.get(TRAINING) or training_rows())
        if RATIOS in sets:
            sets[RATIOS] += [*pairs_of(sets[STEPS]), *doubled_of(sets[STEPS])]
    has_paper = what in (None, PAPER) and before is None
    found = simulate_figures(figure or list(FIGURES)) if has_paper else []
    if output is not None:
        write_page(found, output, sets)
    worse = [] if before is None else list(worsened(sets, before))
    if as_json:
        figures = {one.name: one.describe() for one in found}
        told = {} if before is None else {"worsened": worse}
        print_json({**{name: describe(some) for name, some in sets.items()}, **figures, **told})
    else:
        _print(sets, found, rows)
    _end_with(worse)


def _print(sets: dict[str, list[Row]], found: list[PaperFigure], has_rows: bool) -> None:
    """Print tables of published rows, and figures of the paper."""
    for name, some in sets.items():
        print_rows(name, some, has_rows)
    for one in found:
        stdout_console().print(figure_table(one))
        for note in one.notes:
            stdout_console().print(f"  {note}", highlight=False)
        stdout_console().print()


def _read_before(path: Path, what: str | None) -> Partitions:
    """Return the errors of an earlier version."""
    if what == PAPER:
        raise ValueError("--against compares published rows; the paper has none")
    if not path.is_file():
        raise ValueError(f"--against {path} must be a file that streamrl validate --output wrote")
    return read_partitions(path)


def _end_with(worse: list[str]) -> None:
    """Print what became worse, and exit with 1 if something did."""
    for line in worse:
        echo(f"worse: {line}", err=True)
    if worse:
        raise typer.Exit(1)


def _check(what: str | None, figure: list[str] | None) -> None:
    """Raise `ValueError` if a set or a figure is unknown."""
    if what == "streamrl":
        raise ValueError("the StreamRL paper is called 'paper' here: streamrl validate paper")
    if what not in (None, PAPER, *ROWS):
        raise ValueError(f"unknown set {what!r}; the sets are {', '.join((*ROWS, PAPER))}")
    if figure and what not in (None, PAPER):
        raise ValueError(f"--figure applies only to the paper, not to {what!r}")
    for name in figure or ():
        if name not in FIGURES:
            raise ValueError(f"--figure {name!r} must be one of {', '.join(FIGURES)}")


# Rows ---------------------------------------------------------------------------------------------


def describe(rows: list[Row]) -> dict[str, object]:
    """Return a JSON object: errors of all rows and by group, and the rows."""
    summaries = {name: summarise(some) for name, some in grouped(rows).items()}
    errors = summarise(rows)
    return {
        "rows_total": errors.rows,
        "median": errors.median,
        "p90": errors.p90,
        "bias": errors.bias,
        "groups": summaries,
        "rows": [{**msgspec.structs.asdict(row), "error": row.error} for row in rows],
    }


def print_rows(name: str, rows: list[Row], has_rows: bool) -> None:
    """Print errors by group, and each row if requested."""
    console = stdout_console()
    console.print(group_table(rows, name))
    if has_rows:
        for group, some in grouped(rows).items():
            console.print()
            console.print(row_table(some, group))
            for note in dict.fromkeys(row.note for row in some if row.note):
                console.print(f"  {note}", highlight=False)
    console.print()


# The paper ----------------------------------------------------------------------------------------


def simulate_figures(names: list[str]) -> list[PaperFigure]:
    """Simulate figures one after the other, each on all cores."""
    found = []
    with make_progress() as progress:
        task = progress.add_task("validate", total=len(names), facts="")
        for name in names:
            progress.update(task, facts=name)
            found += [simulate_figure() for simulate_figure in FIGURES[name]]
            progress.advance(task)
    return found


def write_page(found: list[PaperFigure], output: Path, sets: dict[str, list[Row]]) -> None:
    """Write the page and a picture for each figure; if everything was validated, add a line to the history.

    Sections of executed runs stay unchanged, because they need a quiet machine and an hour.
    """
    pictures = output / PICTURES
    pictures.mkdir(parents=True, exist_ok=True)
    for one in found:
        figure_picture(one, pictures / f"{slug(one.name)}.png")
    first = list(sections(sets, found))
    page = fidelity_page(found, constants(), PICTURES, first, stamp())
    file = output / "fidelity.md"
    before = file.read_text(encoding="utf-8") if file.is_file() else ""
    for title in (EXECUTED, ASYNCHRONY, LENDING):
        page = with_section(page, title, section_of(before, title))
    write_file(file, page)
    if len(sets) == len(ROWS):
        write_history(sets, {slug(one.name): one.mape for one in found}, output / HISTORY)
        write_partitions(sets, output / PARTITIONS)
        write_errors(sets, found, output)
        write_constants(output)


def write_errors(sets: dict[str, list[Row]], found: list[PaperFigure], output: Path) -> None:
    """Write the residuals of stages and steps. In a checkout, also write what bands and the README take from them."""
    residuals = residuals_of([*sets[STEPS], *sets[TRAINING]])
    write_residuals(residuals, output / RESIDUALS)
    if output.resolve() == PROFILES.resolve().parent / "docs":
        write_file(PATH, errors_text(derive(residuals)))
        write_checked(checked_of(sets[STEPS], cells_in_band()), CHECKED_PATH)
        readme = output.parent / "README.md"
        page = with_scorecard(readme.read_text(encoding="utf-8"), sets, found)
        write_file(readme, page)
