"""Start the fork server, send it answers, and notice when it dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from streamrl.executor.verifier.sandbox import SandboxLimits
from streamrl.runfile.roles_config import RewardConfig
from streamrl.runfile.scorer_choice import file_of, with_file

if TYPE_CHECKING:
    from streamrl.workload.prompt_records import Record

BOOT = """
import json, sys
options = json.loads(sys.argv[1])
sys.path[:] = options["path"]
from streamrl.executor.verifier.fork_server import main
main(options)
"""
"""What the process runs; it finds modules where its controller does, and looks at nothing else of it."""
ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""All that the process finds in its environment: it can fork only while it has one thread."""
CLOSE_TIME = 0.5  # seconds that the process gets to end its workers before all of them are killed


class Reply(msgspec.Struct, frozen=True):
    """What came of one answer; see `ScoringOutcome`."""

    id: int
    reward: float
    fault: str | None
    detail: str


class ForkServerProcess:
    """A fork server in a session of its own, at the other end of a socket pair."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        directory: tempfile.TemporaryDirectory[str],
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
        """Whether its scorers are loaded."""

    @classmethod
    async def start(
        cls, rewards: Sequence[RewardConfig], limits: SandboxLimits, log: Path
    ) -> ForkServerProcess:
        """Start the process, in an empty directory; what it prints goes to `log`."""
        directory = tempfile.TemporaryDirectory(prefix="streamrl-verifier-")
        ours, theirs = socket.socketpair()
        options = {
            "path": [str(Path(entry).resolve()) for entry in sys.path],
            "connection": theirs.fileno(),
            "rewards": [
                msgspec.to_builtins(_as_seen_from_anywhere(each), enc_hook=float)
                for each in rewards
            ],
            "limits": limits,
        }
        with theirs, log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, *("-I", "-S", "-B"), "-c", BOOT, json.dumps(options)],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=ENVIRONMENT,
                cwd=directory.name,
                start_new_session=True,  # Ctrl-C is the controller's to handle
            )
        return cls(process, directory, ours, *await asyncio.open_unix_connection(sock=ours))

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    async def ask(self, scorer: int, answer: str, record: Record, patience: float) -> Reply:
        """Return what came of grading `answer`, within `patience` seconds.

        Args:
            scorer: its place among the rewards that the process was started with.
            answer: what of a completion it reads.
            record: whose completion that is.
            patience: seconds.

        Raises:
            RuntimeError: the process is gone, or has been killed as it did not answer in time.
        """
        if self.is_lost:
            raise self._loss()
        self._num_requests += 1
        number = self._num_requests
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._replies[number] = reply
        request = {"id": number, "scorer": scorer, "answer": answer, "record": record}
        if not self._writer.is_closing():  # else `_listen` is about to notice the end
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
        """Hang up, and kill whoever does not leave at once."""
        with suppress(OSError):  # it hung up first
            self._connection.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(CLOSE_TIME)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._directory.cleanup()  # the process does, unless it was killed
        self._listener.cancel()
        self._lose()

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Pass replies on until the process hangs up, or sends what is none."""
        with suppress(ValueError, ConnectionError):  # what is no reply ends it too
            while line := await reader.readline():
                reply = msgspec.json.decode(line, type=Reply)
                self.has_answered = True
                waiting = self._replies.get(reply.id)
                if waiting is not None and not waiting.done():  # its caller may have given up
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


def _as_seen_from_anywhere(reward: RewardConfig) -> RewardConfig:
    """Return a reward whose file, if it has one, is found from any directory."""
    file = file_of(reward.scorer)
    if file is None:
        return reward
    scorer = with_file(reward.scorer, str(Path(file).resolve()))
    return msgspec.structs.replace(reward, scorer=scorer)
