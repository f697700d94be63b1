"""The verifier as the world sees it: completions in, rewards out, whatever a completion does to its scorer."""

from __future__ import annotations

import asyncio
import logging
import os
from math import fsum
from pathlib import Path
from typing import TYPE_CHECKING

from streamrl.executor.launchers.handles import Handle
from streamrl.executor.roles import Exchange, Scoring, VerifierRole
from streamrl.executor.verifier.fork_server_process import ForkServerProcess, Reply
from streamrl.executor.verifier.judge import Judge
from streamrl.executor.verifier.reward_pool import RewardPool, Start
from streamrl.executor.verifier.sandbox import SandboxLimits
from streamrl.executor.verifier.scorers import is_scored, make_scorer
from streamrl.runfile.roles_config import VerifierConfig

if TYPE_CHECKING:
    from streamrl.workload.prompt_records import Record

logger = logging.getLogger(__name__)

START_TIME = 120.0
"""Seconds for the first answer beyond its time limit: a scorer loads slowly from a cold disk."""
ANSWER_TIME = 30.0
"""Seconds for each later one: a process that takes longer has been stopped, or hangs."""

MOST_CHARACTERS = 150_000
"""Of an answer: some 40,000 tokens, which as JSON fill a pipe of 1 MiB at most, so that nobody waits to write one."""
MOST_SHOWN = 200
"""Characters of what a scorer says of an answer that it cannot score."""


class Verifier(VerifierRole):
    """Scores completions, `config.workers` at a time, in processes that are told nothing else.

    A completion that a scorer cannot digest within its limits is wrong: it gets the worst score there is, once, so
    that it holds nobody up and cannot rid its group of itself. But where the record's own answer fares no better, the
    record, the limits or the scorer are at fault, and that is an error.
    """

    def __init__(
        self,
        config: VerifierConfig,
        log: Path = Path(os.devnull),
        start_model: Start | None = None,
    ) -> None:
        """Take what scores, and who starts replicas of a reward model where that is among it."""
        self._rewards = config.rewards
        self._names_each = bool(config.reward)
        self._scorers = [make_scorer(reward) for reward in self._rewards]
        self._judges = {
            place: Judge(reward, f"verifier.reward.{place}")
            for place, reward in enumerate(self._rewards)
            if reward.endpoint is not None
        }
        self._limits = SandboxLimits(config.time_limit, config.memory_limit)
        self._log = log
        self._told: set[tuple[int, str]] = set()
        """Scorers, and kinds of faults of theirs, of which one was told."""
        self._free = asyncio.Semaphore(config.workers)
        self._starting = asyncio.Lock()
        self._process: ForkServerProcess | None = None
        self._models: RewardPool | None = None
        if start_model is not None and config.reward_model is not None:
            self._models = RewardPool(start_model, config.workers, config.max_rollouts_per_call)

    async def start(self) -> ForkServerProcess:
        """Begin to load the scorers, unless they are loaded; return the process that does, a reward model beside."""
        if self._models is not None:
            self._models.begin()
        async with self._starting:
            if self._process is None or self._process.is_lost:
                self._process = await ForkServerProcess.start(
                    self._rewards, self._limits, self._log
                )
            return self._process

    async def verify(self, completion: str, num_tokens: int, record: Record) -> Scoring:
        """Return the reward of a completion's text of `num_tokens` tokens.

        Raises:
            RuntimeError: no completion of this record can be scored, or the process was lost.
        """
        scores: dict[str, float] = {}
        faults: list[str] = []
        total: list[float] = []
        for place, reward in enumerate(self._rewards):
            if not is_scored(record, reward):
                continue
            score, fault = await self._score(place, completion, num_tokens, record)
            total.append(reward.weight * score)
            scores[reward.label] = score
            if fault is not None:
                faults.append(f"{reward.label}: {fault}" if self._names_each else fault)
        return Scoring(fsum(total), "; ".join(faults) or None, scores if self._names_each else {})

    def reward_models(self) -> list[Handle]:
        """Return handles on the replicas of a reward model that are up, those with work first."""
        return [] if self._models is None else self._models.handles()

    async def try_out(self, place: int, record: Record) -> None:
        """Let one scorer score the answer that a record knows, or an empty completion where it knows none.

        Raises:
            RuntimeError: it could not.
        """
        answer = self._scorers[place].expected(record)
        reply = await self._ask(place, "" if answer is None else answer, record)
        if reply.fault is not None:
            raise RuntimeError(reply.detail or reply.fault)

    def close(self) -> None:
        """End the processes at once, whatever they do."""
        if self._models is not None:
            self._models.close()
        if self._process is not None:
            self._process.close()

    async def _score(
        self, place: int, completion: str, num_tokens: int, record: Record
    ) -> tuple[float, str | None]:
        """Return a score, the worst one where there is none, and why there is none."""
        if self._rewards[place].has_model:
            return await self._ask_model(completion, record), None
        answer = self._scorers[place].read(completion, num_tokens)
        if len(answer) > MOST_CHARACTERS:
            return self._worst(place), "too long"
        if (judge := self._judges.get(place)) is not None:
            score, _ = await judge.score(answer, record)
            return (self._worst(place), "no score") if score is None else (score, None)
        async with self._free:
            reply = await self._grade(place, answer, record)
            if reply.fault is None:
                return reply.reward, None
            await self._check(place, record)
            return self._worst(place), self._tell(place, reply)

    async def _ask_model(self, completion: str, record: Record) -> float:
        """Return the score of a reward model, whose replicas are begun where nobody has."""
        assert self._models is not None, "a run with a reward model has who starts it"
        self._models.begin()
        return await self._models.score(Exchange(prompt=record["prompt"], completion=completion))

    def _tell(self, place: int, reply: Reply) -> str:
        """Return why an answer has no score; the first of its kind is told at once, as rewards alone would not show it."""
        fault = ": ".join(filter(None, (reply.fault, _shown(reply.detail))))
        if (kind := (place, str(reply.fault))) not in self._told:
            self._told.add(kind)
            label, worst = self._rewards[place].label, self._worst(place)
            logger.warning(
                f"a completion gets the worst score, {worst:g}, as {label} cannot score it: {fault}"
            )
        return fault

    def _worst(self, place: int) -> float:
        least, most = self._scorers[place].bounds
        return least if self._rewards[place].weight > 0 else most

    async def _check(self, place: int, record: Record) -> None:
        """Raise `RuntimeError` where the answer that the record itself knows cannot be scored either."""
        expected = self._scorers[place].expected(record)
        if expected is None:
            return
        reply = await self._grade(place, expected, record)
        if reply.fault is not None:
            raise RuntimeError(
                f"{self._rewards[place].scorer} cannot score the record's own answer: {reply.detail or reply.fault}"
            )

    async def _grade(self, place: int, answer: str, record: Record) -> Reply:
        reply = await self._ask(place, answer, record)
        if reply.fault == "record":
            raise RuntimeError(
                f"{self._rewards[place].scorer} cannot score the record: {reply.detail}"
            )
        return reply

    async def _ask(self, place: int, answer: str, record: Record) -> Reply:
        process = await self.start()
        beyond = ANSWER_TIME if process.has_answered else START_TIME
        return await process.ask(place, answer, record, beyond + self._limits.time)


def _shown(detail: str) -> str:
    """Return what a scorer said in a line that may be printed: an answer may have had a say in it."""
    line = "".join(letter if letter.isprintable() else " " for letter in detail)
    return line if len(line) <= MOST_SHOWN else f"{line[:MOST_SHOWN]}…"
