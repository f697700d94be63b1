"""How far simulated seconds may be off: errors that were found on shapes nothing was fitted to.

Errors of one side add up: what its operations are composed of is fitted together. Those of different sides are
independent. Two plans that share a stage share its error, so their difference knows less of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from math import hypot
from types import MappingProxyType

import msgspec

from streamrl.engine.trace import Trace
from streamrl.record.attribution import UNDERFILLED, SidesAttribution

OPERATION_OF_ACTIVITY = {
    "prefill": "prefill",
    "decode": "decode",
    UNDERFILLED: "decode",
    "score": "score",
    "train": "train",
}
"""Operation whose tiers and errors an activity has. The run file sets the time of verifiers."""
DECIDING = ("decode", "train")
"""Operations that a plan's seconds are mostly made of, one of each side."""
MOST_UNMEASURED = 0.2
"""Share of busy seconds from datasheets alone, above which a figure is a guess and says so."""


class Uncertainty(msgspec.Struct, frozen=True, kw_only=True):
    """Relative errors of simulated seconds; such an error is as often passed as not."""

    stages: dict[str, float]
    """By operation; a missing operation has an unknown error."""
    step_time: float | None
    """Of the mean step by its passes: sync, switches and what frameworks add are not in it. None where an operation
    that takes seconds was never checked."""
    p90: dict[str, float] = {}
    """By operation: what nine in ten errors are within."""


def uncertainty_of(
    errors: Mapping[str, float],
    sides: Mapping[str, Mapping[str, float]],
    p90: Mapping[str, float] = MappingProxyType({}),
) -> Uncertainty:
    """Put the errors of stages together.

    Args:
        errors: median relative error by operation.
        sides: by side, the share of a step that it spends on each operation.
        p90: what nine in ten errors are within, by operation.
    """
    spent = {
        operation for shares in sides.values() for operation, share in shares.items() if share > 0
    }
    stages = {operation: errors[operation] for operation in sorted(spent) if operation in errors}
    widest = {operation: p90[operation] for operation in sorted(spent) if operation in p90}
    if not stages or spent - set(stages):
        return Uncertainty(stages=stages, step_time=None, p90=widest)
    of_sides = [
        sum(share * errors[operation] for operation, share in shares.items() if share > 0)
        for shares in sides.values()
    ]
    return Uncertainty(stages=stages, step_time=hypot(*of_sides), p90=widest)


def read_uncertainty(trace: Trace, shares: SidesAttribution) -> Uncertainty | None:
    """Return what the costs of a simulated run say of themselves; None of a real one, whose seconds are a clock's."""
    if trace.world == "real":
        return None
    errors, p90 = trace.facts.get("errors", {}), trace.facts.get("p90", {})
    assert isinstance(errors, Mapping) and isinstance(p90, Mapping), "they are by operation"
    sides: dict[str, dict[str, float]] = {}
    for name, of_side in shares.sides.items():
        spent: dict[str, float] = {}
        for activity, share in of_side.busy.items():
            operation = OPERATION_OF_ACTIVITY.get(activity)
            if operation is not None:
                spent[operation] = spent.get(operation, 0.0) + share
        sides[name] = spent
    return uncertainty_of(errors, sides, p90)


def unmeasured_warning(tiers: Mapping[str, float]) -> str:
    """Warn where more than a fifth of the busy seconds come from datasheets alone; say nothing otherwise."""
    share = tiers.get("roofline", 0.0)
    if share <= MOST_UNMEASURED:
        return ""
    return f"{share:.0%} of the busy seconds come from datasheets alone, so this is a guess"


def unshared_error(stages: Mapping[str, float], shared: Set[str]) -> float | None:
    """Return how far the difference of two plans may be off: what both have alike cancels.

    Args:
        stages: errors by operation.
        shared: operations that both plans do on the same GPUs in the same way.

    Returns:
        The largest error of the others, 0.0 where there are none; None where one of them was never checked.
    """
    others = [operation for operation in DECIDING if operation not in shared]
    if any(operation not in stages for operation in others):
        return None
    return max((stages[operation] for operation in others), default=0.0)
