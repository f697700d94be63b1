"""What a replica asks of whatever computes tokens: the contract of an inference engine, and what crosses it.

| what | who guarantees it |
|---|---|
| the order of rollouts, their policy versions, aborts, drained loads, weights that are as they were pushed | `ReplicaWorker`, for every engine |
| a run ends in exactly one call of its `on_end`, on the event loop, unless it is cancelled | the engine |
| while `paused()` is held no token is made, and every earlier `on_end` has been called | the engine |
| after `stop()` or a death, `submit` and `paused` raise `RuntimeError` | the engine |
| log-probabilities are those of softmax(logits / temperature), under the weights and the KV that sampled | the engine |
| nothing of it outlives the replica's process, whatever kills that | the engine; one in this process has it for free |
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

import msgspec

from streamrl.executor.roles import CacheState, Manifest
from streamrl.runfile.roles_config import RolloutBackend


class ReplicaSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What one replica needs to start; its engine has room for `max_running` longest rollouts."""

    model: str
    """Hugging Face directory."""
    max_running: int
    """Most rollouts generated at a time; the others wait in the replica's queue."""
    max_tokens: int
    """Most output tokens of a rollout."""
    max_prompt_tokens: int
    """A longer prompt is refused."""
    temperature: float
    """Divides the logits before sampling; there is no top-k or top-p truncation."""
    seed: int
    """Of sampling; the order of arrivals decides the rest."""
    backend: RolloutBackend = "transformers"
    device: str = "cpu"
    dtype: str = "float32"
    num_threads: int = 1
    """CPU threads of the engine."""
    tensor_parallel: int = 1
    """GPUs that the model is split over."""
    expert_parallel: int = 1
    """1, or `tensor_parallel`: then each GPU holds whole experts."""
    memory_utilization: float = 0.9
    """Share of each GPU's memory for weights and cache, where an engine takes that once and for all."""
    takes_turns: bool = False
    """Whether the trainer computes on the same devices while the replica sleeps."""
    shares_prefixes: bool = True
    """Whether what starts under the same weights shares the keys and values of a prompt, where an engine can."""
    deterministic: bool = False
    """Whether its passes depend on nothing but weights and tokens, down to how weights lie in memory."""
    adapter_rank: int | None = None
    """Rank of the LoRA adapters that the engine computes with beside the model's weights, and loads instead of them; None:
    it loads whole weights."""
    adapters: str | None = None
    """Directory of the adapters that it begins with, as PEFT has them; None: of such as change nothing."""
    save_time: float = 5.0
    """Seconds between two times that what runs is put on disk; see `execute.save_tokens_every`."""
    tokenizer: str | None = None
    """Hugging Face directory of the tokenizer that makes a finished rollout's text; None: no text."""

    def __post_init__(self) -> None:
        for key in ("max_running", "max_tokens", "max_prompt_tokens", "num_threads"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} must be at least 1, got {getattr(self, key)}")
        if self.temperature <= 0:
            raise ValueError(f"temperature must be positive, got {self.temperature}")

    @property
    def max_length(self) -> int:
        """Tokens of the longest rollout, prompt included."""
        return self.max_prompt_tokens + self.max_tokens


@dataclass(frozen=True)
class RunningSequence:
    """What one submitted sequence has made so far, or in all; instants on `time.perf_counter`."""

    tokens: list[int]
    logprobs: list[float]
    prefill_at: float | None
    """Start of the first forward pass that held part of the prefix."""
    token_times: list[float]
    """When each token was known on the host."""


STOPPED = "the replica was stopped"
"""The error of runs that `stop` ends, and of those submitted later."""
OnEnd = Callable[[RunningSequence | Exception], None]
"""Takes what a run made, or why it ended without."""
Copy = Callable[[], Awaitable[None]]
"""Puts weights that were read and checked in place of the model's; only while paused."""


class TimedPass(msgspec.Struct, frozen=True, kw_only=True):
    """One forward pass of a replica, from its start to the start of the next."""

    running: int
    """Rollouts that decoded."""
    context: int
    """Tokens that they attended to, in all."""
    longest: int
    """Of these, those of the rollout that has most."""
    prefixes: list[int]
    """New prefix tokens of each rollout whose prefix, or a part of it, was computed."""
    seconds: float


class InferenceEngine(Protocol):
    """One model that generates; call every method on one event loop."""

    async def start(self, manifest: Manifest | None) -> None:
        """Load the model, then the manifest's weights if given, and be ready to generate.

        Raises `MemoryError` where the cache does not fit.
        """

    @property
    def end_tokens(self) -> frozenset[int]:
        """Token ids that end a rollout; known once started."""

    @property
    def pads_context(self) -> bool:
        """Whether a decode step takes as long as if every rollout were as long as the longest."""

    @property
    def prefill_tokens(self) -> int:
        """Most new prefix tokens of a pass in which all others decode; known once started."""

    @property
    def has_room(self) -> bool:
        """Whether a sequence submitted now joins the next forward pass; True where `submit` raises."""

    @property
    def cache(self) -> CacheState | None:
        """What its KV cache is like now; None where it has none of one size."""

    def submit(
        self,
        tokens: list[int],
        max_new_tokens: int,
        on_end: OnEnd,
        seed: int | None,
        priority: int,
    ) -> str:
        """Generate after `tokens`, prompt and prefix; return the run's name, which no other run has.

        Where the cache is too small for all that run, those of the largest `priority` wait.
        With a `seed` the same sequence is made whatever came before it, by engines that can
        (`streamrl.executor.backend_limits` refuses it to others).
        """

    def paused(self) -> AbstractAsyncContextManager[None]:
        """Hold generation between two forward passes; runs in flight keep their KV."""

    def read(self, run: str) -> RunningSequence:
        """Return what `run` has made so far; only while paused, and only before its `on_end`."""

    def cancel(self, run: str) -> None:
        """Drop `run` without calling its `on_end`; only while paused."""

    async def read_weights(self, manifest: Manifest) -> Copy:
        """Read new weights, whose checksum was verified, beside generation, and return what copies them.

        Raises `ValueError` for those of another model; nothing has changed then.
        """

    async def sleep(self) -> None:
        """Give the device's memory back, where nothing runs; called once before each `wake`."""

    async def wake(self) -> None:
        """Take the memory again, with the weights of before."""

    async def stop(self) -> None:
        """End generation now; every run still there ends in a `RuntimeError`."""

    async def time_passes(self) -> None:
        """Time every forward pass from now on."""

    async def passes(self) -> list[TimedPass]:
        """Return the passes since the last call; the last one has no end, so it is left out."""
