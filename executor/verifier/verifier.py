"""Compute the rewards of completions; a completion cannot harm the run, whatever it does to its scorer."""

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
"""Seconds for the first reply, plus its time limit: scorers load slowly from a cold disk."""
ANSWER_TIME = 30.0
"""Seconds for each later reply; a process that takes longer is stopped or hangs."""

MOST_CHARACTERS = 150_000
"""Maximum length of an answer: about 40,000 tokens.

As JSON it then fits a pipe of 1 MiB, so that writing it never blocks.
"""
BLOCKED = ("[Errno 38]", "[Errno 13]", "start new thread", "/dev/urandom")
"""Parts of the messages of calls that the sandbox blocks."""
SANDBOXED = (
    "the sandbox has no threads, processes, network or files of yours: import and read what the function needs at the "
    "top of the file, or set sandbox = false for this reward"
)
MOST_SHOWN = 200
"""Maximum number of characters of a scorer's message in the log."""


class Verifier(VerifierRole):
    """Scores completions in separate processes, `config.workers` at a time.

    A completion that exceeds a scorer's limits gets the worst score. It is not repeated, so it delays no other rollout,
    and it cannot remove itself from its group. If the record's own answer fails as well, the record, the limits or the
    scorer are wrong, and an error is raised.
    """

    def __init__(
        self,
        config: VerifierConfig,
        log: Path = Path(os.devnull),
        start_model: Start | None = None,
    ) -> None:
        """Take the rewards, and the function that starts replicas of a reward model if there is one."""
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
        self._reported: set[tuple[int, str]] = set()
        """Pairs of scorer and kind of fault that were logged; each is logged once."""
        self._free = asyncio.Semaphore(config.workers)
        self._starting = asyncio.Lock()
        self._processes: dict[bool, ForkServerProcess] = {}
        """The fork server of scorers in the sandbox (True), and that of functions outside it (False)."""
        self._models: RewardPool | None = None
        if start_model is not None and config.reward_model is not None:
            self._models = RewardPool(start_model, config.workers, config.max_rollouts_per_call)

    async def start(self) -> ForkServerProcess:
        """Start loading the scorers and the reward model, if necessary; return a fork server's process."""
        if self._models is not None:
            self._models.begin()
        kinds = sorted({reward.sandbox for reward in self._rewards} or {True}, reverse=True)
        processes = [await self._process_of(is_sandboxed) for is_sandboxed in kinds]
        return processes[0]

    async def _process_of(self, is_sandboxed: bool) -> ForkServerProcess:
        """Return the fork server of scorers in or outside the sandbox; start it if necessary."""
        async with self._starting:
            process = self._processes.get(is_sandboxed)
            if process is None or process.is_lost:
                rewards = [self._rewards[place] for place in self._places(is_sandboxed)]
                process = self._processes[is_sandboxed] = await ForkServerProcess.start(
                    rewards, self._limits, self._log, is_sandboxed=is_sandboxed
                )
            return process

    def _places(self, is_sandboxed: bool) -> list[int]:
        """Return the places of the rewards in or outside the sandbox."""
        rewards = enumerate(self._rewards)
        return [place for place, reward in rewards if reward.sandbox == is_sandboxed]

    async def verify(self, completion: str, num_tokens: int | None, record: Record) -> Scoring:
        """Return the reward of a completion.

        Args:
            completion: its text.
            num_tokens: its number of output tokens; None leaves scores of the length out, as in evaluations.
            record: the record of its prompt.

        Raises:
            RuntimeError: no completion of this record can be scored, or the process was lost.
        """
        scores: dict[str, float] = {}
        faults: list[str] = []
        total: list[float] = []
        for place, reward in enumerate(self._rewards):
            if not is_scored(record, reward) or (num_tokens is None and reward.scores_length):
                continue
            score, fault = await self._score(place, completion, num_tokens or 0, record)
            total.append(reward.weight * score)
            scores[reward.label] = score
            if fault is not None:
                faults.append(f"{reward.label}: {fault}" if self._names_each else fault)
        return Scoring(fsum(total), "; ".join(faults) or None, scores if self._names_each else {})

    def reward_models(self) -> list[Handle]:
        """Return the handles of running replicas of the reward model, those with work first."""
        return [] if self._models is None else self._models.handles()

    async def try_out(self, place: int, record: Record) -> None:
        """Score the record's own answer with one scorer, or an empty completion if the record has none.

        Raises:
            RuntimeError: the scorer failed, or it gives an answer that must win the minimum.
        """
        scorer = self._scorers[place]
        answer = scorer.expected(record)
        reply = await self._ask(place, "" if answer is None else answer, record)
        if reply.fault is not None:
            raise RuntimeError(_cause(reply, self._limits))
        if scorer.must_win and answer is not None and reply.reward <= scorer.bounds[0]:
            raise RuntimeError(f"it scores the record's own answer {answer!r:.80} {reply.reward:g}")

    def close(self) -> None:
        """Kill all processes at once."""
        if self._models is not None:
            self._models.close()
        for process in self._processes.values():
            process.close()

    async def _score(
        self, place: int, completion: str, num_tokens: int, record: Record
    ) -> tuple[float, str | None]:
        """Return a score, and the fault if the score could not be computed; it is then the worst one."""
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
            return self._worst(place), self._report(place, reply)

    async def _ask_model(self, completion: str, record: Record) -> float:
        """Return the score of a reward model; start its replicas if necessary."""
        assert self._models is not None, "a run with a reward model needs start_model"
        self._models.begin()
        return await self._models.score(Exchange(prompt=record["prompt"], completion=completion))

    def _report(self, place: int, reply: Reply) -> str:
        """Return why an answer has no score; log the first fault of each kind, because rewards do not show it."""
        fault = ": ".join(filter(None, (reply.fault, _shown(reply.detail))))
        if (kind := (place, str(reply.fault))) not in self._reported:
            self._reported.add(kind)
            label, worst = self._rewards[place].label, self._worst(place)
            logger.warning(
                f"a completion gets the worst score, {worst:g}, because {label} cannot score it: {fault}"
            )
        return fault

    def _worst(self, place: int) -> float:
        least, most = self._scorers[place].bounds
        return least if self._rewards[place].weight > 0 else most

    async def _check(self, place: int, record: Record) -> None:
        """Raise `RuntimeError` if the record's own answer cannot be scored either."""
        expected = self._scorers[place].expected(record)
        if expected is None:
            return
        reply = await self._grade(place, expected, record)
        if reply.fault is not None:
            raise RuntimeError(
                f"{self._rewards[place].scorer} cannot score the record's own answer: {_cause(reply, self._limits)}"
            )

    async def _grade(self, place: int, answer: str, record: Record) -> Reply:
        reply = await self._ask(place, answer, record)
        if reply.fault == "record":
            raise RuntimeError(
                f"{self._rewards[place].scorer} cannot score the record: {reply.detail}"
            )
        return reply

    async def _ask(self, place: int, answer: str, record: Record) -> Reply:
        is_sandboxed = self._rewards[place].sandbox
        process = await self._process_of(is_sandboxed)
        number = self._places(is_sandboxed).index(place)
        beyond = ANSWER_TIME if process.has_answered else START_TIME
        return await process.ask(number, answer, record, beyond + self._limits.time)


def bounds_of(config: VerifierConfig) -> tuple[float, float] | None:
    """Return the least and the most score of an evaluated rollout; None with a reward model, whose scores have no bounds.

    Scores of the length are left out, as in an evaluation.
    """
    least = most = 0.0
    for reward in config.rewards:
        if reward.has_model:
            return None
        if reward.scores_length:
            continue
        ends = [reward.weight * end for end in make_scorer(reward).bounds]
        ends += [0.0] if reward.families else []  # other prompts have no such score
        least, most = least + min(ends), most + max(ends)
    return least, most


def _cause(reply: Reply, limits: SandboxLimits) -> str:
    """Return why a reply has no reward, with what to do about it if the message does not show it."""
    match reply.fault:
        case "process ended":
            return (
                f"its process ended ({reply.detail or 'unknown status'}); a library may need threads, or more than "
                f"verifier.memory_limit ({limits.memory / 1e6:.0f} MB): import it at the top of the file, or raise the limit"
            )
        case "memory limit":
            return f"memory limit: it needs more than verifier.memory_limit ({limits.memory / 1e6:.0f} MB): raise the limit"
        case "time limit":
            return f"time limit: it takes longer than verifier.time_limit ({limits.time:g} s): raise the limit"
        case _:
            detail = reply.detail or str(reply.fault)
            return f"{detail}; {SANDBOXED}" if any(sign in detail for sign in BLOCKED) else detail


def _shown(detail: str) -> str:
    """Return a scorer's message as one printable line; the answer may have influenced it."""
    line = "".join(letter if letter.isprintable() else " " for letter in detail)
    return line if len(line) <= MOST_SHOWN else f"{line[:MOST_SHOWN]}…"
