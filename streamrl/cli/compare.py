"""`streamrl compare`: compare an executed run with its simulation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from streamrl.cli.shared import (
    AsJson,
    Intervals,
    Overrides,
    open_trace,
    print_json,
    stdout_console,
    trace_file,
)
from streamrl.engine.trace import Trace
from streamrl.record.metrics import measure
from streamrl.record.recorded_inputs import recorded_inputs
from streamrl.report.run_tables import compare as compare_metrics
from streamrl.report.run_tables import (
    comparison_table,
    measure_first_text,
    most_different_cause,
)
from streamrl.sim.studies.rerun import simulate_as_recorded

KINDS = {"real": "an executed run", "simulated": "a simulation"}


def compare(
    measured: Annotated[Path, typer.Argument(help="Directory or trace of an executed run.")],
    predicted: Annotated[
        Path | None,
        typer.Argument(
            help="Directory or trace of a simulation. Default: simulate the measured run now."
        ),
    ] = None,
    overrides: Overrides = None,
    intervals: Intervals = False,
    as_json: AsJson = False,
) -> None:
    """Compare an executed run with its simulation.

    The table shows step time, throughput and idle time by cause, over the same steps of both. Without PREDICTED, the
    simulation uses the recorded output lengths and the recorded share of non-zero advantages. So only times differ.

    `--set` changes the simulation, such as the profile that it uses (costs.profile).

    Example: streamrl compare runs/quickstart
    """
    if predicted is not None and overrides:
        raise ValueError(
            "--set changes what is simulated now, but a simulation was given: remove one of them"
        )
    trace = _open(measured, "real", "streamrl execute RUN.toml makes an executed run")
    figures = measure(trace)
    if predicted is not None:
        expected = measure(_open(predicted, "simulated", "what predicts must be simulated"))
    else:
        recorded = recorded_inputs(trace, trace_file(measured))
        simulated = simulate_as_recorded(recorded, figures.num_steps, overrides or ())
        expected = measure(simulated, figures.counted_steps)
    if as_json:
        print_json(compare_metrics(expected, figures))
    else:
        console = stdout_console()
        console.print(comparison_table(expected, figures, intervals=intervals))
        if figures.note:
            console.print(f"\nnote on the executed run: {figures.note}", highlight=False)
        if cause := most_different_cause(expected, figures):
            console.print(f"\n{cause}", highlight=False)
        if hint := measure_first_text(expected, str(measured)):
            console.print(f"\n{hint}", highlight=False)


def _open(path: Path, world: Literal["simulated", "real"], hint: str) -> Trace:
    """Read a trace of a simulated or a real run.

    A comparison of two runs of the same kind would not show the error of a prediction.
    """
    trace = open_trace(path)
    if trace.world != world:
        wanted, found = (KINDS[each] for each in (world, trace.world))
        raise ValueError(
            f"{path}: compare needs {wanted} here, got {found}: {hint}. "
            "To compare other pairs, use streamrl report DIR DIR. "
            "streamrl diff DIR DIR compares scores of executed runs"
        )
    return trace
