"""The files that a worker may open: those below given directories, for reading.

Landlock (Linux 5.13) needs no rights and no namespaces, and lasts as long as the process. What is not named
cannot be opened: weights, keys, other processes in /proc, devices.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Iterable
from pathlib import Path

from streamrl.executor.libc import syscall

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # on every architecture
ASK_VERSION, BENEATH = 1, 1
READ_FILE, READ_DIRECTORY = 1 << 2, 1 << 3
EVERYTHING = (
    1 << 13
) - 1  # all that the first version knows: executing, reading, writing, making, removing


def is_available() -> bool:
    """Whether the kernel has Landlock, and lets this process use it."""
    if sys.platform != "linux":
        return False
    try:
        return syscall(CREATE_RULESET, None, ctypes.c_size_t(0), ASK_VERSION) >= 1
    except OSError:
        return False


def make_ruleset(roots: Iterable[Path]) -> int:
    """Return a file descriptor of rules that let files below `roots` be read, and no others be opened.

    Raises:
        OSError: the kernel refused, or a root is not there.
    """
    handled = struct.pack("=Q", EVERYTHING)
    ruleset = syscall(CREATE_RULESET, handled, ctypes.c_size_t(len(handled)), 0)
    for root in roots:
        directory = os.open(root, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", READ_FILE | READ_DIRECTORY, directory)
        syscall(ADD_RULE, ruleset, BENEATH, rule, 0)
        os.close(directory)
    return ruleset


def apply(ruleset: int) -> None:
    """Hold this thread to the rules from now on; it must have given up new privileges before.

    Raises:
        OSError: the kernel refused.
    """
    syscall(RESTRICT_SELF, ruleset, 0)
