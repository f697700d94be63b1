"""Completions that attack their scorer, and what a verifier makes of them."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from streamrl.executor.roles import Scoring
from streamrl.executor.verifier.scorers import Grader, make_scorer
from streamrl.executor.verifier.verifier import Verifier
from streamrl.runfile.roles_config import RewardConfig, VerifierConfig
from streamrl.runfile.units import Duration, Size
from streamrl.workload.prompt_records import Record

EVALUATED: Record = {"task": "string_insertion", "entry": {"answer": "ABC", "metadata": {}}}
"""A record whose scorer evaluates answers: a Python list of the right letters has reward 0.1."""
WENT_THROUGH, WAS_STOPPED = 0.1, 0.0
"""Rewards of an `attempt`."""


def attempt(code: str) -> str:
    """Return an answer to `EVALUATED` that has a reward if `code` runs to its end."""
    return f"[exec({code!r}, {{}}), *'ABC'][1:]"


@cache
def load(scorer: str) -> Grader:
    """Load a scorer into this process: for trusted answers."""
    return make_scorer(RewardConfig(scorer=scorer)).load()


def score(scorer: str, completion: str, record: Record) -> float:
    read = make_scorer(RewardConfig(scorer=scorer)).read
    return load(scorer)(record)(read(completion, len(completion)))


def config(
    *rewards: str | RewardConfig,
    time_limit: float = 1.0,
    memory_limit: float = 3e8,
    workers: int = 2,
) -> VerifierConfig:
    """Return what names one scorer, or lists rewards."""
    limits = {"time_limit": Duration(time_limit), "memory_limit": Size(memory_limit)}
    own: Any = {"reward": rewards}
    if len(rewards) == 1 and isinstance(rewards[0], str):
        own = {"scorer": rewards[0]}
    return VerifierConfig(workers=workers, **limits, **own)


def verdicts(
    scorer: str | Sequence[RewardConfig],
    completions: Iterable[tuple[str, Record]],
    log: Path = Path(os.devnull),
    **limits: Any,
) -> list[Scoring | BaseException]:
    """Return what becomes of each completion, of as many tokens as characters, all of them given at once."""
    rewards = [scorer] if isinstance(scorer, str) else scorer

    async def go() -> list[Scoring | BaseException]:
        verifier = Verifier(config(*rewards, **limits), log)
        try:
            work = [verifier.verify(text, len(text), record) for text, record in completions]
            return await asyncio.gather(*work, return_exceptions=True)
        finally:
            verifier.close()

    return asyncio.run(asyncio.wait_for(go(), timeout=120))


EASY = ("0.5", 3, {"answer": "0.5"})
"""What math-verify compares at once, and cannot act."""
Use = Callable[[Verifier], Awaitable[None]]


def use(do: Use, time_limit: float = 600, reward: str | RewardConfig = "math-verify") -> None:
    """Let a test have a verifier, and end it afterwards."""

    async def go() -> None:
        verifier = Verifier(config(reward, time_limit=time_limit))
        try:
            await do(verifier)
        finally:
            verifier.close()

    asyncio.run(asyncio.wait_for(go(), timeout=60))


def work_time(pid: int) -> float:
    """Return the seconds that a process has computed."""
    return sum(map(int, _stat(pid)[11:13])) / os.sysconf("SC_CLK_TCK")


def wait_until_gone(pids: Iterable[int], seconds: float) -> None:
    """Wait until processes have ended, whether or not somebody asked what of."""
    until = time.monotonic() + seconds
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):  # it is gone, maybe this moment
            while _stat(pid)[0] != "Z":
                assert time.monotonic() < until, f"process {pid} lives on"
                time.sleep(0.01)


def _stat(pid: int) -> list[str]:
    """Return what the kernel tells of a process, from its state on; see proc(5)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def children(pid: int) -> list[int]:
    """Return the ids of a process's children; of one that has ended, none."""
    try:
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except (FileNotFoundError, ProcessLookupError):
        return []
