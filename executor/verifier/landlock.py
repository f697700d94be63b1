"""Restrict which files a worker may open: only those below given directories, and only for reading.

Landlock (Linux 5.13) needs no privileges and no namespaces, and applies until the process ends. All other files cannot
be opened: weights, keys, other processes in /proc, devices.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Iterable
from pathlib import Path

from streamrl.executor.libc import syscall

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # the same on every architecture
ASK_VERSION, BENEATH = 1, 1
READ_FILE, READ_DIRECTORY = 1 << 2, 1 << 3
EVERYTHING = (1 << 13) - 1
"""All rights of Landlock's first version: execute, read, write, create, remove."""


def is_available() -> bool:
    """Return whether the kernel has Landlock and this process may use it."""
    if sys.platform != "linux":
        return False
    try:
        return syscall(CREATE_RULESET, None, ctypes.c_size_t(0), ASK_VERSION) >= 1
    except OSError:
        return False


def make_ruleset(roots: Iterable[Path]) -> int:
    """Return a file descriptor of rules that allow reading files below `roots`, and opening no others.

    Raises:
        OSError: the kernel refused, or a root does not exist.
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
    """Apply the rules to this thread; PR_SET_NO_NEW_PRIVS must be set before.

    Raises:
        OSError: the kernel refused.
    """
    syscall(RESTRICT_SELF, ruleset, 0)
