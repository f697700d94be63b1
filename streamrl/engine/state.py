"""Everything the engine knows, changed in two places: `observe` an event, `commit` a command.

Policies read it and never scan history, so each question they ask has an index here:

    waiting      rollouts to dispatch                              see `streamrl.engine.lines`
    unverified   finished rollouts without a reward                in order of arrival
    untaken      groups not yet taken for a step                   in draw order
    complete     untaken groups whose rollouts are all ready       in order of arrival
    batch        taken groups and what the trainer can work on     see `streamrl.engine.batch`
    failed       rollouts that failed and are not ready yet        by id
    fleet        replicas by version and by load                   see `streamrl.engine.fleet`
    recent       lengths of the rollouts that finished last        by length
    pace         seconds of the last steps, by side                see `streamrl.engine.pace`
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import assert_never

from streamrl.engine.batch import Batch
from streamrl.engine.entities import Group, Phase, Rollout
from streamrl.engine.fleet import Fleet
from streamrl.engine.lines import WaitingGroups, WaitingRollouts
from streamrl.engine.messages import (
    Abort,
    CheckpointSaved,
    Command,
    DrawPrompts,
    Drop,
    Event,
    Failed,
    Generate,
    Generated,
    Interrupted,
    LoadWeights,
    PromptsDrawn,
    PushWeights,
    ReplicaLost,
    ReplicaStarted,
    ReplicaStopped,
    Resize,
    RunStarted,
    SaveCheckpoint,
    Score,
    Scored,
    StartReplica,
    StartTrainer,
    Step,
    Stepped,
    Stop,
    StopReplica,
    Take,
    Train,
    Trained,
    TrainerStarted,
    Verified,
    Verify,
    WakeAt,
    WeightsLoaded,
    WeightsPushed,
    Woke,
)
from streamrl.engine.pace import Pace
from streamrl.engine.recent import RecentLengths
from streamrl.runfile.config import Run


@dataclass(slots=True)
class State:
    """See the module's table; `start` makes the state before the first event."""

    num_steps: int
    prompts_per_step: int
    group_size: int
    batch: Batch
    recent: RecentLengths

    now: float = 0.0
    has_started: bool = False
    version: int = 0
    pushed_version: int = 0
    pushing: int | None = None
    checkpoint_version: int = 0
    trainer_is_ready: bool = False
    trainer_command: Command | None = None
    stop_reason: str | None = None
    is_stopping: bool = False
    """Whether the run should start nothing new: it has a reason to stop, or all its steps."""
    next_wake: float | None = None

    fleet: Fleet = field(default_factory=Fleet)
    pace: Pace = field(default_factory=Pace)
    groups: dict[int, Group] = field(default_factory=dict)
    rollouts: dict[int, Rollout] = field(default_factory=dict)

    waiting: WaitingRollouts = field(default_factory=WaitingRollouts)
    unverified: deque[Rollout] = field(default_factory=deque)
    untaken: WaitingGroups = field(default_factory=WaitingGroups)
    complete: WaitingGroups = field(default_factory=WaitingGroups)
    failed: dict[int, Rollout] = field(default_factory=dict)

    num_admitted: int = 0
    """Groups asked for and not dropped, those behind a resumed run included."""
    num_drawing: int = 0
    next_group: int = 0
    """Id of the next group in draw order."""
    num_generating: int = 0
    num_verifying: int = 0
    num_drawn: int = 0
    num_trained: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    """Rollouts dropped, by reason."""
    failure: str | None = None
    """What broke beyond what a retry can mend."""

    @classmethod
    def start(cls, run: Run) -> State:
        """Make the state that a run begins with, before its `RunStarted`."""
        return cls(
            num_steps=run.algorithm.steps,
            prompts_per_step=run.algorithm.prompts_per_step,
            group_size=run.algorithm.group_size,
            batch=Batch(run.algorithm.trains_whole_groups, run.algorithm.needs_score),
            recent=RecentLengths(enough=run.algorithm.rollouts_per_step),
            fleet=Fleet(num_wanted=run.rollout.replicas),
            waiting=WaitingRollouts(run.policies.learns_from_siblings),
        )

    # Questions ------------------------------------------------------------------------------------

    @property
    def rollouts_per_step(self) -> int:
        """Rollouts that one optimizer step is made of."""
        return self.prompts_per_step * self.group_size

    @property
    def trainer_is_free(self) -> bool:
        """Whether the trainer could begin something now."""
        return self.trainer_is_ready and self.trainer_command is None

    @property
    def is_synced(self) -> bool:
        """Whether every serving replica has the newest policy version."""
        return self.pushing is None and self.fleet.is_synced(self.version)

    @property
    def has_all_steps(self) -> bool:
        """Whether the last step is done."""
        return self.version >= self.num_steps

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to do and nothing is under way."""
        return (
            self.is_stopping
            and not self.rollouts
            and self.trainer_command is None
            and self.pushing is None
            and not self.num_drawing
            and self.fleet.is_settled
        )

    # Changes --------------------------------------------------------------------------------------

    def observe(self, event: Event, now: float) -> None:
        """Enter what happened at `now` seconds.

        Raises:
            ValueError: the event answers no command that is under way.
        """
        self.now = now
        match event:
            case Generated():
                self._end_generate(event)
            case Verified():
                self._end_verify(event)
            case Scored(rollouts) | Trained(rollouts):
                self.trainer_command = None
                self.pace.end_work(now)
                self.batch.end(event, self._still_wanted(rollouts))
            case Stepped(version):
                self._end_step(version)
            case PromptsDrawn():
                self._add_groups(event)
            case WeightsPushed(version):
                self.pushing = None
                self.pushed_version = version
                self.fleet.find_outdated(version)
            case WeightsLoaded(replica_id, version) | ReplicaStarted(replica_id, version):
                self.fleet.serve(replica_id, version, self.pushed_version)
            case TrainerStarted(version):
                self.trainer_command = None
                self.trainer_is_ready = True
                self.version = version
                self.is_stopping = self.is_stopping or self.has_all_steps
            case RunStarted(version, groups_done):
                self.has_started = True
                self.next_group = groups_done
                self.version = self.pushed_version = self.checkpoint_version = version
                self.num_admitted = version * self.prompts_per_step
            case ReplicaLost(replica_id, _) | ReplicaStopped(replica_id):
                self.fleet.lose(replica_id)
            case CheckpointSaved(version):
                self.trainer_command = None
                self.checkpoint_version = version
            case Woke(_):
                self.next_wake = None
            case Failed(command, reason):
                self._fail(command, reason)
            case Interrupted(reason):
                self._stop(reason)
            case _:
                assert_never(event)

    def commit(self, command: Command) -> None:
        """Enter what a policy has decided, before the next command is asked for."""
        match command:
            case Generate(rollout_id, replica_id):
                rollout = self.rollouts[rollout_id]
                self.num_generating += 1
                self.fleet.assign(rollout, replica_id, self.now)
                self.pace.begin_generation(rollout.group.step, self.now, self.fleet)
            case Verify(rollout_id):
                rollout = self.unverified.popleft()
                if rollout.id != rollout_id:
                    raise ValueError(f"rollout {rollout.id} must be verified before {rollout_id}")
                rollout.phase = Phase.VERIFYING
                self.num_verifying += 1
            case Take(group_id, step):
                self.batch.take(self.groups[group_id], step)
            case Score() | Train() | Step() | StartTrainer() | SaveCheckpoint():
                self.trainer_command = command
                self.pace.begin_work(self.now)
                self.batch.begin(command)
            case DrawPrompts(_, num_groups):
                self.num_admitted += num_groups
                self.num_drawing += num_groups
            case PushWeights(version):
                self.pushing = version
            case LoadWeights(replica_id, version):
                self.fleet.load(replica_id, version)
            case Abort(rollout_id):
                self.rollouts[rollout_id].is_aborting = True
            case Drop(group_id, reason):
                self._drop(self.groups[group_id], reason)
            case Stop(reason):
                self._stop(reason)
            case StartReplica() | StopReplica() | Resize():
                self.fleet.change(command)
            case WakeAt(time):
                self.next_wake = time
            case _:
                assert_never(command)

    def _end_generate(self, event: Generated) -> None:
        rollout = self.rollouts[event.rollout]
        self._release(rollout)
        self.pace.end_generation(rollout.group.step, self.now)
        rollout.tokens = event.tokens
        if rollout.born is None and event.tokens:
            rollout.born = event.version
        if rollout.group.is_dropped:
            self._forget(rollout)
        elif event.finish == "aborted":
            self.waiting.add(rollout)
        else:
            rollout.phase = Phase.FINISHED
            self.recent.add(event.tokens)
            self.waiting.learn_from(rollout)
            self.unverified.append(rollout)

    def _end_verify(self, event: Verified) -> None:
        """Let a rollout with a reward go on to training, alone or with its group."""
        rollout = self.rollouts[event.rollout]
        self.num_verifying -= 1
        rollout.reward = event.reward
        group = rollout.group
        if group.is_dropped:
            self._forget(rollout)
            return
        rollout.phase = Phase.READY
        if self.failed:
            self.failed.pop(rollout.id, None)
        group.num_missing -= 1
        if not group.num_missing and group.taken_for is None:
            self.complete.add(group)
        if group.taken_for is not None:
            self.batch.add_ready(rollout)

    def _still_wanted(self, rollouts: tuple[int, ...]) -> list[Rollout]:
        """Return back what the trainer had in hand, less what was dropped meanwhile."""
        held = [self.rollouts[rollout] for rollout in rollouts]
        for rollout in held:
            if rollout.group.is_dropped:
                self._forget(rollout)
        return [rollout for rollout in held if not rollout.group.is_dropped]

    def _end_step(self, version: int) -> None:
        if version != self.version + 1:
            raise ValueError(f"step made version {version}, expected {self.version + 1}")
        self.trainer_command = None
        self.pace.end_step(version, self.now)
        self.version = version
        self.is_stopping = self.is_stopping or self.has_all_steps
        self.num_trained += self.batch.num_in_gradient
        for group in self.batch.clear():
            del self.groups[group.id]
            for rollout in group.rollouts:
                del self.rollouts[rollout.id]

    def _add_groups(self, event: PromptsDrawn) -> None:
        self.num_drawing -= len(event.groups)
        for drawn in event.groups:
            group = Group.draw(drawn, event.step, event.oldest_version)
            self.next_group = group.id + 1
            self.groups[group.id] = group
            self.untaken.add(group)
            self.num_drawn += len(group.rollouts)
            for rollout in group.rollouts:
                self.rollouts[rollout.id] = rollout
                self.waiting.add(rollout)

    def _drop(self, group: Group, reason: str) -> None:
        group.is_dropped = True
        self.num_admitted -= 1
        self.dropped[reason] = self.dropped.get(reason, 0) + len(group.rollouts)
        self.batch.drop(group)
        del self.groups[group.id]
        for rollout in group.rollouts:
            if rollout.phase not in (Phase.GENERATING, Phase.VERIFYING, Phase.TRAINING):
                self._forget(rollout)

    def _forget(self, rollout: Rollout) -> None:
        if rollout.phase is Phase.FINISHED:
            self.unverified.remove(rollout)
        self.failed.pop(rollout.id, None)
        del self.rollouts[rollout.id]

    def _stop(self, reason: str) -> None:
        self.stop_reason = self.stop_reason or reason
        self.is_stopping = True

    def _release(self, rollout: Rollout) -> None:
        self.fleet.release(rollout)
        self.num_generating -= 1

    def _fail(self, command: Command, reason: str) -> None:
        match command:
            case Generate(rollout_id):
                rollout = self.rollouts[rollout_id]
                self._release(rollout)
                self._retry(rollout)
            case Verify(rollout_id):
                self.num_verifying -= 1
                self._retry(self.rollouts[rollout_id])
            case StartReplica(replica_id) | StopReplica(replica_id):
                self.fleet.lose(replica_id)
            case LoadWeights(replica_id) if replica_id not in self.fleet.replicas:
                pass  # lost: nothing is left to load into
            case _:
                self._break(command, reason)

    def _break(self, command: Command, reason: str) -> None:
        """Enter a failure that no retry mends."""
        self.failure = f"{type(command).__name__}: {reason}"
        match command:
            case LoadWeights(replica_id):
                self.fleet.replicas[replica_id].loading = None
            case DrawPrompts(_, num_groups):
                self.num_admitted -= num_groups
                self.num_drawing -= num_groups
            case PushWeights():
                self.pushing = None
            case Score(rollouts) | Train(rollouts):
                self.trainer_command = None
                self._still_wanted(rollouts)
            case _:
                self.trainer_command = None

    def _retry(self, rollout: Rollout) -> None:
        """Let what failed be tried again; a policy says how often."""
        if rollout.group.is_dropped:
            self._forget(rollout)
            return
        rollout.failures += 1
        self.failed[rollout.id] = rollout
        if rollout.phase is Phase.VERIFYING:
            rollout.phase = Phase.FINISHED
            self.unverified.append(rollout)
        else:
            self.waiting.add(rollout)
