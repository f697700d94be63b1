"""Kill the processes that an engine started, and remove their shared memory, when the worker process ends.

`python -m streamrl.executor.rollout.child_guard SESSION` waits until its standard input ends. That happens when the
worker process ends, for whatever reason. Then it kills every process of that session. It also kills each process whose
id it read from its standard input (one id a line). A worker usually leads its own session. A worker in another
process's session passes the ids of its children instead.

vLLM's workers on CPUs communicate through shared memory. A killed process does not remove it, so the guard does.
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
"""Part of the command line of Python's process that removes shared memory after its owners end."""
SHARED = "/dev/shm/vllm_dist_"
"""Prefix of the shared-memory files that vLLM's workers leave behind."""
LOOK_TIME = 0.02
"""Seconds between two checks for remaining processes."""
END_TIME = 10.0
"""Seconds that a killed process may take to end; freeing a lot of memory takes a while."""
NO_SESSION = "0"
"""Session argument of a worker that does not lead a session."""


class ChildGuard:
    """A process that outlives this one just long enough to kill the processes that this one started."""

    def __init__(self) -> None:
        leads = os.getsid(0) == os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(os.getpid()) if leads else NO_SESSION],
            stdin=subprocess.PIPE,
            start_new_session=True,  # outside the session that it kills
        )
        self._registered: set[int] = set()

    def register_children(self) -> list[int]:
        """Send the ids of all child processes to the guard, and return them."""
        assert self._process.stdin is not None
        children = [process.pid for process in psutil.Process().children(recursive=True)]
        ours = [pid for pid in children if pid != self._process.pid]
        self._process.stdin.write(b"".join(f"{pid}\n".encode() for pid in ours))
        self._process.stdin.flush()
        self._registered.update(ours)
        return ours

    def kill_registered(self) -> None:
        """Kill the registered processes and end the guard.

        Return once Python's own child processes among them have ended.
        """
        self._process.communicate()
        for child in multiprocessing.active_children():
            if child.pid in self._registered:
                child.join(END_TIME)


def _watch(leader: int) -> None:
    registered: set[psutil.Process] = set()
    shared: set[Path] = set()
    for line in sys.stdin.buffer:
        with suppress(psutil.Error):
            registered.add(psutil.Process(int(line)))
            shared |= _shared_by(
                int(line)
            )  # a process that ends before it is killed is missed later
    shared |= _kill(registered)
    if leader and not psutil.pid_exists(leader):
        while members := _members(leader):
            shared |= _kill(members)
    for path in shared:
        path.unlink(missing_ok=True)


def _kill(processes: Iterable[psutil.Process]) -> set[Path]:
    """Kill processes, and return the shared memory that they used.

    Resource trackers are spared: they clean up and then end by themselves.
    """
    shared: set[Path] = set()
    for process in processes:
        with suppress(psutil.Error):
            if not _is_tracker(process):
                shared |= _shared_by(process.pid)
                process.kill()
    time.sleep(LOOK_TIME)
    return shared


def _shared_by(pid: int) -> set[Path]:
    """Return the shared-memory files of vLLM that a process has mapped; see proc(5)."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
        paths = (line.split(maxsplit=5)[-1] for line in lines)
        return {Path(path) for path in paths if path.startswith(SHARED)}
    return set()


def _members(session: int) -> list[psutil.Process]:
    """Return the living processes of a session, without resource trackers."""
    members = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            is_alive = process.status() != psutil.STATUS_ZOMBIE
            if is_alive and os.getsid(process.pid) == session:
                members.append(process)
    return [process for process in members if not _is_tracker(process)]


def _is_tracker(process: psutil.Process) -> bool:
    try:
        return TRACKER in " ".join(process.cmdline())
    except psutil.Error:  # it has ended
        return True


if __name__ == "__main__":
    _watch(int(sys.argv[1]))
