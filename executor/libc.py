"""What Linux offers and Python has no name for, by the C library; errors become `OSError`."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""The signal that a process gets when the thread that started it dies."""

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


def _checked(name: str, result: int) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return result


def die_with_parent() -> None:
    """Let the kernel kill this process with the one that started it, whatever either does; only Linux knows how."""
    if sys.platform == "linux":
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
