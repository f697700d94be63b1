"""Combine the model errors of operations into the error of a simulated step.

The error of an operation was measured on models and shapes that no constant was fitted to. Errors of
one side add up, because the costs of its operations are fitted together. Errors of different sides
are independent. If two plans share a stage, its error cancels in their difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from math import hypot
from types import MappingProxyType

import msgspec

from streamrl.engine.trace import Trace
from streamrl.hardware.tiers import datasheet_share
from streamrl.record.attribution import UNDERFILLED, SidesAttribution
from streamrl.runfile.formatting import format_share

OPERATION_OF_ACTIVITY = {
    "prefill": "prefill",
    "decode": "decode",
    UNDERFILLED: "decode",
    "score": "score",
    "train": "train",
}
"""By activity: the operation that has its tiers and errors. Verifiers are not in it, because the run file
sets their time."""
DECIDING = ("decode", "train")
"""The operations that take most of a plan's time, one for each side."""
MOST_UNMEASURED = 0.2
"""Share of the seconds from datasheets alone above which a warning calls the figures a guess."""


class Uncertainty(msgspec.Struct, frozen=True, kw_only=True):
    """Median relative errors of simulated seconds: half of all errors are larger."""

    stages: dict[str, float]
    """By operation; a missing operation has an unknown error."""
    step_time: float | None
    """Error of the mean step time from forward and backward passes alone: weight sync, phase switches and framework
    overhead are not included. None if the error of an operation is unknown."""
    p90: dict[str, float] = {}
    """By operation: the 90th percentile of the relative errors."""


def uncertainty_of(
    errors: Mapping[str, float],
    sides: Mapping[str, Mapping[str, float]],
    p90: Mapping[str, float] = MappingProxyType({}),
) -> Uncertainty:
    """Return the errors of the used operations, and the error of the mean step.

    Args:
        errors: median relative error by operation.
        sides: by side, the share of a step that it spends on each operation.
        p90: 90th percentile of the relative errors by operation.
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
    """Return the model errors of a simulated run; None for a real run, whose seconds are measured."""
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
    """Return a warning if over `MOST_UNMEASURED` of the busy seconds come from datasheets alone, else ""."""
    share = datasheet_share(tiers)
    if share <= MOST_UNMEASURED:
        return ""
    return f"{format_share(share, 0)} {GUESS}"


GUESS = "of the busy seconds come from datasheets alone, so this is a guess"
"""The end of the warning, by which others find it among notes."""


def unshared_error(stages: Mapping[str, float], shared: Set[str]) -> float | None:
    """Return the relative error of the difference between two plans. Errors that both plans share cancel.

    Args:
        stages: errors by operation.
        shared: operations that both plans do on the same GPUs in the same way.

    Returns:
        The largest error of the other operations; 0.0 if there are none, None if one of them is unknown.
    """
    others = [operation for operation in DECIDING if operation not in shared]
    if any(operation not in stages for operation in others):
        return None
    return max((stages[operation] for operation in others), default=0.0)
