"""Trainers that joined a run while it went on: what a resume has to bring back beside the run file's.

attached.json    sections of those that the run file does not have, in the order in which they joined, and who is away
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from streamrl.runfile.config import Run
from streamrl.runfile.reading import with_follower

ATTACHED = "attached.json"


class Attached(msgspec.Struct, frozen=True):
    """What is in that file."""

    followers: tuple[dict[str, Any], ...] = ()
    """Sections as JSON has them."""
    away: tuple[str, ...] = ()
    """Names of trainers that were detached, those of the run file among them."""
    promoted: str = ""
    """Name of the one that took the leading trainer's place; nothing where none did."""
    leads_from: int = 0
    """The version at which it did."""


def read_attached(directory: Path) -> Attached:
    """Return what a run directory has; nothing where nobody joined or left.

    Raises:
        ValueError: it cannot be read.
    """
    path = directory / ATTACHED
    try:
        return msgspec.json.decode(path.read_bytes(), type=Attached)
    except FileNotFoundError:
        return Attached()
    except (OSError, msgspec.MsgspecError) as error:
        raise ValueError(f"{path}: cannot be read, so the run cannot be resumed: {error}") from None


def write_attached(directory: Path, attached: Attached) -> None:
    """Write it, whole or not at all."""
    replace_file(directory / ATTACHED, msgspec.json.encode(attached))


def with_attached(run: Run, directory: Path) -> Run:
    """Return the run file with those that joined, as far as it has not got them itself.

    Raises:
        ValueError: what is written there cannot be read.
    """
    for section in read_attached(directory).followers:
        if section.get("name") not in run.follower_names:
            run = with_follower(run, section)
    return run


def replace_file(path: Path, data: bytes) -> None:
    """Let a file hold `data`, for whoever reads it meanwhile all of the old or all of the new."""
    partial = path.with_name(f".{path.name}.tmp")
    partial.write_bytes(data)
    partial.rename(path)
