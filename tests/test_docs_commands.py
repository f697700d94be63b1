"""Commands in the docs are those of the command line: names, options and numbers of arguments."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from streamrl.cli.main import app
from tests.command_line import streamrl
from tests.doc_pages import ALL, DOCS, ROOT, commands

START = DOCS / "start-here.md"
SMALL = ["--set", "algorithm.prompts_per_step=8", "--set", "simulate.max_steps=6"]
"""For commands that simulate: whether they work does not depend on how much they simulate."""
SIMULATING = {"simulate", "doctor"}


def parse(words: list[str]) -> None:
    """Parse a command line as `streamrl` does, without running it or looking at its files."""
    command: Any = get_command(app)
    context = command.context_class(command, info_name="streamrl")
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        if "measure" in command.commands and words[0] not in command.commands:
            words = ["measure", *words]  # as `streamrl profile DIR` does
        name, command, words = command.resolve_command(context, words)
        command = command.load() if hasattr(command, "load") else command
        context = command.context_class(command, info_name=name, parent=context)
    values, rest, _ = command.make_parser(context).parse_args(args=[*words])
    assert not rest, f"too many arguments: {rest}"
    for parameter in command.params if words else ():  # a name alone is no call
        is_given = values.get(parameter.name) not in (None, ())
        assert is_given or not parameter.required, f"{parameter.name} is missing"


@pytest.mark.parametrize("page", ALL, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_command_of_a_page_is_one_that_streamrl_has(page: Path) -> None:
    for words in commands(page):
        try:
            parse(words)
        except Exception as error:
            pytest.fail(f"streamrl {' '.join(words)}: {error}")


@pytest.mark.parametrize(
    "line", ["simulat run.toml", "plan --modle x", "report a --output", "diff a b c", "diff --json"]
)
def test_a_wrong_command_of_a_page_is_found(line: str) -> None:
    with pytest.raises(Exception, match=r"no command|option|requires|argument|missing"):
        parse(line.split())


def test_the_first_page_shows_the_commands_of_a_first_hour() -> None:
    names = [words[0] for words in commands(START)]
    wanted = ["plan", "examples", "simulate", "report", "execute", "replay", "compare"]
    assert [name for name in dict.fromkeys(names) if name in wanted] == wanted


def test_the_quick_commands_of_the_first_page_work_in_an_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    slow = {"--sweep", "--set"}
    shown = [words for words in commands(START) if slow.isdisjoint(words)]
    quick = [words for words in shown if words[0] in {"examples", "simulate", "explain"}]
    for words in quick:
        done = streamrl(*words, *(SMALL if words[0] in SIMULATING else []))
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs/first/trace.jsonl").exists()
    assert (tmp_path / "examples/make_quickstart.py").exists()


ALONE = re.compile(
    r"--version|explain .+|examples (list|copy [a-z].*)|model show [a-z][^/]*|profile show .+|lengths .+|"
    r"doctor examples/.+|init run.toml .+|simulate examples/[\w-]+\.toml.*"
)
"""Commands that need no run, no measurement and no search before them."""
OTHERS = re.compile(r"…|\b[A-Z]{3,}\b|--against|--sweep")
"""Placeholders, and what takes longer; `test_against_command` and `test_sweep` run such commands."""


REFUSED = {"profile show qwen2.5-7b --gpu a100 --dtype fp8": "does not compute in fp8"}
"""Commands that a page shows with their error."""


def runnable() -> list[str]:
    """Return the commands of all pages that run by themselves in seconds."""
    found = {shlex.join(words) for page in ALL for words in commands(page)}
    return sorted(line for line in found if ALONE.fullmatch(line) and not OTHERS.search(line))


@pytest.mark.parametrize("line", runnable())
def test_a_command_of_a_page_that_needs_nothing_before_it_works(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if not line.startswith("examples"):
        (tmp_path / "examples").symlink_to(ROOT / "examples")
    words = shlex.split(line)
    done = streamrl(*words, *(SMALL if words[0] in SIMULATING else []))
    assert done.returncode == (2 if line in REFUSED else 0), done.stderr
    assert REFUSED.get(line, "") in done.stderr
