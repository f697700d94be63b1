"""What a process gives up for good before it looks at what a model wrote.

A scorer may evaluate an answer, so an answer is a program, and it has its process to itself:

what                          it gets                                              kept by
CPU, memory                   the limits of `[verifier]`, and no more              rlimits, on every system
files                         none to write; Python's own and libraries' to read   rlimits, seccomp, Landlock
network, other processes      none: no socket, fork, thread, signal or trace       seccomp
environment, open files       none but its two pipes                               how it is started
wall-clock time               `verifier.time_limit`, then it is killed             the process that started it

None of this needs rights: namespaces, which most containers refuse, would add nothing to it. What is left to an
answer that is evaluated is its own score, within the bounds of its scorer, and no other rollout's. Where seccomp or Landlock is
missing workers go on without, and `find_gaps` says what is open then.
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

OPEN_FILES = 64  # a scorer that imports a module late has two or three open
PR_SET_NO_NEW_PRIVS = 38


class SandboxLimits(NamedTuple):
    """What one completion may take."""

    time: float
    """Seconds, of the clock on the wall and of a CPU."""
    memory: float
    """Bytes of address space beside those of the scorer itself."""


def find_gaps() -> list[str]:
    """Return what this system cannot keep from an answer that a scorer evaluates, nothing where it is kept."""
    gaps = []
    if not seccomp.is_available():
        gaps.append(
            "no seccomp: it may use the network, start processes, and end those of its user"
        )
    if not landlock.is_available():
        gaps.append("no Landlock: it may read its user's files, keys and weights among them")
    return gaps


class Sandbox:
    """Holds processes to limits; prepared once, entered by each of them."""

    def __init__(self, limits: SandboxLimits, roots: Iterable[Path]) -> None:
        self._limits = limits
        self._filter = seccomp.program() if seccomp.is_available() else None
        self._rules = landlock.make_ruleset(roots) if landlock.is_available() else None

    @property
    def files(self) -> list[int]:
        """File descriptors that `enter` needs open."""
        return [] if self._rules is None else [self._rules]

    def enter(self) -> None:
        """Hold this process to the limits from now on, for as long as it lives.

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
    """Return the bytes of address space that this process has; 0 where there is no /proc to tell."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[0]) * resource.getpagesize() if statm.exists() else 0
