"""A run set against another, as `streamrl simulate A.toml --against B.toml -o DIR` leaves it: against.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from streamrl.record.against import Against
from streamrl.report.against_report import verdict

AGAINST_JSON = "against.json"


class AgainstFile(msgspec.Struct, frozen=True, kw_only=True):
    """Two runs, and what is known of their difference."""

    names: tuple[str, str]
    """What A is and what B is, in a line each."""
    against: Against

    def as_json(self) -> dict[str, Any]:
        """Return all figures of the difference, the names and the verdict, as data."""
        told = {"verdict": verdict(self.against), "names": self.names}
        return {**msgspec.to_builtins(self.against), **told}


def write_comparison(comparison: AgainstFile, directory: Path) -> Path:
    """Write against.json to a directory, which is made; return its path.

    Raises:
        ValueError: it cannot be written.
    """
    path = directory / AGAINST_JSON
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(comparison.as_json())))
    except OSError as error:
        raise ValueError(f"{path}: cannot be written: {error.strerror}") from None
    return path


def read_comparison(path: Path) -> AgainstFile:
    """Read against.json; its verdict is said anew from the figures.

    Raises:
        ValueError: the file is missing or holds no comparison.
    """
    try:
        data = path.read_bytes()
        names = msgspec.json.decode(data, type=_Names).names
        return AgainstFile(names=names, against=msgspec.json.decode(data, type=Against))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path}: not a run set against another: {error}") from None


class _Names(msgspec.Struct, frozen=True):
    names: tuple[str, str]
