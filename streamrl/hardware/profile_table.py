"""Define the base class of all tables in the files under `profiles/`."""

from __future__ import annotations

import math

import msgspec


class ProfileTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of a profile. Unknown keys are errors."""


def check_positive(figures: msgspec.Struct, zero_allowed: tuple[str, ...] = ()) -> None:
    """Raise `ValueError` for the first number among the fields that is not positive and finite."""
    for key in figures.__struct_fields__:
        value = getattr(figures, key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if not (math.isfinite(value) and (value > 0 or (value == 0 and key in zero_allowed))):
            kind = "finite and not negative" if key in zero_allowed else "positive and finite"
            raise ValueError(f"{key} must be {kind}, got {value}")
