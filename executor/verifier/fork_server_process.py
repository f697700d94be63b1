"""Start the fork server, send it answers, and notice when it dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from streamrl.executor.directory_lock import OwnedDirectory
from streamrl.executor.verifier.fork_server import ENVIRONMENT
from streamrl.executor.verifier.sandbox import SandboxLimits
from streamrl.runfile.roles_config import RewardConfig
from streamrl.runfile.scorer_choice import file_of, with_file

if TYPE_CHECKING:
    from streamrl.workload.prompt_records import Record

BOOT = """
import json, sys
options = json.loads(sys.argv[1])
sys.path[:] = options["path"]
from streamrl.executor.libc import continue_without_parent
continue_without_parent()
from streamrl.executor.verifier.fork_server import main
main(options)
"""
"""Program of the process; it imports from the controller's `sys.path` and inherits nothing else."""
CLOSE_TIME = 0.5  # seconds for the process to end its workers; then all of them are killed


class Reply(msgspec.Struct, frozen=True):
    """Result of grading one answer; see `ScoringOutcome`."""

    id: int
    reward: float
    fault: str | None
    detail: str


class ForkServerProcess:
    """A fork server in its own session, connected by a socket pair."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        directory: OwnedDirectory,
        connection: socket.socket,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._directory = directory
        self._connection = connection
        self._writer = writer
        self._replies: dict[int, asyncio.Future[Reply]] = {}
        self._num_requests = 0
        self._listener = asyncio.create_task(self._listen(reader))
        self.is_lost = False
        self.has_answered = False
        """Whether its scorers have been loaded."""

    @classmethod
    async def start(
        cls,
        rewards: Sequence[RewardConfig],
        limits: SandboxLimits,
        log: Path,
        *,
        is_sandboxed: bool = True,
    ) -> ForkServerProcess:
        """Start the process in an empty directory; its output goes to `log`.

        Without the sandbox it has the environment of this process. What it has started ends with it.
        """
        directory = OwnedDirectory("verifier")
        ours, theirs = socket.socketpair()
        options = {
            "path": [str(Path(entry).resolve()) for entry in sys.path],
            "connection": theirs.fileno(),
            "rewards": [
                msgspec.to_builtins(_with_absolute_file(each), enc_hook=float) for each in rewards
            ],
            "limits": limits,
            "is_sandboxed": is_sandboxed,
        }
        with theirs, log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, *("-I", "-S", "-B"), "-c", BOOT, json.dumps(options)],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**({} if is_sandboxed else os.environ), **ENVIRONMENT, **directory.mark},
                cwd=directory.path,
                start_new_session=True,  # only the controller handles Ctrl-C
            )
        return cls(process, directory, ours, *await asyncio.open_unix_connection(sock=ours))

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._process.pid

    async def ask(self, scorer: int, answer: str, record: Record, patience: float) -> Reply:
        """Grade `answer`, and return the reply.

        Args:
            scorer: index among the rewards that the process was started with.
            answer: the part of a completion that the scorer reads.
            record: the record of the completion's prompt.
            patience: seconds to wait for the reply.

        Raises:
            RuntimeError: the process has ended, or was killed because it did not reply in time.
        """
        if self.is_lost:
            raise self._loss()
        self._num_requests += 1
        number = self._num_requests
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._replies[number] = reply
        request = {"id": number, "scorer": scorer, "answer": answer, "record": record}
        if not self._writer.is_closing():  # otherwise `_listen` notices the end soon
            self._writer.write(msgspec.json.encode(request) + b"\n")
        try:
            async with asyncio.timeout(patience):
                return await reply
        except TimeoutError:
            self.close()
            raise self._loss() from None
        finally:
            self._replies.pop(number, None)

    def close(self) -> None:
        """Close the connection, and kill the process group if it does not end in time."""
        with suppress(OSError):  # the process may have closed it first
            self._connection.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(CLOSE_TIME)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._directory.remove()
        self._listener.cancel()
        self._lose()

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Deliver replies until the process closes the connection or sends an invalid reply."""
        with suppress(
            ValueError, RecursionError, ConnectionError
        ):  # an invalid reply also ends the process
            while line := await reader.readline():
                reply = msgspec.json.decode(line, type=Reply)
                self.has_answered = True
                waiting = self._replies.get(reply.id)
                if waiting is not None and not waiting.done():  # the caller may have been cancelled
                    waiting.set_result(reply)
        self.close()

    def _lose(self) -> None:
        self.is_lost = True
        self._writer.close()
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(self._loss())

    def _loss(self) -> RuntimeError:
        return RuntimeError(f"the verifier's process ended with status {self._process.returncode}")


def _with_absolute_file(reward: RewardConfig) -> RewardConfig:
    """Return a reward with the absolute path of its file, if it has one."""
    file = file_of(reward.scorer)
    if file is None:
        return reward
    scorer = with_file(reward.scorer, str(Path(file).resolve()))
    return msgspec.structs.replace(reward, scorer=scorer)
