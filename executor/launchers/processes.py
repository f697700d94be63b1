"""Start the process of a worker: spawned, or forked from a prefork server that has imported the libraries."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, Protocol

from streamrl.executor.launchers import prefork_server as prefork_server
from streamrl.executor.launchers import worker
from streamrl.runfile.backend_choice import ENGINES, engine_named

Environment = dict[str, str]
READ_AT_IMPORT = (
    *("DNNL_", "HF_", "KMP_", "LD_", "MALLOC_", "MKL_", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTHON"),
    *("TORCH", "TRANSFORMERS_", "VLLM_"),
)
"""Beginnings of variables that libraries look at once: who has others needs another prefork_server."""
COMMON = ("streamrl.executor.rollout.replica_worker", "streamrl.executor.trainer.trainer_worker")
"""Whose imports, torch and transformers among them, most workers need: a prefork_server has them."""
PADDING = " " * 100
"""Of a prefork_server's command line: its workers show their own in its place."""
CLOSED = -1
"""Descriptor of a socket that was closed."""
MOST_BYTES = 32
"""Of what a prefork_server tells of a worker."""


class WorkerProcess(Protocol):
    """The process of a worker, as `subprocess.Popen` has it."""

    pid: int
    returncode: int | None

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit status, negative for a signal.

        Raises:
            subprocess.TimeoutExpired: it lives on.
        """

    def kill(self) -> None:
        """Kill it, if it lives."""


Begin = Callable[[str, socket.socket, BinaryIO, Environment], Awaitable[WorkerProcess]]
"""Of a role, the worker's end of its connection, its log and its whole environment."""


def begin_for(device: str, backend: object = None) -> Begin:
    """Return how a worker of a device begins: CUDA has threads that no fork takes along."""
    if sys.platform != "linux" or device != "cpu":
        return spawn
    is_engine = ENGINES.find_error(backend, ENGINES.key) is None
    imports = engine_named(str(backend)).preload if is_engine else ()
    return partial(fork_from, (*COMMON, *imports)) if imports else fork


async def spawn(
    role: str, connection: socket.socket, log: BinaryIO, environment: Environment
) -> WorkerProcess:
    """Start a worker that imports what it needs."""
    return _start([worker.MODULE, role, str(connection.fileno())], connection, log, environment)


def _start(
    words: list[str], connection: socket.socket, log: BinaryIO, environment: Environment
) -> subprocess.Popen[bytes]:
    """Run a module, given with its arguments, that has the descriptor of a connection."""
    return subprocess.Popen(
        [sys.executable, "-m", *words],
        pass_fds=(connection.fileno(),),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=environment,
        start_new_session=True,  # Ctrl-C is the controller's to handle
    )


async def fork(
    role: str, connection: socket.socket, log: BinaryIO, environment: Environment
) -> WorkerProcess:
    """Let a prefork_server that has imported what most workers need fork one; see `fork_from`."""
    return await fork_from(COMMON, role, connection, log, environment)


async def fork_from(
    modules: Sequence[str],
    role: str,
    connection: socket.socket,
    log: BinaryIO,
    environment: Environment,
) -> WorkerProcess:
    """Let a prefork_server that has imported modules fork a worker; the first one of an environment waits until there is one.

    Raises:
        ChildProcessError: the prefork_server has died, and so has another; its words are in `log`.
    """
    request = prefork_server.WorkerRequest(role, environment, str(Path.cwd()))
    for _ in range(2):  # the first one may just have had no work for too long
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            control = _prefork_server_for(environment, modules, log)
            descriptors = [connection.fileno(), log.fileno(), theirs.fileno()]
            with suppress(BrokenPipeError, ConnectionResetError):
                prefork_server.send(control, request, descriptors)
        if told := await asyncio.get_running_loop().sock_recv(ours, MOST_BYTES):
            return Forked(int(told), ours)
        ours.close()
        control.close()  # its process may be ending still, and is not asked again
    raise ChildProcessError("the process that workers are forked from has died")


class Forked:
    """A worker that a prefork_server has forked."""

    def __init__(self, pid: int, answers: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._answers = answers

    def wait(self, timeout: float | None = None) -> int:
        """See `WorkerProcess`."""
        poll = select.poll()
        poll.register(self._answers, select.POLLIN)
        if not poll.poll(None if timeout is None else 1e3 * timeout):
            raise subprocess.TimeoutExpired("worker", timeout or 0.0)
        told = self._answers.recv(MOST_BYTES, socket.MSG_PEEK)  # whoever else waits reads it too
        self.returncode = int(told) if told else -signal.SIGKILL  # it died with its prefork_server
        return self.returncode

    def kill(self) -> None:
        """See `WorkerProcess`; a process id is not given anew before its prefork_server has told of the end."""
        try:
            self.wait(0.0)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):  # it has died with its prefork_server this moment
                os.kill(self.pid, signal.SIGKILL)


_prefork_servers: dict[
    tuple[tuple[str, str], ...], tuple[subprocess.Popen[bytes], socket.socket]
] = {}
"""Those of this process, by the thread with which they end, what they import, and what their libraries have read."""


def _prefork_server_for(
    environment: Environment, modules: Sequence[str], log: BinaryIO
) -> socket.socket:
    """Return the connection to a prefork_server that lives."""
    read = {name: value for name, value in environment.items() if name.startswith(READ_AT_IMPORT)}
    key = (
        ("thread", str(threading.get_native_id())),
        ("imports", " ".join(modules)),
        *sorted(read.items()),
    )
    process, control = _prefork_servers.get(key, (None, None))
    if process is not None and control is not None:
        if process.poll() is None and control.fileno() != CLOSED:
            return control
        control.close()
    control, theirs = socket.socketpair()
    with theirs:
        words = [prefork_server.__name__, str(theirs.fileno()), *modules, PADDING]
        process = _start(words, theirs, log, environment)
    _prefork_servers[key] = process, control
    return control
