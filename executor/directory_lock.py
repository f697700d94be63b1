"""Lock a directory for one process, and say who may read its files.

The kernel releases the lock when the process ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO

LOCK = "lock"
HIDDEN: Mapping[str, int] = MappingProxyType({"owner": 0o077, "group": 0o027, "everyone": 0o022})
"""By `execute.readers`: the permissions that new files lack (the umask)."""


@contextlib.contextmanager
def readable_by(readers: str, directory: Path) -> Iterator[None]:
    """Within this context, this process and those that it starts make files for these readers alone.

    A directory that exists, perhaps with files for more readers, is closed to the others too.
    """
    before = os.umask(HIDDEN[readers])
    try:
        if directory.is_dir():
            directory.chmod(0o777 & ~HIDDEN[readers])
        yield
    finally:
        os.umask(before)


class DirectoryLock:
    """The lock of a directory, which this process may hold."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOCK
        self._file: IO[str] | None = None

    def take(self) -> str:
        """Take the lock and write this process's id to it; if another process holds it, return that id.

        On a file system without locks every process gets the lock.
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
        file = os.fdopen(_open_lock(self._path, os.O_RDWR | os.O_CREAT), "a+", encoding="utf-8")
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
        """Take the lock if its file exists; write nothing."""
        return self._take() if self._path.exists() else ""

    def release(self) -> None:
        """Release the lock."""
        if self._file is not None:
            self._file.close()
            self._file = None


def is_abandoned(directory: Path) -> bool:
    """Return whether the process that locked a directory is dead; False if that is unknown."""
    try:
        descriptor = _open_lock(directory / LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _open_lock(path: Path, flags: int) -> int:
    """Open the file of a lock, which others may have made, and return its descriptor.

    Raises:
        OSError: the path is a link or a special file; nothing is written to what it points at.
    """
    descriptor = os.open(
        path, flags | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666
    )
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "a lock must be a regular file; remove this one", str(path))
    return descriptor
