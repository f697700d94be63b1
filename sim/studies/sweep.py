"""Simulate the grid of a what-if study in parallel: check every combination, then simulate every seed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from itertools import count
from pathlib import Path

from msgspec.structs import replace

from streamrl.runfile.files import decode_run, encode_run
from streamrl.runfile.sweep import Grid, RejectedCell
from streamrl.sim.costs.costs import Costs
from streamrl.sim.parallel import answers, worker_pool
from streamrl.sim.steady_state import UnfinishedError, measure_steady
from streamrl.sim.studies.finished_jobs import FinishedJobs
from streamrl.sim.studies.results import StudyRow
from streamrl.workload.workload import SimulatedWorkload

Watch = Callable[[str, int, int], None]
"""Called with the current work, the number of finished jobs, and the total."""

SIMULATING = "simulating"
"""What `watch` is told while simulations run."""


def run_sweep(
    grid: Grid,
    num_seeds: int,
    *,
    skips: bool = False,
    watch: Watch = lambda what, done, total: None,
    finished: Path | None = None,
) -> tuple[Grid, list[StudyRow]]:
    """Simulate a grid; return it without failed combinations, and a row for each combination and seed.

    Args:
        grid: the combinations.
        num_seeds: simulations of each.
        skips: whether to leave out combinations that cannot be simulated.
        watch: receives progress.
        finished: file of finished simulations, which are read and not repeated; None to keep none.

    Raises:
        ValueError: a combination cannot be simulated and `skips` is false, no combination is left,
            the file of finished simulations is damaged, or an input file changes meanwhile.
        RuntimeError: no combination finishes.
    """
    with worker_pool() as pool:
        checked = _check(pool, grid, skips, watch)
        return _simulate(pool, checked, num_seeds, watch, FinishedJobs(finished))


def _check(pool: Executor, grid: Grid, skips: bool, watch: Watch) -> Grid:
    """Move combinations that cannot be simulated to the rejected ones."""
    runs = [encode_run(cell.run) for cell in grid.cells]
    reasons = answers(pool, _find_fault, runs, _counted(watch, "checking", len(runs)))
    refused = list(grid.refused)
    for cell, reason in zip(grid.cells, reasons, strict=True):
        if reason:
            refused.append(RejectedCell(cell.place, reason))
            if not skips:
                raise ValueError(f"--sweep {grid.name(cell.place)}: {reason}")
    if len(refused) == len(grid.cells) + len(grid.refused):
        name, reason = grid.name(refused[0].place), refused[0].reason
        raise ValueError(f"no combination can be simulated; {name}: {reason}")
    cells = [cell for cell, reason in zip(grid.cells, reasons, strict=True) if not reason]
    return Grid(grid.axes, cells, sorted(refused))


def _simulate(
    pool: Executor, grid: Grid, num_seeds: int, watch: Watch, jobs: FinishedJobs
) -> tuple[Grid, list[StudyRow]]:
    """Simulate every combination with every seed, and separate those that do not finish."""
    tasks = [(cell, cell.run.seed + offset) for cell in grid.cells for offset in range(num_seeds)]
    runs = [encode_run(replace(cell.run, seed=seed)) for cell, seed in tasks]
    missing = jobs.missing(runs)
    answers(pool, _measure, missing, _counted(watch, SIMULATING, len(missing)), jobs.add)
    found = [jobs.find(run) for run in runs]
    unfinished: dict[tuple[int, ...], RejectedCell] = {}
    for (cell, seed), each in zip(tasks, found, strict=True):
        if isinstance(each, str):
            unfinished.setdefault(cell.place, RejectedCell(cell.place, f"seed {seed}: {each}"))
    rows = [
        replace(each, place=cell.place, seed=seed)
        for (cell, seed), each in zip(tasks, found, strict=True)
        if isinstance(each, StudyRow) and cell.place not in unfinished
    ]
    if not rows:
        place, reason = next(iter(unfinished.values()))
        raise RuntimeError(f"no combination finishes; {grid.name(place)}: {reason}")
    cells = [cell for cell in grid.cells if cell.place not in unfinished]
    return Grid(grid.axes, cells, grid.refused, list(unfinished.values())), rows


def _counted(watch: Watch, what: str, total: int) -> Callable[[], None]:
    """Return the callback for the end of each of `total` jobs."""
    done = count(1)
    return lambda: watch(what, next(done), total)


def _find_fault(run: bytes) -> str:
    """Return the reason why a run cannot be simulated; empty if it can be."""
    try:
        decoded = decode_run(run)
        Costs.load(decoded)
        SimulatedWorkload(decoded)
    except ValueError as error:
        return str(error)
    return ""


def _measure(run: bytes) -> StudyRow | str:
    """Return the row of a run without its place, or the reason why it failed or did not finish."""
    try:
        metrics = measure_steady(decode_run(run))
    except (ValueError, RuntimeError) as error:
        return str(error)
    if metrics.unfinished:
        return str(UnfinishedError(metrics.unfinished))
    return StudyRow.of((), 0, metrics)
