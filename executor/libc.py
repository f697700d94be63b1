"""Call Linux functions that Python lacks, through the C library; errors become `OSError`."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1
"""Option of prctl: send this process a signal when the thread that started it dies."""

ARG_START = 45
"""Index of arg_start in the fields after the name in /proc/self/stat. It is field 48; field 3 has index 0."""

_LIBRARY = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, *arguments: object) -> int:
    """Set an option of this process in the kernel; the manual page has the options and arguments."""
    padding = (0,) * (4 - len(arguments))
    return _checked("prctl", _LIBRARY.prctl(option, *arguments, *padding))


def syscall(number: int, *arguments: object) -> int:
    """Make a system call for which the C library has no function."""
    return _checked(f"system call {number}", _LIBRARY.syscall(number, *arguments))


def madvise(address: int, size: int, advice: int) -> None:
    """Advise the kernel how memory will be used; ignore errors, because the advice is optional."""
    _LIBRARY.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), advice)


def show_command_line(words: Sequence[str]) -> None:
    """Replace the command line that `ps` shows for this process; truncate it to the length of the old one.

    The command line is in the memory of the process, between arg_start and arg_end (proc(5)).
    """
    fields = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace")
    start, end = map(int, fields.rpartition(")")[2].split()[ARG_START : ARG_START + 2])
    data = b"\0".join(os.fsencode(word) for word in words)[: end - start - 1]
    ctypes.memmove(start, data.ljust(end - start, b"\0"), end - start)


def _checked(name: str, result: int) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return result


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent dies; does nothing except on Linux."""
    if sys.platform == "linux":
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
