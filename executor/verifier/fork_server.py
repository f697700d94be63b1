"""Load the scorers once, and fork a sandboxed worker for each answer that could run code.

The fork server starts with an empty environment. Its controller sends a line of JSON for each answer, `{"id", "scorer",
"answer", "record"}`. It replies with `{"id", "reward", "fault", "detail"}`. It never evaluates an answer itself.

A worker grades one answer after the other in its sandbox. Its verdict may have been written by the answer, so the
server treats it as untrusted data. After an answer that could run code the worker is killed, because the answer may
have changed the worker's memory. The server then forks the next worker at once.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import re
import selectors
import shutil
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypedDict

import msgspec

from streamrl.executor.directory_lock import MARK, kill_marked
from streamrl.executor.libc import die_with_parent, madvise
from streamrl.executor.verifier import remote_program
from streamrl.executor.verifier.sandbox import Sandbox, SandboxLimits, find_gaps
from streamrl.executor.verifier.scorers import Grade, Grader, Scorer, can_act, make_scorer
from streamrl.runfile.roles_config import RewardConfig

if TYPE_CHECKING:
    from streamrl.workload.prompt_records import Record

HUGE_PAGE = 1 << 21  # bytes, on x86 and on ARM with pages of 4 KB
MAPS = Path("/proc/self/maps")
MADV_COLLAPSE = 25
"""Since Linux 6.1; works for all settings of transparent huge pages except "never"."""
_OWN_MEMORY = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p \S+ 00:00 0\s*(\[heap\])?\n")


def collapse() -> None:
    """Move this process's memory to huge pages, if the kernel can."""
    if sys.platform != "linux":
        return
    try:
        maps = MAPS.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for line in maps.splitlines(keepends=True):
        if (match := _OWN_MEMORY.fullmatch(line)) is not None:
            start = -(-int(match[1], 16) // HUGE_PAGE) * HUGE_PAGE
            size = int(match[2], 16) // HUGE_PAGE * HUGE_PAGE - start
            if size > 0:
                madvise(start, size, MADV_COLLAPSE)


REWARD, ERROR, MEMORY, ENDED = b"R", b"E", b"M", b"P"
"""First byte of a verdict; a float of 8 bytes, a text, or nothing follows."""
PROCESS_ENDED = "process ended"
MOST_BYTES = 4096  # of a verdict: a pipe delivers this many in one piece
MOST_FILES = 1 << 16  # upper bound of the file descriptors of a fork server


class ScoringOutcome(NamedTuple):
    """Result of grading one answer."""

    reward: float
    """Within the scorer's bounds; 0 if there is a fault."""
    fault: str | None = None
    """Reason why there is no reward, as a fixed short text; None if there is a reward."""
    detail: str = ""
    """Message of the scorer; do not trust it, because the answer may have written it."""


def work(
    requests: int,
    verdicts: int,
    program: int | None,
    graders: Sequence[Grader],
    sandbox: Sandbox | None,
) -> NoReturn:
    """Grade requests until `requests` is closed; then the process ends."""
    try:
        pipes = {requests, verdicts}
        if program is not None:
            pipes.add(program)
            remote_program.channel = remote_program.Channel(program)
        refusal = _prepare(sandbox, pipes)
        with os.fdopen(requests, "rb") as lines:
            for line in lines:
                os.write(verdicts, refusal or _grade(line, graders))
    finally:
        os._exit(0)


def read_verdict(data: bytes, bounds: tuple[float, float]) -> ScoringOutcome:
    """Return the result in a worker's verdict; a fault if the verdict is malformed or outside `bounds`."""
    kind, text = data[:1], data[1:]
    if kind == REWARD and len(text) == 8:
        (reward,) = struct.unpack("=d", text)
        if isfinite(reward) and bounds[0] <= reward <= bounds[1]:
            return ScoringOutcome(reward)
    if data == MEMORY:
        return ScoringOutcome(0.0, "memory limit")
    if data == ENDED:
        return ScoringOutcome(0.0, PROCESS_ENDED)
    if kind == ERROR:
        return ScoringOutcome(0.0, "error", text.decode(errors="replace"))
    return ScoringOutcome(0.0, "no reward")


def _prepare(sandbox: Sandbox | None, pipes: set[int]) -> bytes:
    """Close everything except `pipes` and enter the sandbox, if any; return the error to answer with, or nothing."""
    die_with_parent()
    os.setpgid(0, 0)  # so that it can be killed with any process that it starts
    os.dup2(0, 1)  # 0 is /dev/null
    os.dup2(0, 2)
    _close_all_but({0, 1, 2, *pipes, *(sandbox.files if sandbox is not None else ())})
    if sandbox is None:
        return b""
    try:
        sandbox.enter()
    except Exception as error:
        return _error(error)
    return b""


def _grade(line: bytes, graders: Sequence[Grader]) -> bytes:
    """Return the verdict on a request; an exception of the answer becomes part of it."""
    try:
        request = json.loads(line)
        grader = graders[request["scorer"]]
        reward = float(grader(request["record"])(request["answer"]))
    except MemoryError:
        return MEMORY
    except remote_program.ProgramEndedError:
        return ENDED
    except BaseException as error:
        return _error(error)
    return REWARD + struct.pack("=d", reward)


def _error(error: BaseException) -> bytes:
    text = ": ".join(filter(None, (type(error).__name__, str(error))))
    return ERROR + text.encode(errors="replace")[: MOST_BYTES - 1]


def _close_all_but(kept: set[int]) -> None:
    for before, after in pairwise([*sorted(kept), MOST_FILES]):
        os.closerange(before + 1, after)


OWN = ("__main__", "streamrl")
"""Packages whose remaining files a worker does not need."""
LIBRARIES = ("/usr", "/lib", "/lib64", f"{sys.base_prefix}/lib")
"""Directories of shared libraries that Python's modules need."""
PIPE_BYTES = 1 << 20
"""Maximum size of a request: the pipe size that any user may set (fs.pipe-max-size)."""
MOST_DETAIL = 1000  # characters of an error message
ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""The whole environment of the process and of its C libraries. It can fork only while it has one thread."""
TICK = 0.5
"""Seconds between two looks at the clock while workers grade. If a look is later than twice this, the server was stopped."""
STOPPED = "Tt"
"""States of a stopped process in /proc."""
EXIT_CHECKS, EXIT_PAUSE = 20, 0.001
"""Number of looks at a process that closed its pipe, and seconds between them: it ends a moment later."""


class Options(TypedDict):
    """Arguments of the process."""

    path: list[str]
    """`sys.path` of the controller."""
    connection: int
    """File descriptor of the socket to the controller."""
    rewards: list[dict[str, Any]]
    """Fields of `RewardConfig`."""
    limits: tuple[float, float]
    """Seconds and bytes; see `SandboxLimits`."""
    is_sandboxed: bool
    """Whether workers enter the sandbox; otherwise they keep the environment, and only time limits apply."""


def main(options: Options) -> None:
    """Serve until the controller closes the connection."""
    os.umask(0o077)
    for gap in find_gaps() if options["is_sandboxed"] else ():
        print(f"the scorer's sandbox is incomplete: {gap}", file=sys.stderr)
    mark = os.environ[MARK]
    rewards = msgspec.convert(
        options["rewards"], tuple[RewardConfig, ...], dec_hook=lambda kind, value: kind(value)
    )
    scorers = [make_scorer(reward) for reward in rewards]
    own = {number: load(scorer) for number, scorer in enumerate(scorers) if scorer.is_own}
    ours = readable_roots()
    graders = [own.get(number) or load(scorer) for number, scorer in enumerate(scorers)]
    roots = [root for root in readable_roots() if root in ours or holds_libraries(root)]
    if options["is_sandboxed"]:
        os.environ.clear()
        for name, value in ENVIRONMENT.items():  # for C libraries that a scorer imports late
            os.putenv(name, value)
    gc.collect()
    gc.freeze()  # otherwise garbage collection in a worker would copy all pages
    collapse()
    limits = SandboxLimits(*options["limits"])
    connection = socket.socket(fileno=options["connection"])
    sandbox = Sandbox(limits, roots) if options["is_sandboxed"] else None
    runs_programs = any(scorer.runs_programs for scorer in scorers)
    nursery = Nursery.fork(connection, sandbox) if runs_programs else None
    ForkServer(connection, scorers, graders, limits, sandbox, nursery).serve()
    kill_marked(mark)
    shutil.rmtree(Path.cwd(), ignore_errors=True)  # the controller made it for this process


def load(scorer: Scorer) -> Grader:
    """Import the modules of a scorer; if that fails, return a grader that raises the error for every record."""
    try:
        return scorer.load()
    except (Exception, SystemExit) as error:
        failure = Exception(str(error)) if isinstance(error, SystemExit) else error

    def refuse(record: Record) -> Grade:
        raise failure

    return refuse


def readable_roots() -> list[Path]:
    """Return the directories of all imported modules, and those of shared libraries."""
    tops = [module for name, module in sys.modules.items() if "." not in name and name not in OWN]
    files = [Path(file) for module in tops if (file := getattr(module, "__file__", None))]
    roots = {file.parent.parent if file.stem == "__init__" else file.parent for file in files}
    return sorted(root for root in {*roots, *map(Path, LIBRARIES)} if root.is_dir())


def holds_libraries(root: Path) -> bool:
    """Return whether a directory has installed packages; other directories of user code may be private."""
    return "site-packages" in root.parts or "dist-packages" in root.parts


@dataclass(slots=True)
class Worker:
    """One worker, from the fork server's side."""

    pid: int
    requests: int
    verdicts: int
    request: int | None = None
    """Id of the request that it grades; None while it is idle."""
    line: bytes = b""
    """The request itself."""
    is_second_try: bool = False
    """Whether the first process for this request was killed or stopped by a signal."""
    bounds: tuple[float, float] = (0.0, 1.0)
    """Bounds of the scores for this request."""
    began_at: float = 0.0
    work_time: float = 0.0
    """Seconds that it has graded so far."""
    is_used_up: bool = False
    program: int | None = None
    """Process in which it runs programs."""

    @property
    def is_idle(self) -> bool:
        """Return whether it waits for a request."""
        return self.request is None

    @property
    def may_try_again(self) -> bool:
        """Return whether it grades a request for the first time."""
        return not self.is_idle and not self.is_second_try


def is_stopped(pid: int | None) -> bool:
    """Return whether a signal has stopped a child; False where the kernel does not say it."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in STOPPED


def cause_of_end(pid: int) -> str:
    """Return exit status or signal of a child that ends now; an empty text if it goes on. It stays a zombie."""
    for _ in range(EXIT_CHECKS):
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None:
            is_signal = ended.si_code != os.CLD_EXITED
            status = ended.si_status
            return signal.Signals(status).name if is_signal else f"exit status {status}"
        time.sleep(EXIT_PAUSE)
    return ""


class Nursery:
    """A process that forks the processes for programs. It was forked before any record came, so they know none."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    @classmethod
    def fork(cls, other: socket.socket, sandbox: Sandbox | None) -> Nursery:
        """Start the process; it closes `other`."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            try:
                die_with_parent()
                ours.close()
                other.close()
                _serve_nursery(theirs, sandbox)
            finally:
                os._exit(0)
        theirs.close()
        return cls(ours)

    def begin(self) -> tuple[int, int]:
        """Return the id of a new process, and the descriptor of the connection to it.

        Raises:
            OSError: there is no memory or descriptor for it.
        """
        mine, programs = socket.socketpair()
        with programs:
            socket.send_fds(self._connection, [b"begin"], [programs.fileno()])
        pid = int(self._connection.recv(MOST_BYTES) or b"0")
        if pid <= 0:
            mine.close()
            raise OSError(-pid, f"no process for a program: {os.strerror(-pid)}")
        return pid, mine.detach()

    def end(self, pid: int, *, has_ended: bool = False) -> str:
        """Kill a process; if it has ended by itself, return how, as `cause_of_end`."""
        self._connection.send(f"{'cause' if has_ended else 'kill'} {pid}".encode())
        return self._connection.recv(MOST_BYTES).decode().strip()


def _serve_nursery(connection: socket.socket, sandbox: Sandbox | None) -> None:
    killed: set[int] = set()
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, MOST_BYTES, 1)
        if not message:
            return
        if message != b"begin":
            word, _, number = message.decode().partition(" ")
            cause = cause_of_end(int(number)) if word == "cause" else ""
            os.kill(int(number), signal.SIGKILL)  # a child that was not reaped
            killed.add(int(number))
            connection.send(cause.encode() or b" ")
            continue
        killed -= {pid for pid in killed if os.waitpid(pid, os.WNOHANG)[0]}
        (descriptor,) = descriptors
        try:
            pid = os.fork()
        except OSError as error:
            pid = -(error.errno or 1)
        if pid == 0:
            try:
                if not _prepare(sandbox, {descriptor}):
                    remote_program.serve_program(descriptor)
            finally:
                os._exit(0)
        os.close(descriptor)
        connection.send(str(pid).encode())


class ForkServer:
    """Sends each request to a worker, and enforces the time limit."""

    def __init__(
        self,
        connection: socket.socket,
        scorers: Sequence[Scorer],
        graders: Sequence[Grader],
        limits: SandboxLimits,
        sandbox: Sandbox | None,
        nursery: Nursery | None = None,
    ) -> None:
        self._nursery = nursery
        self._connection = connection
        self._scorers = scorers
        self._graders = graders
        self._limits = limits
        self._sandbox = sandbox
        self._workers: dict[int, Worker] = {}
        self._killed: set[int] = set()
        """Killed processes that have not ended yet; their pipes are closed already."""
        self._unread = b""
        self._is_over = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ, self._receive)

    def serve(self) -> None:
        """Answer requests until the controller closes the connection; then kill all workers."""
        looked_at = time.monotonic()
        while not self._is_over:
            for key, _ in self._selector.select(self._patience()):
                handle: Callable[[], None] = key.data
                handle()
            before, looked_at = looked_at, time.monotonic()
            self._excuse(looked_at - before)
            self._end_overdue()
            self._bury(os.WNOHANG)
        for worker in list(self._workers.values()):
            self._discard(worker)
        self._bury()

    def _receive(self) -> None:
        data = self._connection.recv(1 << 20)
        self._is_over = not data
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            self._begin(line)

    def _begin(self, line: bytes) -> None:
        request = json.loads(line)
        grader = self._graders[request["scorer"]]
        try:
            # Loads the data of the record's task once, before later workers are forked.
            grader(request["record"])
        except Exception as error:
            detail = f"{type(error).__name__}: {error}"[:MOST_DETAIL]
            self._answer(request["id"], ScoringOutcome(0.0, "record", detail))
            return
        if len(line) >= PIPE_BYTES:
            detail = f"the request has {len(line)} bytes, more than the limit of {PIPE_BYTES}"
            self._answer(request["id"], ScoringOutcome(0.0, "record", detail))
            return
        self._assign(line + b"\n")

    def _assign(self, line: bytes, *, is_second_try: bool = False) -> None:
        """Let a worker grade a request that was checked."""
        request = json.loads(line)
        scorer = self._scorers[request["scorer"]]
        worker = self._hand_over(line)
        worker.request, worker.began_at = request["id"], time.monotonic()
        worker.line, worker.is_second_try = line, is_second_try
        worker.bounds = scorer.bounds
        worker.is_used_up = scorer.evaluates and can_act(request["answer"])

    def _try_again(self, worker: Worker) -> None:
        """Repeat a request whose process was struck by a signal. An answer that sends it to itself fails twice."""
        line = worker.line
        self._discard(worker)
        self._assign(line, is_second_try=True)

    def _hand_over(self, line: bytes) -> Worker:
        """Send a request to an idle worker, or to a new one."""
        idle = (worker for worker in self._workers.values() if worker.is_idle)
        worker = next(idle, None) or self._fork()
        try:
            # Writes everything: the pipe of an idle worker is empty and large enough.
            os.write(worker.requests, line)
        except BrokenPipeError:  # the worker was killed from outside
            self._discard(worker)
            return self._hand_over(line)
        return worker

    def _fork(self) -> Worker:
        if len(self._killed) > len(self._workers) + 1:
            self._bury()  # otherwise dying processes would use more memory than allowed
        pipes = [*os.pipe(), *os.pipe()]
        requests, to_worker, verdicts, from_worker = pipes
        program, ours = None, None
        try:
            if self._nursery is not None:
                program, ours = self._nursery.begin()
                pipes.append(ours)
            if sys.platform == "linux":
                fcntl.fcntl(to_worker, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
            pid = os.fork()
        except OSError:
            for pipe in pipes:
                os.close(pipe)
            raise
        if pid == 0:
            work(requests, from_worker, ours, self._graders, self._sandbox)
        os.close(requests)
        os.close(from_worker)
        if ours is not None:
            os.close(ours)
        worker = Worker(pid, to_worker, verdicts, program=program)
        self._workers[pid] = worker
        self._selector.register(verdicts, selectors.EVENT_READ, partial(self._end, worker))
        return worker

    def _end(self, worker: Worker) -> None:
        """Send the verdict of a worker to the controller; keep the worker if it can be used again."""
        if self._workers.get(worker.pid) is not worker:
            return  # discarded after the selector reported it
        data = os.read(worker.verdicts, MOST_BYTES)
        outcome = read_verdict(data, worker.bounds) if data else self._lost(worker)
        if outcome.fault == PROCESS_ENDED and data and self._nursery and worker.program:
            outcome = outcome._replace(detail=self._nursery.end(worker.program, has_ended=True))
            worker.program = None
        if outcome[1:] == (PROCESS_ENDED, "SIGKILL") and worker.may_try_again:
            self._try_again(worker)
            return
        worker.work_time += time.monotonic() - worker.began_at
        is_old = worker.work_time > self._limits.time  # and near its limit of CPU time
        has_graded = not worker.is_idle
        self._settle(worker, outcome)
        if worker.is_used_up or is_old or outcome.fault is not None:
            self._discard(worker)
            if has_graded and not any(other.is_idle for other in self._workers.values()):
                with suppress(OSError):  # the next answer forks again, and reports the error
                    self._fork()

    def _lost(self, worker: Worker) -> ScoringOutcome:
        """Return the outcome of a worker that has ended without a verdict, with its exit status or signal."""
        return ScoringOutcome(0.0, PROCESS_ENDED, cause_of_end(worker.pid))

    def _settle(self, worker: Worker, outcome: ScoringOutcome) -> None:
        if worker.request is not None:
            self._answer(worker.request, outcome)
        worker.request = None

    def _excuse(self, elapsed: float) -> None:
        """Count no time of workers during which this process, and so probably they, were stopped."""
        if elapsed > 2 * TICK:
            for worker in self._workers.values():
                worker.began_at = min(worker.began_at + elapsed, time.monotonic())

    def _end_overdue(self) -> None:
        latest = time.monotonic() - self._limits.time
        for worker in list(self._workers.values()):
            if worker.is_idle or worker.began_at > latest:
                continue
            if worker.may_try_again and (is_stopped(worker.pid) or is_stopped(worker.program)):
                self._try_again(worker)
            else:
                self._settle(worker, ScoringOutcome(0.0, "time limit"))
                self._discard(worker)

    def _patience(self) -> float | None:
        """Return the seconds until the first worker exceeds its time, at most a tick; None if all are idle."""
        first = min((w.began_at for w in self._workers.values() if not w.is_idle), default=inf)
        if first == inf:
            return None
        return min(TICK, max(0.0, first + self._limits.time - time.monotonic()))

    def _discard(self, worker: Worker) -> None:
        del self._workers[worker.pid]
        self._selector.unregister(worker.verdicts)
        os.kill(worker.pid, signal.SIGKILL)
        with suppress(ProcessLookupError):  # with seccomp a worker cannot start processes
            os.killpg(worker.pid, signal.SIGKILL)
        if self._nursery is not None and worker.program is not None:
            self._nursery.end(worker.program)
        self._killed.add(worker.pid)
        os.close(worker.verdicts)
        os.close(worker.requests)

    def _bury(self, options: int = 0) -> None:
        """Reap killed processes; without WNOHANG wait until all have ended."""
        self._killed -= {pid for pid in self._killed if os.waitpid(pid, options)[0]}

    def _answer(self, request: int, outcome: ScoringOutcome) -> None:
        reply = {"id": request, **outcome._asdict()}
        shown = (c if c.isprintable() else " " for c in reply["detail"])  # no terminal escapes
        text = "".join(shown).encode(errors="replace").decode()
        self._connection.sendall(json.dumps({**reply, "detail": text}).encode() + b"\n")
