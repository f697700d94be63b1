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
"""Prefixes of variables that libraries read at import. If their values differ, another prefork server is needed."""
COMMON = ("streamrl.executor.rollout.replica_worker", "streamrl.executor.trainer.trainer_worker")
"""Modules that every prefork server imports. Most workers need their imports, such as torch and transformers."""
PADDING = " " * 100
"""Last argument of a prefork server. It leaves room in which workers show their own command line."""
CLOSED = -1
"""Descriptor of a closed socket."""
MOST_BYTES = 32
"""Maximum size of an answer of the prefork server, in bytes."""


class WorkerProcess(Protocol):
    """The process of a worker, with the methods of `subprocess.Popen`."""

    pid: int
    returncode: int | None

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit status, negative for a signal.

        Raises:
            subprocess.TimeoutExpired: the process is still alive.
        """

    def kill(self) -> None:
        """Kill it, if it is alive."""


Begin = Callable[[str, socket.socket, BinaryIO, Environment], Awaitable[WorkerProcess]]
"""Starts a worker from its role, its end of the connection, its log and its whole environment."""


def begin_for(device: str, backend: object = None) -> Begin:
    """Return the function that starts a worker of a device; with CUDA it spawns, because a fork loses CUDA's threads."""
    if not _is_forked(device):
        return spawn
    imports = _imports_of(backend)
    return partial(fork_from, (*COMMON, *imports)) if imports else fork


def begin_imports(environment: Environment, device: str, backend: object = None) -> None:
    """Start the prefork server of a device's workers, which imports their libraries while this process does other work.

    Its output is discarded. If it dies, `fork_from` starts another one.

    Args:
        environment: variables that the workers get in addition to those of this process.
        device: torch device of the workers; with CUDA there is no prefork server.
        backend: inference engine of the workers, if they are replicas.
    """
    if _is_forked(device):
        modules = (*COMMON, *_imports_of(backend))
        with Path(os.devnull).open("wb") as log:
            _prefork_server_for({**os.environ, **environment}, modules, log)


def _is_forked(device: str) -> bool:
    return sys.platform == "linux" and device == "cpu"


def _imports_of(backend: object) -> tuple[str, ...]:
    """Return the modules that an inference engine's workers import in addition to the common ones."""
    is_engine = ENGINES.find_error(backend, ENGINES.key) is None
    return engine_named(str(backend)).preload if is_engine else ()


async def spawn(
    role: str, connection: socket.socket, log: BinaryIO, environment: Environment
) -> WorkerProcess:
    """Start a worker that imports its libraries itself."""
    return _start([worker.MODULE, role, str(connection.fileno())], connection, log, environment)


def _start(
    words: list[str], connection: socket.socket, log: BinaryIO, environment: Environment
) -> subprocess.Popen[bytes]:
    """Run a module with its arguments, and pass it the descriptor of a connection."""
    return subprocess.Popen(
        [sys.executable, "-m", *words],
        pass_fds=(connection.fileno(),),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=environment,
        start_new_session=True,  # the controller handles Ctrl-C
    )


async def fork(
    role: str, connection: socket.socket, log: BinaryIO, environment: Environment
) -> WorkerProcess:
    """Fork a worker from a prefork server with the common imports; see `fork_from`."""
    return await fork_from(COMMON, role, connection, log, environment)


async def fork_from(
    modules: Sequence[str],
    role: str,
    connection: socket.socket,
    log: BinaryIO,
    environment: Environment,
) -> WorkerProcess:
    """Fork a worker from a prefork server with these imports; start the server if there is none.

    Raises:
        ChildProcessError: two prefork servers have died; their output is in `log`.
    """
    request = prefork_server.WorkerRequest(role, environment, str(Path.cwd()))
    for _ in range(2):  # the first server may just have ended because it was idle
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            control = _prefork_server_for(environment, modules, log)
            descriptors = [connection.fileno(), log.fileno(), theirs.fileno()]
            with suppress(BrokenPipeError, ConnectionResetError):
                prefork_server.send(control, request, descriptors)
        if pid := await asyncio.get_running_loop().sock_recv(ours, MOST_BYTES):
            return Forked(int(pid), ours)
        ours.close()
        control.close()  # its process may still be ending, so the next try starts another one
    raise ChildProcessError("the prefork server, from which workers are forked, has died")


class Forked:
    """A worker that was forked from a prefork server."""

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
        status = self._answers.recv(MOST_BYTES, socket.MSG_PEEK)  # other waiters read it too
        self.returncode = int(status) if status else -signal.SIGKILL  # died with its server
        return self.returncode

    def kill(self) -> None:
        """See `WorkerProcess`; the process id cannot be reused before the prefork server has sent the exit status."""
        try:
            self.wait(0.0)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):  # it has just died with its prefork server
                os.kill(self.pid, signal.SIGKILL)


_prefork_servers: dict[
    tuple[tuple[str, str], ...], tuple[subprocess.Popen[bytes], socket.socket]
] = {}
"""Prefork servers of this process. The key is the thread with which they end, their imports, and the variables read at
import."""


def _prefork_server_for(
    environment: Environment, modules: Sequence[str], log: BinaryIO
) -> socket.socket:
    """Return the connection to a running prefork server; start one if needed."""
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
