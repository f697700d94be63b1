"""`streamrl simulate --sweep`: simulate every combination of values, with every seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from streamrl.cli.progress import make_progress
from streamrl.cli.shared import print_json, simulating_on, stdout_console
from streamrl.report.study_file import DEFAULT_METRICS, NUM_SEEDS, Study, is_study, load_study
from streamrl.report.study_report import (
    STUDY_CSV,
    StudyResult,
    describe,
    text_table,
    write_study,
)
from streamrl.runfile.sweep import make_grid, parse_axis
from streamrl.sim.studies.finished_jobs import FINISHED
from streamrl.sim.studies.sweep import SIMULATING, run_sweep


def make_study(
    run_file: Path,
    sweeps: Sequence[str],
    overrides: Sequence[str],
    num_seeds: int | None,
    metrics: Sequence[str],
) -> Study:
    """Return the study of the command line: a study file, or `sweeps` over a run file.

    Raises:
        ValueError: a study file is given together with sweeps, or the study is invalid.
    """
    if not is_study(run_file):
        return Study(
            run_file=run_file,
            title=f"{run_file.stem}: what if?",
            overrides=tuple(overrides),
            axes=tuple(parse_axis(text) for text in sweeps),
            num_seeds=NUM_SEEDS if num_seeds is None else num_seeds,
            metrics=tuple(metrics) or DEFAULT_METRICS,
        )
    if sweeps:
        raise ValueError(
            f"--sweep {sweeps[0]}: {run_file} is a study and has its own sweeps; remove --sweep"
        )
    study = load_study(run_file)
    return replace(
        study,
        overrides=(*study.overrides, *overrides),
        num_seeds=study.num_seeds if num_seeds is None else num_seeds,
        metrics=tuple(metrics) or study.metrics,
    )


def run_study(
    study: Study,
    output: Path | None,
    ray: str | None,
    *,
    skips: bool,
    as_json: bool,
    intervals: bool,
) -> None:
    """Check every combination, simulate each with every seed, and print the results; with `ray`, on that cluster.

    Raises:
        RuntimeError: some combinations do not finish; raised after all others are printed and written.
    """
    finished = None if output is None else output / FINISHED
    with simulating_on(ray, run_sweep.__module__):
        report = _simulate(study, finished, skips=skips)
    figures = [] if output is None else write_study(report, output)
    if finished is not None:
        finished.unlink()  # the study is whole
    if as_json:
        print_json(describe(report))
    else:
        _print(report, figures, output, intervals=intervals)
    if unfinished := report.grid.unfinished:
        names = "; ".join(report.grid.name(each.place) for each in unfinished)
        raise RuntimeError(
            f"{len(unfinished)} combinations do not finish and are left out: {names}"
        )


def _print(
    report: StudyResult, figures: list[Path], output: Path | None, *, intervals: bool
) -> None:
    study, console = report.study, stdout_console()
    console.print(study.title, style="bold", highlight=False)
    if study.question:
        console.print(study.question, highlight=False)
    console.print()
    console.print(text_table(report, intervals=intervals))
    console.print()
    for sentence in dict.fromkeys(s for m in study.metrics for s in report.sentences(m)):
        console.print(sentence, highlight=False)
    console.print(report.table_note, highlight=False)
    for doubt in report.doubts:
        console.print(doubt, highlight=False)
    for each in (*report.grid.refused, *report.grid.unfinished):
        console.print(f"left out: {report.grid.name(each.place)}: {each.reason}", highlight=False)
    if output is not None:
        names = ", ".join([STUDY_CSV, *(path.name for path in figures)])
        console.print(f"\nwritten to {output}: {names}", highlight=False)


def _interruption(done: int, total: int, finished: Path | None) -> str:
    """Return how many of the simulations that were missing have finished, and how to go on."""
    if finished is None:
        then = "nothing is kept; with --output DIR, an interrupted study keeps what has finished"
    elif not finished.exists():
        then = "nothing is kept"
    else:
        then = f"they are kept in {finished}, and the same command continues after them"
    return f"{done} of {total} simulations were finished; {then}"


def _simulate(study: Study, finished: Path | None, *, skips: bool) -> StudyResult:
    """Return a study's rows, with a progress bar on a terminal."""
    grid = make_grid(study.load, study.overrides, study.axes, skips=skips)
    simulated = 0, len(grid.cells) * study.num_seeds
    try:
        with make_progress() as progress:
            task = progress.add_task("study", total=len(grid.cells), facts="")

            def watch(what: str, done: int, total: int) -> None:
                nonlocal simulated
                if what == SIMULATING:
                    simulated = done, total
                progress.update(task, completed=done, total=total, facts=what)

            grid, rows = run_sweep(
                grid, study.num_seeds, skips=skips, watch=watch, finished=finished
            )
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_interruption(*simulated, finished)) from None
    return StudyResult(study, grid, rows)
