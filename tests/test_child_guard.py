"""What an engine starts ends with it, and ending it waits for that."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import pytest

from streamrl.executor.rollout.child_guard import SHARED, ChildGuard

SHARES = """
import mmap, sys, time
file = open(sys.argv[1], "w+b")
file.truncate(4096)
held = mmap.mmap(file.fileno(), 4096)
print(flush=True)
time.sleep(600)
"""


def test_what_was_told_of_is_killed() -> None:
    child = subprocess.Popen(["sleep", "600"])
    guard = ChildGuard()
    assert child.pid in guard.register_children()
    guard.kill_registered()
    assert child.wait(10) == -signal.SIGKILL


def test_children_are_gone_once_they_are_killed() -> None:
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    child.start()
    guard = ChildGuard()
    assert child.pid in guard.register_children()
    guard._process.kill()  # the one that kills is late, as with a child of much memory that takes a while to end
    assert child.pid is not None
    threading.Timer(0.3, os.kill, (child.pid, signal.SIGKILL)).start()
    guard.kill_registered()
    assert child not in multiprocessing.active_children()


@pytest.mark.skipif(not Path(SHARED).parent.is_dir(), reason="no /dev/shm here")
@pytest.mark.parametrize("is_dead", [False, True])
def test_memory_that_an_engine_s_processes_share_goes_with_them(is_dead: bool) -> None:
    shared = Path(f"{SHARED}test-{os.getpid()}")
    command = [sys.executable, "-c", SHARES, str(shared)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline()
        guard = ChildGuard()
        assert child.pid in guard.register_children()
        assert guard._process.stdin is not None
        while any(fcntl.ioctl(guard._process.stdin, termios.FIONREAD, bytes(4))):
            time.sleep(0.01)
        time.sleep(0.5)  # the guard has read the ids and their shared memory
        if is_dead:
            child.kill()
            child.wait()
        assert shared.exists()
        guard.kill_registered()
    assert not shared.exists()
