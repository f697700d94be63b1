"""Simulate a run file against another one, or a recorded run with changes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from msgspec.structs import asdict

from streamrl.cli.progress import make_progress
from streamrl.cli.shared import open_trace, print_json, sole_writer, stdout_console, trace_file
from streamrl.record.run_comparison import Against
from streamrl.report.against_report import AgainstFile, against_report, write_comparison
from streamrl.report.rerun_report import rerun_report, verdict
from streamrl.report.study_file import is_study
from streamrl.report.words import planned_sides_of, sides_text
from streamrl.runfile.config import Run
from streamrl.runfile.files import load_run
from streamrl.sim.studies.comparison import compare_runs
from streamrl.sim.studies.rerun import rerun

LETTERS = ("A", "B")


def simulate_against(
    run_file: Path,
    other: Path,
    overrides: Sequence[str],
    output: Path | None,
    *,
    as_json: bool,
    intervals: bool,
) -> None:
    """Simulate run file A against run file B, and print whether A is worth it."""
    files = (run_file, other)
    with nullcontext() if output is None else sole_writer(output):
        (name_a, a), (name_b, b) = (
            _load(path, letter, overrides) for path, letter in zip(files, LETTERS, strict=True)
        )
        names = (name_a, name_b)
        comparison = AgainstFile(names=names, against=compare(a, b))
        if output is not None:
            write_comparison(comparison, output)
    if as_json:
        print_json(comparison.as_json())
    else:
        stdout_console().print(against_report(comparison.against, names, intervals=intervals))


def _load(path: Path, letter: str, overrides: Sequence[str]) -> tuple[str, Run]:
    """Return a description of a run file, and the run with its changes."""
    if is_study(path):
        raise ValueError(f"--against compares run files, but {path} is a study")
    run = load_run(path, _overrides_of(letter, overrides))
    pools = run.cluster.pools
    team = planned_sides_of(pools, run.rollout, run.trainer, run.followers, run.verifier)
    return f"{path.name}: {sides_text(team, run.policies.system)}", run


def _overrides_of(letter: str, overrides: Sequence[str]) -> list[str]:
    """Return the changes for both runs, and those marked with the letter, in their order."""
    others = tuple(f"{each}:" for each in LETTERS if each != letter)
    return [each.removeprefix(f"{letter}:") for each in overrides if not each.startswith(others)]


def compare(a: Run, b: Run) -> Against:
    """Simulate two runs of the same work until their difference is known, with progress."""
    with make_progress() as progress:
        task = progress.add_task("step", total=None, facts="")

        def watch(what: str, done: int, most: int) -> None:
            progress.update(task, description=what, completed=done, total=most)

        return compare_runs(a, b, watch)


def simulate_again(
    recorded: Path, changes: Sequence[str], *, as_json: bool, intervals: bool
) -> None:
    """Simulate a recorded run unchanged and with changes, and print what the changes would have saved."""
    with make_progress() as progress:
        task = progress.add_task("step", total=None, facts="")

        def watch(what: str, done: int, most: int) -> None:
            progress.update(task, description=what, completed=done, total=most)

        found = rerun(open_trace(recorded), trace_file(recorded), changes, watch)
    if as_json:
        print_json({**asdict(found), "verdict": verdict(found)})
    else:
        stdout_console().print(rerun_report(found, intervals=intervals))
