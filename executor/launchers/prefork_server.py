"""Fork worker processes from a prefork server that has imported their libraries.

    python -m streamrl.executor.launchers.prefork_server FD MODULE...

Importing the libraries takes about five seconds of CPU time, which a forked worker saves.

The controller requests workers over FD. A request has the role, the environment and the directory of the worker, and
three file descriptors: the worker's connection, its log, and a socket for answers. On that socket the prefork server
sends the worker's process id, and its exit status when it has ended.

A prefork server computes nothing, because a fork would lose its threads. It ends with the thread that started it, or
after `IDLE_TIME` without workers. If it is killed, its workers die too.
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
"""Seconds that it waits for a request while it has no workers, long enough for a user who starts one run after another."""
NUM_DESCRIPTORS = 3
HEADER = 8
"""Bytes that encode the length of a request; the descriptors come with them."""
CONNECTION = 3
"""Descriptor of a worker's connection. The worker has only this one and the standard ones."""


class WorkerRequest(msgspec.Struct, frozen=True):
    """Role, environment, working directory and file mode mask of a worker."""

    role: str
    environment: dict[str, str]
    directory: str
    umask: int


class Child(NamedTuple):
    """A running worker."""

    pid: int
    answers: socket.socket


def main(control: socket.socket, modules: Sequence[str]) -> None:
    """Import the libraries of workers, then fork a worker for each request.

    Raises:
        RuntimeError: a module has started a thread.
    """
    gc.disable()  # imported objects stay: to scan them for garbage takes a tenth of the time
    for name in modules:
        importlib.import_module(name)
    if threads := threading.active_count() - 1:  # C libraries restart their threads themselves
        raise RuntimeError(
            f"{' '.join(modules)} started {threads} threads, but a fork has none of them"
        )
    gc.collect()
    gc.freeze()  # otherwise a garbage collection in a worker would copy all of these pages
    gc.enable()
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        while ready := selector.select(IDLE_TIME if len(selector.get_map()) == 1 else None):
            for key, _ in ready:
                if key.data is not None:
                    selector.unregister(key.fd)
                    _reap(key.fd, key.data)
                elif (received := receive(control)) is None:
                    return
                else:
                    child = _fork(*received)
                    pidfd = os.pidfd_open(child.pid)
                    selector.register(pidfd, selectors.EVENT_READ, child)


def encode(request: WorkerRequest) -> bytes:
    """Return the bytes of a request; the descriptors of the worker are sent with the first of them."""
    data = msgspec.json.encode(request)
    return len(data).to_bytes(HEADER, "big") + data


def receive(control: socket.socket) -> tuple[WorkerRequest, list[int]] | None:
    """Return the next request and its descriptors, or None if the connection is closed."""
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


def is_closed(connection: socket.socket) -> bool:
    """Return whether the other end of a connection is closed and nothing of it is left to read."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False


def _fork(request: WorkerRequest, descriptors: list[int]) -> Child:
    connection, log, answers = descriptors
    pid = os.fork()
    if pid == 0:
        _work(request, connection, log)
    os.close(connection)
    os.close(log)
    child = Child(pid, socket.socket(fileno=answers))
    _answer(child, pid)
    return child


def _reap(pidfd: int, child: Child) -> None:
    """Send the exit status of a worker, then reap it; the kernel does not reuse its id before that."""
    os.close(pidfd)
    ended = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert ended is not None, "it is waited for"
    status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    with child.answers:
        _answer(child, status)
    os.waitpid(child.pid, 0)


def _answer(child: Child, number: int) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):  # the controller has closed the socket
        child.answers.send(str(number).encode(), socket.MSG_NOSIGNAL)


def _work(request: WorkerRequest, connection: int, log: int) -> NoReturn:
    """Run as a worker, in the same state as a spawned one."""
    try:
        os.setsid()  # the controller handles Ctrl-C
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(connection, CONNECTION, inheritable=False)
        os.closerange(CONNECTION + 1, os.sysconf("SC_OPEN_MAX"))
        die_with_parent()
        os.environ.clear()
        os.environ.update(request.environment)
        os.chdir(request.directory)
        os.umask(request.umask)
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
    connection = socket.socket(fileno=int(sys.argv[1]))
    # a parent that died before the first line is not noticed otherwise
    if not is_closed(connection):
        main(connection, sys.argv[2:-1])  # the last argument is padding
    os._exit(0)
