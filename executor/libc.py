"""What Linux offers and Python has no name for, by the C library; errors become `OSError`."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1
"""The signal that a process gets when the thread that started it dies."""

ARG_START = 45
"""Place of arg_start among what follows the name in /proc/self/stat: field 48, and the third is the first there."""

_LIBRARY = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, *arguments: object) -> int:
    """Change how the kernel treats this process, by number and arguments of its manual page."""
    padding = (0,) * (4 - len(arguments))
    return _checked("prctl", _LIBRARY.prctl(option, *arguments, *padding))


def syscall(number: int, *arguments: object) -> int:
    """Make a system call that the C library has no function for."""
    return _checked(f"system call {number}", _LIBRARY.syscall(number, *arguments))


def madvise(address: int, size: int, advice: int) -> None:
    """Tell the kernel how memory will be used; whether it does as advised is its own affair."""
    _LIBRARY.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), advice)


def show_command_line(words: Sequence[str]) -> None:
    """Show other words than this process was started with where processes are listed, as far as they fit.

    They stand in its memory, between arg_start and arg_end (proc(5)).
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
    """Let the kernel kill this process with the one that started it, whatever either does; only Linux knows how."""
    if sys.platform == "linux":
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
