"""Load the scorers once, and fork a sandboxed worker for each answer that could run code.

A worker: a process that grades one answer after the other in its sandbox, until it is killed.

What it answers may have been written by the very answer it was to grade: it is read as data from a stranger.

The process that holds the scorers, and forks a worker where an answer needs one of its own.

Started with an empty environment, it loads the scorers once. Of its controller it gets a line of JSON for each
answer, `{"id", "scorer", "answer", "record"}`, and gives one back, `{"id", "reward", "fault", "detail"}`. It never looks
at an answer itself. A worker that was given an answer which could run code is not used again: what that may have
changed there would meet the next rollout. The next one is forked as soon as it has answered.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import re
import selectors
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

from streamrl.executor.libc import die_with_parent, madvise
from streamrl.executor.verifier.sandbox import Sandbox, SandboxLimits, find_gaps
from streamrl.executor.verifier.scorers import Grade, Grader, Scorer, can_act, make_scorer
from streamrl.runfile.roles_config import RewardConfig

if TYPE_CHECKING:
    from streamrl.workload.prompt_records import Record

HUGE_PAGE = 1 << 21  # bytes: of x86, and of ARM with pages of 4 KB
MAPS = Path("/proc/self/maps")
MADV_COLLAPSE = 25
"""Since Linux 6.1, and whatever the system says of transparent huge pages unless it never has them."""
_OWN_MEMORY = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p \S+ 00:00 0\s*(\[heap\])?\n")


def collapse() -> None:
    """Put what this process has allocated into huge pages, as far as the kernel does."""
    if sys.platform != "linux":
        return
    try:
        maps = MAPS.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for line in maps.splitlines(keepends=True):
        if (found := _OWN_MEMORY.fullmatch(line)) is not None:
            start = -(-int(found[1], 16) // HUGE_PAGE) * HUGE_PAGE
            size = int(found[2], 16) // HUGE_PAGE * HUGE_PAGE - start
            if size > 0:
                madvise(start, size, MADV_COLLAPSE)


REWARD, ERROR, MEMORY = b"R", b"E", b"M"
"""The first byte of a verdict: 8 bytes of a float follow, a text, or nothing."""
MOST_BYTES = 4096  # of a verdict: what a pipe delivers in one piece
MOST_FILES = 1 << 16  # more than a fork server ever opens


class ScoringOutcome(NamedTuple):
    """What came of grading one answer."""

    reward: float
    """Within the scorer's bounds; 0 where there is none."""
    fault: str | None = None
    """Why there is no reward, in a word or two of our own; None where there is one."""
    detail: str = ""
    """What the scorer said, to be believed only if the answer is trusted."""


def work(requests: int, verdicts: int, graders: Sequence[Grader], sandbox: Sandbox) -> NoReturn:
    """Grade what arrives at `requests` until it is closed; the process ends here."""
    try:
        refusal = _prepare(sandbox, {requests, verdicts})
        with os.fdopen(requests, "rb") as lines:
            for line in lines:
                os.write(verdicts, refusal or _grade(line, graders))
    finally:
        os._exit(0)


def read_verdict(data: bytes, bounds: tuple[float, float]) -> ScoringOutcome:
    """Return what a worker answered; a fault where that is no verdict, or no score within `bounds`."""
    kind, text = data[:1], data[1:]
    if kind == REWARD and len(text) == 8:
        (reward,) = struct.unpack("=d", text)
        if isfinite(reward) and bounds[0] <= reward <= bounds[1]:
            return ScoringOutcome(reward)
    if data == MEMORY:
        return ScoringOutcome(0.0, "memory limit")
    if kind == ERROR:
        return ScoringOutcome(0.0, "error", text.decode(errors="replace"))
    return ScoringOutcome(0.0, "no reward")


def _prepare(sandbox: Sandbox, pipes: set[int]) -> bytes:
    """Leave everything behind but `pipes`; return what to answer where that was refused, else nothing."""
    die_with_parent()
    os.setpgid(0, 0)  # to be killed with what it starts, where it can start anything
    os.dup2(0, 1)  # nothing is read or written there
    os.dup2(0, 2)
    _close_all_but({0, 1, 2, *pipes, *sandbox.files})
    try:
        sandbox.enter()
    except Exception as error:
        return _error(error)
    return b""


def _grade(line: bytes, graders: Sequence[Grader]) -> bytes:
    """Return the verdict on a request; whatever an answer raises is part of it."""
    try:
        request = json.loads(line)
        grader = graders[request["scorer"]]
        reward = float(grader(request["record"])(request["answer"]))
    except MemoryError:
        return MEMORY
    except BaseException as error:
        return _error(error)
    return REWARD + struct.pack("=d", reward)


def _error(error: BaseException) -> bytes:
    said = ": ".join(filter(None, (type(error).__name__, str(error))))
    return ERROR + said.encode(errors="replace")[: MOST_BYTES - 1]


def _close_all_but(kept: set[int]) -> None:
    for before, after in pairwise([*sorted(kept), MOST_FILES]):
        os.closerange(before + 1, after)


OWN = ("__main__", "streamrl")
"""Packages of which a worker needs no more files."""
LIBRARIES = ("/usr", "/lib", "/lib64", f"{sys.base_prefix}/lib")
"""Where Python's modules find what they are linked with."""
PIPE_BYTES = 1 << 20
"""Of a request: what any user may make a pipe hold (fs.pipe-max-size)."""
MOST_DETAIL = 1000  # characters of what an error says


class Options(TypedDict):
    """What the process is told at its start."""

    path: list[str]
    """`sys.path` of its controller."""
    connection: int
    """File descriptor of the socket to it."""
    rewards: list[dict[str, Any]]
    """As `RewardConfig`."""
    limits: tuple[float, float]
    """Seconds and bytes; see `SandboxLimits`."""


def main(options: Options) -> None:
    """Serve until the controller hangs up."""
    os.umask(0o077)
    for gap in find_gaps():
        print(f"what the scorer evaluates is not kept from everything: {gap}", file=sys.stderr)
    rewards = msgspec.convert(
        options["rewards"], tuple[RewardConfig, ...], dec_hook=lambda kind, value: kind(value)
    )
    scorers = [make_scorer(reward) for reward in rewards]
    own = {place: load(scorer) for place, scorer in enumerate(scorers) if scorer.is_own}
    ours = readable_roots()
    graders = [own.get(place) or load(scorer) for place, scorer in enumerate(scorers)]
    roots = [root for root in readable_roots() if root in ours or holds_libraries(root)]
    os.environ.clear()
    gc.collect()
    gc.freeze()  # or collecting in a worker would copy all of it
    collapse()
    limits = SandboxLimits(*options["limits"])
    connection = socket.socket(fileno=options["connection"])
    sandbox = Sandbox(limits, roots)
    ForkServer(connection, scorers, graders, limits, sandbox).serve()
    Path.cwd().rmdir()  # made for this process


def load(scorer: Scorer) -> Grader:
    """Import what a scorer needs; where that fails, return one that says so for every record."""
    try:
        return scorer.load()
    except (Exception, SystemExit) as error:
        failure = Exception(str(error)) if isinstance(error, SystemExit) else error

    def refuse(record: Record) -> Grade:
        raise failure

    return refuse


def readable_roots() -> list[Path]:
    """Return the directories that the modules imported so far came from, and those of shared libraries."""
    tops = [module for name, module in sys.modules.items() if "." not in name and name not in OWN]
    files = [Path(file) for module in tops if (file := getattr(module, "__file__", None))]
    roots = {file.parent.parent if file.stem == "__init__" else file.parent for file in files}
    return sorted(root for root in {*roots, *map(Path, LIBRARIES)} if root.is_dir())


def holds_libraries(root: Path) -> bool:
    """Whether a directory is one of Python's: of what the user's own code imports, all else may be private."""
    return "site-packages" in root.parts or "dist-packages" in root.parts


@dataclass(slots=True)
class Worker:
    """One worker, as the process that forked it knows it."""

    pid: int
    requests: int
    verdicts: int
    request: int | None = None
    """What it grades; None while it is idle."""
    bounds: tuple[float, float] = (0.0, 1.0)
    """Of the scores that may come of that."""
    began_at: float = 0.0
    work_time: float = 0.0
    """Seconds that it has been grading."""
    is_used_up: bool = False

    @property
    def is_idle(self) -> bool:
        """Whether it waits for a request."""
        return self.request is None


class ForkServer:
    """Gives each request to a worker, and each worker its time."""

    def __init__(
        self,
        connection: socket.socket,
        scorers: Sequence[Scorer],
        graders: Sequence[Grader],
        limits: SandboxLimits,
        sandbox: Sandbox,
    ) -> None:
        self._connection = connection
        self._scorers = scorers
        self._graders = graders
        self._limits = limits
        self._sandbox = sandbox
        self._workers: dict[int, Worker] = {}
        self._killed: set[int] = set()
        """Processes that die on their own time: what they had is given back meanwhile."""
        self._unread = b""
        self._is_over = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ, self._receive)

    def serve(self) -> None:
        """Answer requests until the controller hangs up, then leave no worker behind."""
        while not self._is_over:
            for key, _ in self._selector.select(self._patience()):
                handle: Callable[[], None] = key.data
                handle()
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
        scorer, grader = self._scorers[request["scorer"]], self._graders[request["scorer"]]
        try:
            # loads what the record's task needs, once for all workers that are forked later
            grader(request["record"])
        except Exception as error:
            detail = f"{type(error).__name__}: {error}"[:MOST_DETAIL]
            self._answer(request["id"], ScoringOutcome(0.0, "record", detail))
            return
        if len(line) >= PIPE_BYTES:
            detail = f"it and its answer have {len(line)} bytes, more than {PIPE_BYTES}"
            self._answer(request["id"], ScoringOutcome(0.0, "record", detail))
            return
        worker = self._hand_over(line + b"\n")
        worker.request, worker.began_at = request["id"], time.monotonic()
        worker.bounds = scorer.bounds
        worker.is_used_up = scorer.evaluates and can_act(request["answer"])

    def _hand_over(self, line: bytes) -> Worker:
        """Send a request to a worker that is idle, or to a new one."""
        idle = (worker for worker in self._workers.values() if worker.is_idle)
        worker = next(idle, None) or self._fork()
        try:
            os.write(
                worker.requests, line
            )  # all of it: an idle worker's pipe is empty, and wide enough
        except BrokenPipeError:  # somebody killed it meanwhile
            self._discard(worker)
            return self._hand_over(line)
        return worker

    def _fork(self) -> Worker:
        if len(self._killed) > len(self._workers) + 1:
            self._bury()  # or their memory would grow beyond what as many workers may have
        pipes = [*os.pipe(), *os.pipe()]
        requests, to_worker, verdicts, from_worker = pipes
        try:
            if sys.platform == "linux":
                fcntl.fcntl(to_worker, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
            pid = os.fork()
        except OSError:
            for pipe in pipes:
                os.close(pipe)
            raise
        if pid == 0:
            work(requests, from_worker, self._graders, self._sandbox)
        os.close(requests)
        os.close(from_worker)
        worker = Worker(pid, to_worker, verdicts)
        self._workers[pid] = worker
        self._selector.register(verdicts, selectors.EVENT_READ, partial(self._end, worker))
        return worker

    def _end(self, worker: Worker) -> None:
        """Pass on what a worker answered; keep it if it can go on."""
        if self._workers.get(worker.pid) is not worker:
            return  # discarded since this was found to be readable
        data = os.read(worker.verdicts, MOST_BYTES)
        outcome = (
            read_verdict(data, worker.bounds) if data else ScoringOutcome(0.0, "process ended")
        )
        worker.work_time += time.monotonic() - worker.began_at
        is_old = worker.work_time > self._limits.time  # and would meet its limit of CPU time
        has_graded = not worker.is_idle
        self._settle(worker, outcome)
        if worker.is_used_up or is_old or outcome.fault is not None:
            self._discard(worker)
            if has_graded and not any(other.is_idle for other in self._workers.values()):
                with suppress(OSError):  # the next answer tries again, and says why
                    self._fork()

    def _settle(self, worker: Worker, outcome: ScoringOutcome) -> None:
        if worker.request is not None:
            self._answer(worker.request, outcome)
        worker.request = None

    def _end_overdue(self) -> None:
        latest = time.monotonic() - self._limits.time
        for worker in list(self._workers.values()):
            if not worker.is_idle and worker.began_at <= latest:
                self._settle(worker, ScoringOutcome(0.0, "time limit"))
                self._discard(worker)

    def _patience(self) -> float | None:
        """Return the seconds until the first worker is overdue, None where all are idle."""
        first = min((w.began_at for w in self._workers.values() if not w.is_idle), default=inf)
        return None if first == inf else max(0.0, first + self._limits.time - time.monotonic())

    def _discard(self, worker: Worker) -> None:
        del self._workers[worker.pid]
        self._selector.unregister(worker.verdicts)
        os.kill(worker.pid, signal.SIGKILL)
        with suppress(ProcessLookupError):  # the rule where seccomp is at work: it started nobody
            os.killpg(worker.pid, signal.SIGKILL)
        self._killed.add(worker.pid)
        os.close(worker.verdicts)
        os.close(worker.requests)

    def _bury(self, options: int = 0) -> None:
        """Take back the processes of those that are dead, or wait until they are."""
        self._killed -= {pid for pid in self._killed if os.waitpid(pid, options)[0]}

    def _answer(self, request: int, outcome: ScoringOutcome) -> None:
        told = {"id": request, **outcome._asdict()}
        shown = (c if c.isprintable() else " " for c in told["detail"])  # no escapes for a terminal
        text = "".join(shown).encode(errors="replace").decode()
        self._connection.sendall(json.dumps({**told, "detail": text}).encode() + b"\n")
