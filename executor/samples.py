"""What crosses between the controller, the replicas and the trainer: what is said about tokens, as plain msgpack structs."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from streamrl.executor.checksums import combine
from streamrl.executor.tokens import TokenBlock, TokenSegment

FinishReason = Literal["stop", "length", "aborted"]
ParcelKind = Literal["full", "delta", "lora"]


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout to generate, from its prompt or from a prefix of an interrupted attempt."""

    rollout: int
    prompt: bytes
    """Prompt token ids; see `streamrl.executor.tokens`."""
    priority: int
    """Smaller starts first; ties start in order of rollout."""
    max_tokens: int
    """Most output tokens, those of the prefix included."""
    prefix: tuple[TokenBlock, ...] = ()
    """Output tokens that aborted attempts already made; generation goes on after them."""
    seed: int | None = None
    """Of its sampling; None: whatever its replica draws next."""
    output_path: str | None = None
    """Where to put the output tokens; None: into the completion."""


class CacheState(msgspec.Struct, frozen=True, kw_only=True):
    """What the KV cache of an inference engine is like."""

    tokens: int | None
    """That it holds; None where the engine does not tell."""
    use: float
    """Share of it that is in use."""
    num_preempted: int
    """Times since the start that what ran was put off for want of room."""


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """What one attempt made: only the tokens after the request's prefix."""

    rollout: int
    output: TokenBlock
    """New output tokens; the end-of-sequence token is included where it was sampled. Log-probabilities are those
    under the policy that sampled."""
    segments: tuple[TokenSegment, ...]
    """Whose the tokens of `output` are; none where there are no tokens."""
    text: str | None
    """The rollout's whole output, its prefix included, special tokens left out; None where it was aborted, or
    where the replica has no tokenizer."""
    versions: list[tuple[int, int]]
    """Spans `(version, start)`: from token `start` of `output` on, the policy version that sampled."""
    finish: FinishReason
    run_time: float
    """Seconds from leaving the replica's queue to the last token."""
    prefill_time: float
    """Seconds, at the start of `run_time`, until the rollout's prefix was computed."""
    cache: CacheState | None = None
    """Its replica's when it ended; None where an engine has none that it tells of, or the attempt was left by a lost one."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One finished rollout as the trainer consumes it."""

    rollout: int
    prompt: bytes
    output: tuple[TokenBlock, ...]
    segments: tuple[TokenSegment, ...]
    advantage: float
    """By the algorithm; ppo: its reward; dpo: 1 of the better rollout of a pair, -1 of the worse one."""
    partner: int | None = None
    """dpo: the other rollout of the pair."""


class Bucket(msgspec.Struct, frozen=True):
    """One safetensors file of a weight version."""

    path: str
    num_bytes: int
    checksum: str
    """BLAKE2b-128 of the file's bytes, in hex."""


class Loaded(msgspec.Struct, frozen=True):
    """What a load took, and what it brought."""

    load_time: float
    """Seconds for which the replica stood still."""
    checksum: str
    """Of the weights, as the replica found them."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Every bucket of one weight version; complete or not there at all."""

    version: int
    buckets: list[Bucket]
    origin: str = ""
    """Checksum of the adapters that these weights were merged from; none where they were pushed as they are."""

    @property
    def checksum(self) -> str:
        """Of what was pushed, where every bucket is as it was written."""
        return self.origin or combine(bucket.checksum for bucket in self.buckets)

    @property
    def num_bytes(self) -> int:
        """Bytes of all buckets together."""
        return sum(bucket.num_bytes for bucket in self.buckets)


class Parcel(msgspec.Struct, frozen=True, kw_only=True):
    """What a far directory is sent of a weight version, given what it holds."""

    kind: ParcelKind
    """full: the buckets themselves; delta: what changed in them since `base`; lora: adapters, which a relay merges with the
    model that the run began with where replicas cannot compute with them beside it."""
    pieces: list[Bucket]
    """What is sent, as it lies with the sender."""
    result: Manifest
    """full, delta: what comes out, bucket by bucket, as it lies with the sender. lora: the adapters."""
    base: str = ""
    """delta: the checksum of the version that must be there."""
    seconds: float = 0.0
    """That encoding took."""

    @property
    def num_bytes(self) -> int:
        """Bytes that are sent."""
        return sum(piece.num_bytes for piece in self.pieces)


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """A place in a circle of relays, in which the first tells and the others hear."""

    address: str
    """Host and port where its members find each other."""
    rank: int
    size: int


class Arrived(msgspec.Struct, frozen=True, kw_only=True):
    """A version that lies where replicas can load it."""

    manifest: Manifest
    seconds: float
    """That decoding took, with checking and writing."""


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """A completion that a reward model scores, and what it answers."""

    prompt: str | list[dict[str, Any]]
    """A text, or the messages of a chat."""
    completion: str


class ModelScore(msgspec.Struct, frozen=True, kw_only=True):
    """What a reward model made of an exchange."""

    num_tokens: int
    """That it read, or would have had to."""
    score: float | None = None
    """None where it cannot score it."""
    fault: str = ""
    """Why it cannot."""
