"""Say in one line what is wrong with the options and arguments of a command."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import typer

UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""What typer raises for a wrong command line. Typer has no public name for it."""
PARSING = re.compile(r", unable to parse .*|\.$")
"""End of a message of typer that says nothing more."""
EXTRA = re.compile(r"unexpected extra arguments?(?:\(s\))? \((.*)\)")


def usage_text(error: Any, context: Any) -> str:
    """Return what is wrong, with the nearest name or the command that lists all names."""
    option: str = getattr(error, "option_name", "")
    param = _param_of(context, option) if option else getattr(error, "param", None)
    kind = type(error).__name__
    if kind == "NoSuchOption":
        return f"no option {option}; {_remedy(context, option, _options_of(context))}"
    if kind == "BadOptionUsage" and param is not None:
        return _misused(option, param, context)
    if kind == "MissingParameter" and param is not None:
        return f"{_name(param)} is missing: {_hint(param, context)}"
    if isinstance(error, typer.BadParameter) and param is not None:
        return _wrong_value(error, param)
    text = error.format_message()
    if extra := EXTRA.search(text):
        text = f"too many arguments, from {extra[1].split()[0]!r} on"
    return f"{_plain(text)}; {_see_help(context)}"


def check_paths(context: Any, args: Sequence[str]) -> None:
    """Raise `ValueError` if a path is empty. It would be read as the current directory."""
    for param in context.command.get_params(context):
        value = context.params.get(param.name)
        values = value if isinstance(value, list | tuple) else [value]
        empty = {"", *(f"{name}=" for name in param.opts)}
        if Path() in values and empty.intersection(args):
            raise ValueError(f"{_name(param)} is empty; write a path")


def no_such_command(context: Any, name: str, names: Iterable[str]) -> str:
    """Return the error of a command that does not exist."""
    return f"no command {name}; {_remedy(context, name, names)}"


def _remedy(context: Any, name: str, names: Iterable[str]) -> str:
    """Return the nearest name, or else the command that lists all of them."""
    near = get_close_matches(name, [*names], n=1)
    return f"did you mean {near[0]}?" if near else _see_help(context)


def _see_help(context: Any) -> str:
    return f"see `{context.command_path} --help`"


def _options_of(context: Any) -> list[str]:
    params = context.command.get_params(context)
    return [name for param in params for name in param.opts if name.startswith("--")]


def _param_of(context: Any, option: str) -> Any:
    params = context.command.get_params(context)
    return next((param for param in params if option in param.opts), None)


def _misused(option: str, param: Any, context: Any) -> str:
    """Return the error of an option that lacks its value, or has one that it does not take."""
    if param.is_flag:
        return f"{option} takes no value; write {option} alone"
    return f"{option} needs a value: {_hint(param, context)}"


def _wrong_value(error: Any, param: Any) -> str:
    """Return the error of a value that is not of an option's kind."""
    text = _plain(PARSING.sub("", error.message)).replace("input should be", "must be")
    found: list[Any] = getattr(
        error.__cause__, "errors", list
    )()  # of pydantic, whose message lacks the value
    got = f", got {found[0]['input']!r}" if found else ""
    between = " " if text.startswith("must") else ": "
    return f"{_name(param)}{between}{text}{got}"


def _name(param: Any) -> str:
    """Return how a user writes a parameter: its longest option, or the metavar of an argument."""
    if param.param_type_name == "argument":
        return str(param.metavar or param.name.upper()).strip("[]")
    return str(max(param.opts, key=len))


def _hint(param: Any, context: Any) -> str:
    """Return what a parameter stands for, as its help says."""
    text = _plain((param.help or "").replace("\\[", "["))
    return text or _see_help(context)


def _plain(message: str) -> str:
    """Return a message as the middle of a line."""
    return (message if message[1:2].isupper() else message[:1].lower() + message[1:]).rstrip(".")
