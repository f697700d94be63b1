"""`streamrl validate`: a paper's evaluation in simulation, figure by figure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sim.fidelity.calibration import constants, decode_curve
from sim.fidelity.growth import adjustment
from sim.fidelity.makespan import dispatch
from sim.fidelity.scaling import divisions, scaling
from sim.fidelity.throughput import ablation, end_to_end, heterogeneous, ratios, verl
from streamrl.cli.progress import make_progress
from streamrl.cli.shared import AsJson, print_json
from streamrl.report.fidelity import PaperFigure, fidelity_page, figure_picture, figure_table, slug

PAPERS = ("streamrl",)
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
PICTURES = "fidelity"


def validate(
    paper: Annotated[str, typer.Argument(help="Which paper: streamrl.")] = "streamrl",
    figure: Annotated[
        list[str] | None, typer.Option(help=f"Only these: {', '.join(FIGURES)}.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write fidelity.md and its pictures there."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate the paper's evaluation, and print its numbers, ours and the error.

    Example: streamrl validate --figure fig8 --figure table3
    """
    if paper not in PAPERS:
        raise ValueError(f"no paper {paper!r}; there is {', '.join(PAPERS)}")
    for name in figure or ():
        if name not in FIGURES:
            raise ValueError(f"--figure {name!r} is none of {', '.join(FIGURES)}")
    found = simulate_figures(figure or list(FIGURES))
    if output is not None:
        write_page(found, output)
    if as_json:
        print_json({one.name: one.describe() for one in found})
        return
    for one in found:
        Console().print(figure_table(one))
        for note in one.notes:
            Console().print(f"  {note}", highlight=False)
        Console().print()


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


def write_page(found: list[PaperFigure], output: Path) -> None:
    """Write the page and a picture for each figure."""
    pictures = output / PICTURES
    pictures.mkdir(parents=True, exist_ok=True)
    for one in found:
        figure_picture(one, pictures / f"{slug(one.name)}.png")
    (output / "fidelity.md").write_text(fidelity_page(found, constants(), PICTURES))
