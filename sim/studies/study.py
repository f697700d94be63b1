"""Simulate a study's grid, a process a core: first is every combination checked, then every seed simulated."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor
from itertools import count

from msgspec.structs import replace

from sim.costs.costs import Costs
from sim.parallel import answers
from sim.steady_state import measure_steady
from streamrl.record.metrics import Metrics
from streamrl.report.study_table import StudyRow
from streamrl.runfile.grid import Grid, GridCell, Refused
from streamrl.runfile.reading import decode_run, encode_run
from streamrl.workload.workload import SimulatedWorkload

Watch = Callable[[str, int, int], None]
"""Told what is under way, how many of it are done, and of how many."""


def run_sweep(
    grid: Grid,
    num_seeds: int,
    *,
    skips: bool = False,
    watch: Watch = lambda what, done, total: None,
) -> tuple[Grid, list[StudyRow]]:
    """Return the grid without what cannot be simulated, and a row for each combination and seed.

    Raises:
        ValueError: the first combination whose costs, memory or workload allow no simulation, unless `skips`;
            or nothing is left to simulate.
        RuntimeError: a simulation made no step.
    """
    with ProcessPoolExecutor() as pool:
        grid = _check(pool, grid, skips, watch)
        return grid, _simulate(pool, grid, num_seeds, watch)


def _check(pool: Executor, grid: Grid, skips: bool, watch: Watch) -> Grid:
    """Move the combinations that profiles, memory or files do not allow to the refused ones."""
    runs = [encode_run(cell.run) for cell in grid.cells]
    reasons = answers(pool, _find_fault, runs, _counted(watch, "checking", len(runs)))
    refused = list(grid.refused)
    for cell, reason in zip(grid.cells, reasons, strict=True):
        if reason:
            refused.append(Refused(cell.place, reason))
            if not skips:
                raise ValueError(f"--sweep {grid.name(cell.place)}: {reason}")
    if len(refused) == len(grid.cells) + len(grid.refused):
        name, reason = grid.name(refused[0].place), refused[0].reason
        raise ValueError(f"no combination can be simulated; {name}: {reason}")
    cells = [cell for cell, reason in zip(grid.cells, reasons, strict=True) if not reason]
    return Grid(grid.axes, cells, sorted(refused))


def _simulate(pool: Executor, grid: Grid, num_seeds: int, watch: Watch) -> list[StudyRow]:
    tasks = [(cell, cell.run.seed + offset) for cell in grid.cells for offset in range(num_seeds)]
    runs = [encode_run(replace(cell.run, seed=seed)) for cell, seed in tasks]
    found = answers(pool, _measure, runs, _counted(watch, "simulating", len(runs)))
    return [_row(grid, task, each) for task, each in zip(tasks, found, strict=True)]


def _counted(watch: Watch, what: str, total: int) -> Callable[[], None]:
    """Return what is to be called after each of `total` jobs."""
    done = count(1)
    return lambda: watch(what, next(done), total)


def _row(grid: Grid, task: tuple[GridCell, int], found: Metrics | str) -> StudyRow:
    cell, seed = task
    if isinstance(found, str):
        raise RuntimeError(f"{grid.name(cell.place)}, seed {seed}: {found}")
    return StudyRow.of(cell.place, seed, found)


def _find_fault(run: bytes) -> str:
    """Say why a run cannot be simulated; nothing where it can."""
    try:
        decoded = decode_run(run)
        Costs.load(decoded)
        SimulatedWorkload(decoded)
    except ValueError as error:
        return str(error)
    return ""


def _measure(run: bytes) -> Metrics | str:
    """Simulate and measure a run, or say why that failed."""
    try:
        return measure_steady(decode_run(run))
    except (ValueError, RuntimeError) as error:
        return str(error)
