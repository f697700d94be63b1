"""Times calls of a reward model's replica, the way there and back included, on texts that mean nothing."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from streamrl.executor.carriers.handles import LocalProcess
from streamrl.executor.carriers.launch import REWARD_MODEL, worker_environment
from streamrl.executor.carriers.processes import begin_for
from streamrl.executor.carriers.remote import remote
from streamrl.executor.profiling.measurements import Setup
from streamrl.executor.profiling.readings import Readings
from streamrl.executor.prompts import load_tokenizer
from streamrl.executor.roles import RewardRole
from streamrl.executor.samples import Exchange


async def time_rewards(
    setup: Setup,
    common: dict[str, object],
    scratch: Path,
    readings: Readings,
    watch: Callable[[str], None],
) -> None:
    """Start a replica, and enter the seconds of its calls by rollouts and by the tokens that it read of each.

    Raises:
        RuntimeError: it cannot score such texts.
    """
    assert setup.reward_model is not None, "nothing to time"
    config = {
        **common,
        "model": setup.reward_model,
        "max_tokens_per_pass": setup.limits.max_tokens_per_pass,
    }
    texts = _Texts(load_tokenizer(setup.reward_model))
    environment = worker_environment(setup.threads)
    log, begin = scratch / "reward.log", begin_for(setup.device)
    handle = await LocalProcess.start(REWARD_MODEL, config, log, environment, begin=begin)
    try:
        role = remote(RewardRole, handle)
        await role.start()
        await _call(role, texts, *max(setup.plan.rewards, key=lambda p: p[0] * p[1]))
        for _ in range(setup.plan.repeats):
            for rollouts, width in setup.plan.rewards:
                tokens, seconds = await _call(role, texts, rollouts, width)
                readings.reward[rollouts, tokens].append(seconds)
                watch("reward")
    finally:
        await handle.close()


async def _call(role: RewardRole, texts: _Texts, rollouts: int, width: int) -> tuple[int, float]:
    """Return the tokens of each that were read, and the seconds of the call."""
    exchange = texts.exchange(width)
    began_at = time.perf_counter()
    found = await role.score([exchange] * rollouts)
    seconds = time.perf_counter() - began_at
    if found[0].score is None:
        raise RuntimeError(f"the reward model cannot score what is timed: {found[0].fault}")
    return found[0].num_tokens, seconds


FRAME = 2
"""Tokens that a tokenizer adds to a text without a template: those of its beginning and its end."""


class _Texts:
    """Texts of about as many tokens as are asked for, the same ones every time."""

    def __init__(self, tokenizer: Any) -> None:
        special = {*tokenizer.all_special_ids}
        self._ids = [token for token in range(len(tokenizer)) if token not in special]
        self._tokenizer = tokenizer

    def exchange(self, width: int) -> Exchange:
        """Return a prompt and a completion of so many tokens together, those of a template left out."""
        drawn = random.Random(width).choices(self._ids, k=max(2, width - FRAME))
        prompt = max(1, width // 4)
        return Exchange(
            prompt=self._tokenizer.decode(drawn[:prompt]),
            completion=self._tokenizer.decode(drawn[prompt:]),
        )
