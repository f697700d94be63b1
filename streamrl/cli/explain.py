"""`streamrl explain`: what a key of a run file means, its default, its allowed values and an example."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from streamrl.cli.lazy_commands import OUTPUT
from streamrl.cli.output import echo
from streamrl.cli.shared import AsJson, print_json, stdout_console
from streamrl.runfile.key_reference import Key, Table, find, reference_markdown, tables
from streamrl.runfile.run_file_schema import run_file_schema

FIRST_SENTENCE = ". "


def explain(
    key: Annotated[
        str | None,
        typer.Argument(
            metavar="KEY",
            help="A key such as rollout.max_running, or a section such as rollout; all sections where absent.",
        ),
    ] = None,
    as_markdown: Annotated[
        bool,
        typer.Option(
            "--markdown", help="Print all keys as the page docs/keys.md.", rich_help_panel=OUTPUT
        ),
    ] = False,
    as_schema: Annotated[
        bool,
        typer.Option(
            "--schema",
            help="Print the JSON Schema of run files, for editors.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Explain a key or a section of a run file.

    It prints the meaning, type, default, allowed values, an example, and the commands that use the key.

    Example: streamrl explain rollout.max_running
    """
    if as_schema:
        echo(json.dumps(run_file_schema(), indent=1))
    elif as_markdown:
        echo(reference_markdown(), nl=False)
    elif key is None and as_json:
        print_json(tables())
    elif key is None:
        _list_sections()
    else:
        found = find(key)
        if as_json:
            print_json(found._asdict())
        elif isinstance(found, Key):
            _print_key(found)
        else:
            _print_table(found)


def _print_key(key: Key) -> None:
    console = stdout_console()
    console.print(f"{key.name}\n", style="bold", highlight=False)
    console.print(key.text, highlight=False)
    facts = {
        "type": key.type,
        "default": key.default,
        "allowed": key.allowed,
        "used by": ", ".join(key.used_by),
        "example": key.example,
    }
    console.print()
    for name, text in facts.items():
        if text:
            console.print(f"{name:8s} {text}", highlight=False)


def _print_table(table: Table) -> None:
    from rich.table import Table as Grid

    console = stdout_console()
    console.print(f"{table.header}  {table.text}\n", highlight=False)
    grid = Grid(box=None, pad_edge=False)
    for name in ("key", "default", "meaning"):
        grid.add_column(name, overflow="fold")
    for key in table.keys:
        begin = key.text.partition(FIRST_SENTENCE)[0].removesuffix(".")
        grid.add_row(key.name.removeprefix(f"{table.name}."), key.default, begin)
    console.print(grid)
    inner = [each.header for each in tables() if each.name.startswith(f"{table.name}.")]
    if inner:
        console.print(f"\ntables in it: {', '.join(inner)}", highlight=False)


def _list_sections() -> None:
    from rich.table import Table as Grid

    console, grid = stdout_console(), Grid(box=None, pad_edge=False, show_header=False)
    for table in tables():
        if table.name:
            begin = table.text.partition(FIRST_SENTENCE)[0].removesuffix(".")
            grid.add_row(table.header, str(len(table.keys)), begin)
    console.print(grid)
    console.print(
        "\n`streamrl explain SECTION` lists its keys, `streamrl explain KEY` explains one."
    )
