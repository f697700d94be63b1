"""Messages between the engine and a world: commands go out, events come back.

Every command ends in exactly one event. `Abort`, `Close`, `Truncate`, `Take`, `Skip`, `Postpone`, `Drop`, `Resize`,
`EndEvaluation` and `Stop` have no event of their own. An abort ends the running `Generate`, and a close the running `Act`; the others only change what the engine plans. A command contains all that a world
needs to carry it out. Trainer 0 is the primary trainer: replicas load its versions. Secondary trainers train on the same
rollouts. A rollout is an episode of one turn or more: `Generate` continues it, and `Act` lets its environment answer.

Rollout r of an evaluation is r in `Evaluate` and `Evaluated`. With an environment it is `HELD_OUT` + r in `Act`, `Close`,
`Truncate`, `Abort`, `Verify` and their events, because these also name rollouts of training.

    command         ends in             resource
    StartReplica    ReplicaStarted      replica
    StopReplica     ReplicaStopped      replica
    StartTrainer    TrainerStarted      trainer
    StopTrainer     TrainerStopped      trainer
    ResizeTrainer   TrainerResized      trainer
    Promote         TrainerLeaving      trainer
    DrawPrompts     PromptsDrawn        workload
    Generate        Generated           replica
    Act             Observed            environment
    Verify          Verified            verifier
    Score           Scored              trainer
    Train           Trained             trainer
    Step            Stepped             trainer
    PushWeights     WeightsPushed       link
    LoadWeights     WeightsLoaded       replica
    Lend            Lent                replica and trainer 0, whose GPUs change sides
    TakeBack        TakenBack           replica and trainer 0, whose GPUs change sides
    SaveCheckpoint  CheckpointSaved     trainer
    DrawEvaluation  EvaluationDrawn     workload
    Evaluate        Evaluated           replica, then verifier
    WakeAt          Woke                clock

Any may end in `Failed`. `RunStarted`, `ReplicaLeaving`, `ReplicaLost`, `MachineReplaced`, `TrainerLost`,
`TrainerJoined`, `TrainerLeaving`, `RanksRequested`, `ExpectationsChanged` and `Interrupted` come unasked.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from streamrl.runfile.recorded_numbers import GroupNumber

HELD_OUT = 1 << 40
"""Number of the first rollout of an evaluation beside those of training, which are fewer."""


class Message(msgspec.Struct, frozen=True, tag=True, gc=False):
    """A fact or an order; it is immutable."""


# Commands -----------------------------------------------------------------------------------------


class StartReplica(Message, frozen=True, omit_defaults=True):
    """Start replica `replica` with weights of `version`."""

    replica: int
    version: int
    kind: int = 0
    """Kind of the replica: 0 is `[rollout]` itself, others are in `rollout.others`."""


class StopReplica(Message, frozen=True):
    """Stop replica `replica`, which has no rollouts, and release its GPUs."""

    replica: int


class Resize(Message, frozen=True):
    """Set the target to `num_replicas` replicas."""

    num_replicas: int


class StartTrainer(Message, frozen=True, omit_defaults=True):
    """Start trainer `trainer` with weights of `version`: the initial ones, or those of a checkpoint."""

    trainer: int
    version: int
    data_parallel: int | None = None
    """Its data-parallel ranks; None if they are those of its section in the run file."""


class StopTrainer(Message, frozen=True):
    """Stop trainer `trainer`, which was detached and is idle."""

    trainer: int


class ResizeTrainer(Message, frozen=True):
    """Let trainer `trainer`, which is idle, continue with `data_parallel` data-parallel ranks.

    Added ranks get weights and optimizer state from the ranks that stay, without a checkpoint. Ranks may join within a
    step, but leave only between two steps, because each has a part of the gradient.
    """

    trainer: int
    data_parallel: int


class Promote(Message, frozen=True):
    """Replace trainer 0 by secondary trainer `trainer`, which ends.

    Trainer 0 restarts at `version`, from the newest weights of that trainer.
    """

    trainer: int
    version: int


class DrawPrompts(Message, frozen=True):
    """Draw the next `num_groups` prompts for `step`. Their rollouts start under `oldest_version` or newer."""

    step: int
    num_groups: int
    oldest_version: int


class Generate(Message, frozen=True, omit_defaults=True):
    """Generate `rollout` on `replica`, and continue after its first `prefix` output tokens.

    With an environment it generates the turn after the first `turn` turns, whose observations have
    `observed` tokens.
    """

    rollout: int
    replica: int
    priority: int
    """Smaller starts first; ties start in order of rollout id."""
    prefix: int = 0
    brings_cache: bool = False
    """Whether its KV cache is transferred from its last replica, so that nothing is computed again.
    """
    prefilled_on: int | None = None
    """Prefill replica from which the KV cache of its context is transferred; None if it has no cache there."""
    turn: int = 0
    """Turns that its environment has answered."""
    observed: int = 0
    """Tokens of its observations."""


class Abort(Message, frozen=True):
    """End the `Generate` of `rollout` on `replica` now. The rollout keeps the tokens generated so far."""

    rollout: int
    replica: int


class Act(Message, frozen=True, omit_defaults=True):
    """Let the environment of `rollout` answer turn `turn`. With `starts`, a new environment is started first.

    Turns count from 1; turn 0 only starts the environment. A new environment first repeats the
    actions of all earlier turns, and replaces an earlier environment of the rollout.
    """

    rollout: int
    turn: int
    starts: bool = False
    time_limit: float | None = None
    """Seconds after which the action times out; None if it has no limit. A start does not count."""


class Close(Message, frozen=True):
    """Close the environment of `rollout`. A running `Act` ends now."""

    rollout: int


class Truncate(Message, frozen=True):
    """End the episode of `rollout` with the tokens that it has, because its time is over."""

    rollout: int


class Verify(Message, frozen=True):
    """Compute the reward of a finished rollout."""

    rollout: int


class Take(Message, frozen=True):
    """Add `group` to step `step` of `trainer`."""

    group: int
    step: int
    trainer: int


class Skip(Message, frozen=True):
    """Exclude `group` from `trainer` for good, because of `reason`. Other trainers may still train on it."""

    group: int
    trainer: int
    reason: str


class Postpone(Message, frozen=True):
    """Restart the rollouts of `group` that are not running under `oldest_version` or newer. They keep their tokens."""

    group: int
    oldest_version: int


class Drop(Message, frozen=True):
    """Remove `group` from all trainers that have not trained on it, because of `reason`."""

    group: int
    reason: str


class Stop(Message, frozen=True):
    """Start nothing new and let the run end, because of `reason`."""

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
    """Send weights of `version` from `trainer` to a place from which replicas can load them."""

    version: int
    trainer: int


class LoadWeights(Message, frozen=True):
    """Replace the weights of `replica`. With `drain` its rollouts finish first; else they continue with their KV cache."""

    replica: int
    version: int
    drain: bool


class Lend(Message, frozen=True):
    """Let `replica` generate with weights of `version` on GPUs that trainer 0 has and does not use.

    They are GPUs of an idle trainer, or the replica's own, which trainer 0 had borrowed.
    """

    replica: int
    version: int


class TakeBack(Message, frozen=True):
    """Give the GPUs of `replica`, which has no rollouts or only aborted ones, to trainer 0."""

    replica: int


class SaveCheckpoint(Message, frozen=True, omit_defaults=True):
    """Save everything that a resumed run needs at policy version `version`.

    Groups before `groups_done` in draw order are trained or dropped. A resumed run draws from
    there, except groups in `done_ahead`, which were done earlier than their order.
    """

    version: int
    groups_done: GroupNumber
    trainer: int
    done_ahead: tuple[GroupNumber, ...] = ()


class DrawEvaluation(Message, frozen=True):
    """Draw the held-out prompts on which `version` is evaluated."""

    version: int


class Evaluate(Message, frozen=True, omit_defaults=True):
    """Generate `rollout` of the evaluation of `version` on `replica`, and compute its reward.

    With an environment it only generates the turn after the first `turn` turns, as `Generate` does. `Verify` computes
    the reward when the episode is over.
    """

    rollout: int
    """Number in this evaluation; with n rollouts of a prompt it is of prompt `rollout` // n."""
    replica: int
    version: int
    prefix: int = 0
    """Output tokens that it has."""
    turn: int = 0
    """Turns that its environment has answered."""
    observed: int = 0
    """Tokens of its observations."""


class EndEvaluation(Message, frozen=True, omit_defaults=True):
    """End the evaluation of `version`. With a `reason` it has no result, and rollouts that run end now."""

    version: int
    reason: str = ""


class WakeAt(Message, frozen=True):
    """Call the policies again at `time` seconds."""

    time: float


Command: TypeAlias = (
    Generate
    | Verify
    | Act
    | Close
    | Truncate
    | Take
    | Skip
    | Postpone
    | Score
    | Train
    | Step
    | DrawPrompts
    | PushWeights
    | LoadWeights
    | Lend
    | TakeBack
    | Abort
    | Drop
    | Stop
    | StartReplica
    | StopReplica
    | Resize
    | StartTrainer
    | StopTrainer
    | ResizeTrainer
    | Promote
    | SaveCheckpoint
    | DrawEvaluation
    | Evaluate
    | EndEvaluation
    | WakeAt
)


# Events -------------------------------------------------------------------------------------------

Finish: TypeAlias = Literal["stop", "length", "aborted", "prefilled"]
UNFINISHED: frozenset[Finish] = frozenset(("aborted", "prefilled"))
"""Ends of a `Generate` after which the rollout, or its turn, continues on a replica."""


class RunStarted(Message, frozen=True, omit_defaults=True):
    """The run begins at policy version `version`; groups before `groups_done` are done."""

    version: int
    groups_done: GroupNumber
    followers: tuple[SaveCheckpoint, ...] = ()
    """Checkpoints from which secondary trainers continue, in their order. Trainers without one
    begin at version 0.
    """
    away: tuple[int, ...] = ()
    """Secondary trainers that were detached before the run was resumed."""
    promoted: int | None = None
    """The secondary trainer that replaced trainer 0 before the run was resumed; None if none did.
    """
    is_evaluated: bool = False
    """Whether `version` was evaluated before the run was resumed."""


class ReplicaStarted(Message, frozen=True, omit_defaults=True):
    """Replica `replica` serves weights of `version`, with `checksum` unless they are the initial weights."""

    replica: int
    version: int
    checksum: str = ""
    cache_tokens: int | None = None
    """Tokens whose keys and values fit its cache. None if no policy asks, or its engine does not
    report it.
    """


class ReplicaStopped(Message, frozen=True):
    """Replica `replica` has stopped, as commanded."""

    replica: int


class ReplicaLeaving(Message, frozen=True):
    """The machine of replica `replica` will be taken away in `warning` seconds, as the provider of a spot machine says."""

    replica: int
    warning: float


class MachineReplaced(Message, frozen=True):
    """A machine is there in place of that of replica `replica`, which was taken away."""

    replica: int


class ReplicaLost(Message, frozen=True):
    """Replica `replica` is lost. Each command that ran there then ends in `Failed`."""

    replica: int
    reason: str


class TrainerStarted(Message, frozen=True):
    """Trainer `trainer` is ready at policy version `version`."""

    trainer: int
    version: int


class TrainerJoined(Message, frozen=True):
    """Trainer `trainer` joins the run. A new trainer sees groups drawn after this; a detached one is attached again."""

    trainer: int
    follower: dict[str, Any]
    """Its section of a run file, with quantities in base units."""


class TrainerLeaving(Message, frozen=True):
    """Secondary trainer `trainer` is to finish its work, save a checkpoint, and leave the run."""

    trainer: int


class TrainerStopped(Message, frozen=True):
    """Trainer `trainer` has stopped, as commanded."""

    trainer: int


class TrainerResized(Message, frozen=True):
    """Trainer `trainer` continues with `data_parallel` data-parallel ranks."""

    trainer: int
    data_parallel: int


class RanksRequested(Message, frozen=True):
    """The user wants trainer 0 to have `data_parallel` data-parallel ranks from its next step on."""

    data_parallel: int


class TrainerLost(Message, frozen=True):
    """Trainer `trainer` is lost, with everything since its last checkpoint. Its running command then ends in `Failed`."""

    trainer: int
    reason: str


class KeptTurns(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The turns of an episode from before the run was resumed."""

    answered: int
    """Turns that the environment has answered."""
    observed: int
    """Tokens of its observations."""
    is_turn_over: bool
    """Whether the policy has ended one more turn, which the environment has not answered."""


class DrawnGroup(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One prompt and the ids of its rollouts."""

    group: GroupNumber
    rollouts: tuple[int, ...]
    prompt_tokens: int
    expected_tokens: tuple[int, ...]
    """Expected output tokens of each rollout; policies use only their order."""
    prompt: int | None = None
    """Line of the prompts file, whose token ids are in a file beside the trace; None if there is no
    file.
    """
    kept: tuple[tuple[int, int], ...] = ()
    """For each rollout: output tokens from before the run was resumed, and the version of the first
    one. Empty if there are none.
    """
    turns: tuple[KeptTurns, ...] = ()
    """For each rollout: its turns from before the run was resumed. Empty if there are none."""
    family: str | None = None
    """Family of the prompt. None if no trainer uses families, or the prompt has none."""


class PromptsDrawn(Message, frozen=True):
    """The prompts of a `DrawPrompts`, in draw order."""

    step: int
    oldest_version: int
    groups: tuple[DrawnGroup, ...]


class ExpectationsChanged(Message, frozen=True, omit_defaults=True):
    """The expected lengths of `rollouts` change, because of a ranker or their siblings."""

    rollouts: tuple[int, ...]
    tokens: tuple[int, ...]  # expected output tokens of each
    recall: float | None = None
    """Share of the longest fifth that the ranker predicted in the last window of groups; None
    between windows.
    """
    reason: str = ""  # why the ranker is switched off or on, or was fitted anew


class Generated(Message, frozen=True, omit_defaults=True):
    """A `Generate` ended: the rollout, or its turn, is finished, or aborted with the tokens generated so far.

    With an environment, "stop" ends a turn, and "length" ends the episode. On a prefill replica it ends as "prefilled",
    without a new token: the replica keeps the KV cache of the context until a decode replica has it.
    """

    rollout: int
    tokens: int
    """Output tokens of the rollout, earlier attempts included."""
    finish: Finish
    version: int
    """Policy version under which this attempt started; meaningless if it generated no token."""
    run_time: float
    """Seconds from the end of its wait in the replica's queue to its own end."""
    prefill_time: float
    """Seconds at the start of `run_time` until the rollout's prefix was computed (alone or in a
    batch) or transferred.
    """
    cache_use: float | None = None
    """Share of the replica's KV cache in use at that moment, with or without this rollout. None if
    no policy asks, or the engine does not report it.
    """
    num_preempted: int = 0
    """Rollouts that the replica preempted for lack of cache since its last report."""
    cached_tokens: int = 0
    """Tokens of its context that the prefix cache had when it began. Only known with an environment."""
    recompute_time: float = 0.0
    """Seconds of `prefill_time` for tokens that had been in a KV cache before. Only known with an
    environment.
    """
    transfer_time: float = 0.0
    """Seconds at the start of `run_time` until its KV cache was there from a prefill replica. `prefill_time` comes after
    them."""


class Observed(Message, frozen=True, omit_defaults=True):
    """An `Act` ended: the environment has answered with an observation, or the episode is over."""

    rollout: int
    tokens: int
    """Tokens of the observation, or of what the environment shows before the first turn; 0 where the
    episode has them already.
    """
    is_over: bool = False
    has_timed_out: bool = False
    """Whether the action reached its time limit."""


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
    """Trainer `trainer` made its policy version `version`."""

    version: int
    trainer: int


class WeightsPushed(Message, frozen=True, omit_defaults=True):
    """Every replica can load weights of `version`."""

    version: int
    num_bytes: int
    checksum: str = ""
    """Checksum of the pushed weights; empty in a simulation."""
    encode_time: float = 0.0
    """Seconds of encoding the weights, for example as a delta. This and the next two fields are
    those of the slowest place.
    """
    wire_time: float = 0.0
    decode_time: float = 0.0


class WeightsLoaded(Message, frozen=True, omit_defaults=True):
    """Replica `replica` serves weights of `version` with `checksum`. It spent its last `load_time` seconds on loading."""

    replica: int
    version: int
    load_time: float
    checksum: str = ""


class Lent(Message, frozen=True, omit_defaults=True):
    """Replica `replica` generates with weights of `version` on GPUs that trainer 0 had."""

    replica: int
    version: int
    switch_time: float
    """Seconds in which these GPUs neither trained nor generated."""
    checksum: str = ""
    """Checksum of the weights; empty in a simulation, and for the initial weights."""


class TakenBack(Message, frozen=True):
    """Trainer 0 has the GPUs of `replica`."""

    replica: int
    switch_time: float
    """Seconds in which these GPUs neither trained nor generated."""


class CheckpointSaved(Message, frozen=True):
    """The checkpoint of `version` is complete on disk."""

    version: int
    trainer: int


class EvaluationDrawn(Message, frozen=True):
    """The held-out prompts of a `DrawEvaluation`, with `samples` rollouts of each."""

    version: int
    samples: Annotated[int, msgspec.Meta(ge=1, le=10**6)]
    prompt_tokens: tuple[int, ...]
    """Tokens of each prompt."""


class Evaluated(Message, frozen=True, omit_defaults=True):
    """An `Evaluate` ended: its rollout has a reward, or with an environment its turn has ended."""

    rollout: int
    version: int
    tokens: int
    """Output tokens."""
    reward: float
    run_time: float
    """Seconds from the end of its wait in the replica's queue to its last token."""
    prefill_time: float
    """Seconds at the start of `run_time` until its prompt was computed."""
    is_truncated: bool = False
    """Whether it ended because it had the maximum length."""
    is_turn: bool = False
    """Whether only a turn has ended. Then `reward` is 0."""


class Woke(Message, frozen=True):
    """The time of a `WakeAt` has come."""

    time: float


class Failed(Message, frozen=True):
    """`command` ended without a result."""

    command: Command
    reason: str


class Interrupted(Message, frozen=True):
    """The user, or the machine, asks the run to end now."""

    reason: str
    saves: bool = False
    """Whether each trainer is saved first. Its running command ends before that."""


Event: TypeAlias = (
    Generated
    | Observed
    | Verified
    | Scored
    | Trained
    | Stepped
    | PromptsDrawn
    | WeightsPushed
    | WeightsLoaded
    | Lent
    | TakenBack
    | ReplicaStarted
    | ReplicaStopped
    | ReplicaLeaving
    | MachineReplaced
    | TrainerStarted
    | TrainerStopped
    | TrainerResized
    | RanksRequested
    | TrainerJoined
    | TrainerLeaving
    | RunStarted
    | ReplicaLost
    | TrainerLost
    | ExpectationsChanged
    | CheckpointSaved
    | EvaluationDrawn
    | Evaluated
    | Woke
    | Failed
    | Interrupted
)
