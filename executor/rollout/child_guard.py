"""Processes that an engine starts end with the process that started them, whatever kills that, and so does what they share.

`python -m streamrl.executor.rollout.child_guard SESSION` waits until its standard input ends, which it does when whoever holds
the other end is gone, and then kills every process of a session, and those whose ids it was told, one a line. A worker
leads a session of its own; where an engine lives in somebody else's, its processes are told once they are there. Memory
by which vLLM's workers on CPUs talk to each other is removed then: who is killed removes none.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

TRACKER = "resource_tracker"
"""In the command of the process that removes shared memory once those who made it are gone (Python's)."""
SHARED = "/dev/shm/vllm_dist_"
"""What the names of shared memory begin with that vLLM's workers leave."""
LOOK_TIME = 0.02
"""Seconds between two looks at what is left."""
END_TIME = 10.0
"""Seconds that a killed process may take to end; one with much memory takes a while."""
NOBODY = "0"
"""In place of a session's leader."""


class ChildGuard:
    """A process that outlives this one for as long as it takes to kill what this one has started."""

    def __init__(self) -> None:
        leads = os.getsid(0) == os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(os.getpid()) if leads else NOBODY],
            stdin=subprocess.PIPE,
            start_new_session=True,  # apart from what it kills
        )
        self._told: set[int] = set()

    def tell(self) -> list[int]:
        """Tell it which processes there are, and return their ids."""
        assert self._process.stdin is not None
        found = [process.pid for process in psutil.Process().children(recursive=True)]
        ours = [pid for pid in found if pid != self._process.pid]
        self._process.stdin.write(b"".join(f"{pid}\n".encode() for pid in ours))
        self._process.stdin.flush()
        self._told.update(ours)
        return ours

    def kill_told(self) -> None:
        """Let it kill those that it was told of, and end; return once those that Python started here are gone."""
        self._process.communicate()
        for child in multiprocessing.active_children():
            if child.pid in self._told:
                child.join(END_TIME)


def _watch(leader: int) -> None:
    told: set[psutil.Process] = set()
    shared: set[Path] = set()
    for line in sys.stdin.buffer:
        with suppress(psutil.Error):
            told.add(psutil.Process(int(line)))
            shared |= _shared_by(int(line))  # or one that ends before it is killed would keep it
    shared |= _kill(told)
    if leader and not psutil.pid_exists(leader):
        while found := _members(leader):
            shared |= _kill(found)
    for path in shared:
        path.unlink(missing_ok=True)


def _kill(processes: Iterable[psutil.Process]) -> set[Path]:
    """Kill processes, but for those that clean up after the others and end by themselves; return what they shared."""
    shared: set[Path] = set()
    for process in processes:
        with suppress(psutil.Error):
            if not _is_tracker(process):
                shared |= _shared_by(process.pid)
                process.kill()
    time.sleep(LOOK_TIME)
    return shared


def _shared_by(pid: int) -> set[Path]:
    """Return the shared memory of an engine that a process has in its address space; see proc(5)."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
        paths = (line.split(maxsplit=5)[-1] for line in lines)
        return {Path(path) for path in paths if path.startswith(SHARED)}
    return set()


def _members(session: int) -> list[psutil.Process]:
    """Return the living processes of a session, but for those that end by themselves."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            is_alive = process.status() != psutil.STATUS_ZOMBIE
            if is_alive and os.getsid(process.pid) == session:
                found.append(process)
    return [process for process in found if not _is_tracker(process)]


def _is_tracker(process: psutil.Process) -> bool:
    try:
        return TRACKER in " ".join(process.cmdline())
    except psutil.Error:  # it has ended
        return True


if __name__ == "__main__":
    _watch(int(sys.argv[1]))
