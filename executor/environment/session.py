"""One environment in its worker process, and the host that forks these processes, seen from the controller."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Annotated, Any

import msgspec

from streamrl.executor.environment.host import (
    COMMAND,
    KILL,
    MOST_REWARD,
    OPEN,
    Description,
    Options,
)
from streamrl.executor.environment.tool_calls import FORMATS, format_of
from streamrl.executor.launchers.handles import WorkerLostError
from streamrl.executor.verifier.fork_server import ENVIRONMENT
from streamrl.executor.verifier.fork_server_process import CLOSE_TIME
from streamrl.runfile.environment_choice import ENVIRONMENTS
from streamrl.runfile.environment_config import EnvironmentConfig
from streamrl.runfile.errors import OneOf, RunError
from streamrl.runfile.scorer_choice import file_of, with_file
from streamrl.workload.prompt_records import Record

BOOT = """
import json, sys
options = json.loads(sys.argv[1])
sys.path[:] = options["path"]
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
        except msgspec.MsgspecError as error:
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


class EnvironmentHost:
    """The host process; it is started again when it was lost."""

    def __init__(self, config: EnvironmentConfig, log: Path = Path(os.devnull)) -> None:
        self._config = config
        self._log = log
        self._numbers = itertools.count()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._starting = asyncio.Lock()

    @property
    def start_time_limit(self) -> float:
        """Seconds that the start of one environment may take."""
        return float(self._config.start_time_limit)

    @property
    def pid(self) -> int | None:
        """Process id of the host; None if it does not run."""
        return (
            None if self._process is None or self._process.poll() is not None else self._process.pid
        )

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
        ours, theirs = socket.socketpair()
        self._directory = tempfile.TemporaryDirectory(prefix="streamrl-environment-")
        with theirs, self._log.open("ab") as output:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    *("-I", "-S", "-B"),
                    "-c",
                    BOOT,
                    json.dumps(self._options(theirs)),
                ],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=ENVIRONMENT if self._config.sandbox else {**os.environ, **ENVIRONMENT},
                cwd=self._directory.name,
                start_new_session=True,
            )
        self._connection = ours
        try:
            line = await asyncio.wait_for(asyncio.to_thread(_read_line, ours), IMPORT_TIME)
            described = msgspec.json.decode(line, type=Description)
        except (TimeoutError, msgspec.MsgspecError):
            self.close()
            raise EnvironmentFaultError(f"its process did not start; see {self._log}") from None
        if described["fault"] is not None:
            self.close()
            raise EnvironmentFaultError(described["fault"])
        return described

    def _options(self, connection: socket.socket) -> Options:
        config = self._config
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

    async def open(self) -> tuple[int, asyncio.StreamReader, asyncio.StreamWriter]:
        """Let the host fork a worker, and return its number and connection; start the host again if it was lost."""
        async with self._starting:
            if self.pid is None:
                await self.start()
        number = next(self._numbers)
        ours, theirs = socket.socketpair()
        with theirs:
            self._send(OPEN, number, theirs.fileno())
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=MOST_BYTES)
        return number, reader, writer

    def kill(self, session: int) -> None:
        """Kill the worker of a session, if it runs."""
        with suppress(WorkerLostError):
            self._send(KILL, session)

    def _send(self, kind: int, session: int, *files: int) -> None:
        assert self._connection is not None, "start was called"
        try:
            socket.send_fds(self._connection, [COMMAND.pack(kind, session)], files)
        except OSError as error:
            raise WorkerLostError(f"the host of environments has ended: {error}") from None

    def close(self) -> None:
        """End the process with all workers."""
        process, self._process = self._process, None
        if process is None or self._connection is None or self._directory is None:
            return
        self._connection.close()
        try:
            process.wait(CLOSE_TIME)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._directory.cleanup()


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


def _read_line(connection: socket.socket) -> bytes:
    """Return the first line that the host sends; it sends nothing after it."""
    data = b""
    while not data.endswith(b"\n"):
        more = connection.recv(1 << 16)
        if not more:
            break
        data += more
    return data


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
