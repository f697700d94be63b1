"""A directory that one process has at a time: what it holds is gone with it, however it ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO

LOCK = "lock"


class DirectoryLock:
    """The lock of a directory, taken or not."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOCK
        self._file: IO[str] | None = None

    def take(self) -> str:
        """Take the lock and sign it, unless it is taken; return who else holds it, as its process id, or nothing.

        A file system that knows no locks lets everybody have it.
        """
        holder = self._take()
        if self._file is not None:
            self._file.truncate(0)
            self._file.write(f"{os.getpid()}\n")
            self._file.flush()
        return holder

    def _take(self) -> str:
        if self._file is not None:
            return ""
        file = self._path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with file:
                file.seek(0)
                return file.read().strip() or "unknown"
        except OSError:
            pass
        self._file = file
        return ""

    def take_if_there(self) -> str:
        """Take the lock of a directory that had one before; nothing is written."""
        return self._take() if self._path.exists() else ""

    def release(self) -> None:
        """Let others have the directory."""
        if self._file is not None:
            self._file.close()
            self._file = None


def is_abandoned(directory: Path) -> bool:
    """Whether a directory had an owner, which is dead; False where that is not sure."""
    try:
        with (directory / LOCK).open(encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def replace_file(path: Path, data: bytes) -> None:
    """Let a file hold `data`, for whoever reads it meanwhile all of the old or all of the new."""
    partial = path.with_name(f".{path.name}.tmp")
    partial.write_bytes(data)
    partial.rename(path)
