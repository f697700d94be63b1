"""`streamrl simulate A.toml --against B.toml`: is a run worth it over the one that one has?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from streamrl.cli.progress import make_progress
from streamrl.cli.shared import claim_directory, print_json, stdout_console
from streamrl.record.against import Against
from streamrl.report.against_file import AgainstFile, write_comparison
from streamrl.report.against_report import against_report
from streamrl.report.study_file import is_study
from streamrl.report.words import team_of, what_text
from streamrl.runfile.config import Run
from streamrl.runfile.reading import load_run
from streamrl.sim.studies.pair import compare_runs

LETTERS = ("A", "B")


def simulate_against(
    run_file: Path, other: Path, overrides: Sequence[str], output: Path | None, *, as_json: bool
) -> None:
    """Simulate A, the run file, against B, the other, and say whether A is worth it."""
    if output is not None:
        claim_directory(output)
    files = (run_file, other)
    a, b = (_load(path, letter, overrides) for path, letter in zip(files, LETTERS, strict=True))
    names = (_name(run_file, a), _name(other, b))
    comparison = AgainstFile(names=names, against=_compare(a, b))
    if output is not None:
        write_comparison(comparison, output)
    if as_json:
        print_json(comparison.as_json())
    else:
        stdout_console().print(against_report(comparison.against, names))


def _load(path: Path, letter: str, overrides: Sequence[str]) -> Run:
    if is_study(path):
        raise ValueError(f"--against sets run files against each other, and {path} is a study")
    return load_run(path, _overrides_of(letter, overrides))


def _overrides_of(letter: str, overrides: Sequence[str]) -> list[str]:
    """Return the changes for both runs, and those for one with the letter, in their order."""
    others = tuple(f"{each}:" for each in LETTERS if each != letter)
    return [each.removeprefix(f"{letter}:") for each in overrides if not each.startswith(others)]


def _name(path: Path, run: Run) -> str:
    return f"{path.name}: {what_text(team_of(run), run.policies.system)}"


def _compare(a: Run, b: Run) -> Against:
    with make_progress() as progress:
        task = progress.add_task("step", total=None, facts="")

        def watch(what: str, done: int, most: int) -> None:
            progress.update(task, description=what, completed=done, total=most)

        return compare_runs(a, b, watch)
