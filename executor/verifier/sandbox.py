"""Restrict a process permanently before it evaluates text that a model wrote.

A scorer may evaluate an answer, so an answer is a program. These limits apply to its process:

| resource                | limit                                             | enforced by                      |
|-------------------------|---------------------------------------------------|----------------------------------|
| CPU time, memory        | the limits of `[verifier]`                        | rlimits, on every system         |
| files                   | no writing; reading only of Python and libraries  | rlimits, seccomp, Landlock       |
| network, processes      | no socket, fork, thread, signal or trace          | seccomp                          |
| environment, open files | empty; only its two pipes                         | the way in which it is started   |
| wall-clock time         | `verifier.time_limit`, then it is killed          | the process that started it      |

This needs no privileges. Namespaces would add nothing, and most containers do not allow them. An answer can influence
only its own score, within the scorer's bounds. Without seccomp or Landlock workers run all the same, and `find_gaps`
reports what is open then.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable
from math import ceil
from pathlib import Path
from typing import NamedTuple

from streamrl.executor.libc import prctl
from streamrl.executor.verifier import landlock, seccomp

OPEN_FILES = 64  # a scorer with late imports has two or three open
PR_SET_NO_NEW_PRIVS = 38


class SandboxLimits(NamedTuple):
    """Limits of grading one completion."""

    time: float
    """Seconds of wall-clock time; the limit of CPU time is twice as high."""
    memory: float
    """Bytes of address space, in addition to those of the scorer itself."""


def find_gaps() -> list[str]:
    """Return the restrictions that this system cannot enforce; empty if it enforces all."""
    gaps = []
    if not seccomp.is_available():
        gaps.append(
            "no seccomp: an answer may use the network, start processes, and end this user's processes"
        )
    if not landlock.is_available():
        gaps.append("no Landlock: an answer may read this user's files, including keys and weights")
    return gaps


class Sandbox:
    """Prepared once; each worker enters it."""

    def __init__(self, limits: SandboxLimits, roots: Iterable[Path]) -> None:
        self._limits = limits
        self._filter = seccomp.program() if seccomp.is_available() else None
        self._rules = landlock.make_ruleset(roots) if landlock.is_available() else None

    @property
    def files(self) -> list[int]:
        """Return the file descriptors that `enter` needs."""
        return [] if self._rules is None else [self._rules]

    def enter(self) -> None:
        """Apply the limits to this process until it ends.

        Raises:
            OSError: the kernel refused.
        """
        os.umask(0o077)
        self._limit()
        if self._rules is not None or self._filter is not None:
            prctl(PR_SET_NO_NEW_PRIVS, 1)
        if self._rules is not None:
            landlock.apply(self._rules)
            os.close(self._rules)
        if self._filter is not None:
            seccomp.apply(self._filter)

    def _limit(self) -> None:
        for limit, most in (
            (resource.RLIMIT_CPU, ceil(2 * self._limits.time)),
            (resource.RLIMIT_AS, _address_space() + int(self._limits.memory)),
            (resource.RLIMIT_FSIZE, 0),
            (resource.RLIMIT_NOFILE, OPEN_FILES),
            (resource.RLIMIT_NPROC, 0),
            (resource.RLIMIT_CORE, 0),
        ):
            _, hard = resource.getrlimit(limit)
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(limit, (most, most))


def _address_space() -> int:
    """Return this process's address space in bytes; 0 without /proc."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[0]) * resource.getpagesize() if statm.exists() else 0
