"""A user of this machine without a token attacks every port of a run: the run makes all of its steps.

Sockets that listen are found in /proc, so a new listener of any library is attacked too.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import cycle
from pathlib import Path

import psutil
import pytest

from tests.test_end_to_end import has_two_steps
from tests.test_external import write_run
from tests.test_signals import BACK_ENDS, RANKS

pytestmark = pytest.mark.signals
LISTENING = psutil.CONN_LISTEN
RUNS: dict[str, tuple[str, ...]] = {
    **{name: own for name, own in BACK_ENDS.items() if name not in ("torch", "external")},
    "torch": (*RANKS, "trainer.zero=0"),
    "relays": (
        "sync.mode=delta",
        "model.dtype=bfloat16",
        "rollout.replicas=2",
        "cluster.pools.local.gpus_per_node=4",
    ),
}
STEPS = 30
LIMIT = 900.0
MOST_FILES = 1024
"""Usual limit of open files."""
CROWD = 1300
FLOOD_TIME = 10.0


def listeners_of(driver: int) -> dict[int, tuple[str, int]]:
    """Return the address and process of each port on which a process, or one that it has started, listens."""
    found = {}
    for process in (psutil.Process(driver), *psutil.Process(driver).children(recursive=True)):
        with suppress(psutil.Error):
            for each in process.net_connections("tcp"):
                if each.status == LISTENING:
                    found[each.laddr.port] = each.laddr.ip, process.pid
    return found


def crowd(port: int) -> None:
    """Open more connections than a process may have, and keep them open."""
    kept = []
    for _ in range(CROWD):
        with suppress(OSError):
            kept.append(socket.create_connection(("127.0.0.1", port), timeout=0.5))
    time.sleep(1.0)
    for each in kept:
        each.close()


def garbage(port: int) -> None:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=0.5) as each:
        each.sendall(os.urandom(4096))
        each.settimeout(0.5)
        each.recv(4096)


def drip(port: int) -> None:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=0.5) as each:
        for byte in b"GET /" * 4:
            each.sendall(bytes([byte]))
            time.sleep(0.1)


def leave(port: int) -> None:
    with suppress(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=0.5).close()


def attack(driver: int, until: Callable[[], bool]) -> dict[int, tuple[str, int]]:
    """Attack every port of a run until `until`, each way in turn; return the ports that were attacked."""
    attacked: dict[int, tuple[str, int]] = {}
    ways: Iterator[Callable[[int], None]] = cycle((garbage, drip, leave, crowd))
    while not until():
        try:
            ports = listeners_of(driver)
        except psutil.NoSuchProcess:
            break
        attacked |= ports
        for way in (next(ways), next(ways)):
            threads = [threading.Thread(target=way, args=(port,), daemon=True) for port in ports]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(FLOOD_TIME)
        time.sleep(0.2)
    return attacked


@pytest.mark.parametrize("name", RUNS)
def test_attacks_on_every_port_end_no_run(tmp_path: Path, name: str) -> None:
    file = write_run(tmp_path, ["http://127.0.0.1:1"], api="sglang")
    file.write_text(file.read_text().partition("[rollout.external]")[0])
    changes = [f"algorithm.steps={STEPS}", "rollout.replicas=1", "execute.stream_port=0"]
    words = [word for change in [*changes, *RUNS[name]] for word in ("--set", change)]
    command = [sys.executable, "-c", "from streamrl.cli import main; main()", "execute", str(file)]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (MOST_FILES, limits[1]))
    try:
        log = (tmp_path / "log").open("wb")
        process = subprocess.Popen([*command, *words, "--json"], stdout=log, stderr=log)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    try:
        while process.poll() is None and not has_two_steps(tmp_path / "run"):
            time.sleep(0.1)
        attacked = attack(process.pid, lambda: process.poll() is not None)
        process.wait(LIMIT)
    finally:
        process.kill()
        log.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    text = (tmp_path / "log").read_text()
    assert process.returncode == 0, text[-3000:]
    assert " lost at step" not in text and "Traceback" not in text, text[-3000:]
    figures = json.loads(text[text.index("{") :].strip()) if "{" in text else {}
    assert figures.get("num_steps") == STEPS
    assert {address for address, _ in attacked.values()} == {"127.0.0.1"}, attacked
