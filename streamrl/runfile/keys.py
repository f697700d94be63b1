"""Dotted keys of a run file, as errors name them and `--set` takes them: `cluster.links.0.latency`."""

from __future__ import annotations

import json
import re
from typing import Any

_PART = re.compile(r'"(?:[^"\\]|\\.)*"|[^."]+')
_BARE = re.compile(r"[A-Za-z0-9_-]+")


def join_key(parent: str, name: str | int) -> str:
    """Return the key of an entry of a table or list; as in TOML a name with a dot or a space is quoted."""
    part = str(name)
    if not _BARE.fullmatch(part):
        part = json.dumps(part, ensure_ascii=not part.isprintable())
    return f"{parent}.{part}" if parent else part


def pool_key(pool: str, name: str) -> str:
    """Return the key of one thing that a pool says."""
    return join_key(join_key("cluster.pools", pool), name)


def split_key(key: str) -> list[str]:
    """Return the names that a dotted key is made of.

    Raises:
        ValueError: the key is empty, or has an empty name or an open quote.
    """
    parts = _PART.findall(key)
    if not parts or ".".join(parts) != key:
        raise ValueError(f"{key!r} is no dotted key")
    return [json.loads(part) if part.startswith('"') else part for part in parts]


def place_of(table: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    """Return the table that a key stands in, which is made where there is none, and its name there.

    For keys that the project spells out itself: no name in them is quoted, none is of a list.
    """
    *parents, last = key.split(".")
    for parent in parents:
        table = table.setdefault(parent, {})
    return table, last
