"""Model errors of operations, for the difference of two plans: the error of a stage that both share cancels.

The error of an operation was measured on models and shapes that no constant was fitted to. The error of a
step is another one (`streamrl.record.band`).
"""

from __future__ import annotations

from collections.abc import Mapping, Set

import msgspec

from streamrl.engine.trace import Trace
from streamrl.hardware.tiers import datasheet_share
from streamrl.record.attribution import RECOMPUTED, UNDERFILLED, SidesAttribution
from streamrl.runfile.formatting import format_share
from streamrl.runfile.recorded_numbers import NotNegative

OPERATION_OF_ACTIVITY = {
    "prefill": "prefill",
    "decode": "decode",
    UNDERFILLED: "decode",
    RECOMPUTED: "prefill",
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

    stages: dict[str, NotNegative]
    """By operation; a missing operation has an unknown error."""


def read_uncertainty(trace: Trace, shares: SidesAttribution) -> Uncertainty | None:
    """Return the model errors of a simulated run; None for a real run, whose seconds are measured."""
    if trace.world == "real":
        return None
    errors = trace.facts.get("errors", {})
    assert isinstance(errors, Mapping), "they are by operation"
    spent = {
        operation
        for of_side in shares.sides.values()
        for activity, share in of_side.busy.items()
        if share > 0 and (operation := OPERATION_OF_ACTIVITY.get(activity)) is not None
    }
    return Uncertainty(stages={each: errors[each] for each in sorted(spent) if each in errors})


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
