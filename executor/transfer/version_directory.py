"""Where the buckets of a weight version lie."""

from __future__ import annotations

import shutil
from pathlib import Path


def version_directory(directory: Path, version: int) -> Path:
    """Return where the buckets of `version` lie."""
    return directory / f"v{version:06d}"


def remove_version(directory: Path, version: int) -> None:
    """Remove the buckets of `version`; a version that is not there is removed already."""
    target = version_directory(directory, version)
    if target.exists():
        shutil.rmtree(target)
