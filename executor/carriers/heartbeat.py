"""Does a process live? It answers pings, or it computes; one that is stopped, or waits for what never comes, does neither.

Time is counted in pings, so that a controller that was itself stopped for an hour finds its workers alive.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from streamrl.runfile.config import ExecuteConfig

PING_TIME = (
    1.0  # seconds between two pings: far shorter than any patience, far longer than an answer takes
)
PATIENCE = ExecuteConfig().patience
"""Seconds without a sign of life, where nothing else is said."""
FACTOR = 10
"""How many times as long as the longest silence so far a process may be silent, and as `patience` while it starts and
imports what its role needs."""


class Heartbeat:
    """The signs of life of one process, counted in pings; it is told when one is due and when one is answered."""

    def __init__(self, pid: int | None, patience: float) -> None:
        """Begin with a process of this machine, or with one whose CPU time nobody tells."""
        self._pid = pid
        self._patience = patience
        self._num_silent = 0
        """Pings for which there was no sign of life."""
        self._longest = 0.0
        self._has_started = False
        self._is_waiting = False
        self._work_time = 0

    @property
    def silence(self) -> float:
        """Seconds without a sign of life."""
        return self._num_silent * PING_TIME

    @property
    def is_over(self) -> bool:
        """Whether the process has been silent for too long."""
        most = max(self._patience, FACTOR * self._longest)
        return self.silence > (most if self._has_started else FACTOR * self._patience)

    def is_asked_for(self) -> bool:
        """Enter that it is time for a ping; return whether one should be sent, as none waits for its answer."""
        if not self._is_waiting:
            self._is_waiting = True
            return True
        work_time = 0 if self._pid is None else cpu_ticks(self._pid)
        if work_time != self._work_time:
            self._work_time = work_time
            self._num_silent = 0
        else:
            self._num_silent += 1
        return False

    def answer(self, has_started: bool = True) -> None:
        """Enter that the last ping was answered, and whether by a process that has made its role."""
        if self._has_started:
            self._longest = max(self._longest, self.silence)
        self._has_started = has_started
        self._is_waiting = False
        self._num_silent = 0


def cpu_ticks(pid: int) -> int:
    """Return the CPU time of a process so far, in clock ticks (proc(5), utime and stime); 0 where nobody tells."""
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text()
        user, system = stat.rpartition(")")[2].split()[11:13]
        return int(user) + int(system)
    return 0
