"""The contract between a replica worker and its inference engine, and the data that both exchange.

| guarantee | given by |
|---|---|
| the order of rollouts, their policy versions, aborts, drained loads, checked weights | `ReplicaWorker`, for every engine |
| a run ends in exactly one call of its `on_end`, on the event loop, unless it is cancelled | the engine |
| inside `paused()` no token is sampled, and every earlier `on_end` has been called | the engine |
| after `stop()` or a crash, `submit` and `paused` raise `RuntimeError` | the engine |
| log-probabilities are of softmax(logits / temperature) over the tokens that `truncation` leaves, with the weights and KV cache that sampled | the engine |
| nothing of the engine outlives the replica's process | the engine; trivial without processes of its own |
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

import msgspec

from streamrl.executor.expert_choices import Choices
from streamrl.executor.roles import CacheState, Manifest
from streamrl.executor.rollout.server_api import ServerSettings
from streamrl.executor.sampling import WHOLE, IsOver, Sampling, Truncation
from streamrl.runfile.backend_choice import RolloutBackend

PREFILL_TOKENS = 512
"""Prefix tokens of a pass of the transformers engine, in addition to decoding rollouts; more only widens the masks of
sdpa."""
GPU_PASS_TOKENS = 8192
"""New prefix tokens of a pass of vLLM on GPUs, in addition to decoding rollouts.

vLLM's server uses this value; an embedded engine would use 2,048 for prefix and decoding tokens together.
"""


class ReplicaSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one replica; its engine has room for `max_running` rollouts of maximum length."""

    model: str
    """Hugging Face directory."""
    max_running: int
    """Maximum number of rollouts generated at a time; the others wait in the replica's queue."""
    max_tokens: int
    """Maximum number of output tokens of a rollout, observations included."""
    max_prompt_tokens: int
    """Maximum length of a prompt; longer prompts are rejected."""
    max_context: int | None = None
    """Maximum length of a rollout of several turns, with its prompt and observations; None: it has one turn."""
    temperature: float
    """Divides the logits before sampling."""
    truncation: Truncation = WHOLE
    """Tokens that may be sampled."""
    evaluation: Sampling | None = None
    """Sampling of rollouts on held-out prompts; None: the replica has none."""
    stop: tuple[str, ...] = ()
    """Texts that end a rollout; they need a tokenizer."""
    seed: int
    """Seed of sampling; results also depend on the order in which requests arrive."""
    backend: RolloutBackend = "transformers"
    device: str = "cpu"
    dtype: str = "float32"
    num_threads: int = 1
    """CPU threads of the engine."""
    tensor_parallel: int = 1
    """Number of GPUs that share the model by tensor parallelism."""
    expert_parallel: int = 1
    """1, or equal to `tensor_parallel`: then each GPU stores whole experts."""
    memory_utilization: float = 0.9
    """Share of each GPU's memory for weights and cache; only for engines that reserve it at the start."""
    takes_turns: bool = False
    """Whether replica and trainer alternate on the same devices: the replica sleeps while the trainer computes."""
    shares_prefixes: bool = True
    """Whether rollouts under the same weights share the KV cache of a common prompt, if the engine supports it."""
    deterministic: bool = False
    """Whether results depend only on weights and tokens, not on the memory alignment of weights."""
    adapter_rank: int | None = None
    """Rank of the LoRA adapters that the replica loads instead of whole weights; None: it loads whole weights."""
    adapters: str | None = None
    """Directory of the first adapters, in PEFT's format; None: adapters that change nothing."""
    router_replay: bool = False
    """Whether the experts that routers choose are recorded with the tokens."""
    save_time: float = 5.0
    """Seconds between two saves of running rollouts; see `execute.save_tokens_every`."""
    tokenizer: str | None = None
    """Hugging Face directory of the tokenizer that decodes finished rollouts; None: no text."""
    end_tokens: tuple[int, ...] = ()
    """Token ids that end a rollout, in addition to those of the model's config."""
    server: ServerSettings | None = None
    """For an external engine: the server that generates."""

    def __post_init__(self) -> None:
        for key in ("max_running", "max_tokens", "max_prompt_tokens", "num_threads"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} must be at least 1, got {getattr(self, key)}")
        if self.temperature <= 0:
            raise ValueError(f"temperature must be positive, got {self.temperature}")

    def sampling(self, *, evaluates: bool) -> Sampling:
        """Return the distribution of training rollouts, or of those on held-out prompts."""
        own = Sampling(temperature=self.temperature, truncation=self.truncation)
        return self.evaluation or own if evaluates else own

    @property
    def max_length(self) -> int:
        """Return the number of tokens of the longest rollout, prompt included."""
        if self.max_context is not None:
            return self.max_context
        return self.max_prompt_tokens + self.max_tokens


@dataclass(frozen=True)
class RunningSequence:
    """Output of one submitted sequence, so far or complete; instants are those of `time.perf_counter`."""

    tokens: list[int]
    logprobs: list[float]
    prefill_at: float | None
    """Start of the first forward pass that computed part of the prefix."""
    token_times: list[float]
    """When each token arrived on the host."""
    experts: Choices | None = None
    """Chosen experts of the context's tokens, prompt included, but not of the last one, which was never computed.
    None unless `ReplicaSettings.router_replay` is set and the engine knows them."""


STOPPED = "the replica was stopped"
"""Error of runs that `stop` ends, and of runs that are submitted later."""
OnEnd = Callable[[RunningSequence | Exception], None]
"""Called with the output of a run, or with the error that ended it."""
Copy = Callable[[], Awaitable[None]]
"""Copies weights that were read and checked into the model; call it only while paused."""


class TimedPass(msgspec.Struct, frozen=True, kw_only=True):
    """One forward pass of a replica, measured from its start to the start of the next pass."""

    running: int
    """Number of rollouts that decoded."""
    context: int
    """Number of tokens that they attended to, summed over rollouts."""
    longest: int
    """Number of tokens that the longest of them attended to."""
    prefixes: list[int]
    """New prefix tokens of each rollout whose prefix was computed, completely or in part."""
    seconds: float


class InferenceEngine(Protocol):
    """One model that generates; call all methods on one event loop."""

    async def start(self, manifest: Manifest | None) -> None:
        """Load the model and the manifest's weights, if given; then generation can begin.

        Raises `MemoryError` if the cache does not fit.
        """

    @property
    def end_tokens(self) -> frozenset[int]:
        """Return the token ids that end a rollout; available after `start`."""

    @property
    def pads_context(self) -> bool:
        """Return whether a decode step takes as long as if all rollouts had the length of the longest."""

    @property
    def prefill_tokens(self) -> int:
        """Return the maximum number of new prefix tokens in a pass that also decodes; available after `start`."""

    @property
    def has_room(self) -> bool:
        """Return whether a sequence submitted now joins the next forward pass; True if `submit` raises."""

    @property
    def is_over(self) -> bool:
        """Return whether generation has ended for good, by `stop` or by a crash."""

    @property
    def cache(self) -> CacheState | None:
        """Return the size and use of the KV cache; None if the engine has no cache of fixed size."""

    def submit(
        self,
        tokens: list[int],
        max_new_tokens: int,
        on_end: OnEnd,
        seed: int | None,
        priority: int,
        is_over: IsOver | None = None,
        evaluates: bool = False,
    ) -> str:
        """Generate after `tokens` (prompt and prefix); return a unique name of this run.

        With `evaluates`, the run has the sampling of `ReplicaSettings.evaluation`, beside others that do not.

        With `is_over`, which is called with the output so far after each token, the run ends at the first token for
        which it is true. Its output has no later token.

        If the cache is too small for all running sequences, those with the largest `priority` value wait.
        With a `seed` the output does not depend on earlier requests. Not every engine supports this:
        `streamrl.targets.execute_limits` rejects the others.
        """

    def paused(self) -> AbstractAsyncContextManager[None]:
        """Stop generation between two forward passes; running sequences keep their KV cache."""

    def read(self, run: str) -> RunningSequence:
        """Return the output of `run` so far; call it only while paused and before its `on_end`."""

    def cancel(self, run: str) -> None:
        """Drop `run` without calling its `on_end`; only while paused."""

    async def read_weights(self, manifest: Manifest) -> Copy:
        """Read new weights while generation goes on; return a function that copies them into the model.

        The caller has verified the checksum. Raises `ValueError` if the weights belong to another model; then
        nothing has changed.
        """

    async def sleep(self) -> None:
        """Free the device's memory; call it once before each `wake`, and only if nothing runs."""

    async def wake(self) -> None:
        """Allocate the device's memory again, with the same weights as before `sleep`."""

    async def stop(self) -> None:
        """Stop generation now; every remaining run ends in a `RuntimeError`."""

    async def time_passes(self) -> None:
        """Start timing every forward pass."""

    async def passes(self) -> list[TimedPass]:
        """Return the completed passes since the last call; the newest pass has no end yet."""
