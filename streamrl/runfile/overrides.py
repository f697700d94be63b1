"""Replace keys of a run file's table: `--set rollout.replicas=8`."""

from __future__ import annotations

import tomllib
from typing import Any


def override(table: dict[str, Any], override: str) -> None:
    """Set one dotted key, such as `rollout.replicas=8` or `cluster.links.0.latency=20 ms`."""
    key, separator, text = override.partition("=")
    *parents, last = key.strip().split(".")
    if not separator or not all([*parents, last]):
        raise ValueError(f"--set {override!r} must read key=value")
    place: Any = table
    for depth, part in enumerate(parents):
        place = _enter(place, part, ".".join(parents[: depth + 1]))
    if not isinstance(place, dict):
        raise ValueError(f"--set {key}: name a key inside an entry of this list")
    place[last] = _read_value(text.strip())


def _enter(place: Any, part: str, path: str) -> Any:
    if isinstance(place, list):
        if not part.isdigit() or int(part) >= len(place):
            raise ValueError(f"--set {path}: no entry {part!r} in a list of {len(place)}")
        return place[int(part)]
    inner = place.setdefault(part, {})
    if not isinstance(inner, dict | list):
        raise ValueError(f"--set {path}: {inner!r} is no table")
    return inner


def _read_value(text: str) -> object:
    """Read a TOML value; what is none is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
