"""What the engine and a world say to each other: commands go out, events come back.

Every command ends in exactly one event. `Abort`, `Take`, `Skip`, `Postpone`, `Drop`, `Resize` and `Stop` have none of their own: an
abort makes the running `Generate` end now, the others only change what the engine plans. A command says all that a world
needs to carry it out. Trainer 0 leads: its versions are what replicas load; the others follow on the same rollouts.

    command         ends in             resource
    StartReplica    ReplicaStarted      replica
    StopReplica     ReplicaStopped      replica
    StartTrainer    TrainerStarted      trainer
    StopTrainer     TrainerStopped      trainer
    Promote         TrainerLeaving      trainer
    DrawPrompts     PromptsDrawn        workload
    Generate        Generated           replica
    Verify          Verified            verifier
    Score           Scored              trainer
    Train           Trained             trainer
    Step            Stepped             trainer
    PushWeights     WeightsPushed       link
    LoadWeights     WeightsLoaded       replica
    SaveCheckpoint  CheckpointSaved     trainer
    WakeAt          Woke                clock

Any may end in `Failed`. `RunStarted`, `ReplicaLost`, `TrainerLost`, `TrainerJoined`, `TrainerLeaving`,
`ExpectationsChanged` and `Interrupted` come unasked.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec


class Message(msgspec.Struct, frozen=True, tag=True, gc=False):
    """A fact or an order; it never changes once it is made."""


# Commands -----------------------------------------------------------------------------------------


class StartReplica(Message, frozen=True, omit_defaults=True):
    """Bring replica `replica` up with weights of `version`."""

    replica: int
    version: int
    kind: int = 0
    """Of which kind it is: `[rollout]` itself, or which of `rollout.others`."""


class StopReplica(Message, frozen=True):
    """End replica `replica`, which has nothing on its hands, and give its GPUs back."""

    replica: int


class Resize(Message, frozen=True):
    """Have `num_replicas` replicas from now on."""

    num_replicas: int


class StartTrainer(Message, frozen=True):
    """Bring trainer `trainer` up with weights of `version`: the initial ones, or a checkpoint's."""

    trainer: int
    version: int


class StopTrainer(Message, frozen=True):
    """End trainer `trainer`, which follows no longer and has nothing on its hands."""

    trainer: int


class Promote(Message, frozen=True):
    """Let `trainer`, which follows, end; from then on trainer 0 is what it was, and begins at `version` with its newest weights."""

    trainer: int
    version: int


class DrawPrompts(Message, frozen=True):
    """Take the next `num_groups` prompts, meant for `step`; no rollout may start under an older version than said."""

    step: int
    num_groups: int
    oldest_version: int


class Generate(Message, frozen=True, omit_defaults=True):
    """Generate `rollout` on `replica`, going on after its first `prefix` output tokens."""

    rollout: int
    replica: int
    priority: int
    """Smaller starts first; ties start in order of rollout."""
    prefix: int = 0
    brings_cache: bool = False
    """Whether its KV cache comes along from where it ran last, so that nothing is computed again."""


class Abort(Message, frozen=True):
    """End the `Generate` of `rollout` on `replica` now; it reports what it has made so far."""

    rollout: int
    replica: int


class Verify(Message, frozen=True):
    """Compute the reward of a finished rollout."""

    rollout: int


class Take(Message, frozen=True):
    """Let `trainer` train on `group` in its step `step`."""

    group: int
    step: int
    trainer: int


class Skip(Message, frozen=True):
    """Let `trainer` never train on `group`, which others may; `reason` says why."""

    group: int
    trainer: int
    reason: str


class Postpone(Message, frozen=True):
    """Let what of `group` is not running start under `oldest_version` or newer alone, with the tokens that it has."""

    group: int
    oldest_version: int


class Drop(Message, frozen=True):
    """Let no trainer train on `group` that has not yet; `reason` says why."""

    group: int
    reason: str


class Stop(Message, frozen=True):
    """Begin nothing new and let the run end; `reason` says why."""

    reason: str


class Score(Message, frozen=True):
    """Run the forward passes (reference, critic, proximal policy) that training on `rollouts` needs."""

    rollouts: tuple[int, ...]
    trainer: int


class Train(Message, frozen=True):
    """Accumulate the gradient of `rollouts`."""

    rollouts: tuple[int, ...]
    trainer: int


class Step(Message, frozen=True):
    """Apply the gradient accumulated from `groups`; this makes policy version `version`."""

    version: int
    groups: tuple[int, ...]
    trainer: int


class PushWeights(Message, frozen=True):
    """Send weights of `version` from `trainer` to where replicas can load them."""

    version: int
    trainer: int


class LoadWeights(Message, frozen=True):
    """Replace the weights of `replica`; with `drain` once what runs there has ended, else that goes on with its KV cache."""

    replica: int
    version: int
    drain: bool


class SaveCheckpoint(Message, frozen=True, omit_defaults=True):
    """Write down everything that a resumed run needs at policy version `version`.

    Groups before `groups_done` in draw order are trained or dropped: a resumed run draws from there, but for those of
    `done_ahead`, which overtook it.
    """

    version: int
    groups_done: int
    trainer: int
    done_ahead: tuple[int, ...] = ()


class WakeAt(Message, frozen=True):
    """Let the policies look again at `time` seconds."""

    time: float


Command: TypeAlias = (
    Generate
    | Verify
    | Take
    | Skip
    | Postpone
    | Score
    | Train
    | Step
    | DrawPrompts
    | PushWeights
    | LoadWeights
    | Abort
    | Drop
    | Stop
    | StartReplica
    | StopReplica
    | Resize
    | StartTrainer
    | StopTrainer
    | Promote
    | SaveCheckpoint
    | WakeAt
)


# Events -------------------------------------------------------------------------------------------

Finish: TypeAlias = Literal["stop", "length", "aborted"]


class RunStarted(Message, frozen=True, omit_defaults=True):
    """The run begins at policy version `version`; groups before `groups_done` are behind it."""

    version: int
    groups_done: int
    followers: tuple[SaveCheckpoint, ...] = ()
    """Checkpoints that trainers which follow go on from, in their order; those without begin at version 0."""
    away: tuple[int, ...] = ()
    """Trainers that do not follow now, as they were detached before the run was resumed."""
    promoted: int | None = None
    """The one of them that trainer 0 has been since before the run was resumed; None where it is itself."""


class ReplicaStarted(Message, frozen=True, omit_defaults=True):
    """Replica `replica` serves with weights of `version`, and of `checksum` unless the run began with them."""

    replica: int
    version: int
    checksum: str = ""
    cache_tokens: int | None = None
    """Tokens whose keys and values it can hold; None where no policy asks, or its engine does not tell."""


class ReplicaStopped(Message, frozen=True):
    """Replica `replica` has ended, as it was told to."""

    replica: int


class ReplicaLost(Message, frozen=True):
    """Replica `replica` is gone; each command that ran there ends in `Failed` after this."""

    replica: int
    reason: str


class TrainerStarted(Message, frozen=True):
    """Trainer `trainer` is ready at policy version `version`."""

    trainer: int
    version: int


class TrainerJoined(Message, frozen=True):
    """Trainer `trainer` is to follow from now on: a new one on what is drawn after this, or one that was detached before."""

    trainer: int
    follower: dict[str, Any]
    """Its section of a run file, quantities in base units."""


class TrainerLeaving(Message, frozen=True):
    """Trainer `trainer`, which does not lead, is to end what it does, save itself, and follow no longer."""

    trainer: int


class TrainerStopped(Message, frozen=True):
    """Trainer `trainer` has ended, as it was told to."""

    trainer: int


class TrainerLost(Message, frozen=True):
    """Trainer `trainer` is gone with all since its last checkpoint; what ran there ends in `Failed` after this."""

    trainer: int
    reason: str


class DrawnGroup(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One prompt and the ids of the rollouts to make from it."""

    group: int
    rollouts: tuple[int, ...]
    prompt_tokens: int
    expected_tokens: tuple[int, ...]
    """Output tokens expected of each rollout; only their order is relied on."""
    prompt: int | None = None
    """Line of the prompts file, whose token ids lie beside the trace; None where there is none."""
    kept: tuple[tuple[int, int], ...] = ()
    """Of each rollout the output tokens from before the run was resumed, and the version of the first; () where none are."""
    family: str | None = None
    """Of the prompt, where a trainer takes groups by it; None where none does, or the prompt has none."""


class PromptsDrawn(Message, frozen=True):
    """The prompts that a `DrawPrompts` asked for, in draw order."""

    step: int
    oldest_version: int
    groups: tuple[DrawnGroup, ...]


class ExpectationsChanged(Message, frozen=True, omit_defaults=True):
    """Other lengths are expected of `rollouts` now: a ranker, or their siblings, told."""

    rollouts: tuple[int, ...]
    tokens: tuple[int, ...]  # output tokens expected of each
    recall: float | None = None
    """Share of the longest fifth that the ranker found in a window of groups, where one has ended."""
    reason: str = ""  # why the ranker is no longer heeded, or is again, or was fitted anew


class Generated(Message, frozen=True, omit_defaults=True):
    """A `Generate` ended: finished, or aborted with what it has made so far."""

    rollout: int
    tokens: int
    """Output tokens that the rollout has now, those of earlier attempts included."""
    finish: Finish
    version: int
    """Policy version that this attempt started under; of one that made no token it says nothing."""
    run_time: float
    """Seconds from leaving the replica's queue to the end."""
    prefill_time: float
    """Seconds, at the start of `run_time`, until the rollout's prefix was computed, alone or with others, or sent."""
    cache_use: float | None = None
    """Share of its replica's KV cache that is in use then, this rollout's part counted or not; None where no policy asks,
    or the engine does not tell."""
    num_preempted: int = 0
    """Rollouts that the replica has put off for want of cache since it last told this."""


class Verified(Message, frozen=True):
    """The reward of a rollout is known."""

    rollout: int
    reward: float


class Scored(Message, frozen=True):
    """The forward passes of a `Score` are done."""

    rollouts: tuple[int, ...]
    trainer: int


class Trained(Message, frozen=True):
    """The gradient of a `Train` is accumulated."""

    rollouts: tuple[int, ...]
    trainer: int


class Stepped(Message, frozen=True):
    """Trainer `trainer` has made its policy version `version`."""

    version: int
    trainer: int


class WeightsPushed(Message, frozen=True, omit_defaults=True):
    """Weights of `version` can be loaded by every replica."""

    version: int
    num_bytes: int
    checksum: str = ""
    """Of what was pushed; empty where that is but imagined."""
    encode_time: float = 0.0
    """Seconds of making what is sent of the weights, where that is something else; these three of the slowest place."""
    wire_time: float = 0.0
    decode_time: float = 0.0


class WeightsLoaded(Message, frozen=True, omit_defaults=True):
    """Replica `replica` serves with weights of `version` and `checksum`; its last `load_time` seconds went into that."""

    replica: int
    version: int
    load_time: float
    checksum: str = ""


class CheckpointSaved(Message, frozen=True):
    """The checkpoint of `version` is complete on disk."""

    version: int
    trainer: int


class Woke(Message, frozen=True):
    """The time that a `WakeAt` asked for has come."""

    time: float


class Failed(Message, frozen=True):
    """`command` ended without its result."""

    command: Command
    reason: str


class Interrupted(Message, frozen=True):
    """The user, or the machine, wants the run to end now."""

    reason: str


Event: TypeAlias = (
    Generated
    | Verified
    | Scored
    | Trained
    | Stepped
    | PromptsDrawn
    | WeightsPushed
    | WeightsLoaded
    | ReplicaStarted
    | ReplicaStopped
    | TrainerStarted
    | TrainerStopped
    | TrainerJoined
    | TrainerLeaving
    | RunStarted
    | ReplicaLost
    | TrainerLost
    | ExpectationsChanged
    | CheckpointSaved
    | Woke
    | Failed
    | Interrupted
)
