"""Pool several profiles of one machine into one: the median of their measurements, scaled to one speed of its cores.

On a shared host, kernels can take up to twice as long from one quarter of an hour to the next. The
reference work of the core watch shows only a part of this. Replicas take the same time for weights and
for adapters. So their tables are pooled over profiles of both kinds. Then the gain of one over the
other does not depend on when it was profiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from msgspec.structs import asdict, replace

from streamrl.hardware.measured_profile import (
    TIMED,
    MeasuredProfile,
    read_measured,
    scaled_to_mean_speed,
)
from streamrl.hardware.profile_table import ProfileTable

OF_REPLICAS = ("decode", "mixed", "prefill", "join", "turnover", "handling", "handling_over_ray")
"""Tables that do not depend on what the trainer learns."""
ALIKE = ("gpu", "model", "dtype", "backend", "serves_adapters", "host")
POINTS = ("running", "rollouts", "tokens", "joining", "generating", "training", "mode")
"""Columns that identify a row. Contexts are means of what was seen, and differ by fractions of a
token.
"""


class Profiled(NamedTuple):
    """A profile, and the speed of the cores during its measurement."""

    path: Path
    work_time: float
    """Seconds of the reference work of the core watch during the measurement."""


def pooled(
    own: Sequence[Profiled], others: Sequence[Profiled], work_time: float
) -> MeasuredProfile:
    """Return the median of profiles of one kind; tables of replicas are pooled over all kinds.

    Args:
        own: profiles of the requested kind.
        others: profiles of runs whose trainer learns something else.
        work_time: seconds of the reference work at the speed that the result is scaled to.

    Raises:
        ValueError: the profiles are of different machines, models or engines, or have other points.
    """
    kind = [_at(one, work_time) for one in own]
    every = [*kind, *(_at(one, work_time) for one in others)]
    for key in ALIKE:
        if len({str(getattr(one, key)) for one in every}) > 1:
            raise ValueError(f"profiles with different values of {key} cannot be pooled")
    tables = {
        name: _middle([getattr(one, name) for one in (every if name in OF_REPLICAS else kind)])
        for name in TIMED
    }
    shared = [  # tables of a trainer depend on what it learns
        _middle(rows if rows[0].training == 0 else rows[: len(kind)])
        for rows in zip(*(one.sharing for one in every), strict=True)
    ]
    found: MeasuredProfile = replace(kind[0], **tables, sharing=tuple(shared))
    return found


def _at(profiled: Profiled, work_time: float) -> MeasuredProfile:
    profile = read_measured(profiled.path)
    pace = (profile.pace or 1.0) * work_time / profiled.work_time
    return scaled_to_mean_speed(replace(profile, pace=pace))


def _middle(tables: Sequence[Any]) -> Any:
    """Return the row, or rows, with the median seconds and shares of tables that have the same points."""
    first = tables[0]
    if first is None:
        return None
    if not isinstance(first, ProfileTable):
        return type(first)(map(_middle, zip(*tables, strict=True)))
    measured = {key: value for key, value in asdict(first).items() if isinstance(value, tuple)}
    points = [{k: v for k, v in asdict(row).items() if k in POINTS} for row in tables]
    if any(point != points[0] for point in points):
        raise ValueError(f"rows of different points cannot be pooled: {points}")
    medians = {
        key: tuple(map(median, zip(*(getattr(row, key) for row in tables), strict=True)))
        for key in measured
    }
    return replace(first, **medians)
