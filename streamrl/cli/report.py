"""`streamrl report`: what a plan, runs and studies come to, as one page to read, print or send."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from streamrl.cli.shared import AsJson, print_json, stdout_console
from streamrl.report.page.page import describe, make_page, read_report, render_html, render_markdown

PAGE = "report.html"


def report(
    directories: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR...", help="Directories of plans, runs and studies, in any mixture."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help=f"The HTML file; {PAGE} in the first DIR where absent."
        ),
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", help="Write the same as Markdown there.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write one self-contained HTML page: the answer, alternatives, idle time, sensitivity, and how sure it is.

    Nothing is simulated: the page says what the directories hold. Several runs are compared with each other.

    A run that is executed may go on meanwhile: it is told as far as it is.

    Example: streamrl report plans/7b runs/what-if -o report.html --markdown report.md
    """
    found = read_report(directories)
    page = make_page(found)
    target = directories[0] / PAGE if output is None else output
    _write(target, render_html(page))
    if markdown is not None:
        _write(markdown, render_markdown(page))
    if as_json:
        written = {"html": str(target), "markdown": None if markdown is None else str(markdown)}
        print_json({**describe(found), **written})
    else:
        stdout_console().print(page.answer, highlight=False, markup=False)
        stdout_console().print(
            f"\nwritten to {target}", highlight=False, markup=False, soft_wrap=True
        )


def _write(path: Path, text: str) -> None:
    """Write a file; raise `ValueError` with its path where that cannot be done."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: cannot be written: {error.strerror}") from None
