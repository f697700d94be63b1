"""`streamrl examples list` and `streamrl examples copy`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from streamrl.cli.output import echo
from streamrl.cli.shared import AsJson, claim_directory, print_json, stdout_console
from streamrl.runfile.examples import copy_example, describe_example, example_names


def list_examples(as_json: AsJson = False) -> None:
    """List the example run files and studies.

    Example: streamrl examples list
    """
    found = {name: describe_example(name) for name in example_names()}
    if as_json:
        print_json(found)
        return
    console, width = stdout_console(), max(map(len, found))
    for name, text in found.items():
        console.print(f"{name:{width}s}  {text}", highlight=False, soft_wrap=True)


def copy(
    name: Annotated[str, typer.Argument(metavar="NAME", help="An example, such as plan-7b.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the copies.")] = Path(
        "examples"
    ),
    as_json: AsJson = False,
) -> None:
    """Copy an example, with the files that it names.

    Paths in examples are relative to their folder: the quickstart's model is in build/quickstart beside it.

    Example: streamrl examples copy plan-7b
    """
    claim_directory(output)
    written = copy_example(name, output)
    if as_json:
        print_json([str(path) for path in written])
        return
    for path in written:
        echo(f"written to {path}")
