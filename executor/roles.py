"""Define the contracts of the roles (replica, trainer, transfer, verifier, relay) and the messages that they exchange.

A contract is the set of methods that the controller calls, whatever implements the role and wherever it runs.
`tests/test_contracts.py` checks every implementation.
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
Channel = Literal["gloo", "nccl", "cuda-ipc"]
"""How the bytes of a broadcast travel: between CPUs, between GPUs, or within one GPU."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout to generate, from its prompt or from a prefix of an interrupted attempt."""

    rollout: int
    prompt: bytes
    """Prompt token ids; see `streamrl.executor.tokens`."""
    priority: int
    """The smallest value starts first; ties start in order of rollout."""
    max_tokens: int
    """Maximum number of output tokens, including those of the prefix."""
    prefix: tuple[TokenBlock, ...] = ()
    """Output tokens of aborted attempts; generation continues after them."""
    seed: int | None = None
    """Seed of its sampling. None: use the random state of the replica."""
    output_path: str | None = None
    """File for the output tokens. None: return them in the completion."""
    evaluates: bool = False
    """Whether it is on a held-out prompt, with the sampling of evaluations."""


class CacheState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of an inference engine's KV cache."""

    tokens: int | None
    """Capacity in tokens; None if the engine does not report it."""
    use: float
    """Share of the capacity that is in use, 0 to 1."""
    num_preempted: int
    """Number of preemptions since the start, because the cache was full."""


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The output of one attempt: only the tokens after the request's prefix."""

    rollout: int
    output: TokenBlock
    """New output tokens, with the end-of-sequence token if it was sampled. Log-probabilities are those of the policy
    that sampled."""
    segments: tuple[TokenSegment, ...]
    """Which tokens of `output` the policy sampled; empty if there are no tokens."""
    text: str | None
    """The whole output of the rollout with its prefix, without special tokens. None if the attempt was aborted or the
    replica has no tokenizer."""
    versions: list[tuple[int, int]]
    """Spans `(version, start)`: the policy version that sampled from token `start` of `output` on."""
    finish: FinishReason
    run_time: float
    """Seconds from leaving the replica's queue to the last token."""
    prefill_time: float
    """Seconds at the start of `run_time` until the prefix was computed."""
    cache: CacheState | None = None
    """State of the replica's KV cache at the end. None if the engine does not report it or the replica was lost."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One finished rollout, as the trainer receives it."""

    rollout: int
    prompt: bytes
    output: tuple[TokenBlock, ...]
    segments: tuple[TokenSegment, ...]
    advantage: float
    """Advantage of the algorithm. ppo: the reward. dpo: 1 for the better rollout of a pair, -1 for the worse one."""
    turn_advantages: tuple[float, ...] = ()
    """Advantage of each turn of an episode; empty: all turns have `advantage`."""
    partner: int | None = None
    """dpo: number of the other rollout of the pair."""
    is_masked: bool = False
    """Whether it is left out of the loss and of its mean."""


class Bucket(msgspec.Struct, frozen=True):
    """One safetensors file of a weight version."""

    path: str
    num_bytes: int
    checksum: str
    """BLAKE2b-128 of the file's bytes, in hex."""


class Loaded(msgspec.Struct, frozen=True):
    """The result of loading weights into a replica."""

    load_time: float
    """Seconds in which the replica generated nothing."""
    checksum: str
    """Checksum of the weights, as the replica read them."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """All buckets of one complete weight version."""

    version: int
    buckets: list[Bucket]
    origin: str = ""
    """Checksum of the adapters that were merged into these weights; empty if nothing was merged."""
    is_packed: bool = False
    """Whether the buckets are in the trainer's memory and have no paths; `TrainerRole.send` sends them."""

    @property
    def checksum(self) -> str:
        """Checksum of the pushed weights or adapters, assuming intact buckets."""
        return self.origin or combine(bucket.checksum for bucket in self.buckets)

    @property
    def num_bytes(self) -> int:
        """Bytes of all buckets together."""
        return sum(bucket.num_bytes for bucket in self.buckets)


class Parcel(msgspec.Struct, frozen=True, kw_only=True):
    """A weight version encoded for another relay, which may already have an older version."""

    kind: ParcelKind
    """full: the buckets themselves. delta: their changes since `base`. lora: adapters; the relay merges them into the
    initial model if replicas cannot apply adapters themselves."""
    pieces: list[Bucket]
    """The files to send, with the sender's paths."""
    result: Manifest
    """full, delta: the buckets of the version, with the sender's paths. lora: the adapters."""
    base: str = ""
    """delta: checksum of the version that the receiver must have."""
    seconds: float = 0.0
    """Seconds of encoding."""

    @property
    def num_bytes(self) -> int:
        """Number of bytes to send."""
        return sum(piece.num_bytes for piece in self.pieces)


class BroadcastRank(msgspec.Struct, frozen=True, kw_only=True):
    """The rank of a process in a broadcast group; rank 0 sends and the others receive."""

    address: str
    """Host and port of the group's rendezvous."""
    rank: int
    size: int
    channel: Channel = "gloo"
    patience: float = 60.0
    """Timeout in seconds to join the group, and for one block, which takes about a second on a slow link."""


class Arrived(msgspec.Struct, frozen=True, kw_only=True):
    """A version in a directory from which replicas can load it."""

    manifest: Manifest
    seconds: float
    """Seconds of decoding, checking and writing."""


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt and its completion, which a reward model scores."""

    prompt: str | list[dict[str, Any]]
    """A text, or the messages of a chat."""
    completion: str


class ModelScore(msgspec.Struct, frozen=True, kw_only=True):
    """The score of an exchange by a reward model."""

    num_tokens: int
    """Number of tokens in the exchange."""
    score: float | None = None
    """None if the model cannot score the exchange."""
    fault: str = ""
    """Why it cannot."""


Figures = dict[str, float]
"""Measurements of a trainer's call, by name."""


class RoleLostError(RuntimeError):
    """A role cannot continue, although its process is alive; the caller kills the process."""


class AnswerError(RuntimeError):
    """A role in another process raised an error; this has its text, from `reason_of` in that process."""


def reason_of(error: Exception) -> str:
    """Return the type and message of an error; for `AnswerError`, those of the original error."""
    return str(error) if isinstance(error, AnswerError) else f"{type(error).__name__}: {error}"


class ReplicaRole(Protocol):
    """Generates rollouts and loads new weights meanwhile; calls take effect in order."""

    async def start(self, manifest: Manifest | None, version: int) -> str:
        """Load the model, then the weights of `manifest` if given, and start to serve as `version`.

        Returns the checksum of the loaded weights as they were read, or an empty string without a manifest.
        """

    async def generate(self, request: Request) -> Completion:
        """Generate one rollout, and return when it is finished or aborted.

        The smallest priority starts first; ties start in order of rollout. Raises an error that names the key and the
        limit if the request does not fit, and an error if the replica is stopped or generation fails. Raises
        `RoleLostError` if the replica can never generate again.
        """

    async def abort(self, rollout: int) -> None:
        """Make the rollout's `generate` return now with its tokens so far; do nothing if it is not here."""

    async def load(self, manifest: Manifest, drain: bool) -> Loaded:
        """Load the weights of `manifest`, and use them from the next token on.

        No rollout starts between this call and the end of the load. So rollouts sent after it start with the new
        weights. With `drain`, running rollouts end first. A bad manifest raises an error, and the old weights stay.
        Raises `RoleLostError` if the replica cannot be used any more.
        """

    async def receive(self, manifest: Manifest, seat: BroadcastRank, kept: list[int]) -> None:
        """Receive packed buckets from the trainer and verify them; a later `load` or `start` uses them.

        Join the group of `seat` first if it is another one than before. Forget received versions other than `kept`.
        Generation goes on meanwhile. Raises an error if a member of the group is gone, or a checksum differs.
        """

    async def cache(self) -> CacheState | None:
        """Return the current state of the KV cache, or None if the engine does not report it."""

    async def sleep(self) -> None:
        """Release device memory until `wake`; no rollout may run meanwhile. Do nothing if it sleeps already."""

    async def wake(self) -> None:
        """Restore the same weights on the device; do nothing if it is awake."""

    def check_alive(self) -> None:
        """Raise `RoleLostError` if the replica can never generate again; called at each ping."""

    async def stop(self) -> None:
        """End generation; every pending `generate` raises an error."""


class TrainerRole(Protocol):
    """Trains on rollouts as they arrive, and pushes weight versions; calls take effect in order."""

    async def start(self, checkpoint: str | None, version: int | None = None) -> int:
        """Load the initial weights (version 0) or a checkpoint, and return the version; `version` overrides it."""

    async def start_blank(self) -> None:
        """Load the models without trained weights, as a new rank that `regroup` will add to others."""

    async def regroup(self, num_ranks: int, num_kept: int, rendezvous: str) -> int:
        """Continue with `num_ranks` ranks that meet at `rendezvous`, and return the version; all of them must call this.

        The first `num_kept` ranks have the trainer's state. The others get it from the first rank. Raises an error if
        samples were trained on since the last step.
        """

    async def score(self, samples: list[Sample]) -> Figures:
        """Run the forward passes that must precede training on these samples."""

    async def train(self, samples: list[Sample]) -> Figures:
        """Add the gradient of these samples to the batch."""

    async def step(self, version: int) -> Figures:
        """Make an optimizer step with the batch, which creates `version`; return the number of `rollouts` and others.

        Raises an error if `version` is not the next one, or the batch is empty.
        """

    async def push(self, version: int, directory: str) -> Manifest:
        """Write the weights to `directory`; raise an error if `version` is not the current one."""

    async def pack(self, version: int, kept: list[int]) -> Manifest:
        """Pack the weights in memory, and forget packed versions other than `kept`; else like `push`."""

    async def listen(self) -> str:
        """Open the rendezvous of the group to which packed versions will be sent, and return its address."""

    async def send(self, version: int, seat: BroadcastRank) -> None:
        """Send a packed version to the group of `seat`; join it first if it is another one than before.

        Raises an error if a member of the group is gone.
        """

    async def save(self, path: str) -> None:
        """Write a checkpoint of the last step; it is complete or absent."""

    async def sleep(self) -> None:
        """Release device memory until `wake`, and keep the current batch. Do nothing if it sleeps already."""

    async def wake(self) -> None:
        """Restore the state on the device; do nothing if it is awake."""

    async def stop(self) -> None:
        """Finish all pending calls, then end."""


class Scoring(NamedTuple):
    """The reward of a completion."""

    reward: float
    """The score, mostly 0 to 1. With several scorers it is the weighted sum of their scores."""
    fault: str | None
    """Why the completion could not be scored and has the worst score, such as "time limit"; else None."""
    scores: Mapping[str, float] = MappingProxyType({})
    """With several scorers, the score of each by name."""


class RewardRole(Protocol):
    """Scores completions with a reward model."""

    async def start(self) -> None:
        """Load the model."""

    async def score(self, exchanges: list[Exchange]) -> list[ModelScore]:
        """Return the score of each exchange in order, with as few forward passes as possible.

        An exchange that cannot be scored has a fault in its result; the others are scored.
        """

    async def stop(self) -> None:
        """Finish all pending calls, then end."""


class VerifierRole(Protocol):
    """Scores completions."""

    async def start(self) -> object:
        """Start to load the scorers; otherwise the first `verify` does."""

    async def verify(self, completion: str, num_tokens: int | None, record: Record) -> Scoring:
        """Return the reward of a completion's text of `num_tokens` tokens; with None, without scores of its length.

        Raises:
            RuntimeError: no completion of this record can be scored.
        """

    def reward_models(self) -> Sequence[object]:
        """Return handles on the running replicas of the reward model, busy ones first; empty if there are none."""
        return ()

    def close(self) -> None:
        """End all scoring at once; a later `verify` starts again."""


class UnreachedError(ConnectionError):
    """A pushed version reached none of the places from which replicas load."""

    def __init__(self, message: str, replicas: Sequence[int]) -> None:
        super().__init__(message)
        self.replicas = replicas
        """The replicas of these places."""


Write = Callable[[int, Path], Awaitable[Manifest]]
"""Writes the weights of a version to a directory: a trainer's `push`."""


class WeightSource(Protocol):
    """The controller's side of the primary trainer; see `TrainerRole`."""

    @property
    def worker(self) -> object:
        """The handle of its worker; another object after a restart."""

    async def push(self, version: int, directory: Path) -> Manifest:
        """Write the weights to a directory."""

    async def pack(self, version: int, kept: list[int]) -> Manifest:
        """Pack the weights in memory."""

    async def listen(self) -> str:
        """Open a rendezvous, and return its address."""

    async def send(self, version: int, seat: BroadcastRank) -> None:
        """Send a packed version to a group."""


class WeightTarget(Protocol):
    """The controller's side of a replica; see `ReplicaRole`."""

    @property
    def is_up(self) -> bool:
        """Whether it has started."""

    async def receive(self, manifest: Manifest, seat: BroadcastRank, kept: list[int]) -> None:
        """Receive a packed version from a group."""


class RelayRole(Protocol):
    """Stores weight versions on one machine, and exchanges them with other relays."""

    async def start(self) -> str:
        """Create the directory of versions, and return its path."""

    async def pack(self, manifest: Manifest, kind: str, base: Manifest | None) -> Parcel:
        """Return a parcel with which another relay can restore a version of this machine; see `ParcelKind`.

        Raises an error if the base has other tensors.
        """

    async def read(self, path: str, offset: int, size: int) -> bytes:
        """Return bytes of a file in the directory of versions; raise an error for any other file."""

    async def receive(self, version: int, piece: int, offset: int, data: bytes) -> None:
        """Store bytes of one piece of a parcel."""

    async def listen(self) -> str:
        """Open the rendezvous of the broadcast group that this relay sends to, and return its address."""

    async def join_broadcast(
        self, receives: BroadcastRank | None, sends: BroadcastRank | None
    ) -> None:
        """Join the group that this relay receives from and the one that it sends to; wait for all members."""

    async def broadcast(self, parcel: Parcel) -> None:
        """Receive a parcel, or read it if this relay is the first, and send it on to its broadcast group.

        Raises an error if a member of a group is gone; the data received until then is incomplete.
        """

    async def unpack(self, parcel: Parcel, is_here: bool) -> Arrived:
        """Restore a version from a received parcel, or from pieces that are on this machine.

        Raises an error if the base is missing or a checksum differs; then nothing has changed.
        """

    async def keep(self, checksums: list[str]) -> None:
        """Remove all unpacked versions except these."""

    async def remove(self, version: int) -> None:
        """Remove a version that was written on this machine."""

    async def stop(self) -> None:
        """Remove all files."""


class TransferRole(Protocol):
    """Brings pushed weights to places from which replicas load them, and keeps the newest version."""

    def join(self, replica: int, place: str, target: WeightTarget | None = None) -> None:
        """Record the place from which a replica loads weights, and the replica for transfers that send to it."""

    def leave(self, replica: int) -> None:
        """Record that a replica is gone."""

    async def prepare(self) -> None:
        """Prepare for pushes when the trainer has started, so that its next step cannot overtake a waiting push."""

    async def reach(self, replica: int) -> None:
        """Start whatever a replica's place needs for weights, while the replica starts.

        A machine may refuse new processes once it is about to be taken away. So no push starts one there.

        Raises `ConnectionError` if it does not start.
        """

    async def push(self, command: PushWeights) -> WeightsPushed:
        """Send a version to all places from which replicas load.

        Raises `UnreachedError` if there are such places and the version reached none of them.
        """

    async def fetch(self, version: int, replica: int) -> Manifest | None:
        """Return the manifest of a version for a replica, or None if the version was never pushed.

        Raises `ConnectionError` if the version is gone, or cannot reach the replica's place.
        """

    def hold(self, version: int) -> None:
        """Keep a version for a replica that will load it, even if a newer version arrives."""

    def release(self, version: int) -> None:
        """End a `hold` of a version."""

    async def close(self) -> None:
        """End all relays and remove all files."""

    def stop(self) -> None:
        """Remove all files, even of an unfinished push; may be called from any thread."""
