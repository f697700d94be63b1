"""Restrict which system calls a worker may make: only those for computing and reading files.

A seccomp filter needs no privileges and no namespaces, and applies until the process ends. The other calls are blocked,
so a worker has no sockets, processes, threads or signals. It cannot write files, share memory, or change its limits. A
blocked call fails with ENOSYS, so that C libraries use their fallbacks.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys

from streamrl.executor.libc import prctl

ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""By machine: the column of the tables below, and the kernel's number of the architecture (linux/audit.h)."""
CALLS: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63),
    "write": (1, 64),
    "close": (3, 57),
    "stat": (4, None),
    "fstat": (5, 80),
    "lstat": (6, None),
    "poll": (7, None),
    "lseek": (8, 62),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "brk": (12, 214),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "pread64": (17, 67),
    "readv": (19, 65),
    "writev": (20, 66),
    "access": (21, None),
    "sched_yield": (24, 124),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "nanosleep": (35, 101),
    "alarm": (37, None),
    "setitimer": (38, 103),
    "getpid": (39, 172),
    "exit": (60, 93),
    "uname": (63, 160),
    "getcwd": (79, 17),
    "readlink": (89, None),
    "gettimeofday": (96, 169),
    "getrusage": (98, 165),
    "sysinfo": (99, 179),
    "times": (100, 153),
    "getuid": (102, 174),
    "getgid": (104, 176),
    "geteuid": (107, 175),
    "getegid": (108, 177),
    "sigaltstack": (131, 132),
    "gettid": (186, 178),
    "futex": (202, 98),
    "sched_getaffinity": (204, 123),
    "getdents64": (217, 61),
    "restart_syscall": (219, 128),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115),
    "exit_group": (231, 94),
    "newfstatat": (262, 79),
    "readlinkat": (267, 78),
    "faccessat": (269, 48),
    "ppoll": (271, 73),
    "getrandom": (318, 278),
    "statx": (332, 291),
    "faccessat2": (439, 439),
}
"""Numbers of the calls that are allowed with all arguments (asm/unistd.h)."""
OPENING: dict[str, tuple[int | None, int | None, int]] = {
    "open": (2, None, 1),
    "openat": (257, 56, 2),
}
"""Numbers of the calls that open files, and the index of their flags; allowed for reading only."""
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

ALLOW, FAIL = 0x7FFF0000, 0x00050000 | errno.ENOSYS
INSTRUCTION = "=HBBI"
LOAD, EQUAL, ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06  # of classic BPF (linux/filter.h)
NUMBER, MACHINE, ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data, in bytes
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2


class _Program(ctypes.Structure):
    """The C type struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def is_available() -> bool:
    """Return whether this architecture is listed, and the kernel accepts filters."""
    if sys.platform != "linux" or platform.machine() not in ARCHITECTURES:
        return False
    try:
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, None)
    except OSError as error:
        return error.errno == errno.EFAULT  # the kernel tried to read the (missing) filter
    return False


def program() -> bytes:
    """Return the filter for this machine, as instructions of classic BPF."""
    column, architecture = ARCHITECTURES[platform.machine()]
    code = [(LOAD, 0, 0, MACHINE), (EQUAL, 1, 0, architecture), (RETURN, 0, 0, FAIL)]
    code.append((LOAD, 0, 0, NUMBER))
    for numbers in CALLS.values():
        if (number := numbers[column]) is not None:
            code += [(EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    for *both, flags in OPENING.values():
        if (number := both[column]) is not None:
            code += [(EQUAL, 0, 4, number), (LOAD, 0, 0, ARGUMENTS + 8 * flags)]
            code += [(ANY_BIT, 0, 1, WRITING), (RETURN, 0, 0, FAIL), (RETURN, 0, 0, ALLOW)]
    code.append((RETURN, 0, 0, FAIL))
    return b"".join(struct.pack(INSTRUCTION, *instruction) for instruction in code)


def apply(program: bytes) -> None:
    """Apply the filter to this thread; PR_SET_NO_NEW_PRIVS must be set before.

    Raises:
        OSError: the kernel refused.
    """
    filter = _Program(len(program) // struct.calcsize(INSTRUCTION), program)
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(filter))
