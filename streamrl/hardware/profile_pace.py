"""Seconds as a machine takes them on average: a profile's medians are those of its usual pace, a run has all of its paces."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from msgspec.structs import asdict, replace

from streamrl.hardware.machine_profile import MeasuredProfile
from streamrl.hardware.profile_table import ProfileTable

TIMED = (
    "decode",
    "mixed",
    "prefill",
    "join",
    "train",
    "score",
    "reward",
    "call",
    "optimizer",
    "push",
    "load",
    "relay",
    "turnover",
    "handling",
    "handling_over_ray",
    "push_over_ray",
)
"""Tables of seconds. Streams, which `turnover` is of, last a second and spells several: their median has the usual pace too."""


def pace_of(readings: Iterable[Mapping[Any, Sequence[float]]]) -> float:
    """Return what all readings took over what they would have at the medians of their points.

    A host that others use as well is slower in spells, which medians leave out; readings of one point are too few to say
    how often, all of them together are not. The first reading of a point is left out: it loads what no later one does.

    Args:
        readings: seconds by point, of each operation.
    """
    points = [seconds for table in readings for seconds in table.values() if len(seconds) > 1]
    usual = sum((len(seconds) - 1) * median(seconds) for seconds in points)
    return sum(sum(seconds[1:]) for seconds in points) / usual if usual else 1.0


def at_its_pace(profile: MeasuredProfile) -> MeasuredProfile:
    """Return a profile whose seconds are those of the machine's mean pace; as it is where that was not measured."""
    if profile.pace is None:
        return profile
    tables = {name: _scaled(getattr(profile, name), profile.pace) for name in TIMED}
    found: MeasuredProfile = replace(profile, pace=1.0, **tables)
    return found


def _scaled(table: Any, pace: float) -> Any:
    """Return a row, or rows, with all that is in seconds so many times as long; None of what was not measured."""
    if table is None:
        return None
    if not isinstance(table, ProfileTable):
        return type(table)(_scaled(row, pace) for row in table)
    seconds = {key: value for key, value in asdict(table).items() if isinstance(value, tuple)}
    longer = {key: tuple(pace * one for one in value) for key, value in seconds.items()}
    return replace(table, **longer)
