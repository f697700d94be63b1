"""`streamrl report`: write one HTML page about plans, runs and studies."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from streamrl.cli.lazy_commands import OUTPUT
from streamrl.cli.shared import (
    HTML,
    MARKDOWN,
    AsJson,
    claim_file,
    keep_private,
    print_json,
    stdout_console,
)
from streamrl.report.page.page import describe, make_page, read_report, render_html, render_markdown
from streamrl.report.page.sources import check_directory
from streamrl.runfile.result_files import write_files
from streamrl.sim.studies.rerun import simulate_as_recorded

logger = logging.getLogger(__name__)

PAGE = "report.html"
PAGES = (".html", ".md")
"""Ends of the names of pages, which a new page may replace."""


def report(
    directories: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR...", help="Directories of plans, runs and studies, in any combination."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help=f"The HTML file. Default: {PAGE} in the first DIR.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    markdown: Annotated[
        Path | None,
        typer.Option(
            "--markdown",
            help="Also write the page as Markdown to this file.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write one HTML page about plans, runs and studies.

    A page of a plan shows the decision, its cost with a band, the options and the reasons. A page of an executed run
    shows measured against predicted figures, learning curves and faults. It is one file that needs no server. Several
    runs are compared with each other. A running job is shown up to its last step.

    Example: streamrl report plans/7b runs/what-if -o report.html --markdown report.md
    """
    for directory in directories:
        check_directory(directory)  # before a file is claimed there
    keep_private(*directories)
    target = directories[0] / PAGE if output is None else output
    inputs = [file for each in directories for file in each.iterdir() if file.suffix not in PAGES]
    claim_file(target, HTML, inputs=inputs)
    if markdown is not None:
        claim_file(markdown, MARKDOWN, "--markdown", inputs)
    with blaming_figures(directories):
        found = read_report(directories)
        facts = describe(found)
        page = make_page(found, simulator=simulate_as_recorded)
        texts = {target: render_html(page)}
        if markdown is not None:
            texts[markdown] = render_markdown(page)
    write_files(texts)
    if as_json:
        written = {"html": str(target), "markdown": None if markdown is None else str(markdown)}
        print_json({**facts, **written})
    else:
        stdout_console().print(page.answer, highlight=False)
        stdout_console().print(f"\nwritten to {target}", highlight=False, soft_wrap=True)


@contextmanager
def blaming_figures(directories: Sequence[Path]) -> Iterator[None]:
    """Turn exceptions of impossible figures into a `ValueError`. Each figure is in range, but they contradict each other.

    Raises:
        ValueError: a page cannot be made from the recorded figures.
    """
    try:
        yield
    except (ArithmeticError, LookupError) as error:
        names = ", ".join(map(str, directories))
        logger.debug("the page cannot be made", exc_info=True)
        raise ValueError(
            f"{names}: recorded figures contradict each other ({type(error).__name__}: {error}); "
            "write the results again"
        ) from error
