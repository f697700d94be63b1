"""Types of numbers in recorded files. Decoding refuses a number out of range, such as a negative time or 1e308."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta

MOST = 1e18
"""Largest recorded number. Larger ones overflow in products; a run has fewer seconds, dollars, tokens and bytes."""
Number: TypeAlias = Annotated[float, Meta(ge=-MOST, le=MOST)]
"""A number that may be negative, such as a difference or the end of an interval."""
NotNegative: TypeAlias = Annotated[float, Meta(ge=0, le=MOST)]
Positive: TypeAlias = Annotated[float, Meta(gt=0, le=MOST)]
LEAST_FACTOR, MOST_FACTOR = 1e-4, 1e4
Factor: TypeAlias = Annotated[float, Meta(ge=LEAST_FACTOR, le=MOST_FACTOR)]
"""A ratio of two speeds, in the range of `costs.generation_factor`."""
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=1e7)]
"""Seconds of something that happens within a step, in the range of `framework.step_time`."""
Count: TypeAlias = Annotated[int, Meta(ge=0, le=10**15)]
Ordinal: TypeAlias = Annotated[int, Meta(ge=1, le=10**15)]
"""A number in a list, from 1."""
GroupNumber: TypeAlias = Annotated[int, Meta(ge=0, le=10**9)]
"""The number of a group in draw order. The numbers of its rollouts stay below those of evaluations, 2^40."""
Interval: TypeAlias = tuple[Number, Number]
"""Least and most; see `check_order`."""
Setting: TypeAlias = str | bool | Annotated[int, Meta(ge=-(10**15), le=10**15)] | Number
"""The value of a key of a run file."""


def check_order(interval: Interval | None) -> None:
    """Raise `ValueError` if the ends of an interval are in the wrong order."""
    if interval is not None and interval[0] > interval[1]:
        raise ValueError("interval must be [least, most], got [{:g}, {:g}]".format(*interval))
