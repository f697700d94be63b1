"""`streamrl compare`: what was predicted against what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from sim.world import simulate
from streamrl.cli.options import TRACE_FILE, AsJson, TracePath, open_trace, print_json
from streamrl.config import LengthsConfig
from streamrl.metrics import measure
from streamrl.report import compare as compare_metrics
from streamrl.report import comparison_table
from streamrl.trace import Trace


def compare(
    measured: TracePath,
    predicted: Annotated[
        Path | None,
        typer.Argument(help="A simulated trace; without it, the measured run is simulated now."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare a run with its simulation: step time, throughput, and idle time by cause.

    Without a second trace the run file in the trace is simulated with the output lengths that the run
    had, so that only the seconds differ.

    Example: streamrl compare runs/quickstart
    """
    trace = open_trace(measured)
    figures = measure(trace)
    expected = measure(open_trace(predicted) if predicted else _simulate(trace, measured))
    if as_json:
        print_json(compare_metrics(expected, figures))
    else:
        Console().print(comparison_table(expected, figures))


def _simulate(trace: Trace, path: Path) -> Trace:
    """Simulate the run of a trace with its recorded lengths and as many steps as it made."""
    replace = msgspec.structs.replace
    source = path / TRACE_FILE if path.is_dir() else path
    run = trace.run
    lengths = LengthsConfig(kind="trace", source=str(source))
    num_steps = measure(trace).num_steps
    return simulate(
        replace(
            run,
            workload=replace(run.workload, lengths=lengths),
            algorithm=replace(run.algorithm, steps=num_steps),
        )
    )
