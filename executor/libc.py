"""Call Linux functions that Python lacks, through the C library; errors become `OSError`."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import stat
import struct
import sys
import threading
from collections.abc import Iterator, Sequence
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


def continue_without_parent() -> None:
    """Let the kernel continue this process, if it is stopped, when its parent dies; does nothing except on Linux.

    It then sees that its connection is closed, and ends in its own way.
    """
    if sys.platform == "linux":
        prctl(PR_SET_PDEATHSIG, signal.SIGCONT)


SO_ATTACH_FILTER = 26
"""Option of a socket (asm-generic/socket.h): drop the packets that a program of classic BPF does not accept."""
DROP_ALL = struct.pack("=HBBI", 0x06, 0, 0, 0)
"""The program "return 0" (linux/filter.h)."""


def refuse_connections(descriptor: int) -> None:
    """Let the kernel drop all packets for a listening socket; its earlier connections stay as they are.

    gloo keeps listening sockets that it no longer needs, and aborts the process if others connect until no file
    descriptor is free. Only Linux has such filters.
    """
    if sys.platform != "linux":
        return
    program = ctypes.create_string_buffer(DROP_ALL)
    filter = struct.pack("HP", 1, ctypes.addressof(program))
    with socket.socket(fileno=os.dup(descriptor)) as listening:
        listening.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, filter)


@contextlib.contextmanager
def closed_afterwards(keep_port: int | None = None) -> Iterator[None]:
    """Refuse connections to the TCP sockets that began to listen in this context, except to `keep_port`, once it ends.

    Contexts of several threads end together, because their groups may wait for each other.
    """
    with _CONTEXTS:
        if not _OPEN:
            _EARLIER.update(listening_sockets())
        _OPEN.append(keep_port)
    try:
        yield
    finally:
        with _CONTEXTS:
            _OPEN.remove(keep_port)
            if not _OPEN:
                for descriptor, port in listening_sockets().items():
                    if descriptor not in _EARLIER and port != keep_port:
                        refuse_connections(descriptor)
                _EARLIER.clear()


_CONTEXTS = threading.Lock()
_OPEN: list[int | None] = []
_EARLIER: dict[int, int] = {}
"""Sockets that listened before the first of the open contexts."""


def listening_sockets() -> dict[int, int]:
    """Return the TCP sockets on which this process listens: the port of each descriptor. Empty except on Linux."""
    found = {}
    for path in Path("/proc/self/fd").iterdir() if sys.platform == "linux" else ():
        number = int(path.name)
        with contextlib.suppress(OSError):  # closed meanwhile
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                with socket.socket(fileno=os.dup(number)) as each:
                    is_tcp = each.family in (socket.AF_INET, socket.AF_INET6)
                    if is_tcp and each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        found[number] = int(each.getsockname()[1])
    return found
