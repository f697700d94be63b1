"""A table of the run file, as every part of it is one."""

from __future__ import annotations

import msgspec


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the run file; unknown keys are refused."""
