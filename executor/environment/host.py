"""The process that imports an environment's class once, and forks a worker process for each episode.

The controller sends commands of fixed size over a socket: `OPEN` with the number of a session and one end of its
socket, `KILL` with the number, or `PING`. The host sends back each `OPEN` and `PING` that it has carried out, so the
controller notices a host that hangs. Requests and answers of a session are lines of JSON on its own socket, between
controller and worker. So the host never reads what an environment or a policy wrote.

| request                                        | answer                                                     |
|------------------------------------------------|------------------------------------------------------------|
| `{"do": "reset", "task": {...}}`               | `{"observation": ...}`                                     |
| `{"do": "step", "action": "...", "limit": s}`  | `{"observation": ..., "reward": r, "done": b}`             |

Each request also has a random `"id"`, which its answer repeats. So a line that a tool's code prints to the socket is
never taken for an answer. Code that an environment executes in its process can find the id, and so change its own
reward. An answer has `"fault"` if the environment raised an error, and `"timed_out"` if the action was stopped at its
limit, with the MCP server that it waited for (`"server"`).
A worker that reads the end of its socket closes its environment and ends. What it has started ends with the host, which
kills the processes with its mark (`directory_lock.MARK`).
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from traceback import walk_tb
from types import FrameType
from typing import Any, BinaryIO, NoReturn, TypedDict

from streamrl.executor.directory_lock import MARK, kill_marked
from streamrl.executor.environment.registry import find_class
from streamrl.executor.libc import die_with_parent
from streamrl.executor.verifier.fork_server import (
    ENVIRONMENT,
    MOST_FILES,
    collapse,
    holds_libraries,
    readable_roots,
)
from streamrl.executor.verifier.sandbox import Sandbox, SandboxLimits, find_gaps

COMMAND = struct.Struct("<BI")
"""A command to the host: its kind, and the number of a session."""
OPEN, KILL, PING = 0, 1, 2
REAP_TIME = 1.0
"""Seconds between two looks for workers that have ended."""
TIMED_OUT = "The action was stopped: it took more than {:g} s."
NO_MEMORY = "The action was stopped: it needed more memory than it may have."
MOST_REWARD = 1e6
"""Maximum size of a reward, positive or negative. Assumption: one beyond it is a mistake."""
MOST_DETAIL = 1000
"""Maximum characters of an error message."""


class Options(TypedDict):
    """Arguments of the process."""

    path: list[str]
    """`sys.path` of the controller."""
    connection: int
    """File descriptor of the socket to the controller."""
    implementation: str
    arguments: dict[str, Any]
    limits: tuple[float, float]
    """Seconds and bytes; see `SandboxLimits`."""
    is_sandboxed: bool


class Description(TypedDict):
    """First line of the host: whether the class can be used, and what the chat template needs of it."""

    fault: str | None
    tools: list[dict[str, Any]]


class ActionTimeoutError(BaseException):
    """The time of an action is over. It is no `Exception`, because environments and tools catch those."""


def main(options: Options) -> None:
    """Serve until the controller closes the connection."""
    os.umask(0o077)
    for gap in find_gaps() if options["is_sandboxed"] else ():
        print(f"the environment's sandbox is incomplete: {gap}", file=sys.stderr)
    connection = socket.socket(fileno=options["connection"])
    before, mark = readable_roots(), os.environ[MARK]
    try:
        kind = find_class(options["implementation"])
        if hasattr(kind, "prepare"):
            kind.prepare(**options["arguments"])
        tools = list(_described(kind, options["arguments"]))
    except (Exception, SystemExit) as error:
        _say(connection, {"fault": _text_of(error), "tools": []})
        return
    roots = [root for root in readable_roots() if root in before or holds_libraries(root)]
    sandbox = None
    if options["is_sandboxed"]:
        os.environ.clear()
        for name, value in ENVIRONMENT.items():
            os.putenv(name, value)
        sandbox = Sandbox(SandboxLimits(*options["limits"]), roots)
    gc.collect()
    gc.freeze()  # otherwise garbage collection in a worker would copy all pages
    collapse()
    _say(connection, {"fault": None, "tools": tools})
    Host(connection, lambda: kind(**options["arguments"]), sandbox).serve()
    kill_marked(mark)


def _described(kind: Callable[..., Any], arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the schemas of the tools of a class; one object is made if they depend on its arguments."""
    tools = getattr(kind, "tools", ())
    if not isinstance(tools, property):
        yield from tools
        return
    environment = kind(**arguments)
    yield from environment.tools
    if hasattr(environment, "close"):
        environment.close()


def _say(connection: socket.socket, description: Description) -> None:
    connection.sendall(json.dumps(description).encode() + b"\n")


class Host:
    """Forks a worker for each session, and kills workers that the controller gives up."""

    def __init__(
        self, connection: socket.socket, make: Callable[[], Any], sandbox: Sandbox | None
    ) -> None:
        self._connection = connection
        self._make = make
        self._sandbox = sandbox
        self._workers: dict[int, int] = {}
        """Process id of each session's worker."""

    def serve(self) -> None:
        """Execute commands until the connection ends; then kill all workers."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._connection, selectors.EVENT_READ)
            while True:
                if selector.select(REAP_TIME) and not self._execute():
                    break
                self._reap(os.WNOHANG)
        for session in list(self._workers):
            self._kill(session)
        self._reap(0)

    def _execute(self) -> bool:
        """Execute one command; return False if the connection has ended."""
        data, files, _, _ = socket.recv_fds(self._connection, COMMAND.size, 1)
        if len(data) < COMMAND.size:
            return False
        kind, session = COMMAND.unpack(data)
        if kind == KILL:
            self._kill(session)
            return True
        if kind == OPEN:
            self._fork(session, files[0])
        try:
            self._connection.sendall(data)
        except ConnectionError:
            return False
        return True

    def _fork(self, session: int, file: int) -> None:
        pid = os.fork()
        if pid == 0:
            work(file, self._make, self._sandbox)
        os.close(file)
        self._workers[session] = pid

    def _kill(self, session: int) -> None:
        pid = self._workers.get(session)
        if pid is not None:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            with suppress(ProcessLookupError):  # it may not lead its group yet
                os.kill(pid, signal.SIGKILL)

    def _reap(self, options: int) -> None:
        """Forget workers that have ended, so that their process ids are never killed again."""
        for session, pid in list(self._workers.items()):
            if os.waitpid(pid, options)[0]:
                del self._workers[session]


def work(file: int, make: Callable[[], Any], sandbox: Sandbox | None) -> NoReturn:
    """Answer the requests of one session until its socket is closed; then the process ends."""
    try:
        die_with_parent()
        os.setpgid(0, 0)
        kept = {0, 1, 2, file, *(sandbox.files if sandbox is not None else ())}
        for before, after in pairwise([*sorted(kept), MOST_FILES]):
            os.closerange(before + 1, after)
        signal.signal(signal.SIGALRM, _time_out)
        if sandbox is not None:  # it may not write to the log: 0 is /dev/null
            os.dup2(0, 1)
            os.dup2(0, 2)
        # The sandbox allows read and write, not the calls of sockets.
        with os.fdopen(file, "rb") as requests, os.fdopen(os.dup(file), "wb") as answers:
            _serve(requests, answers, make, sandbox)
    finally:
        os._exit(0)


def _serve(
    requests: BinaryIO, answers: BinaryIO, make: Callable[[], Any], sandbox: Sandbox | None
) -> None:
    environment: Any = None
    os.set_inheritable(requests.fileno(), False)
    for line in requests:
        request = json.loads(line)
        try:
            if environment is None:
                if sandbox is not None:
                    sandbox.enter()
                environment = make()
            answer = {**_answer(environment, request), "id": request["id"]}
            data = json.dumps(answer, ensure_ascii=False)  # half of a surrogate pair becomes "?"
        except BaseException as error:
            fault = _text_of(error) + _place_of(error)
            data = json.dumps({"fault": fault, "id": request["id"]})
        answers.write(data.encode(errors="replace") + b"\n")
        answers.flush()
    if hasattr(environment, "close"):
        environment.close()


def _answer(environment: Any, request: dict[str, Any]) -> dict[str, Any]:
    if request["do"] == "reset":
        return {"observation": environment.reset(request["task"])}
    limit = request["limit"]
    try:
        with _limited(limit):
            answer = environment.step(request["action"])
    except ActionTimeoutError:
        late = {"timed_out": True, "server": str(getattr(environment, "waits_for", ""))}
        return {"observation": TIMED_OUT.format(limit), "reward": 0.0, "done": False, **late}
    except MemoryError:
        return {"observation": NO_MEMORY, "reward": 0.0, "done": False}
    if not isinstance(answer, (tuple, list)) or len(answer) != 3:
        raise TypeError("step must return (observation, reward, done)")
    observation, reward, done = answer
    reward = float(reward)
    if not abs(reward) <= MOST_REWARD:
        raise ValueError(
            f"a reward must be between {-MOST_REWARD:,.0f} and {MOST_REWARD:,.0f}, got {reward:g}"
        )
    if done not in (True, False):  # a text such as "no" would be true
        raise TypeError(f"done must be True or False, got {repr(done)[:40]}")
    return {"observation": observation, "reward": reward, "done": bool(done)}


@contextmanager
def _limited(seconds: float | None) -> Iterator[None]:
    """Raise `ActionTimeoutError` in this block after some seconds."""
    if seconds is not None:
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def _time_out(number: int, frame: FrameType | None) -> None:
    raise ActionTimeoutError


def _place_of(error: BaseException) -> str:
    """Return the file and line of the environment where an error came from; empty if it has none.

    It reads no file, because the sandbox forbids that.
    """
    places = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    own = [place for place in places if place[0] != _place_of.__code__.co_filename]
    if not own:
        return ""
    file, line = [place for place in own if place[0] == own[0][0]][-1]
    return f" ({file}:{line})"


def _text_of(error: BaseException) -> str:
    return ": ".join(filter(None, (type(error).__name__, str(error))))[:MOST_DETAIL]
