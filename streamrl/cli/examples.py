"""`streamrl examples`: the example run files of this version."""

from __future__ import annotations

from typing import ClassVar

import typer

from streamrl.cli.lazy_commands import CommandTable, LazyGroup


class ExampleCommands(LazyGroup):
    """The commands about examples."""

    panels: ClassVar[dict[str, CommandTable]] = {
        "Commands": {
            "list": (
                "streamrl.cli.examples_copy:list_examples",
                "List the example run files and studies.",
            ),
            "copy": (
                "streamrl.cli.examples_copy:copy",
                "Copy an example, with the files that it names.",
            ),
        }
    }


examples = typer.Typer(
    name="examples",
    cls=ExampleCommands,
    no_args_is_help=True,
    help="List the example run files, or copy one.\n\nExample: streamrl examples copy plan-7b",
)
