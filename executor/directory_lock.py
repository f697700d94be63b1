"""Lock a directory for one process, own a temporary one, and say who may read its files.

The kernel releases the lock when the process ends. Processes that inherit the mark of a temporary directory end with it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO

LOCK = "lock"
OWNER, PREFIX = ".streamrl-owner", "streamrl-"
"""The lock of a temporary directory, and the start of its name. Run directories have another lock, so none is removed,
whatever it is called.
"""
MARK = "STREAMRL_OWNED_DIRECTORY"
"""Environment variable with the path of a temporary directory, for processes that must end with it."""
END_TIME = 2.0
"""Seconds in which marked processes that start others meanwhile are killed."""
LOOK_TIME = 0.01
"""Seconds between two looks for them."""
HIDDEN: Mapping[str, int] = MappingProxyType({"owner": 0o077, "group": 0o027, "everyone": 0o022})
"""By `execute.readers`: the permissions that new files lack (the umask)."""


@contextlib.contextmanager
def readable_by(readers: str, directory: Path) -> Iterator[None]:
    """Within this context, this process and those that it starts make files for these readers alone.

    A directory that exists, perhaps with files for more readers, is closed to the others too.

    Raises:
        ValueError: its permissions cannot be changed.
    """
    before, mode = os.umask(HIDDEN[readers]), 0o777 & ~HIDDEN[readers]
    try:
        if directory.is_dir() and stat.S_IMODE(directory.stat().st_mode) != mode:
            try:
                directory.chmod(mode)
            except OSError as error:
                raise ValueError(
                    f"{directory}: its permissions cannot be changed to {mode:o} (execute.readers = {readers!r}): "
                    f"{error.strerror}; name a directory of your own, or to resume a copy of it"
                ) from None
        yield
    finally:
        os.umask(before)


class DirectoryLock:
    """The lock of a directory, which this process may hold."""

    def __init__(self, directory: Path, name: str = LOCK) -> None:
        self._path = directory / name
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


class OwnedDirectory:
    """A new temporary directory that only this user can open.

    If its owner dies before `remove`, the next owner of one in the same place removes it.
    """

    def __init__(self, name: str, parent: Path | None = None) -> None:
        """Create it, and remove those whose owners have died.

        Args:
            name: its purpose; letters, digits, `_`, `-` and `.`.
            parent: where it is; by default the directory for temporary files.
        """
        parent = parent or Path(tempfile.gettempdir())
        remove_abandoned(parent)
        unlocked = Path(tempfile.mkdtemp(prefix=f".{PREFIX}{name}-", dir=parent))
        self._lock = DirectoryLock(unlocked, OWNER)
        self._lock.take()
        self.path = unlocked.rename(parent / unlocked.name.removeprefix("."))

    @property
    def mark(self) -> dict[str, str]:
        """Return the environment variable of processes that must end with the directory, wherever they are."""
        return {MARK: str(self.path)}

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *error: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Kill the marked processes, and remove the directory with its content; repeated calls do nothing."""
        kill_marked(str(self.path))
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()


def remove_abandoned(parent: Path) -> None:
    """Remove temporary directories of this user whose owners have died, and kill the processes with their marks."""
    for path in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # its owner may remove it meanwhile
            status = path.lstat()  # anyone may make a link of that name
            is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
            if is_own and is_abandoned(path, OWNER):
                if os.environ.get(MARK) != str(path):
                    kill_marked(str(path))
                shutil.rmtree(path, ignore_errors=True)


def kill_marked(directory: str) -> None:
    """Kill all processes with the mark of a directory except this one, until none is left or `END_TIME` is over.

    They are found in /proc by their environment, whatever session or parent they have. A process that was started
    with other variables is not found.
    """
    mark, until = f"{MARK}={directory}".encode(), time.monotonic() + END_TIME
    while (found := _marked(mark)) and time.monotonic() < until:
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(LOOK_TIME)


def _marked(mark: bytes) -> list[int]:
    """Return the processes whose environment has a variable, except this one; a dead process has none."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # of another user, or it has ended
            if mark in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return [pid for pid in found if pid != os.getpid()]


def is_abandoned(directory: Path, name: str = LOCK) -> bool:
    """Return whether the process that locked a directory is dead; False if that is unknown."""
    try:
        descriptor = _open_lock(directory / name, os.O_RDONLY)
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
