"""What crosses between the controller, the replicas and the trainer: token data as plain msgpack structs."""

from __future__ import annotations

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "aborted"]


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout to generate, from its prompt or from a prefix of an interrupted attempt."""

    rollout: int
    prompt: list[int]
    """Prompt token ids."""
    priority: int
    """Smaller starts first; ties start in order of rollout."""
    max_tokens: int
    """Most output tokens, those of the prefix included."""
    prefix: list[int] = []
    """Output tokens that an aborted attempt already made; generation goes on after them."""


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """What one attempt made: only the tokens after the request's prefix."""

    rollout: int
    tokens: list[int]
    """New output token ids; the end-of-sequence token is included where it was sampled."""
    logprobs: list[float]
    """Log-probability of each token under the policy that sampled it, in nats."""
    versions: list[tuple[int, int]]
    """Spans `(version, start)`: from index `start` of `tokens` on, the policy version that sampled."""
    finish: FinishReason
    run_time: float
    """Seconds from leaving the replica's queue to the last token."""
    prefill_time: float
    """Seconds, at the start of `run_time`, until the rollout's prefix was computed."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One finished rollout as the trainer consumes it."""

    rollout: int
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    """Behaviour log-probabilities, one per output token, in nats."""
    advantage: float


class Bucket(msgspec.Struct, frozen=True):
    """One safetensors file of a weight version."""

    path: str
    num_bytes: int
    checksum: str
    """BLAKE2b-128 of the file's bytes, in hex."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Every bucket of one weight version; complete or not there at all."""

    version: int
    buckets: list[Bucket]

    @property
    def num_bytes(self) -> int:
        """Bytes of all buckets together."""
        return sum(bucket.num_bytes for bucket in self.buckets)
