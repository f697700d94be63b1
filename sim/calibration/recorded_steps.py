"""Calibrate by a recorded run: the same rollouts, prompt by prompt, simulated from the run file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec.structs import replace

from streamrl.logs.measured_steps import MeasuredStep, MeasuredSteps
from streamrl.logs.run_steps import read_run_steps
from streamrl.record.informative import recorded_workload
from streamrl.record.trace import Trace
from streamrl.runfile.config import Run
from streamrl.sim.calibration.calibrate import HELD_OUT, Calibrated, calibrate_checked, refuse
from streamrl.sim.calibration.disagreement import (
    LENGTHS,
    find_differences,
    mean_tokens,
    takes_turns,
)
from streamrl.sim.calibration.stepwise import SimulatedSteps
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.fill import fill_policies
from streamrl.sim.steady_state import UnfinishedError
from streamrl.sim.world import SimWorld
from streamrl.workload.workload import SimulatedWorkload


def measured_steps(trace: Trace, name: str) -> MeasuredSteps:
    """Return the steps of a recorded run.

    Raises:
        ValueError: it made none.
    """
    beside = 0.0 if trace.world == "real" else Costs.load(trace.run).training.overhead_time
    steps = read_run_steps(trace, beside, takes_turns=takes_turns(trace.run))
    if not steps:
        raise ValueError(f"{name}: records no finished step")
    return MeasuredSteps(
        source=f"{name} ({trace.world} run)", framework="streamrl", steps=tuple(steps)
    )


def calibrate_recorded(
    run: Run,
    trace: Trace,
    file: Path,
    held_out: float = HELD_OUT,
    watch: Callable[[str], None] = lambda what: None,
) -> Calibrated:
    """Fit a calibration to a run that was executed.

    Args:
        run: the run file; a calibration that it names is left out of account.
        trace: the recorded run.
        file: its trace, where lengths are read.
        held_out: share of the steps, the last ones, that nothing is fitted to.
        watch: told what is simulated.

    Raises:
        ValueError: the recorded run is of another run file, naming each key, or nothing can be fitted.
    """
    measured = measured_steps(trace, str(file.parent if file.name == "trace.jsonl" else file))
    refuse(find_differences(run, trace.run), measured.source)
    measured = replace(measured, notes=(*_note_lengths(run, measured),))
    num_steps = len(measured.steps)

    def simulated(seen: Run, steps: Sequence[MeasuredStep]) -> SimulatedSteps:
        algorithm = replace(seen.algorithm, steps=num_steps)
        workload = recorded_workload(trace, file)
        seen = replace(seen, algorithm=algorithm, workload=workload, faults=())
        costs = Costs.load(seen)
        filled = fill_policies(seen, costs)
        made = SimWorld(filled, costs, SimulatedWorkload(seen)).run()
        overhead = costs.training.overhead_time
        found = read_run_steps(made, overhead, takes_turns=takes_turns(seen))
        by_number = {step.step: step for step in found}
        if missing := [step.step for step in steps if step.step not in by_number]:
            raise UnfinishedError(f"stopped before step {missing[0]} of {num_steps}")
        return SimulatedSteps([by_number[step.step] for step in steps], overhead)

    return calibrate_checked(run, measured, held_out, simulated, watch)


def _note_lengths(run: Run, measured: MeasuredSteps) -> list[str]:
    theirs = measured.mean("output_tokens")
    if run.workload.lengths is None or theirs is None:
        return []
    ours, _ = mean_tokens(run)
    if abs(theirs / ours - 1) <= LENGTHS:
        return []
    return [
        f"workload.lengths has a mean of {ours:.4g} output tokens, {theirs:.4g} were recorded: the fit is of the recorded ones, "
        "streamrl import makes a workload of them"
    ]
