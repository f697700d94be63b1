"""Own a directory in shared memory, and name the directory of each weight version in it."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from streamrl.executor.directory_lock import DirectoryLock, is_abandoned

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "streamrl-"


class SharedDirectory:
    """A fresh directory that only this user can open, in shared memory where there is one.

    It is gone once you remove it. Where you die before that it stays until somebody makes the next one, which removes
    all that have no owner any more.
    """

    def __init__(self, name: str) -> None:
        """Make the directory.

        Args:
            name: what it is for, in letters, digits, `_`, `-` and `.`.

        Raises:
            ValueError: the name has others.
        """
        if not re.fullmatch(r"[\w.-]+", name):
            raise ValueError(f"name must be letters, digits, '_', '-' or '.', got {name!r}")
        usable = SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK | os.X_OK)
        parent = SHARED_MEMORY if usable else Path(tempfile.gettempdir())
        remove_abandoned(parent)
        unlocked = Path(tempfile.mkdtemp(prefix=f".{PREFIX}{name}-", dir=parent))
        self._lock = DirectoryLock(unlocked)
        self._lock.take()
        self.path = unlocked.rename(parent / unlocked.name.removeprefix("."))

    def remove(self) -> None:
        """Remove it with all that lies in it; once is enough."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()


def remove_abandoned(parent: Path) -> None:
    """Remove the directories of this user whose owners are dead."""
    for path in parent.glob(f"{PREFIX}*"):
        with suppress(FileNotFoundError):  # its owner has removed it meanwhile
            if path.stat().st_uid == os.getuid() and is_abandoned(path):
                shutil.rmtree(path, ignore_errors=True)


def version_directory(directory: Path, version: int) -> Path:
    """Return where the buckets of `version` lie."""
    return directory / f"v{version:06d}"


def remove_version(directory: Path, version: int) -> None:
    """Remove the buckets of `version`; a version that is not there is removed already."""
    target = version_directory(directory, version)
    if target.exists():
        shutil.rmtree(target)
