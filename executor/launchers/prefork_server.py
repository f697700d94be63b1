"""The process that workers are forked from: it has imported what they all need, which takes one five seconds of a core.

    python -m streamrl.executor.launchers.prefork_server FD MODULE...

Over FD its controller asks for workers and tells each one's role, environment and directory, with three descriptors: the
worker's connection, its log, and a socket on which the prefork_server answers with the worker's process id and, once it has
ended, its exit status. A prefork_server computes nothing, so that it has no threads which a fork would lose. It ends with the
thread that asked for it first, or when it has had no workers for a while; who kills it kills its workers.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple, NoReturn

import msgspec

from streamrl.executor.launchers.worker import MODULE, serve
from streamrl.executor.libc import die_with_parent, show_command_line

IDLE_TIME = 300.0
"""Seconds that it waits for somebody to ask for a worker while it has none: as who looks at a run and begins another."""
NUM_DESCRIPTORS = 3
HEADER = 8
"""Bytes that tell how long a request is; the descriptors come with them."""
CONNECTION = 3
"""Descriptor of a worker's connection; it has no others but the standard ones."""


class WorkerRequest(msgspec.Struct, frozen=True):
    """What a worker is to be."""

    role: str
    environment: dict[str, str]
    directory: str


class Child(NamedTuple):
    """A worker that lives."""

    pid: int
    answers: socket.socket


def main(control: socket.socket, modules: Sequence[str]) -> None:
    """Import what workers need, then fork them as they are asked for.

    Raises:
        RuntimeError: a module has started a thread.
    """
    for name in modules:
        importlib.import_module(name)
    if threads := threading.active_count() - 1:  # those of libraries in C begin again by themselves
        raise RuntimeError(
            f"{' '.join(modules)} started {threads} threads, which no fork takes along"
        )
    gc.collect()
    gc.freeze()  # or collecting in a worker would copy all of it
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        while ready := selector.select(IDLE_TIME if len(selector.get_map()) == 1 else None):
            for key, _ in ready:
                if key.data is not None:
                    selector.unregister(key.fd)
                    _reap(key.fd, key.data)
                elif (asked := receive(control)) is None:
                    return
                else:
                    child = _fork(*asked)
                    pidfd = os.pidfd_open(child.pid)
                    selector.register(pidfd, selectors.EVENT_READ, child)


def send(control: socket.socket, request: WorkerRequest, descriptors: list[int]) -> None:
    """Ask a prefork_server for a worker."""
    data = msgspec.json.encode(request)
    socket.send_fds(control, [len(data).to_bytes(HEADER, "big")], descriptors)
    control.sendall(data)


def receive(control: socket.socket) -> tuple[WorkerRequest, list[int]] | None:
    """Return a request and its descriptors; None where there are no more."""
    header, descriptors, _, _ = socket.recv_fds(control, HEADER, NUM_DESCRIPTORS)
    if not header:
        return None
    data = bytearray()
    size = int.from_bytes(header, "big")
    while len(data) < size:
        if not (part := control.recv(size - len(data))):
            return None
        data += part
    return msgspec.json.decode(data, type=WorkerRequest), descriptors


def _fork(request: WorkerRequest, descriptors: list[int]) -> Child:
    connection, log, told = descriptors
    pid = os.fork()
    if pid == 0:
        _work(request, connection, log)
    os.close(connection)
    os.close(log)
    child = Child(pid, socket.socket(fileno=told))
    _tell(child, pid)
    return child


def _reap(pidfd: int, child: Child) -> None:
    """Tell how a worker has ended, then take back its process: until then nobody else has its id."""
    os.close(pidfd)
    ended = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert ended is not None, "it is waited for"
    status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    with child.answers:
        _tell(child, status)
    os.waitpid(child.pid, 0)


def _tell(child: Child, number: int) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):  # nobody asks any more
        child.answers.send(str(number).encode(), socket.MSG_NOSIGNAL)


def _work(request: WorkerRequest, connection: int, log: int) -> NoReturn:
    """Be a worker, as one that was started by itself is."""
    try:
        os.setsid()  # Ctrl-C is the controller's to handle
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(connection, CONNECTION, inheritable=False)
        os.closerange(CONNECTION + 1, os.sysconf("SC_OPEN_MAX"))
        die_with_parent()
        os.environ.clear()
        os.environ.update(request.environment)
        os.chdir(request.directory)
        sys.argv = [MODULE, request.role, str(CONNECTION)]
        show_command_line([sys.executable, "-m", *sys.argv])
        asyncio.run(serve(request.role, socket.socket(fileno=CONNECTION)))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:-1])  # the last makes room
    os._exit(0)
