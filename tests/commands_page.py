"""Write docs/commands.md from the options of each command: `python -m tests.commands_page > docs/commands.md`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from streamrl.cli.main import Commands, app

HEAD = """\
# Commands

Each command prints its help with `-h`. `--json` prints one JSON object in place of tables. The exit status is 0 for success, 2
for wrong input with one clear line, and 1 for a failure. `python -m tests.commands_page` writes this page.
"""


def commands_page() -> str:
    """Return the page: all commands by task, with their arguments and options."""
    commands: Any = get_command(app)
    lines = [HEAD]
    for panel, table in Commands.panels.items():
        lines.append(f"## {panel}\n")
        for name in table:
            lines += _section(name, commands.commands[name].load())
    return "\n".join(lines)


def _section(name: str, command: Any) -> Iterator[str]:
    """Yield the lines about a command; those of a group's commands follow it."""
    yield f"### `streamrl {name}`\n"
    yield f"{_plain(command.help)}\n"
    examples = [line.removeprefix("Example: ") for line in (command.epilog or "").splitlines()]
    if examples:
        yield "\n".join(["```", *map(_plain, examples), "```\n"])
    if rows := [_row(each) for each in command.params if not each.hidden]:
        yield "\n".join(["| argument or option | meaning |", "|---|---|", *rows]) + "\n"
    for inner, within in getattr(command, "commands", {}).items():
        yield from _section(f"{name} {inner}", within.load() if hasattr(within, "load") else within)


def _row(parameter: Any) -> str:
    """Return the row of an argument or an option."""
    is_option = parameter.opts[0].startswith("-")
    names = parameter.opts if is_option else []
    takes_value = not (getattr(parameter, "is_flag", False) or getattr(parameter, "count", False))
    metavar = (parameter.metavar or parameter.name.upper()).replace("|", "/")  # ends a cell
    value = [metavar] if takes_value else []
    written = ", ".join(f"`{each}`" for each in (*names[:-1], " ".join([*names[-1:], *value])))
    meaning = _plain(parameter.help or "").replace("|", "\\|")
    return f"| {written} | {meaning}{_default(parameter)} |"


def _default(parameter: Any) -> str:
    """Return the default of a parameter that has one, as a sentence."""
    value = parameter.default
    is_shown = parameter.show_default is True and not isinstance(value, bool | list | tuple)
    return f" Default: `{value}`." if is_shown and value not in (None, "", 0) else ""


def _plain(text: str) -> str:
    """Return a help text without the marks that keep rich from reading its brackets."""
    return text.replace("\\[", "[").replace("\b", "")


if __name__ == "__main__":
    print(commands_page(), end="")
