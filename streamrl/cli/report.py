"""`streamrl report`: write one HTML page about plans, runs and studies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from streamrl.cli.lazy_commands import OUTPUT
from streamrl.cli.shared import AsJson, claim_file, print_json, stdout_console
from streamrl.report.page.page import describe, make_page, read_report, render_html, render_markdown
from streamrl.runfile.result_files import write_files
from streamrl.sim.studies.rerun import simulate_as_recorded

PAGE = "report.html"


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
    target = directories[0] / PAGE if output is None else output
    found = read_report(directories)
    claim_file(target)
    if markdown is not None:
        claim_file(markdown, "--markdown")
    page = make_page(found, simulator=simulate_as_recorded)
    texts = {target: render_html(page)}
    if markdown is not None:
        texts[markdown] = render_markdown(page)
    write_files(texts)
    if as_json:
        written = {"html": str(target), "markdown": None if markdown is None else str(markdown)}
        print_json({**describe(found), **written})
    else:
        stdout_console().print(page.answer, highlight=False, markup=False)
        stdout_console().print(
            f"\nwritten to {target}", highlight=False, markup=False, soft_wrap=True
        )
