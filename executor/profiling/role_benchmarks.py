"""Time the weight relays and the reward model's replica, on synthetic work."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from streamrl.executor.launchers.handles import Handle, LocalProcess, remote
from streamrl.executor.launchers.launcher import RELAY, REWARD_MODEL, worker_environment
from streamrl.executor.launchers.processes import begin_for
from streamrl.executor.profiling.measurements import Readings, Setup
from streamrl.executor.prompts import load_tokenizer
from streamrl.executor.roles import Arrived, Exchange, Manifest, Parcel, RelayRole, RewardRole
from streamrl.executor.transfer.delta import count_changes
from streamrl.hardware.model_shape import BYTES

Start = Callable[[str, dict[str, object]], contextlib.AbstractAsyncContextManager[Handle]]
"""Starts a role as a run does, and ends it with the context."""


class RelayBench:
    """Times a relay near the trainer and two remote ones, for whole weights and for deltas."""

    def __init__(self, near: RelayRole, whole: RelayRole, delta: RelayRole, dtype: str) -> None:
        self._near, self._whole, self._delta = near, whole, delta
        self._dtype = dtype
        self._base: Manifest | None = None
        """Weights that the relay for deltas has."""

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls, start: Start, model: str, dtype: str, merges_adapters: bool
    ) -> AsyncIterator[RelayBench]:
        """Start the relays, and end them with the context."""
        async with contextlib.AsyncExitStack() as ends:
            config = {"model": model, "dtype": dtype, "merges_adapters": merges_adapters}
            relays = []
            for _ in range(3):
                handle = await ends.enter_async_context(start(RELAY, config))
                relays.append(remote(RelayRole, handle))
                await relays[-1].start()
                ends.push_async_callback(relays[-1].stop)
            near, whole, delta = relays
            yield cls(near, whole, delta, dtype)

    async def time(self, manifest: Manifest, readings: Readings) -> None:
        """Send a push to both remote relays and record the seconds; the first push has no delta."""
        whole = await self._near.pack(manifest, "full", None)
        readings.unpack["full"].append((await _bring(self._whole, whole)).seconds)
        readings.pack["full"].append(whole.seconds)
        readings.packed["full"] = (whole.num_bytes, whole.num_bytes // BYTES[self._dtype])
        await self._whole.keep([])
        parcel = whole
        if self._base is not None:
            parcel = await self._near.pack(manifest, "delta", self._base)
            changes = sum(count_changes(Path(piece.path).read_bytes()) for piece in parcel.pieces)
            readings.packed["delta"] = (parcel.num_bytes, changes)
            readings.pack["delta"].append(parcel.seconds)
        arrived = await _bring(self._delta, parcel)
        if parcel.kind == "delta":
            readings.unpack["delta"].append(arrived.seconds)
        self._base = arrived.manifest
        await self._delta.keep([arrived.manifest.checksum])

    async def time_adapters(self, manifest: Manifest, readings: Readings) -> Manifest:
        """Send adapters to a relay, record the seconds, and return the manifest that replicas load there."""
        parcel = await self._near.pack(manifest, "lora", None)
        arrived = await _bring(self._whole, parcel)
        readings.pack["lora"].append(parcel.seconds)
        readings.unpack["lora"].append(arrived.seconds)
        readings.packed["lora"] = (parcel.num_bytes, parcel.num_bytes // BYTES[self._dtype])
        await self._whole.keep([arrived.manifest.checksum])
        return arrived.manifest


async def _bring(relay: RelayRole, parcel: Parcel) -> Arrived:
    """Send a parcel to a relay, which unpacks it to weights."""
    for number, piece in enumerate(parcel.pieces):
        await relay.receive(parcel.result.version, number, 0, Path(piece.path).read_bytes())
    return await relay.unpack(parcel, is_here=False)


async def time_rewards(
    setup: Setup,
    common: dict[str, object],
    scratch: Path,
    readings: Readings,
    watch: Callable[[str], None],
) -> None:
    """Start a reward model and record the seconds of its calls, by rollouts and tokens of each.

    Raises:
        RuntimeError: the reward model cannot score the texts.
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
    """Return the number of tokens read of each rollout, and the seconds of the call."""
    exchange = texts.exchange(width)
    began_at = time.perf_counter()
    scored = await role.score([exchange] * rollouts)
    seconds = time.perf_counter() - began_at
    if scored[0].score is None:
        raise RuntimeError(f"the reward model cannot score the synthetic texts: {scored[0].fault}")
    return scored[0].num_tokens, seconds


FRAME = 2
"""Tokens that a tokenizer adds to a text without a template: beginning and end of text."""


class _Texts:
    """Random texts of about a given number of tokens, with a fixed seed."""

    def __init__(self, tokenizer: Any) -> None:
        special = {*tokenizer.all_special_ids}
        self._ids = [token for token in range(len(tokenizer)) if token not in special]
        self._tokenizer = tokenizer

    def exchange(self, width: int) -> Exchange:
        """Return a prompt and a completion with `width` tokens in total, not counting a template."""
        drawn = random.Random(width).choices(self._ids, k=max(2, width - FRAME))
        prompt = max(1, width // 4)
        return Exchange(
            prompt=self._tokenizer.decode(drawn[:prompt]),
            completion=self._tokenizer.decode(drawn[prompt:]),
        )
