"""Define the contracts of the roles (replica, trainer, transfer, verifier, relay) and the messages that they exchange.

The contracts of the roles: what the controller asks of each, whoever plays it and wherever it lives.

`tests/test_contracts.py` holds every implementation to them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import msgspec

from streamrl.engine.messages import PushWeights, WeightsPushed
from streamrl.executor.checksums import combine
from streamrl.executor.tokens import TokenBlock, TokenSegment

if TYPE_CHECKING:
    from streamrl.workload.prompt_records import Record

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


class BroadcastRank(msgspec.Struct, frozen=True, kw_only=True):
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


Figures = dict[str, float]
"""What a call of the trainer measured, by name."""


class RoleLostError(RuntimeError):
    """A role can do nothing any more, though its process lives: whoever called ends it as one that died."""


class AnswerError(RuntimeError):
    """A role in another process answered with an error: its type and words, as `reason_of` has them there."""


def reason_of(error: Exception) -> str:
    """Return the type and words of an error, those of another process's as it told them."""
    return str(error) if isinstance(error, AnswerError) else f"{type(error).__name__}: {error}"


class ReplicaRole(Protocol):
    """Generates rollouts and takes new weights while it does; calls take effect in order."""

    async def start(self, manifest: Manifest | None, version: int) -> str:
        """Load the model, then the manifest's weights if given, and begin to serve as `version`.

        Returns the checksum of these weights as they were found; nothing where there are none.
        """

    async def generate(self, request: Request) -> Completion:
        """Return when this rollout is finished or aborted, whatever its siblings do.

        The smallest priority starts first, ties by rollout. Raises an error that names the key and the bound for
        a request without room, and one for whatever else keeps it from its end; a replica that was stopped says so.
        `RoleLostError` where none will ever be generated.
        """

    async def abort(self, rollout: int) -> None:
        """Make its `generate` return now with the tokens so far; nothing if it is not here."""

    async def load(self, manifest: Manifest, drain: bool) -> Loaded:
        """Serve the manifest's weights from the next token on, and return the seconds it stood still and their checksum.

        Nothing starts from this call on until the weights are in place, so what is sent after a load starts under
        what it brings. With `drain` the running rollouts end first. A bad manifest is an error, and the old
        weights go on serving.
        """

    async def cache(self) -> CacheState | None:
        """Return what its KV cache is like now; None where its engine has none that it tells of."""

    async def sleep(self) -> None:
        """Give the device's memory back until `wake`; nothing may be generated meanwhile. Nothing where it sleeps."""

    async def wake(self) -> None:
        """Be ready again, with the weights of before; nothing where it is."""

    async def stop(self) -> None:
        """End generation; every pending `generate` raises an error."""


class TrainerRole(Protocol):
    """Trains on rollouts as they arrive, makes and pushes weight versions; calls take effect in order."""

    async def start(self, checkpoint: str | None, version: int | None = None) -> int:
        """Load the initial weights (version 0) or a checkpoint, and return the version: `version` where it is given."""

    async def score(self, samples: list[Sample]) -> Figures:
        """Run the forward passes that training on these samples needs first."""

    async def train(self, samples: list[Sample]) -> Figures:
        """Add the gradient of these samples to the batch."""

    async def step(self, version: int) -> Figures:
        """Make `version` from the batch; its `rollouts` are those trained on since the last step.

        An error where `version` is not the next one, or nothing was trained on.
        """

    async def push(self, version: int, directory: str) -> Manifest:
        """Write the weights to `directory`; an error where `version` is not the current one."""

    async def save(self, path: str) -> None:
        """Write a checkpoint of the last step, which is complete or not there."""

    async def sleep(self) -> None:
        """Give the device's memory back until `wake`, with the batch under way kept. Nothing where it sleeps."""

    async def wake(self) -> None:
        """Be ready to train again; nothing where it is."""

    async def stop(self) -> None:
        """Finish the work that was called for, and end."""


class Scoring(NamedTuple):
    """What a completion gets."""

    reward: float
    """Of one scorer mostly 0 to 1; of several the weighted sum of their scores."""
    fault: str | None
    """What became of a completion that could not be scored and has the worst score: "time limit"; else None."""
    scores: Mapping[str, float] = MappingProxyType({})
    """Of several scorers, what each gave, by its name."""


class RewardRole(Protocol):
    """Scores completions with a model of its own."""

    async def start(self) -> None:
        """Load the model."""

    async def score(self, exchanges: list[Exchange]) -> list[ModelScore]:
        """Return what the model makes of each, in order, in as few passes as may be.

        An exchange that it cannot score says so and keeps none of the others from their score.
        """

    async def stop(self) -> None:
        """Finish the work that was called for, and end."""


class VerifierRole(Protocol):
    """Scores completions."""

    async def start(self) -> object:
        """Begin to load what scores; `verify` does so where nobody else has."""

    async def verify(self, completion: str, num_tokens: int, record: Record) -> Scoring:
        """Return the reward of a completion's text of `num_tokens` tokens.

        Raises:
            RuntimeError: no completion of this record can be scored.
        """

    def reward_models(self) -> Sequence[object]:
        """Return handles on the replicas of a reward model that are up, those with work first; none where there is none."""
        return ()

    def close(self) -> None:
        """End at once, whatever is under way; `verify` begins anew."""


Write = Callable[[int, Path], Awaitable[Manifest]]
"""Writes the weights of a version to a directory: a trainer's `push`."""


class RelayRole(Protocol):
    """Holds weight versions on one machine, and makes what other relays need of them."""

    async def start(self) -> str:
        """Make the directory of versions, and return its path."""

    async def pack(self, manifest: Manifest, kind: str, base: Manifest | None) -> Parcel:
        """Return what another place needs to have a version that was written here; see `ParcelKind`.

        An error where the base has other tensors.
        """

    async def read(self, path: str, offset: int, size: int) -> bytes:
        """Return bytes of a file below the directory; an error where it lies elsewhere."""

    async def receive(self, version: int, piece: int, offset: int, data: bytes) -> None:
        """Take bytes of a piece of a parcel."""

    async def listen(self) -> str:
        """Open a meeting for a circle that this one will tell, in place of one before, and return its address."""

    async def join_broadcast(
        self, hears: BroadcastRank | None, tells: BroadcastRank | None
    ) -> None:
        """Take seats in the circle that this one hears, and in the one that it tells, once all others take theirs."""

    async def broadcast(self, parcel: Parcel) -> None:
        """Hear a parcel, or read it where this one hears nobody, and tell it to those who hear this one.

        An error where a member of a circle is gone; what was received until then is no parcel.
        """

    async def unpack(self, parcel: Parcel, is_here: bool) -> Arrived:
        """Make a version of a parcel that was received, or whose pieces can be read here.

        An error where its base is not here, or anything is not what was sent; nothing has changed then.
        """

    async def keep(self, checksums: list[str]) -> None:
        """Remove every unpacked version but these."""

    async def remove(self, version: int) -> None:
        """Remove a version that was written here."""

    async def stop(self) -> None:
        """Leave nothing behind."""


class TransferRole(Protocol):
    """Brings pushed weights to where replicas load them; a version stays until a newer one is there."""

    def join(self, replica: int, place: str) -> None:
        """Enter where a replica loads weights."""

    def leave(self, replica: int) -> None:
        """Enter that a replica is gone."""

    async def prepare(self) -> None:
        """Be ready to be given weights, now that the trainer is up: its next step must not overtake a push that waits."""

    async def push(self, command: PushWeights) -> WeightsPushed:
        """Send a version to where replicas can load it."""

    async def fetch(self, version: int, replica: int) -> Manifest | None:
        """Return what a replica that has joined loads; None for a version that was never pushed.

        `ConnectionError` for one that is gone, or does not reach it.
        """

    def hold(self, version: int) -> None:
        """Keep a version for someone who will load it, also where a newer one is there."""

    def release(self, version: int) -> None:
        """Let go of a version that was held."""

    async def close(self) -> None:
        """End whoever brings weights, and leave nothing behind."""

    def stop(self) -> None:
        """Leave nothing behind, also of a push that broke off, from any thread."""
