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
Count: TypeAlias = Annotated[int, Meta(ge=0, le=10**15)]
Ordinal: TypeAlias = Annotated[int, Meta(ge=1, le=10**15)]
"""A number in a list, from 1."""
Interval: TypeAlias = tuple[Number, Number]
"""Least and most."""
Setting: TypeAlias = str | bool | Annotated[int, Meta(ge=-(10**15), le=10**15)] | Number
"""The value of a key of a run file."""
