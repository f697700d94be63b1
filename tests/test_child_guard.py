"""What an engine starts ends with it, and ending it waits for that."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import threading
import time

from executor.rollout.child_guard import ChildGuard


def test_what_was_told_of_is_killed() -> None:
    child = subprocess.Popen(["sleep", "600"])
    guard = ChildGuard()
    assert child.pid in guard.tell()
    guard.kill_told()
    assert child.wait(10) == -signal.SIGKILL


def test_children_are_gone_once_they_are_killed() -> None:
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    child.start()
    guard = ChildGuard()
    assert child.pid in guard.tell()
    guard._process.kill()  # the one that kills is late, as with a child of much memory that takes a while to end
    assert child.pid is not None
    threading.Timer(0.3, os.kill, (child.pid, signal.SIGKILL)).start()
    guard.kill_told()
    assert child not in multiprocessing.active_children()
