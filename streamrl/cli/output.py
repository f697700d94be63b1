"""Print lines for commands, which print in no other way. Names in a line cannot act on the terminal."""

from __future__ import annotations

import typer

from streamrl.runfile.escaping import visible


def echo(text: object = "", *, err: bool = False, nl: bool = True) -> None:
    """Print a line on standard output, or on standard error; without `nl` it has no line break of its own."""
    typer.echo(visible(str(text)), err=err, nl=nl)
