"""Own a directory in shared memory; each weight version has a subdirectory."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from streamrl.executor.directory_lock import OwnedDirectory

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
WATCHDOG = 'trap "" HUP INT TERM; while read -r line; do :; done; rm -rf -- "$0"'
"""Ends at the end of its input, which is the death of the owner and of all processes that have its pipe."""
MORE_SHARED_MEMORY = "start the container with --shm-size, or with --ipc=host (Kubernetes: an emptyDir of medium Memory)"
"""Remedy for a container, which has 64 MB by default (Docker)."""


def free_shared_memory() -> int:
    """Return the bytes of shared memory that this process may still write; 0 if the machine has none."""
    if not SHARED_MEMORY.is_dir() or not os.access(SHARED_MEMORY, os.W_OK | os.X_OK):
        return 0
    return shutil.disk_usage(SHARED_MEMORY).free


class SharedDirectory:
    """A new directory that only this user can open, in shared memory if the machine has it.

    `remove` deletes it. If the owner dies first, a watchdog process deletes it: a shell that reads a pipe until its
    writer, the owner, is gone. If the watchdog dies too, the next owner on this machine deletes it.
    """

    def __init__(self, name: str, room: int = 0, *, on_disk: bool = False) -> None:
        """Create the directory.

        Args:
            name: its purpose; letters, digits, `_`, `-` and `.`.
            room: bytes that will be written to it. If shared memory has less, the directory is on a disk.
            on_disk: whether it is on a disk in any case.

        Raises:
            ValueError: the name has other characters.
        """
        if not re.fullmatch(r"[\w.-]+", name):
            raise ValueError(f"name must be letters, digits, '_', '-' or '.', got {name!r}")
        has_room = not on_disk and free_shared_memory() >= max(1, room)
        parent = SHARED_MEMORY if has_room else Path(tempfile.gettempdir())
        if not has_room:
            warn_of_little_room(name, room)
        self._owned = OwnedDirectory(name, parent)
        self.path = self._owned.path
        self._watchdog = subprocess.Popen(
            ("/bin/sh", "-c", WATCHDOG, str(self.path)),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # signals of the terminal do not reach it
        )

    def remove(self) -> None:
        """Remove the directory with its content; repeated calls do nothing."""
        self._owned.remove()
        if self._watchdog.stdin is not None:
            self._watchdog.stdin.close()
        self._watchdog.kill()
        self._watchdog.wait()


def warn_of_little_room(what: str, room: int) -> None:
    """Log that something of `room` bytes has no room in shared memory, and what to do."""
    if room and SHARED_MEMORY.is_dir():
        logger.warning(
            f"{what} of {room / 1e6:,.0f} MB go through files in {tempfile.gettempdir()}: {SHARED_MEMORY} has room for "
            f"{free_shared_memory() / 1e6:,.0f} MB; {MORE_SHARED_MEMORY}"
        )


def reserve(path: Path, num_bytes: int) -> bool:
    """Create a file with all its memory; return whether there is room for it.

    A file that only has a size gets its memory at the first write, which kills the process if there is none left.
    """
    with path.open("xb") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, max(1, num_bytes))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        else:
            return True
    path.unlink()
    return False


def version_directory(directory: Path, version: int) -> Path:
    """Return the directory with the buckets of `version`."""
    return directory / f"v{version:06d}"


def remove_version(directory: Path, version: int) -> None:
    """Remove the buckets of `version`, if they exist."""
    target = version_directory(directory, version)
    if target.exists():
        shutil.rmtree(target)
