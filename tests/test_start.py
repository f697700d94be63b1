"""What `streamrl` does before a command runs: lists, completes, says its version, imports no more than is used."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from streamrl import __version__
from streamrl.cli import main
from streamrl.cli.lazy_commands import LazyCommand, LazyGroup
from streamrl.cli.main import app
from tests.command_line import streamrl

ROOT = Path(__file__).parent.parent
RUNNER = CliRunner()
ALL = get_command(app)
assert isinstance(ALL, LazyGroup)
GROUPS = {"": ALL, "profile": ALL.commands["profile"].load()}
COMMANDS = {
    f"{group} {name}".strip(): command
    for group, commands in GROUPS.items()
    for name, command in commands.commands.items()
}
LOADED = """
import sys
from streamrl.cli.main import app
def run(*arguments):
    try:
        app(arguments, standalone_mode=False)
    except SystemExit:
        pass
    roots = {"streamrl", "numpy", "matplotlib", "pandas", "jinja2", "torch"}
    print("loaded:", *sorted(name for name in sys.modules if name.split(".")[0] in roots))
run("--help")
run("replay", "--help")
run("simulate", sys.argv[1], "--json", *("--set algorithm.steps=1 --set algorithm.prompts_per_step=8".split()))
"""


def test_a_command_imports_what_it_uses_and_the_list_of_commands_none_of_them() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADED, str(ROOT / "examples" / "h20-h800.toml")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("loaded:")]
    listed, replay, simulated = map(set, lines)
    start = {"lazy_commands", "log_output", "main", "output", "usage_errors"}
    escaping = {"streamrl.runfile", "streamrl.runfile.escaping"}
    own = {"streamrl", "streamrl.cli", *(f"streamrl.cli.{name}" for name in start)}
    assert listed == own | escaping
    assert "streamrl.cli.replay" in replay and not replay & {
        "numpy",
        "streamrl.sim",
        "streamrl.executor",
    }
    assert {"streamrl.sim.world", "numpy"} <= simulated
    assert not simulated & {"matplotlib", "pandas", "jinja2", "torch", "streamrl.executor"}
    unused = {
        "streamrl.sim.planner",
        "streamrl.doctor",
        "streamrl.cli.simulate_sweep",
        "streamrl.report.page",
    }
    assert not simulated & unused


def test_a_profile_leaves_the_import_of_torch_to_its_workers() -> None:
    code = "import sys, streamrl.executor.profiling.profile_file; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "False\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_says_of_each_what_its_own_help_begins_with(name: str) -> None:
    command = COMMANDS[name]
    assert isinstance(command, LazyCommand)
    assert command.place.startswith("streamrl.cli.")
    loaded = command.load()
    assert loaded.name == name.split()[-1]
    assert inspect.cleandoc(loaded.help).split("\n\n")[0] == command.help


@pytest.mark.parametrize("name", ["", *COMMANDS, "ranker eval"])
def test_every_command_explains_itself_at_h_as_at_help(name: str) -> None:
    short, long = (RUNNER.invoke(app, [*name.split(), option]) for option in ("-h", "--help"))
    assert short.exit_code == 0 and "Usage: " in short.stdout
    assert short.stdout == long.stdout


def test_the_version_is_that_of_the_package() -> None:
    done = RUNNER.invoke(app, ["--version"])
    assert (done.exit_code, done.stdout) == (0, f"streamrl {__version__}\n")


def test_streamrl_alone_shows_its_help() -> None:
    done = RUNNER.invoke(app, [])
    assert "Usage: " in done.output and "simulate" in done.output


def test_an_unknown_command_is_wrong_input_that_names_the_nearest() -> None:
    done = streamrl("simulat")
    assert done.returncode == 2 and "did you mean simulate?" in done.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["sim"], ["simulate"]),
        (["pr"], ["profile"]),
        (["profile", "s"], ["show"]),
        (["simulate", "--ski"], ["--skip-infeasible"]),
        (["profile", "build/model", "--max-c"], ["--max-context"]),
        (["ranker", "eval", "--hi"], ["--history"]),
    ],
)
def test_a_shell_completes_commands_and_their_options(
    words: list[str],
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("_STREAMRL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", " ".join(["streamrl", *words]))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert capsys.readouterr().out.split() == expected


def test_completion_is_shown_and_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")  # the option names it
    shown, installed = (
        RUNNER.invoke(app, [option, "bash"], prog_name="streamrl")
        for option in ("--show-completion", "--install-completion")
    )
    assert shown.exit_code == installed.exit_code == 0
    assert "_STREAMRL_COMPLETE=complete_bash" in shown.stdout
    script = tmp_path / ".bash_completions" / "streamrl.sh"
    assert script.read_text().strip() == shown.stdout.strip()
