"""What the engine and a world say to each other: commands go out, events come back.

Every command ends in exactly one event. `Abort`, `Take`, `Drop`, `Resize` and `Stop` have none of their own: an
abort makes the running `Generate` end now, the others only change what the engine plans.

    command         ends in             resource
    StartReplica    ReplicaStarted      replica
    StopReplica     ReplicaStopped      replica
    StartTrainer    TrainerStarted      trainer
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

Any of them may end in `Failed` instead. `RunStarted`, `ReplicaLost` and `Interrupted` come unasked.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec


class Message(msgspec.Struct, frozen=True, tag=True, gc=False):
    """A fact or an order; it never changes once it is made."""


# Commands -----------------------------------------------------------------------------------------


class StartReplica(Message, frozen=True):
    """Bring replica `replica` up with weights of `version`."""

    replica: int
    version: int


class StopReplica(Message, frozen=True):
    """End replica `replica`, which has nothing on its hands, and give its GPUs back."""

    replica: int


class Resize(Message, frozen=True):
    """Have `num_replicas` replicas from now on."""

    num_replicas: int


class StartTrainer(Message, frozen=True):
    """Bring the trainer up, from the initial weights or the checkpoint the run resumes from."""


class DrawPrompts(Message, frozen=True):
    """Take the next `num_groups` prompts, meant for step `step`.

    Their rollouts may not start under a policy version older than `oldest_version`.
    """

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
    """End the `Generate` of `rollout` now; it reports what it has made so far."""

    rollout: int


class Verify(Message, frozen=True):
    """Compute the reward of a finished rollout."""

    rollout: int


class Take(Message, frozen=True):
    """Train on `group` in step `step`."""

    group: int
    step: int


class Drop(Message, frozen=True):
    """Never train on `group`; `reason` says why."""

    group: int
    reason: str


class Stop(Message, frozen=True):
    """Begin nothing new and let the run end; `reason` says why."""

    reason: str


class Score(Message, frozen=True):
    """Run the forward passes (reference, critic, proximal policy) that training on `rollouts` needs."""

    rollouts: tuple[int, ...]


class Train(Message, frozen=True):
    """Accumulate the gradient of `rollouts`."""

    rollouts: tuple[int, ...]


class Step(Message, frozen=True):
    """Apply the accumulated gradient; this makes policy version `version`."""

    version: int


class PushWeights(Message, frozen=True):
    """Send weights of `version` from the trainer to where replicas can load them."""

    version: int


class LoadWeights(Message, frozen=True):
    """Replace the weights of `replica`.

    With `drain` the replica first lets what runs on it finish and starts nothing new; without, what runs
    is paused, keeps its KV cache and goes on under the new version.
    """

    replica: int
    version: int
    drain: bool


class SaveCheckpoint(Message, frozen=True):
    """Write down everything that a resumed run needs at policy version `version`.

    Groups before `groups_done` in draw order are trained or dropped: a resumed run draws from there.
    """

    version: int
    groups_done: int


class WakeAt(Message, frozen=True):
    """Let the policies look again at `time` seconds."""

    time: float


Command: TypeAlias = (
    Generate
    | Verify
    | Take
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
    | SaveCheckpoint
    | WakeAt
)


# Events -------------------------------------------------------------------------------------------

Finish: TypeAlias = Literal["stop", "length", "aborted"]


class RunStarted(Message, frozen=True):
    """The run begins at policy version `version`; groups before `groups_done` are behind it."""

    version: int
    groups_done: int


class ReplicaStarted(Message, frozen=True):
    """Replica `replica` serves with weights of `version`."""

    replica: int
    version: int


class ReplicaStopped(Message, frozen=True):
    """Replica `replica` has ended, as it was told to."""

    replica: int


class ReplicaLost(Message, frozen=True):
    """Replica `replica` is gone; each command that ran there ends in `Failed` after this."""

    replica: int
    reason: str


class TrainerStarted(Message, frozen=True):
    """The trainer is ready at policy version `version`."""

    version: int


class DrawnGroup(msgspec.Struct, frozen=True, gc=False):
    """One prompt and the ids of the rollouts to make from it."""

    group: int
    rollouts: tuple[int, ...]
    prompt_tokens: int
    expected_tokens: tuple[int, ...]
    """Output tokens expected of each rollout; only their order is relied on."""


class PromptsDrawn(Message, frozen=True):
    """The prompts that a `DrawPrompts` asked for, in draw order."""

    step: int
    oldest_version: int
    groups: tuple[DrawnGroup, ...]


class Generated(Message, frozen=True):
    """A `Generate` ended: finished, or aborted with what it has made so far."""

    rollout: int
    tokens: int
    """Output tokens that the rollout has now, those of earlier attempts included."""
    finish: Finish
    version: int
    """Policy version that this attempt started under."""
    run_time: float
    """Seconds from leaving the replica's queue to the end."""
    prefill_time: float
    """Seconds, at the start of `run_time`, until the rollout's prefix was computed, alone or with others, or sent."""


class Verified(Message, frozen=True):
    """The reward of a rollout is known."""

    rollout: int
    reward: float


class Scored(Message, frozen=True):
    """The forward passes of a `Score` are done."""

    rollouts: tuple[int, ...]


class Trained(Message, frozen=True):
    """The gradient of a `Train` is accumulated."""

    rollouts: tuple[int, ...]


class Stepped(Message, frozen=True):
    """The trainer has made policy version `version`."""

    version: int


class WeightsPushed(Message, frozen=True):
    """Weights of `version` can be loaded by every replica."""

    version: int
    num_bytes: int


class WeightsLoaded(Message, frozen=True):
    """Replica `replica` serves with weights of `version`; its last `load_time` seconds went into that."""

    replica: int
    version: int
    load_time: float


class CheckpointSaved(Message, frozen=True):
    """The checkpoint of `version` is complete on disk."""

    version: int


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
    | RunStarted
    | ReplicaLost
    | CheckpointSaved
    | Woke
    | Failed
    | Interrupted
)
