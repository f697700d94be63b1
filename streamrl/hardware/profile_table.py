"""A table of a profile, as every part of the files under `profiles/` is one."""

from __future__ import annotations

import math

import msgspec


class ProfileTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of a profile; unknown keys are refused."""


def check_positive(figures: msgspec.Struct, zero_allowed: tuple[str, ...] = ()) -> None:
    """Raise `ValueError` naming the first number among the fields that is not positive and finite."""
    for key in figures.__struct_fields__:
        value = getattr(figures, key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if not (math.isfinite(value) and (value > 0 or (value == 0 and key in zero_allowed))):
            kind = "finite and not negative" if key in zero_allowed else "positive and finite"
            raise ValueError(f"{key} must be {kind}, got {value}")
