"""`streamrl calibrate`: fit predicted times to measured steps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from msgspec.structs import replace

from streamrl.cli.lazy_commands import OUTPUT
from streamrl.cli.output import echo
from streamrl.cli.progress import make_progress
from streamrl.cli.shared import (
    CALIBRATION,
    AsJson,
    Overrides,
    RunFile,
    claim_file,
    holds_run,
    open_trace,
    print_json,
    stdout_console,
    trace_file,
)
from streamrl.hardware.calibration_file import write_calibration
from streamrl.logs.framework_logs import CSV, read_measured_file
from streamrl.logs.measured_steps import MeasuredSteps
from streamrl.record.run_directory import with_kept_inputs
from streamrl.report.calibration_table import calibration_table
from streamrl.runfile.config import Run
from streamrl.runfile.files import load_run
from streamrl.runfile.policies_config import SystemName
from streamrl.runfile.result_files import write_file
from streamrl.sim.calibration.calibrate import (
    HELD_OUT,
    Calibrated,
    calibrate_recorded,
    calibrate_steps,
)
from streamrl.sim.calibration.disagreement import takes_turns


def calibrate(
    run_file: RunFile,
    measured: Annotated[
        Path,
        typer.Argument(
            metavar="MEASURED",
            help="Measured steps of that run. A log of a framework (see --format), a CSV with named columns, or "
            "the directory of an executed run.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write the factors to this file. Name it in costs.calibration of a run file.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    log_format: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="Format of the log: areal, nemo-rl, openrlhf, prime-rl, roll, skyrl, slime, torchforge, trl, verl or csv. Default: detect it.",
        ),
    ] = None,
    held_out: Annotated[
        float, typer.Option(help="Share of steps, from the end, that only test the fit.")
    ] = HELD_OUT,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Fit predicted times to the measured steps of your own runs.

    The command simulates the measured steps with their recorded lengths. Each stage gets a factor: measured over
    simulated time. Stages are generation, score (forward passes before training), train, sync, and the rest of a step.
    The held-out steps show the remaining error. If the run file describes other work than the measured steps (rollouts,
    lengths, GPUs, passes, mode), nothing is fitted. Correct the run file first.

    Example: streamrl calibrate run.toml verl.log -o calibration.toml
    """
    if not 0 <= held_out < 1:
        raise ValueError(f"--held-out must be a share from 0 to below 1, got {held_out:g}")
    run = load_run(run_file, overrides or ())
    if output is not None:
        claim_file(output, CALIBRATION, inputs=(run_file, measured))
    found = _fit(run, measured, log_format, held_out)
    if found.calibration.is_empty:
        raise ValueError(f"{measured}: nothing can be fitted to it; {'; '.join(found.notes)}")
    text = write_calibration(found.calibration)
    if output is not None:
        write_file(output, text)
    if as_json:
        print_json({**msgspec.to_builtins(found.calibration), "notes": found.notes})
        return
    stdout_console().print(calibration_table(found.calibration))
    for note in found.notes:
        echo(f"note: {note}")
    if output is not None:
        echo(f'{output}: name it in a run file, [costs] calibration = "{output.name}"')


def _fit(run: Run, measured: Path, log_format: str | None, held_out: float) -> Calibrated:
    with make_progress() as progress:
        task = progress.add_task("simulating", total=None, facts="")

        def watch(what: str) -> None:
            progress.update(task, facts=what)

        if holds_run(measured):
            if log_format is not None:
                raise ValueError(f"--format applies only to logs; {measured} is a recorded run")
            file = trace_file(measured)
            trace = open_trace(file)
            trace.run = with_kept_inputs(trace.run, file.parent)
            return calibrate_recorded(run, trace, file, held_out, watch)
        steps = read_measured_file(measured, log_format)
        if steps.is_asynchronous is None and not takes_turns(run.policies):
            steps = _read_as_asynchronous(run.policies.system, measured, log_format)
        return calibrate_steps(run, steps, held_out, watch)


def _read_as_asynchronous(
    system: SystemName, measured: Path, log_format: str | None
) -> MeasuredSteps:
    """Read a log that does not show its mode; the run file says that it is asynchronous."""
    steps = read_measured_file(measured, log_format, is_asynchronous=True)
    told = f"{measured.name}: read as of an asynchronous mode, as policies.system {system!r} is one"
    return replace(steps, is_asynchronous=None, notes=() if steps.framework == CSV else (told,))
