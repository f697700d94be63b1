"""Worker processes of plans and studies: they end with the process that began them, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from streamrl.sim.parallel import KILLED, worker_pool

ROOT = Path(__file__).parent.parent
SLEEPS = """
import os, sys, time
from streamrl.sim.parallel import worker_pool

def sleep(number):
    print(os.getpid(), flush=True)
    time.sleep(600)

with worker_pool() as pool:
    jobs = [pool.submit(sleep, number) for number in range(40)]
    jobs[0].result()
"""
PATIENCE = 20.0


def begin() -> tuple[subprocess.Popen[str], int]:
    """Begin a process whose workers sleep; return it and the number of a worker process."""
    process = subprocess.Popen(
        [sys.executable, "-c", SLEEPS],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def is_gone(worker: int) -> bool:
    """Return whether a process has ended within a while."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGHUP])
def test_workers_end_with_a_process_that_is_killed(number: signal.Signals) -> None:
    process, worker = begin()
    process.send_signal(number)
    assert process.wait(PATIENCE) == -number
    assert is_gone(worker)


def test_ctrl_c_ends_running_jobs_at_once_and_workers_print_nothing() -> None:
    """A terminal sends the signal to all of them."""
    process, worker = begin()
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE)
    assert errors.count("Traceback") == errors.count("KeyboardInterrupt") == 1, errors
    assert is_gone(worker)


def test_workers_leave_the_signals_of_a_terminal_to_the_parent_process() -> None:
    with worker_pool() as pool:
        own = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
        found = [pool.submit(signal.getsignal, number).result() for number in own]
    assert found == [signal.SIG_IGN] * len(own)


def test_a_worker_that_is_killed_is_an_error_in_one_line() -> None:
    with (
        pytest.raises(RuntimeError, match=r"^a worker process was killed; ") as raised,
        worker_pool() as pool,
    ):
        pool.submit(os._exit, 9).result()
    assert str(raised.value) == KILLED
