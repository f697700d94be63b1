"""What `streamrl doctor` says: one finding after the other, each with what mends it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

import msgspec

Level = Literal["error", "warning", "ok"]
Topic = Literal[
    "run file", "memory", "divisibility", "batch", "staleness", "link", "versions", "files"
]
TOPICS: tuple[Topic, ...] = (
    *("run file", "memory", "divisibility", "batch"),
    *("staleness", "link", "versions", "files"),
)
"""In the order in which they are shown."""

Changes: TypeAlias = Mapping[str, object]
"""Dotted keys of a run file and their new values; None takes a key away."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at, with its numbers."""

    level: Level
    topic: Topic
    name: str
    """What kind of finding it is, for scripts: "trainer-memory"."""
    text: str
    fix: str = ""
    """What to do; empty where nothing has to be done."""
    changes: Changes = {}
    """The same as keys and values, each tried; empty where no key of the run file mends it."""


def of_part(finding: Finding, side: str, name: str, who: str, own: Callable[[str], str]) -> Finding:
    """Return a finding of a side that was looked at alone as one of the part of the run that it stood for.

    Args:
        finding: of the side.
        side: what its name and text call the side.
        name: what findings of the part begin with.
        who: what texts call the part.
        own: gives a text with the part's own keys.
    """
    text = own(finding.text.removeprefix(f"{side}: "))
    own_name = f"{name}-{finding.name.removeprefix(f'{side}-')}"
    return msgspec.structs.replace(finding, name=own_name, text=f"{who}: {text}")


def is_error(finding: Finding) -> bool:
    """Whether the run cannot go on as the run file says."""
    return finding.level == "error"
