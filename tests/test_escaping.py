"""Names that would act on a terminal, a page or a table are shown instead."""

from __future__ import annotations

import csv
import io
import json
import logging
import re
import sys
from pathlib import Path

import pytest
from rich.progress import Progress
from rich.table import Table

from streamrl.cli import main
from streamrl.cli.consoles import SafeConsole
from streamrl.cli.log_output import log_to_stderr
from streamrl.cli.progress import bar_columns
from streamrl.runfile.escaping import ACTING, csv_rows, visible, visible_json

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "h20-h800.toml"
NAME = "\x1b]0;owned\x07\x1b[2J\u202ex\x9b31m<script>alert(1)</script>|`id`$\\frac{=cmd()"
TAGGED = "[red]A[/b] [link=http://x]y[/link] [/] :warning:"
SMALL = ("--set", "algorithm.prompts_per_step=64", "--set", "simulate.max_steps=3")


def test_what_acts_is_escaped_and_the_rest_stays() -> None:
    assert visible("a\tb\nc é 日本 \xa0 ✓ עברית") == "a\tb\nc é 日本 \xa0 ✓ עברית"
    assert visible(NAME).startswith("\\x1b]0;owned\\x07\\x1b[2J\\u202ex\\x9b31m<script>")
    text = json.dumps({"name": NAME, "tag": "\U000e0041"}, ensure_ascii=False)
    assert not ACTING.search(visible_json(text)) and json.loads(visible_json(text)) == json.loads(
        text
    )


def test_no_cell_of_a_table_is_a_formula() -> None:
    cells = ["=cmd()", "+1+1", "-2", "-2.5e-3", "@x", "\t=1", "-inf", "-x", 3, -4.0, "a"]
    (row,) = csv_rows([cells])
    assert row == ["'=cmd()", "'+1+1", "-2", "-2.5e-3", "'@x", "'\t=1", "-inf", "'-x", 3, -4.0, "a"]


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A run file in whose every name a terminal, a page or a table would find something to do."""
    text = EXAMPLE.read_text()
    pools = re.findall(r"\[cluster\.pools\.([\w-]+)\]", text)
    for number, pool in enumerate(pools):
        key = json.dumps(f"{NAME}{number}")
        text = text.replace(f"[cluster.pools.{pool}]", f"[cluster.pools.{key}]")
        text = re.sub(rf'(?<!gpu = )"{pool}"', lambda _, key=key: key, text)
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def call(*words: object, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a command in this process, and return its exit status."""
    monkeypatch.setattr(sys, "argv", ["streamrl", *map(str, words)])
    with pytest.raises(SystemExit) as found:
        main()
    return int(found.value.code or 0)


def test_no_command_lets_a_name_act(
    hostile: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, wrong = tmp_path / "out", tmp_path / "wrong.toml"
    wrong.write_text(hostile.read_text() + f"\n[{json.dumps(NAME)}]\nx = {json.dumps(NAME)}\n")
    log = tmp_path / "train.log"
    log.write_text(f"{NAME}\nstep: {NAME}\n")
    commands: list[tuple[tuple[object, ...], int]] = [
        (("simulate", hostile, *SMALL, "-o", out), 0),
        (("simulate", hostile, *SMALL, "--json"), 0),
        (("report", out), 0),
        (("replay", out), 0),
        (("doctor", hostile), 0),
        (("simulate", wrong), 2),
        (("simulate", hostile, "--set", f"rollout.pool={NAME}"), 2),
        (("simulate", hostile, "--set", f"{NAME}=1"), 2),
        (("simulate", tmp_path / NAME.replace("/", "")), 2),
        (("explain", NAME), 2),
        (("lengths", NAME), 2),
        (("model", "show", NAME), 2),
        (("import", log, "-o", tmp_path / "imported"), 2),
        ((NAME,), 2),
        (("simulate", f"--{NAME}"), 2),
    ]
    for words, status in commands:
        found = call(*words, monkeypatch=monkeypatch)
        shown = capsys.readouterr()
        assert found == status, (words, shown)
        assert not (acting := ACTING.search(shown.out + shown.err)), (words, acting)
    pages = [path for path in out.iterdir() if path.suffix in (".html", ".md", ".csv", ".txt")]
    assert any(path.suffix == ".html" for path in pages)
    for page in pages:
        text = page.read_text()
        assert not ACTING.search(text) and "<script>alert" not in text, page
        if page.suffix == ".csv":
            cells = [cell for row in csv.reader(text.splitlines()) for cell in row]
            assert not [cell for cell in cells if cell.startswith(("=", "@"))]


def test_brackets_and_colons_of_a_name_are_shown_as_they_are() -> None:
    shown = io.StringIO()
    console = SafeConsole(file=shown, width=200)
    console.print(TAGGED, style="bold", highlight=False)
    table = Table(TAGGED, title=TAGGED)
    table.add_row(TAGGED)
    console.print(table)
    assert shown.getvalue().count(TAGGED) == 4
    progress = Progress(*bar_columns(), console=console)
    progress.add_task(TAGGED, facts=TAGGED)
    shown.truncate(0)
    console.print(progress.make_tasks_table(progress.tasks))
    assert shown.getvalue().count(TAGGED) == 2


def test_no_table_has_the_tags_of_rich() -> None:
    for room in ("cli", "report", "doctor", "sim"):
        for path in (ROOT / "streamrl" / room).rglob("*.py"):
            assert not re.search(r"\[/(?:[a-z]+)?\]", path.read_text()), path


def test_a_logged_name_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    with log_to_stderr():
        logging.getLogger("streamrl.any").warning("lost %s", NAME)
    assert not ACTING.search(capsys.readouterr().err.rstrip("\n"))


def test_commands_print_through_one_module() -> None:
    for path in (ROOT / "streamrl" / "cli").glob("*.py"):
        if path.name not in ("output.py", "consoles.py"):
            text = path.read_text()
            found = re.findall(r"typer\.echo\(|(?<![\w.])(?:Console\(|print\((?!visible))", text)
            assert not found, path
