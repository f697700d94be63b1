"""What a resumed run has otherwise than the leg before it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import msgspec

from streamrl.runfile.config import Run

SAMPLED_WITH = ("model.path", "rollout.temperature", "rollout.max_tokens")
"""What tokens are sampled with: those sampled with another value are of another distribution."""


def changes(before: Run, now: Run) -> dict[str, str]:
    """Return the keys that have other values now, each with both."""
    old, new = (dict(_keys_of(msgspec.to_builtins(run, enc_hook=float))) for run in (before, now))
    keys = dict.fromkeys(chain(old, new))
    return {
        key: f"{key} {old.get(key)!r} -> {new.get(key)!r}"
        for key in keys
        if old.get(key) != new.get(key)
    }


def _keys_of(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield dotted keys with their values."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _keys_of(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
