"""Show a paper's figures next to simulated ones: tables, a picture, and a page in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from streamrl.runfile.result_files import replacing
from streamrl.sim.fidelity.paper_figure import PaperFigure

EXECUTED = "Executed runs and their simulations"
ASYNCHRONY = "Gain of asynchrony, executed and simulated"
"""These sections of docs/fidelity.md are written by `make bench-reality`."""
LENDING = "Gain of lending, executed and simulated"
"""This one is written by `make bench-lending`. `streamrl validate` writes all others."""
PAPER_HEADING = "## The paper\n"
PAPER_COLOUR, OUR_COLOUR = "#999999", "#0072B2"


def figure_table(figure: PaperFigure) -> Table:
    """Lay out one figure for the terminal."""
    mark = ("met", "green") if figure.is_met else ("missed", "red")
    title = Text.assemble(f"{figure.name}: {figure.title}\n{figure.target}: ", mark)
    table = Table(title=title, box=None, pad_edge=False, title_justify="left")
    table.add_column("")
    for name in ("paper", "ours", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    for cell in figure.cells:
        row = f"{cell.paper:.4g}", f"{cell.ours:.4g}", f"{cell.error:+.1%}"
        table.add_row(cell.label, *row)
    return table


def figure_picture(figure: PaperFigure, path: Path) -> None:
    """Draw paper and simulation side by side, to a .png or .svg file."""
    from matplotlib.figure import Figure

    height = 1.2 + 0.28 * len(figure.cells)
    picture = Figure(figsize=(8.0, height), layout="constrained")
    axes = picture.subplots()
    rows = range(len(figure.cells))
    axes.barh(
        [row - 0.2 for row in rows],
        [c.paper for c in figure.cells],
        0.4,
        color=PAPER_COLOUR,
        label="paper",
    )
    axes.barh(
        [row + 0.2 for row in rows],
        [c.ours for c in figure.cells],
        0.4,
        color=OUR_COLOUR,
        label="simulated",
    )
    axes.set_yticks(list(rows), [cell.label for cell in figure.cells], fontsize=8)
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.set_xlabel(figure.unit)
    axes.set_title(f"{figure.name}: {figure.title}", fontsize=10)
    axes.legend(frameon=False, fontsize=8)
    with replacing(path) as partial:
        picture.savefig(partial, dpi=100)


def fidelity_page(
    figures: Sequence[PaperFigure],
    constants: Sequence[tuple[str, str, str]],
    pictures: str,
    first: Sequence[str] = (),
    stamp: str = "",
) -> str:
    """Return the page: published rows, agreement with the paper's figures, constants, and each figure with notes.

    Args:
        figures: in the order of the page.
        constants: name, value and origin of every calibrated constant.
        pictures: folder of the pictures, relative to the page.
        first: lines before the paper's.
        stamp: version and date.
    """
    lines = [
        "# Fidelity: how accurate predictions are",
        "",
        "This page compares predictions with published measurements, with runs executed on one machine, and with the StreamRL",
        f"paper. `streamrl validate --output docs` writes it and its pictures ({stamp}). `make bench-reality` writes",
        "the two sections on executed runs.",
        *first,
        "",
        "## The paper",
        "",
        "These are the figures of StreamRL (arXiv 2504.15930), simulated. All use one reading of the paper. Each figure has its own",
        "section below, with the reasons of misses.",
        "",
        "| figure | target | | found | mean error of all cells | largest |",
        "|---|---|---|---|---|---|",
    ]
    for figure in figures:
        mark = "met" if figure.is_met else "**missed**"
        lines.append(
            f"| {figure.name} | {figure.target} | {mark} | {figure.found} | {figure.mape:.1%} | {figure.max_error:.1%} |"
        )
    lines += ["", "## Calibrated constants", "", "| constant | value | from |", "|---|---|---|"]
    lines += [f"| {name} | {value} | {origin} |" for name, value, origin in constants]
    for figure in figures:
        lines += ["", f"## {figure.name}: {figure.title}", ""]
        lines += [f"- {note}" for note in figure.notes]
        lines += ["", f"![{figure.name}]({pictures}/{slug(figure.name)}.png)", ""]
        lines += [f"| | paper | ours ({figure.unit}) | error |", "|---|---|---|---|"]
        lines += [
            f"| {cell.label} | {cell.paper:.4g} | {cell.ours:.4g} | {cell.error:+.1%} |"
            for cell in figure.cells
        ]
    return "\n".join(lines) + "\n"


def with_section(page: str, title: str, lines: Sequence[str]) -> str:
    """Return a page with a section replaced, or inserted before the paper's; without lines, the page itself."""
    if not lines:
        return page
    text = "\n".join([f"## {title}", "", *lines]).rstrip() + "\n\n"
    before, _, after = page.partition(f"## {title}\n")
    if before == page:
        before, _, rest = page.partition(PAPER_HEADING)
        return before + text + PAPER_HEADING + rest
    _, heading, rest = after.partition("\n## ")
    return before + text + heading.lstrip("\n") + rest


def section_of(page: str, title: str) -> list[str]:
    """Return the lines of a section; none if the page does not have it."""
    _, _, after = page.partition(f"## {title}\n")
    return after.partition("\n## ")[0].strip().splitlines()


def slug(name: str) -> str:
    """Return the file name of a figure: "Figure 8" is figure-8."""
    return name.lower().replace(" ", "-")
