"""A table of a profile, as every part of the files under `profiles/` is one."""

from __future__ import annotations

import msgspec


class ProfileTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of a profile; unknown keys are refused."""
