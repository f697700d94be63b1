"""Questions to a trace: does every command end, is every rollout accounted for, how stale was it?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

from streamrl.engine.messages import (
    Act,
    CheckpointSaved,
    Command,
    DrawPrompts,
    Drop,
    Evaluate,
    Evaluated,
    Event,
    Failed,
    Generate,
    Generated,
    LoadWeights,
    Observed,
    PromptsDrawn,
    PushWeights,
    ReplicaStarted,
    ReplicaStopped,
    ResizeTrainer,
    SaveCheckpoint,
    Score,
    Scored,
    Skip,
    StartReplica,
    StartTrainer,
    Step,
    Stepped,
    StopReplica,
    Train,
    Trained,
    TrainerLost,
    TrainerResized,
    TrainerStarted,
    Verified,
    Verify,
    WakeAt,
    WeightsLoaded,
    WeightsPushed,
    Woke,
)
from streamrl.engine.trace import Trace, replay
from streamrl.engine.trainer_side import LEADER
from tests.runs import of


def check_every_command_ends_once(trace: Trace) -> None:
    """Raise `AssertionError` where an event ends no command, or a command never ends."""
    open_commands: Counter[Hashable] = Counter()
    for entry in trace.entries:
        ended = _ended_by(entry.event)
        if ended is not None:
            assert open_commands[ended] > 0, f"{entry.event} ends nothing"
            open_commands[ended] -= 1
        open_commands.update(key for key in map(_key, entry.commands) if key is not None)
    # a timer may be set when the run ends
    never = {key: num for key, num in (+open_commands).items() if key[:1] != ("wake",)}
    assert not never, f"never ended: {never}"


def check_every_rollout_is_accounted_for(trace: Trace) -> None:
    """Raise `AssertionError` unless the leader trains each drawn rollout once, or it is dropped once with a reason.

    Of steps that are made again after the trainer was lost, the rollouts were trained once too.
    """
    drawn: dict[int, tuple[int, ...]] = {}
    in_gradient: list[int] = []
    fates: Counter[int] = Counter()
    for entry in trace.entries:
        if isinstance(entry.event, PromptsDrawn):
            drawn.update({group.group: group.rollouts for group in entry.event.groups})
        elif isinstance(entry.event, TrainerLost) and entry.event.trainer == LEADER:
            in_gradient = []
        elif isinstance(entry.event, Trained) and entry.event.trainer == LEADER:
            in_gradient += [r for r in entry.event.rollouts if r not in fates]
        elif isinstance(entry.event, Stepped) and entry.event.trainer == LEADER:
            fates.update(in_gradient)
            in_gradient = []
        skips = [skip for skip in of(Skip, entry.commands) if skip.trainer == LEADER]
        for drop in [*of(Drop, entry.commands), *skips]:
            assert drop.reason
            fates.update(drawn[drop.group])
            in_gradient = [r for r in in_gradient if r not in drawn[drop.group]]
    assert not in_gradient
    assert fates == Counter(rollout for rollouts in drawn.values() for rollout in rollouts)


def staleness_of(trace: Trace) -> dict[int, int]:
    """Give, for each rollout handed to training, the version trained from minus the one it began under."""
    born: dict[int, int] = {}
    staleness: dict[int, int] = {}
    version = 0
    for entry in trace.entries:
        match entry.event:
            case Generated(rollout, tokens, _, began) if tokens:
                born.setdefault(rollout, began)
            case Stepped(version):
                pass
        for train in of(Train, entry.commands):
            staleness.update({rollout: version - born[rollout] for rollout in train.rollouts})
    return staleness


def _ended_by(event: Event) -> Hashable:
    match event:
        case Generated(rollout):
            return ("generate", rollout)
        case Verified(rollout):
            return ("verify", rollout)
        case Observed(rollout):
            return ("act", rollout)
        case Evaluated(rollout):
            return ("evaluate", rollout)
        case Scored(rollouts):
            return ("score", rollouts)
        case Trained(rollouts):
            return ("train", rollouts)
        case Stepped(version):
            return ("step", version)
        case PromptsDrawn(step, oldest_version, groups):
            return ("draw", step, oldest_version, len(groups))
        case WeightsPushed(version):
            return ("push", version)
        case WeightsLoaded(replica, version):
            return ("load", replica, version)
        case ReplicaStarted(replica):
            return ("start", replica)
        case ReplicaStopped(replica):
            return ("stop", replica)
        case TrainerStarted():
            return "start-trainer"
        case TrainerResized(trainer):
            return ("resize", trainer)
        case CheckpointSaved(version):
            return ("save", version)
        case Woke(time):
            return ("wake", time)
        case Failed(command):
            return _key(command)
    return None


def _key(command: Command) -> Hashable:
    match command:
        case Generate(rollout):
            return ("generate", rollout)
        case Verify(rollout):
            return ("verify", rollout)
        case Act(rollout):
            return ("act", rollout)
        case Evaluate(rollout):
            return ("evaluate", rollout)
        case Score(rollouts):
            return ("score", rollouts)
        case Train(rollouts):
            return ("train", rollouts)
        case Step(version):
            return ("step", version)
        case DrawPrompts(step, num_groups, oldest_version):
            return ("draw", step, oldest_version, num_groups)
        case PushWeights(version):
            return ("push", version)
        case LoadWeights(replica, version):
            return ("load", replica, version)
        case StartReplica(replica):
            return ("start", replica)
        case StopReplica(replica):
            return ("stop", replica)
        case StartTrainer():
            return "start-trainer"
        case ResizeTrainer(trainer):
            return ("resize", trainer)
        case SaveCheckpoint(version):
            return ("save", version)
        case WakeAt(time):
            return ("wake", time)
    return None


def check_whole(trace: Trace) -> None:
    """Check that no rollout and no command is lost or doubled, and that a replay gives the same commands."""
    check_every_rollout_is_accounted_for(trace)
    check_every_command_ends_once(trace)
    assert replay(trace) is None


def counted(trace: Trace) -> Counter[type]:
    """Return how often a trace has each type of event and command."""
    return Counter(type(each) for entry in trace.entries for each in (entry.event, *entry.commands))
