"""A recorded run beside two simulations of the same work: one as it was, one with another policy or machine."""

from __future__ import annotations

from math import exp

import msgspec

from streamrl.record.against import Known
from streamrl.record.metrics import Metrics, measure
from streamrl.record.paired import ratio_half_width
from streamrl.record.trace import Trace


class Rerun(msgspec.Struct, frozen=True, kw_only=True):
    """What would have happened; every figure is over the same steps, of which each had the same lengths."""

    changes: list[str]
    """`key=value` of what is changed."""
    recorded: Metrics
    as_it_was: Metrics
    """The recorded run, simulated."""
    changed: Metrics
    step_time_ratio: Known
    """Seconds of a step with the changes for one without, both simulated."""
    prediction_error: float
    """Seconds of a step as it was, simulated, over the recorded ones, less 1."""


def set_beside(traces: tuple[Trace, Trace, Trace], changes: list[str]) -> Rerun:
    """Measure a record, its simulation and the changed one over the steps that count in all three.

    Raises:
        ValueError: no step of one of them is left.
        RuntimeError: a simulation stops before the steps that were recorded.
    """
    counted = [measure(trace).counted_steps for trace in traces]
    last = min(last for _, last in counted)
    first = min(max(first for first, _ in counted), last)
    recorded, as_it_was, changed = (measure(trace, (first, last)) for trace in traces)
    for simulated in (as_it_was, changed):
        if simulated.unfinished and simulated.num_steps < recorded.num_steps:
            raise RuntimeError(f"the run, simulated, {simulated.unfinished}")
    ratio = changed.step_time / as_it_was.step_time
    width = ratio_half_width(changed, as_it_was)
    interval = None if width is None else (ratio * exp(-width), ratio * exp(width))
    return Rerun(
        changes=changes,
        recorded=recorded,
        as_it_was=as_it_was,
        changed=changed,
        step_time_ratio=Known(value=ratio, interval=interval),
        prediction_error=as_it_was.step_time / recorded.step_time - 1,
    )
