"""Start the process of a worker: spawned, or forked from a prefork server that has imported the libraries."""

from __future__ import annotations

import asyncio
import atexit
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from io import FileIO
from math import inf
from pathlib import Path
from typing import BinaryIO, Protocol

from streamrl.executor.directory_lock import OwnedDirectory
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
FACTOR = 10
"""A prefork server that imports libraries may be silent for this multiple of `execute.patience`: the disk may be slow."""
SEND_TIME = 0.01
"""Seconds between two tries to send a request to a prefork server that does not read."""
LOOK_TIME = 1.0
"""Seconds between two looks at the CPU time of a prefork server."""
STATUS_TIME = 1.0
"""Seconds that a prefork server has to report the exit status of a worker that has ended."""


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


Begin = Callable[[str, socket.socket, BinaryIO, Environment, float], Awaitable[WorkerProcess]]
"""Starts a worker from its role, its end of the connection, its log, its whole environment, and `execute.patience` in
seconds."""


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
            _prefork_server_for(whole_environment(environment), modules, log)


def whole_environment(own: Environment) -> Environment:
    """Return the environment of a worker: that of this process, a directory for compiled kernels, and its own variables.

    torch makes such a directory when it is imported. Otherwise it would leave one in `TMPDIR`.
    """
    kernels = _kernel_directory()
    return {"TORCHINDUCTOR_CACHE_DIR": str(kernels.path), **os.environ, **kernels.mark, **own}


@cache
def _kernel_directory() -> OwnedDirectory:
    """Return a directory that is removed when this process ends. Workers that still run end with it."""
    made = OwnedDirectory("kernels")
    atexit.register(made.remove)
    return made


def _is_forked(device: str) -> bool:
    return sys.platform == "linux" and device == "cpu"


def _imports_of(backend: object) -> tuple[str, ...]:
    """Return the modules that an inference engine's workers import in addition to the common ones."""
    is_engine = ENGINES.find_error(backend, ENGINES.key) is None
    return engine_named(str(backend)).preload if is_engine else ()


async def spawn(
    role: str,
    connection: socket.socket,
    log: BinaryIO,
    environment: Environment,
    patience: float = inf,
) -> WorkerProcess:
    """Start a worker that imports its libraries itself; this waits for nothing."""
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
    role: str,
    connection: socket.socket,
    log: BinaryIO,
    environment: Environment,
    patience: float,
) -> WorkerProcess:
    """Fork a worker from a prefork server with the common imports; see `fork_from`."""
    return await fork_from(COMMON, role, connection, log, environment, patience)


async def fork_from(
    modules: Sequence[str],
    role: str,
    connection: socket.socket,
    log: BinaryIO,
    environment: Environment,
    patience: float,
) -> WorkerProcess:
    """Fork a worker from a prefork server with these imports; start the server if there is none.

    Raises:
        ChildProcessError: two prefork servers have died; their output is in `log`.
        TimeoutError: the prefork server neither answers nor computes for `patience` seconds, or `FACTOR` times as long
            while it imports. The next call starts another one.
    """
    os.umask(umask := os.umask(0o077))  # it may differ from that of the server's start
    request = prefork_server.WorkerRequest(role, environment, str(Path.cwd()), umask)
    for _ in range(2):  # the first server may just have ended because it was idle
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        try:
            with theirs:
                server = _prefork_server_for(environment, modules, log)
                limit = patience if server.has_answered else FACTOR * patience
                descriptors = [connection.fileno(), log.fileno(), theirs.fileno()]
                with suppress(BrokenPipeError, ConnectionResetError):
                    async with asyncio.timeout(limit):
                        await _send(server, prefork_server.encode(request), descriptors)
            pid = await _answer_of(server, ours, limit)
        except TimeoutError:
            ours.close()
            server.is_stuck = True
            text = f"the prefork server gave no sign of life for {limit:.0f} s"
            raise TimeoutError(text) from None
        if pid:
            server.has_answered = True
            return Forked(int(pid), ours)
        ours.close()
        server.control.close()  # its process may still be ending, so the next try starts another one
    raise ChildProcessError("the prefork server, from which workers are forked, has died")


async def _send(server: PreforkServer, data: bytes, descriptors: list[int]) -> None:
    """Send a request and its descriptors; others run meanwhile if a server that is stopped leaves no room for it."""
    while server.is_sending:
        await asyncio.sleep(SEND_TIME)
    server.is_sending, is_begun = True, False
    try:
        while data:
            try:
                ancillary = [] if is_begun else descriptors
                sent = socket.send_fds(server.control, [data], ancillary)
                data, is_begun = data[sent:], True
            except BlockingIOError:
                await asyncio.sleep(SEND_TIME)
    finally:
        server.is_sending = False
        server.is_stuck |= is_begun and bool(data)  # it would read the next request as the rest


async def _answer_of(server: PreforkServer, ours: socket.socket, limit: float) -> bytes:
    """Return the answer of a prefork server, empty if it has died; raise TimeoutError after `limit` seconds of silence."""
    answer = asyncio.ensure_future(asyncio.get_running_loop().sock_recv(ours, MOST_BYTES))
    silence, ticks = 0.0, 0
    try:
        while silence <= limit:
            done, _ = await asyncio.wait([answer], timeout=LOOK_TIME)
            if done:
                return answer.result()
            before, ticks = ticks, cpu_ticks(server.process.pid)
            silence = silence + LOOK_TIME if ticks == before else 0.0
    finally:
        answer.cancel()
    raise TimeoutError


def cpu_ticks(pid: int) -> int:
    """Return the CPU time of a process in clock ticks (proc(5), utime + stime), or 0 if it cannot be read."""
    with suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text()
        user, system = stat.rpartition(")")[2].split()[11:13]
        return int(user) + int(system)
    return 0


class Forked:
    """A worker that was forked from a prefork server."""

    def __init__(self, pid: int, answers: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._answers = answers
        self._process: FileIO | None = None
        """Descriptor of the process (pidfd_open(2)); None if it has ended already."""
        with suppress(ProcessLookupError):
            self._process = FileIO(os.pidfd_open(pid))
        self._waiting = threading.Lock()
        self._using = threading.Lock()
        """Held while the descriptor of the process is used or closed."""

    def wait(self, timeout: float | None = None) -> int:
        """See `WorkerProcess`; a prefork server that is stopped cannot delay it."""
        if not self._waiting.acquire(timeout=-1 if timeout is None else timeout):
            raise subprocess.TimeoutExpired("worker", timeout or 0.0)
        try:
            if self.returncode is None:
                self.returncode = self._status(timeout)
                self._close()
            return self.returncode
        finally:
            self._waiting.release()

    def _status(self, timeout: float | None) -> int:
        ends: list[socket.socket | FileIO] = [self._answers]
        if self._process is not None:
            ends.append(self._process)
        if not _first_ready(ends, timeout):
            raise subprocess.TimeoutExpired("worker", timeout or 0.0)
        status = b""
        if _first_ready([self._answers], STATUS_TIME):
            status = self._answers.recv(MOST_BYTES)
        # Without a status, its server has died with it or is stopped.
        return int(status) if status else -signal.SIGKILL

    def _close(self) -> None:
        """Close both descriptors now: garbage collection may come long after the worker's end."""
        self._answers.close()
        with self._using:
            if self._process is not None:
                self._process.close()
                self._process = None

    def kill(self) -> None:
        """See `WorkerProcess`."""
        with self._using, suppress(ProcessLookupError):
            if self._process is not None:
                signal.pidfd_send_signal(self._process.fileno(), signal.SIGKILL)


def _first_ready(files: Sequence[socket.socket | FileIO], timeout: float | None) -> bool:
    """Wait until one of the descriptors is readable; return whether one is."""
    poll = select.poll()
    for each in files:
        poll.register(each, select.POLLIN)
    return bool(poll.poll(None if timeout is None else 1e3 * timeout))


@dataclass
class PreforkServer:
    """A prefork server of this process."""

    process: subprocess.Popen[bytes]
    control: socket.socket
    """Connection over which workers are requested."""
    has_answered: bool = False
    is_sending: bool = False
    """Whether a request is being sent to it. Two at a time would be mixed."""
    is_stuck: bool = False
    """Whether it gave no sign of life. It stays, because its workers would end with it."""

    @property
    def is_usable(self) -> bool:
        """Return whether it can fork a worker, as far as is known."""
        is_open = self.control.fileno() != CLOSED
        return is_open and not self.is_stuck and self.process.poll() is None


_prefork_servers: dict[tuple[tuple[str, str], ...], list[PreforkServer]] = {}
"""Prefork servers of this process, the one in use last. The key is the thread with which they end, their imports, and
the variables read at import."""


def _prefork_server_for(
    environment: Environment, modules: Sequence[str], log: BinaryIO
) -> PreforkServer:
    """Return a running prefork server; start one if needed."""
    read = {name: value for name, value in environment.items() if name.startswith(READ_AT_IMPORT)}
    key = (
        ("thread", str(threading.get_native_id())),
        ("imports", " ".join(modules)),
        *sorted(read.items()),
    )
    known = _prefork_servers.setdefault(key, [])
    if known and known[-1].is_usable:
        return known[-1]
    for server in known:
        if not server.is_stuck:
            server.control.close()
    control, theirs = socket.socketpair()
    control.setblocking(False)
    with theirs:
        words = [prefork_server.__name__, str(theirs.fileno()), *modules, PADDING]
        process = _start(words, theirs, log, environment)
    _prefork_servers[key] = [
        *(each for each in known if each.is_stuck),
        PreforkServer(process, control),
    ]
    return _prefork_servers[key][-1]
