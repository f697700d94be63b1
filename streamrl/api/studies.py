"""Run what-if studies from Python, as `streamrl simulate --sweep` does."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from streamrl.report.study_file import DEFAULT_METRICS, NUM_SEEDS, Study
from streamrl.report.study_report import StudyResult
from streamrl.runfile.config import Run
from streamrl.runfile.files import change_run, load_run
from streamrl.runfile.python_values import Changes
from streamrl.runfile.sweep import Values, axes_of, make_grid
from streamrl.sim.studies.sweep import Watch, run_sweep

OPTION = re.compile(r"--([a-z]+(?:-[a-z]+)*)\b")


def sweep(
    run: Run | Path | str | Mapping[str, Any],
    values: Values,
    *,
    changes: Changes = (),
    seeds: int = NUM_SEEDS,
    metrics: Sequence[str] = DEFAULT_METRICS,
    skip_infeasible: bool = False,
    title: str = "what if?",
    watch: Watch = lambda what, done, total: None,
) -> StudyResult:
    """Simulate a run with every combination of values, on all cores.

    Args:
        run: a run, or what `load_run` reads.
        values: a list of values for each dotted key. A tuple of keys changes them side by side.
        changes: changes of all combinations, as `load_run` takes them.
        seeds: simulations of each combination, each with its own seed.
        metrics: the figures that the result shows. `to_frame` has all of them.
        skip_infeasible: whether to leave out combinations that are not possible.
        title: name of the study.
        watch: called with the current work, the number of finished jobs, and the total.

    Raises:
        ValueError: a combination is no valid run or cannot be simulated. The error names it.
        RuntimeError: no combination finishes.
    """
    name = Path(run) if isinstance(run, Path | str) else Path("run")
    run = change_run(run, changes) if isinstance(run, Run) else load_run(run, changes)
    try:
        axes, chosen = axes_of(values), tuple(metrics)
        study = Study(
            run_file=name, run=run, title=title, axes=axes, num_seeds=seeds, metrics=chosen
        )
        grid = make_grid(study.load, (), axes, skips=skip_infeasible)
        grid, rows = run_sweep(grid, seeds, skips=skip_infeasible, watch=watch)
    except ValueError as error:
        raise named_as_arguments(error) from None
    return StudyResult(study, grid, rows)


def named_as_arguments(error: ValueError) -> ValueError:
    """Return an error of a command whose text names arguments: mean_tokens, not --mean-tokens."""
    return ValueError(OPTION.sub(lambda option: option[1].replace("-", "_"), str(error)))
