"""`streamrl simulate`: what a run would take and cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sim.world import simulate as simulate_run
from streamrl.cli.options import (
    TRACE_FILE,
    AsJson,
    Overrides,
    RunFile,
    make_progress,
    open_trace,
    print_json,
    write_views,
)
from streamrl.config import Run
from streamrl.metrics import measure
from streamrl.report import metrics_table
from streamrl.run_file import load_run
from streamrl.trace import Trace


def simulate(
    run_file: RunFile,
    overrides: Overrides = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Write trace.jsonl, timeline.png and chrome_trace.json there."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate a run file and say what a step takes, costs, and where GPUs stand idle.

    Example: streamrl simulate examples/h20-h800.toml --set policies.system=stream-sync -o runs/what-if
    """
    run = load_run(run_file, overrides or ())
    if output is not None:
        refuse_real_run(output)
    trace = _simulate(run)
    metrics = measure(trace)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        (output / TRACE_FILE).write_bytes(trace.encode())
        write_views(trace, output)
    if as_json:
        print_json(metrics)
    else:
        Console().print(metrics_table(metrics))


def refuse_real_run(output: Path) -> None:
    """Raise `ValueError` where a directory holds what no simulation could bring back."""
    if (output / TRACE_FILE).exists() and open_trace(output).world == "real":
        raise ValueError(f"--output {output} holds an executed run, which would be overwritten")


def _simulate(run: Run) -> Trace:
    with make_progress() as progress:
        task = progress.add_task("step", total=run.algorithm.steps, facts="")
        return simulate_run(run, lambda version: progress.update(task, completed=version))
