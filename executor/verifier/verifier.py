"""The verifier as the world sees it: completions in, rewards out, whatever a completion does to its scorer."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING

from executor.roles import Scoring, VerifierRole
from executor.verifier.process import ForkServerProcess, Reply
from executor.verifier.sandbox import SandboxLimits
from executor.verifier.scorers import SCORERS
from streamrl.runfile.sides_config import VerifierConfig

if TYPE_CHECKING:
    from executor.prompts import Record

START_TIME = (
    120.0  # seconds for an answer beyond its time limit: a scorer loads slowly from a cold disk
)

MOST_CHARACTERS = 150_000
"""Of an answer: some 40,000 tokens, which as JSON fill a pipe of 1 MiB at most, so that nobody waits to write one."""


class Verifier(VerifierRole):
    """Scores completions, `config.workers` at a time, in processes that are told nothing else.

    A completion that its scorer cannot digest within its limits is wrong: it gets reward 0, once, so that it
    holds nobody up and cannot rid its group of itself. But where the record's own answer fares no better, the
    record, the limits or the scorer are at fault, and that is an error.
    """

    def __init__(self, scorer: str, config: VerifierConfig, log: Path = Path(os.devnull)) -> None:
        self._name = scorer
        self._scorer = SCORERS[scorer]
        self._limits = SandboxLimits(config.time_limit, config.memory_limit)
        self._log = log
        self._free = asyncio.Semaphore(config.workers)
        self._starting = asyncio.Lock()
        self._process: ForkServerProcess | None = None

    async def start(self) -> ForkServerProcess:
        """Begin to load the scorer, unless it is loaded; return the process that does."""
        async with self._starting:
            if self._process is None or self._process.is_lost:
                self._process = await ForkServerProcess.start(self._name, self._limits, self._log)
            return self._process

    async def verify(self, completion: str, record: Record) -> Scoring:
        """Return the reward of a completion's text.

        Raises:
            RuntimeError: no completion of this record can be scored, or the process was lost.
        """
        answer = self._scorer.read(completion)
        if len(answer) > MOST_CHARACTERS:
            return Scoring(0.0, "too long")
        async with self._free:
            reply = await self._grade(answer, record)
            if reply.fault is not None:
                await self._check(record)
            return Scoring(reply.reward, reply.fault)

    def close(self) -> None:
        """End the processes at once, whatever they do."""
        if self._process is not None:
            self._process.close()

    async def _check(self, record: Record) -> None:
        """Raise `RuntimeError` where the answer that the record itself knows cannot be scored either."""
        expected = self._scorer.expected(record)
        if expected is None:
            return
        reply = await self._grade(expected, record)
        if reply.fault is not None:
            raise RuntimeError(
                f"{self._name} cannot score the record's own answer: {reply.detail or reply.fault}"
            )

    async def _grade(self, answer: str, record: Record) -> Reply:
        process = await self.start()
        reply = await process.ask(answer, record, START_TIME + self._limits.time)
        if reply.fault == "record":
            raise RuntimeError(f"{self._name} cannot score the record: {reply.detail}")
        return reply
