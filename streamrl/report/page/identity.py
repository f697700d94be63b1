"""Say when a page was made, by which version, and from which run file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from streamrl.report.page.sources import Sources
from streamrl.runfile.files import encode_run
from streamrl.runfile.reading import read_regular
from streamrl.sim.planner.plan import PLAN_TOML

HASH_DIGITS = 12
"""Hexadecimal digits that are shown of a run file's hash."""


def day_text(day: date, *, has_year: bool = True) -> str:
    """Return a day for people: "28 Nov 2026"."""
    return f"{day.day} {day:%b}" + (f" {day.year}" if has_year else "")


def facts_of(sources: Sources, today: date) -> Iterator[tuple[str, str]]:
    """Yield the date, the version, and the hash of the run file of a page."""
    yield "made", day_text(today)
    yield "streamrl", streamrl_version()
    for name, digest in _run_files(sources):
        yield name, digest[:HASH_DIGITS]
        return


def streamrl_version() -> str:
    """Return the installed version of streamrl, or "unknown" in a checkout without an installation."""
    try:
        return version("streamrl")
    except PackageNotFoundError:
        return "unknown"


def _run_files(sources: Sources) -> Iterator[tuple[str, str]]:
    """Yield a name and the SHA-256 of each run file: plans first, then runs."""
    for made in sources.plans:
        yield f"sha256 of {PLAN_TOML}", _hash(read_regular(made.path.parent / PLAN_TOML))
    for run in sources.runs:
        yield "sha256 of the run file", _hash(_recorded(run.path.parent, encode_run(run.run)))


def _recorded(directory: Path, encoded: bytes) -> bytes:
    """Return the run file that an executed run keeps, or else the one in its trace."""
    kept = directory / "run.json"
    return read_regular(kept) if kept.exists() else encoded


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
