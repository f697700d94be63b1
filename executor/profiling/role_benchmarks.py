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
"""Starts a role, as runs do, and ends it."""


class RelayBench:
    """A relay beside the trainer, and one at another place for each way of sending weights."""

    def __init__(self, near: RelayRole, whole: RelayRole, delta: RelayRole, dtype: str) -> None:
        self._near, self._whole, self._delta = near, whole, delta
        self._dtype = dtype
        self._base: Manifest | None = None
        """What the place that is sent deltas has."""

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls, start: Start, model: str, dtype: str, merges_adapters: bool
    ) -> AsyncIterator[RelayBench]:
        """Start relays, and leave nothing of them behind."""
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
        """Bring a push to both places; enter the seconds, and of the first push those of whole weights alone."""
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
        """Bring adapters to a place; enter the seconds, and return what replicas load there, merged or as it came."""
        parcel = await self._near.pack(manifest, "lora", None)
        arrived = await _bring(self._whole, parcel)
        readings.pack["lora"].append(parcel.seconds)
        readings.unpack["lora"].append(arrived.seconds)
        readings.packed["lora"] = (parcel.num_bytes, parcel.num_bytes // BYTES[self._dtype])
        await self._whole.keep([arrived.manifest.checksum])
        return arrived.manifest


async def _bring(relay: RelayRole, parcel: Parcel) -> Arrived:
    """Bring a parcel to a relay, and let it make weights of it."""
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
