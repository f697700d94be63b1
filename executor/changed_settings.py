"""What a resumed run has otherwise than the leg before it."""

from __future__ import annotations

from streamrl.runfile.config import Run
from streamrl.runfile.reading import values_by_key

SAMPLED_WITH = ("model.path", "rollout.temperature", "rollout.max_tokens")
"""What tokens are sampled with: those sampled with another value are of another distribution."""


def changes(before: Run, now: Run) -> dict[str, str]:
    """Return the keys that have other values now, each with both."""
    old, new = values_by_key(before), values_by_key(now)
    return {
        key: f"{key} {old.get(key)!r} -> {new.get(key)!r}"
        for key in {**old, **new}
        if old.get(key) != new.get(key)
    }
