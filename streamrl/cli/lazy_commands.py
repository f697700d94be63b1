"""Import a command only when it is called. Until then, the list of commands has its name and a sentence."""

from __future__ import annotations

import gc
import re
from pkgutil import resolve_name
from typing import Any, ClassVar, TypeAlias

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_group

Click: TypeAlias = Any
"""A command or a context of click, or of typer's copy of it, depending on typer's version."""
TAG = re.compile(r"\[[a-z#/@][^[]*?\]")
"""Text that rich reads as a tag (`rich.markup.escape`, which is too slow to import for every command)."""
CommandTable: TypeAlias = dict[str, tuple[str, str]]
"""Location of each command as module:name, and the first sentence of its help."""


class LazyCommand(TyperCommand):
    """A function or a group in the list of commands, imported only when it is called."""

    def __init__(self, name: str, place: str, summary: str) -> None:
        super().__init__(name, help=summary)
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
        alone.command(self.name)(found)
        return _as_written(get_command(alone))


def _as_written(command: Click) -> Click:
    """Return a command whose help shows brackets literally: rich would read "[[trainer]]" as markup."""
    for each in (command, *command.params):
        if text := getattr(each, "help", None):
            each.help = TAG.sub(r"\\\g<0>", text)
    for within in getattr(command, "commands", {}).values():
        _as_written(within)
    return command


class LazyGroup(TyperGroup):
    """A group that reads its commands from a table."""

    table: ClassVar[CommandTable]

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, (place, summary) in self.table.items():
            self.add_command(LazyCommand(name, place, summary))
