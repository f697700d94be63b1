"""One environment in its worker process, and the host that forks these processes, seen from the controller."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections import deque
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Annotated, Any

import msgspec

from streamrl.executor.directory_lock import OwnedDirectory
from streamrl.executor.environment.host import (
    COMMAND,
    KILL,
    MOST_REWARD,
    OPEN,
    PING,
    Description,
    Options,
)
from streamrl.executor.environment.tool_calls import FORMATS, format_of
from streamrl.executor.launchers.handles import PATIENCE, PING_TIME, Heartbeat, WorkerLostError
from streamrl.executor.verifier.fork_server import ENVIRONMENT
from streamrl.executor.verifier.fork_server_process import CLOSE_TIME
from streamrl.runfile.environment_choice import ENVIRONMENTS
from streamrl.runfile.environment_config import EnvironmentConfig
from streamrl.runfile.errors import OneOf, RunError
from streamrl.runfile.scorer_choice import file_of, with_file
from streamrl.workload.prompt_records import Record

logger = logging.getLogger(__name__)

BOOT = """
import json, sys
options = json.loads(sys.argv[1])
sys.path[:] = options["path"]
from streamrl.executor.libc import continue_without_parent
continue_without_parent()
from streamrl.executor.environment.host import main
main(options)
"""
"""Program of the host; it imports from the controller's `sys.path` and inherits nothing else."""
IMPORT_TIME = 300.0
"""Seconds for the import of the environment's class, as for engines and backends from outside."""
END_TIME = 5.0
"""Seconds beyond its limit that an action has to stop. Then its process is killed."""
MOST_BYTES = 1 << 24
"""Maximum size of an answer."""
CPU_SHARE = 1e6
"""Seconds of CPU time of an episode without a time limit."""

Observation = str | list[dict[str, Any]] | None
"""A text, or messages of a chat."""


class EnvironmentFaultError(RuntimeError):
    """An environment raised an error, or gave an answer that cannot be used."""


class Answer(msgspec.Struct, frozen=True):
    """The answer of an environment."""

    id: str = ""
    """That of the request."""
    observation: Observation = None
    reward: Annotated[float, msgspec.Meta(ge=-MOST_REWARD, le=MOST_REWARD)] = 0.0
    done: bool = False
    timed_out: bool = False
    server: str = ""
    """The MCP server that had not answered when the action timed out, if it waited for one."""
    fault: str | None = None


class Session:
    """The environment of one episode; requests follow one after the other. `reset` opens it."""

    def __init__(self, host: EnvironmentHost) -> None:
        self._host = host
        self._number: int | None = None
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self.num_steps = 0
        """Actions that the environment has answered."""
        self.is_over = False
        """Whether the environment has ended the episode."""
        self.is_closed = False

    async def reset(self, task: Record) -> Observation:
        """Begin the episode of a task, and return what the policy sees before its first turn.

        Raises:
            EnvironmentFaultError: it raised an error, or did not start in time.
            WorkerLostError: its process has ended.
        """
        self._number, self._reader, self._writer = await self._host.open()
        if self.is_closed:
            self.close()
        limit = self._host.start_time_limit
        try:
            return (await self._ask({"do": "reset", "task": task}, limit)).observation
        except TimeoutError:
            self.kill()
            raise EnvironmentFaultError(
                f"it did not start within environment.start_time_limit, {limit:g} s"
            ) from None

    async def step(self, action: str, limit: float | None) -> Answer:
        """Return the answer to an action; an action that cannot be stopped at its limit ends the episode."""
        seconds = inf if limit is None else float(limit)
        request = {"do": "step", "action": action, "limit": None if limit is None else seconds}
        try:
            answer = await self._ask(request, seconds + END_TIME)
        except TimeoutError:
            self.kill()
            answer = Answer(done=True, timed_out=True)
        self.num_steps += 1
        self.is_over = self.is_over or answer.done
        return answer

    async def _ask(self, request: dict[str, Any], patience: float) -> Answer:
        """Send a request, and return the answer.

        Raises:
            EnvironmentFaultError: the environment raised an error, or a line is not the answer to this request.
            WorkerLostError: its process has ended.
            TimeoutError: there is no answer within `patience` seconds.
        """
        own = secrets.token_hex(16)
        try:
            self._writer.write(msgspec.json.encode({**request, "id": own}) + b"\n")
            async with asyncio.timeout(None if patience == inf else patience):
                line = await self._reader.readline()
        except ConnectionError:
            line = b""
        except ValueError:
            raise EnvironmentFaultError(f"an answer has more than {MOST_BYTES} bytes") from None
        if not line.endswith(b"\n"):
            raise WorkerLostError("the process of the environment has ended")
        try:
            answer = msgspec.json.decode(line, type=Answer)
        except (ValueError, RecursionError) as error:  # of msgspec or UTF-8
            raise EnvironmentFaultError(f"the answer of the environment: {error}") from None
        if not secrets.compare_digest(answer.id.encode(), own.encode()):
            raise EnvironmentFaultError(
                "a line on the environment's socket is not the answer to its request: other code wrote it"
            )
        if answer.fault is not None:
            raise EnvironmentFaultError(answer.fault)
        return answer

    def close(self) -> None:
        """Let the environment close itself and its process end; kill the process if it does not end in time."""
        self.is_closed = True
        if self._number is not None:
            self._writer.close()
            loop = asyncio.get_running_loop()
            loop.call_later(CLOSE_TIME, self._host.kill, self._number)

    def kill(self) -> None:
        """Kill the process; a running request raises `WorkerLostError`."""
        self.is_closed = True
        if self._number is not None:
            self._host.kill(self._number)


class HostProcess:
    """One process of the host, from its start to its end.

    It is lost if it ends, or if it neither answers pings nor computes for `patience` seconds. Then it is killed with
    all its workers.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        directory: OwnedDirectory,
        connection: socket.socket,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._directory = directory
        self._connection = connection
        self._writer = writer
        self._unsent: deque[tuple[bytes, socket.socket | None]] = deque()
        """Commands for which the connection had no room yet, with the socket that `OPEN` hands over."""
        self._forks: dict[int, asyncio.Future[None]] = {}
        """Resolved when the host has forked the worker of a session."""
        self._tasks: list[asyncio.Task[None]] = []
        self._is_closed = False

    @classmethod
    async def start(
        cls, config: EnvironmentConfig, log: Path, patience: float
    ) -> tuple[HostProcess, Description]:
        """Start the process, and return it with the description of its class.

        Raises:
            EnvironmentFaultError: the class cannot be used.
        """
        ours, theirs = socket.socketpair()
        directory = OwnedDirectory("environment")
        with theirs, log.open("ab") as output:
            process = subprocess.Popen(
                [
                    sys.executable,
                    *("-I", "-S", "-B"),
                    "-c",
                    BOOT,
                    json.dumps(_options(config, theirs)),
                ],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**({} if config.sandbox else os.environ), **ENVIRONMENT, **directory.mark},
                cwd=directory.path,
                start_new_session=True,
            )
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=MOST_BYTES)
        own = cls(process, directory, ours, writer)
        try:
            described = await _description(reader, log)
        except BaseException:
            own.close()
            raise
        own._watch(reader, Heartbeat(process.pid, patience))
        return own, described

    def _watch(self, reader: asyncio.StreamReader, heartbeat: Heartbeat) -> None:
        heartbeat.answer()
        self._tasks = [
            asyncio.create_task(self._listen(reader, heartbeat)),
            asyncio.create_task(self._beat(heartbeat)),
        ]

    @property
    def pid(self) -> int | None:
        """Process id; None if the process does not run."""
        is_over = self._is_closed or self._process.poll() is not None
        return None if is_over else self._process.pid

    async def fork(self, session: int) -> socket.socket:
        """Let the host fork the worker of a session, and return the connection to it.

        Raises:
            WorkerLostError: the host is lost.
        """
        if self._is_closed:
            raise WorkerLostError("the host of environments has ended")
        ours, theirs = socket.socketpair()
        forked = self._forks[session] = asyncio.get_running_loop().create_future()
        try:
            with theirs:
                self.send(OPEN, session, theirs)
                await forked
        except BaseException:
            ours.close()
            raise
        finally:
            del self._forks[session]
        return ours

    def send(self, kind: int, session: int = 0, handed: socket.socket | None = None) -> None:
        """Send a command now, or as soon as the connection has room for it. This never waits."""
        self._unsent.append((COMMAND.pack(kind, session), handed))
        self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent and not self._is_closed:
                data, handed = self._unsent[0]
                if handed is None or handed.fileno() >= 0:  # else its session was given up
                    files = [] if handed is None else [handed.fileno()]
                    socket.send_fds(self._connection, [data], files)
                self._unsent.popleft()
        except BlockingIOError:
            pass  # the next answer or ping tries again
        except OSError as error:
            self._lose(f"has ended: {error}")

    async def _listen(self, reader: asyncio.StreamReader, heartbeat: Heartbeat) -> None:
        """Note the commands that the host has carried out, until it ends."""
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                kind, session = COMMAND.unpack(await reader.readexactly(COMMAND.size))
                forked = self._forks.get(session)
                if kind == PING:
                    heartbeat.answer()
                elif forked is not None and not forked.done():
                    forked.set_result(None)
                self._flush()
        self._lose("has ended")

    async def _beat(self, heartbeat: Heartbeat) -> None:
        """Ping every `PING_TIME`, until the process has been silent for too long."""
        while not heartbeat.is_over:
            if heartbeat.is_asked_for():
                self.send(PING)
            await asyncio.sleep(PING_TIME)
        self._lose(f"gave no sign of life for {heartbeat.silence:.0f} s and was killed")

    def _lose(self, how: str) -> None:
        if self._is_closed:
            return
        logger.warning(f"the host of environments {how}; episodes in it are run again")
        self._process.kill()
        self.close(f"the host of environments {how}")

    def close(self, why: str = "the host of environments was closed") -> None:
        """End the process with all workers; calls that wait for it raise `WorkerLostError`."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        with suppress(OSError):  # the process may have closed it first
            self._connection.shutdown(socket.SHUT_RDWR)
        self._writer.close()
        for forked in self._forks.values():
            if not forked.done():
                forked.set_exception(WorkerLostError(why))
        _end(self._process)
        self._directory.remove()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of a process that leads its group; kill the group if it does not end in time."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(CLOSE_TIME)
        return
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):  # the kernel has not ended it yet
        process.wait(CLOSE_TIME)


class EnvironmentHost:
    """The host process; it is started again when it was lost."""

    def __init__(
        self,
        config: EnvironmentConfig,
        log: Path = Path(os.devnull),
        patience: float = PATIENCE,
    ) -> None:
        """Take the environment's section, the file for its output, and `execute.patience` in seconds."""
        self._config = config
        self._log = log
        self._patience = patience
        self._numbers = itertools.count()
        self._process: HostProcess | None = None
        self._opening = asyncio.Lock()
        """Held while a worker is forked, so that a host which hangs has one such request at most."""

    @property
    def start_time_limit(self) -> float:
        """Seconds that the start of one environment may take."""
        return float(self._config.start_time_limit)

    @property
    def pid(self) -> int | None:
        """Process id of the host; None if it does not run."""
        return None if self._process is None else self._process.pid

    async def describe(self) -> list[dict[str, Any]]:
        """Return the schemas of the tools of the environment's class.

        Raises:
            RunError: the class cannot be used.
        """
        log, self._log = self._log, Path(os.devnull)
        try:
            return (await self.start())["tools"]
        except EnvironmentFaultError as error:
            key, value = "environment.implementation", self._config.implementation
            raise RunError(key, value, text=f"{key} {value!r} cannot be used: {error}") from None
        finally:
            self.close()
            self._log = log

    async def try_out(self, task: Record) -> None:
        """Begin an episode of a record, as a check before a run.

        Raises:
            RunError: the class cannot be used.
            EnvironmentFaultError: it cannot begin this episode.
            WorkerLostError: its process ends.
        """
        await self.describe()
        session = Session(self)
        try:
            await session.reset(task)
        finally:
            session.kill()
            self.close()

    async def start(self) -> Description:
        """Start the process, and return the description of its class.

        Raises:
            EnvironmentFaultError: the class cannot be used.
        """
        self.close()
        self._process, described = await HostProcess.start(self._config, self._log, self._patience)
        return described

    async def open(self) -> tuple[int, asyncio.StreamReader, asyncio.StreamWriter]:
        """Let the host fork a worker, and return its number and connection; start the host again if it was lost.

        Raises:
            EnvironmentFaultError: the host does not start.
            WorkerLostError: the host was lost meanwhile; another call starts a new one.
        """
        async with self._opening:
            if self.pid is None:
                await self.start()
            assert self._process is not None, "it was started"
            number = next(self._numbers)
            ours = await self._process.fork(number)
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=MOST_BYTES)
        return number, reader, writer

    def kill(self, session: int) -> None:
        """Kill the worker of a session, if it runs."""
        if self._process is not None:
            self._process.send(KILL, session)

    def close(self) -> None:
        """End the process with all workers."""
        process, self._process = self._process, None
        if process is not None:
            process.close()


async def _description(reader: asyncio.StreamReader, log: Path) -> Description:
    """Return the first line of a host, which imports the environment's class before it.

    Raises:
        EnvironmentFaultError: the class cannot be used, or the process did not start.
    """
    try:
        async with asyncio.timeout(IMPORT_TIME):
            line = await reader.readline()
        described = msgspec.json.decode(line, type=Description)
    except (TimeoutError, ConnectionError, ValueError, RecursionError):
        raise EnvironmentFaultError(f"its process did not start; see {log}") from None
    if described["fault"] is not None:
        raise EnvironmentFaultError(described["fault"])
    return described


def _options(config: EnvironmentConfig, connection: socket.socket) -> Options:
    limit: float | None = config.episode_time_limit
    if limit is None and config.action_time_limit is not None:
        limit = config.action_time_limit * config.max_turns
    return {
        "path": [str(Path(entry).resolve()) for entry in sys.path],
        "connection": connection.fileno(),
        "implementation": _with_absolute_file(str(config.implementation)),
        "arguments": {**config.arguments, **_arguments_of_tools(config)},
        "limits": (CPU_SHARE if limit is None else float(limit), float(config.memory_limit)),
        "is_sandboxed": config.sandbox,
    }


def with_tool_format(config: EnvironmentConfig, tokenizer: Any) -> EnvironmentConfig:
    """Return the config with the format of tool calls that the model's chat template describes, if it needs one.

    Raises:
        RunError: the chat template describes none.
    """
    if not reads_calls(config) or config.tool_format != "auto":
        return config
    found = format_of(getattr(tokenizer, "chat_template", None))
    if found is None:
        key, names = "environment.tool_format", [*FORMATS]
        text = f"{key}: the model's chat template describes no tool calls; set the format: {', '.join(names)}"
        raise RunError(key, "auto", OneOf(names), text)
    return msgspec.structs.replace(config, tool_format=found)


def _arguments_of_tools(config: EnvironmentConfig) -> dict[str, Any]:
    """Return the arguments of an environment that reads tool calls."""
    names = [_with_absolute_file(each) for each in config.tools]
    functions = {"functions": names} if names else {}
    return functions | ({"tool_format": config.tool_format} if reads_calls(config) else {})


def reads_calls(config: EnvironmentConfig) -> bool:
    """Return whether an environment of this package reads tool calls."""
    chosen = ENVIRONMENTS.get(str(config.implementation))
    return chosen is not None and chosen.reads_calls


def _with_absolute_file(value: str) -> str:
    """Return a value with the absolute path of its file, if it has one."""
    file = file_of(value)
    return value if file is None else with_file(value, str(Path(file).resolve()))
