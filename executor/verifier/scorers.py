"""Rewards of finished rollouts: scorers by name, in a pool of workers beside the event loop."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from functools import cache

from executor.prompts import Record

Scorer = Callable[[str, Record], float]

ANSWER_MARKERS = ("####", "#", "answer:", "Answer:")
"""What stands before the final answer where a completion shows its work."""
IN_PROCESSES = ("math-verify",)
"""Scorers that a completion can keep busy for ever: they stop themselves, by a signal to a main thread."""


class Verifier:
    """Scores completions, at most `workers` at a time."""

    def __init__(self, name: str, workers: int) -> None:
        self._name = name
        self._pool: Executor
        if name in IN_PROCESSES:
            self._pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))
        else:
            self._pool = ThreadPoolExecutor(workers, thread_name_prefix="verifier")

    async def verify(self, completion: str, record: Record) -> float:
        """Give the reward of a completion's text, between 0 and 1."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, score, self._name, completion, record)

    def close(self) -> None:
        """Let what runs finish and end the workers."""
        self._pool.shutdown(cancel_futures=True)


def score(name: str, completion: str, record: Record) -> float:
    """Give the reward of a completion's text by the scorer `name`."""
    return _load(name)(completion, record)


def final_answer(completion: str) -> str:
    """Give what follows the last answer marker, or the last line where there is none."""
    for marker in ANSWER_MARKERS:
        if marker in completion:
            return completion.rpartition(marker)[2].strip()
    lines = completion.strip().splitlines()
    return lines[-1].strip() if lines else ""


def score_exactly(completion: str, record: Record) -> float:
    """Give 1 where the final answer is the record's "answer", else 0."""
    return float(final_answer(completion) == str(record["answer"]).strip())


def _load_math_verify() -> Scorer:
    from math_verify import parse, verify

    def score_maths(completion: str, record: Record) -> float:
        return float(verify(parse(str(record["answer"])), parse(completion)))

    return score_maths


def _load_reasoning_gym() -> Scorer:
    from reasoning_gym import get_score_answer_fn

    scorer_of = cache(get_score_answer_fn)

    def score_task(completion: str, record: Record) -> float:
        entry = record.get("entry") or {"answer": record["answer"], "metadata": {}}
        return float(scorer_of(record["task"])(answer=final_answer(completion), entry=entry))

    return score_task


SCORERS: dict[str, Callable[[], Scorer]] = {
    "exact": lambda: score_exactly,
    "math-verify": _load_math_verify,
    "reasoning-gym": _load_reasoning_gym,
}
"""Loads a scorer by name."""


@cache
def _load(name: str) -> Scorer:
    return SCORERS[name]()
