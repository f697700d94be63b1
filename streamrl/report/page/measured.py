"""Write the sections of an executed run: measured against predicted, and its faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from streamrl.engine.trace import Trace
from streamrl.record.incidents import Incident, find_incidents
from streamrl.record.metrics import Metrics, measure
from streamrl.record.recorded_inputs import (
    RecordedInputs,
    recorded_inputs,
    with_ranks_of_steps,
)
from streamrl.report.page.options import Option, is_same_run
from streamrl.report.page.parts import PageCell, PageSection, PageTable, cells
from streamrl.report.page.sources import RecordedRun
from streamrl.report.pictures.drawing import Picture
from streamrl.report.pictures.paired_bars import Pair, pairs_picture
from streamrl.report.run_tables import (
    is_within_band,
    measure_first_text,
    most_different_cause,
)
from streamrl.report.words import NBSP, change, dollars, seconds, step_seconds
from streamrl.runfile.formatting import format_duration, long_time

MOST_SIMULATED = 100_000
"""Most rollouts that are simulated for a page, which takes about two seconds."""
STAGES: dict[str, tuple[str, ...]] = {
    "generation": ("prefill", "recomputed-prefix", "decode", "underfilled"),
    "evaluation": ("evaluate",),
    "verification": ("verify",),
    "scoring": ("score",),
    "training": ("train",),
}
"""Activities of each stage."""
WAITS = {
    "sync": "waiting for weights",
    "pipeline": "waiting for the other side",
    "skew": "waiting for stragglers",
    "staleness": "waiting to stay in bounds",
    "verifier": "waiting for rewards",
    "tool": "waiting for tools",
    "environment-start": "waiting for environments to start",
    "failure": "down after a loss",
    "checkpoint": "writing checkpoints",
    "resize": "changing ranks",
    "backpressure": "waiting for room",
    "start-up": "starting up",
    "evaluation": "waiting for an evaluation",
}
"""Words for the causes of idle time."""
WORTH_A_ROW = 0.01
"""Share of a step above which a stage is shown."""


class Prediction(NamedTuple):
    """The predicted figures of an executed run, and where they come from."""

    metrics: Metrics
    source: str


Simulator: TypeAlias = Callable[[RecordedInputs, int], Trace]
"""Simulates a recorded run, given its manifest and workload and a number of steps."""


def predict(
    option: Option, runs: Sequence[RecordedRun], simulator: Simulator | None
) -> Prediction | str:
    """Return the prediction of an executed run, or the reason why there is none.

    A simulation of the same run file in the report is used, unless the run had other trainer ranks. Otherwise the run is simulated with its
    recorded lengths, as `streamrl compare` does, if it is small enough and there is a simulator.
    """
    assert option.run is not None, "it was executed"
    measured = option.run.metrics
    for run in runs:
        is_like = run.metrics.world == "simulated" and is_same_run(option, run)
        if is_like and _has_ranks_of_file(option.run):
            counted = _common_steps(measured, run.metrics)
            return Prediction(measure(run.trace, counted), f"the simulation {run.name}")
    num_rollouts = measured.num_steps * option.run.run.algorithm.rollouts_per_step
    if simulator is None or num_rollouts > MOST_SIMULATED:
        return f"The run was not simulated for this page: `streamrl compare {option.run.path.parent}` does it."
    try:
        recorded = recorded_inputs(option.run.trace, option.run.path)
        trace = simulator(recorded, measured.num_steps)
        found = measure(trace, measured.counted_steps)
    except (ValueError, RuntimeError) as error:
        return f"There is no prediction of this run: {error}."
    return Prediction(found, "a simulation with the recorded lengths, without faults")


def _has_ranks_of_file(executed: RecordedRun) -> bool:
    """Return whether nobody changed the trainer's ranks of a run while it was executed."""
    return with_ranks_of_steps(executed.run, executed.trace).trainer == executed.run.trainer


def _common_steps(measured: Metrics, simulated: Metrics) -> tuple[int, int] | None:
    """Return the counted steps of the executed run if the simulation has them all."""
    _, last = measured.counted_steps
    return measured.counted_steps if last <= simulated.num_steps else None


def measured_section(option: Option, found: Prediction | str) -> PageSection:
    """Compare an executed run with its prediction: by stage, a step, and all of it."""
    section = PageSection("measured", "Measured against predicted")
    if isinstance(found, str):
        section.notes.append(found)
        return section
    assert option.run is not None, "it was executed"
    measured, predicted = option.run.metrics, found.metrics
    section.text.append(_verdict(measured, predicted))
    section.pictures.append(_stages_picture(measured, predicted))
    rows = list(_total_rows(measured, predicted))
    head = ("", "measured", "predicted", "error")
    section.tables.append(PageTable("", head, rows, numbers=(1, 2, 3), is_cards=True))
    first, last = measured.counted_steps
    section.notes.append(
        f"The prediction is {found.source}. A mean step is that of steps {first} to {last}. "
        "The error is predicted minus measured, relative to measured."
    )
    if cause := most_different_cause(predicted, measured):
        section.notes.append(cause)
    if hint := measure_first_text(predicted, str(option.run.path.parent)):
        section.notes.append(hint)
    return section


def _verdict(measured: Metrics, predicted: Metrics) -> str:
    """Return how far the prediction of a step was off."""
    error = predicted.step_time / measured.step_time - 1
    way = "shorter" if error < 0 else "longer"
    within = {
        None: "",
        True: " The measured step is within the band of the prediction.",
        False: " The measured step is outside the band of the prediction.",
    }[is_within_band(predicted, measured)]
    return (
        f"A step took {step_seconds(measured.step_time, None)}. The predicted step is {change(abs(error)).lstrip('+')} {way}: "
        f"{step_seconds(predicted.step_time, predicted.step_time_band)}.{within}"
    )


def _stages_picture(measured: Metrics, predicted: Metrics) -> Picture:
    pairs = [
        Pair(label, ours, theirs, f"({_error(theirs, ours)})")
        for label, ours, theirs in stage_seconds(measured, predicted)
    ]
    return pairs_picture("stages", "Seconds of each stage in a step", pairs, seconds)


def stage_seconds(measured: Metrics, predicted: Metrics) -> Iterator[tuple[str, float, float]]:
    """Yield each stage with its measured and predicted seconds of a step, as a side's GPUs spend them."""
    for side in dict.fromkeys([*measured.sides, *predicted.sides]):
        ours, theirs = _seconds_of(measured, side), _seconds_of(predicted, side)
        for stage in dict.fromkeys([*ours, *theirs]):
            pair = ours.get(stage, 0.0), theirs.get(stage, 0.0)
            if max(pair) > WORTH_A_ROW * measured.step_time:
                yield f"{SIDES.get(side, side)}: {stage}", *pair


SIDES = {"rollout": "replicas", "trainer": "trainer", "shared": "GPUs", "verifier": "verifiers"}
"""Words for sides."""


def _seconds_of(metrics: Metrics, side: str) -> dict[str, float]:
    found: dict[str, float] = {}
    shares = metrics.sides.get(side)
    if shares is None:
        return found
    for stage, activities in STAGES.items():
        found[stage] = sum(shares.busy.get(each, 0.0) for each in activities)
    for cause, share in shares.idle.items():
        found[WAITS.get(cause, f"idle: {cause}")] = share
    return {stage: share * metrics.step_time for stage, share in found.items() if share > 0}


def _total_rows(measured: Metrics, predicted: Metrics) -> Iterator[Sequence[PageCell]]:
    yield _row("a step", measured.step_time, predicted.step_time, format_duration)
    ours, theirs = sum(measured.step_times), sum(predicted.step_times)
    if len(measured.step_times) == len(predicted.step_times):
        yield _row(f"all {measured.num_steps:,} steps", ours, theirs, long_time)
    yield _row(
        "tokens trained on per second", measured.goodput, predicted.goodput, "{:,.0f}".format
    )
    if measured.cost_per_step:
        a_step = measured.cost_per_step, predicted.cost_per_step
        yield _row("dollars a step", *a_step, dollars)
        a_million = measured.cost_per_million_tokens, predicted.cost_per_million_tokens
        yield _row("dollars per million tokens", *a_million, dollars)
    lags = _mean(measured.staleness), _mean(predicted.staleness)
    yield cells("mean staleness", f"{lags[0]:.2f}", f"{lags[1]:.2f}", f"{lags[1] - lags[0]:+.2f}")


def _row(what: str, ours: float, theirs: float, show: Callable[[float], str]) -> Sequence[PageCell]:
    return cells(what, show(ours), show(theirs), _error(theirs, ours))


def _error(predicted: float, measured: float) -> str:
    return change(predicted / measured - 1) if measured else "not measured"


def _mean(staleness: Mapping[int, int]) -> float:
    total = sum(staleness.values())
    return sum(lag * count for lag, count in staleness.items()) / total if total else 0.0


def fault_sections(runs: Sequence[RecordedRun]) -> Iterator[PageSection]:
    """Yield the faults of each executed run, and what became of them."""
    for number, run in enumerate(runs, start=1):
        if run.metrics.world != "real":
            continue
        section = PageSection(f"faults-{number}", f"Faults of {run.name}")
        incidents = find_incidents(run.trace)
        rolled_back = run.metrics.dropped.get("rolled back", 0)
        if not incidents:
            section.text.append("Nothing failed.")
        else:
            rows = [_incident_row(incident) for incident in incidents]
            head = ("at", "step", "what", "what became of it")
            section.tables.append(PageTable("", head, rows, numbers=(0, 1), is_cards=True))
        if rolled_back:
            section.text.append(
                f"{rolled_back:,} rollouts were trained on in steps that were rolled back."
            )
        section.text.append(_ledger_text(run.metrics))
        yield section


def _incident_row(incident: Incident) -> Sequence[PageCell]:
    return [
        PageCell(format_duration(incident.time)),
        PageCell(f"{incident.step:,}"),
        PageCell(incident.what, incident.reason),
        PageCell(incident.outcome or "not repaired in this record"),
    ]


def _ledger_text(metrics: Metrics) -> str:
    if metrics.ledger.is_balanced:
        return f"The ledger balances:{NBSP}no rollout was lost or used twice."
    return f"The ledger does not balance: {'; '.join(metrics.ledger.faults)}."
