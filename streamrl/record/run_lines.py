"""The lines that a run leaves for each step and each rollout, and which of them count.

metrics.jsonl and rollouts.jsonl are only ever added to. A trainer that is lost, or a driver that died and resumed, goes
back to its last checkpoint and makes the steps after it again: a line `{"rolled_back_to": version, …}` says so, and
what stands before it and came after that version counts no more.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

METRICS, ROLLOUTS = "metrics.jsonl", "rollouts.jsonl"
ROLLED_BACK_TO = "rolled_back_to"
"""Key of a line that is no step and no rollout."""

Line = dict[str, Any]


def read_metrics(directory: Path) -> list[Line]:
    """Return a line for each step of a run that stayed, in order.

    Raises:
        ValueError: there is no such file, or a line of it is no JSON object.
    """
    kept: list[Line] = []
    for line in _lines(directory / METRICS):
        if ROLLED_BACK_TO not in line:
            kept.append(line)
            continue
        while kept and kept[-1]["step"] > line[ROLLED_BACK_TO]:
            kept.pop()
    return kept


def read_rollouts(directory: Path) -> list[Line]:
    """Return a line for each verified rollout of a run that no resume took back, in order.

    Raises:
        ValueError: there is no such file, or a line of it is no JSON object.
    """
    kept: list[Line] = []
    for line in _lines(directory / ROLLOUTS):
        if ROLLED_BACK_TO not in line:
            kept.append(line)
            continue
        done, ahead = line["groups_done"], frozenset(line["done_ahead"])
        kept = [each for each in kept if each["group"] < done or each["group"] in ahead]
    return kept


def _lines(path: Path) -> Iterator[Line]:
    """Yield every line; a last one that a crash cut short is left out."""
    try:
        *lines, _ = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    for number, line in enumerate(lines, start=1):
        try:
            yield msgspec.json.decode(line, type=Line)
        except msgspec.MsgspecError as error:
            raise ValueError(f"{path}:{number}: not a line of a run: {error}") from None
