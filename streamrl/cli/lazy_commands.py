"""Import a command only when it is called. Until then, the list of commands has its name and a sentence."""

from __future__ import annotations

import gc
import inspect
import re
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import groupby
from pkgutil import resolve_name
from typing import Any, ClassVar, TypeAlias

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_group

from streamrl.cli.usage_errors import UsageError, check_paths, no_such_command, usage_text

Click: TypeAlias = Any
"""A command or a context of click, or of typer's copy of it, depending on typer's version."""
TAG = re.compile(r"\[[a-z#/@][^[]*?\]")
"""Text that rich reads as a tag (`rich.markup.escape`, which is too slow to import for every command)."""
EXAMPLE = "Example: "
"""Begin of a line of help that stands below the options, where a user sees it last."""
UNTIL_END = ExitStack()
"""What a command holds until it ends, such as the locks on the files that it will write."""
OUTPUT = "Output"
"""Panel of the options that say what a command prints and writes."""
CommandTable: TypeAlias = dict[str, tuple[str, str]]
"""Location of each command as module:name, and the first sentence of its help."""


def _without_flag_types(params: list[Any]) -> list[Any]:
    """Return parameters whose help shows no type for options that take no value."""
    for param in params:
        if getattr(param, "is_flag", False) or getattr(param, "count", False):
            param.metavar = ""
    return params


def _in_one_line(ctx: Click, parse: Callable[[], list[str]]) -> list[str]:
    """Read options and arguments; raise `ValueError` with one line if one of them is wrong."""
    try:
        return parse()
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            raise
        raise ValueError(usage_text(error, ctx)) from None


class Plain:
    """Makes the errors of a command or a group one line, and lets its help show only types that a user writes."""

    def parse_args(self, ctx: Click, args: list[str]) -> list[str]:
        """Read the options and arguments; those before the command in a group.

        Raises:
            ValueError: one of them is wrong.
        """
        parent: Any = super()
        written = [*args]  # parsing takes them out
        rest = _in_one_line(ctx, partial(parent.parse_args, ctx, args))
        check_paths(ctx, written)
        return rest

    def get_params(self, ctx: Click) -> list[Any]:
        """Return the parameters, with that of help."""
        parent: Any = super()
        return _without_flag_types(parent.get_params(ctx))


class PlainCommand(Plain, TyperCommand):
    """A plain command."""


class LazyCommand(TyperCommand):
    """A function or a group in the list of commands, imported only when it is called."""

    def __init__(self, name: str, place: str, summary: str, panel: str) -> None:
        super().__init__(name, help=summary, rich_help_panel=panel)
        self.place = place

    def make_context(self, *args: Any, **settings: Any) -> Click:
        """Import the command, which takes over."""
        return self.load().make_context(*args, **settings)

    def load(self) -> Click:
        """Import the command."""
        found = resolve_name(self.place)
        gc.freeze()  # imported objects stay: to scan them for garbage takes a tenth of a short command
        if isinstance(found, typer.Typer):
            return _as_written(get_group(found))
        alone = typer.Typer(add_completion=False, rich_markup_mode="rich")
        alone.command(self.name, cls=PlainCommand)(found)
        return _as_written(get_command(alone))


def _as_written(command: Click) -> Click:
    """Return a command whose help shows brackets literally: rich would read "[[trainer]]" as markup."""
    paragraphs, command.epilog = _in_paragraphs(command.help or "")
    command.help = "\n\n".join(paragraphs)
    for each in (command, *command.params):
        for field in ("help", "epilog"):
            if text := getattr(each, field, None):
                setattr(each, field, TAG.sub(r"\\\g<0>", text))
    for within in getattr(command, "commands", {}).values():
        _as_written(within)
    return command


def _in_paragraphs(text: str) -> tuple[list[str], str]:
    """Return the paragraphs of a help, each one line that a terminal wraps, and its examples, one a line."""
    lines = inspect.cleandoc(text).splitlines()
    examples = [line for line in lines if line.startswith(EXAMPLE)]
    rest = [line for line in lines if line not in examples]
    paragraphs = [" ".join(block) for filled, block in groupby(rest, bool) if filled]
    return paragraphs, "\n".join(examples)


class PlainGroup(Plain, TyperGroup):
    """A plain group. A wrong command gets the nearest name."""

    def resolve_command(self, ctx: Click, args: list[str]) -> Any:
        """Return the command that is called.

        Raises:
            ValueError: there is no such command.
        """
        if self.get_command(ctx, args[0]) is None:
            raise ValueError(no_such_command(ctx, args[0], self.commands))
        return super().resolve_command(ctx, args)


class LazyGroup(PlainGroup):
    """A group that reads its commands from tables, one for each panel of its help."""

    panels: ClassVar[dict[str, CommandTable]]

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for panel, table in self.panels.items():
            for name, (place, summary) in table.items():
                self.add_command(LazyCommand(name, place, summary, panel))
