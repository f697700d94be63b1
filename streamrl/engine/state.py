"""Everything that the engine knows, changed in two places: `observe` an event, `commit` a command.

Policies read it and never scan history, because each question has an index here.

| index            | contents                                         | file or order                       |
|------------------|--------------------------------------------------|-------------------------------------|
| `trainers`       | each trainer with its batch and waiting groups   | `streamrl.engine.trainer_side`      |
| `fleet`          | replicas by version and by load                  | `streamrl.engine.fleet`             |
| `waiting`        | rollouts to dispatch                             | `streamrl.engine.entities`          |
| `prefilled`      | rollouts with a context on a prefill replica     | in order of arrival                 |
| `environments`   | episodes by what they need of their environment  | `streamrl.engine.environments`      |
| `evaluations`    | rollouts on held-out prompts                     | `streamrl.engine.evaluation`        |
| `unverified`     | finished rollouts without a reward               | in order of arrival                 |
| `outlived`       | groups of versions that the primary trainer lost | in draw order                       |
| `recent`         | lengths of the last finished rollouts            | by length                           |
| `failure_counts` | failures, and how many in a short time           | `streamrl.engine.failure_counts`    |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from streamrl.engine.entities import Group, Replica, Rollout, WaitingRollouts
from streamrl.engine.environments import Environments
from streamrl.engine.estimates import RecentLengths
from streamrl.engine.evaluation import Evaluations
from streamrl.engine.failure_counts import FailureCounts
from streamrl.engine.fleet import Fleet
from streamrl.engine.messages import (
    HELD_OUT,
    UNFINISHED,
    Abort,
    Act,
    CheckpointSaved,
    Close,
    Command,
    DrawEvaluation,
    DrawPrompts,
    Drop,
    EndEvaluation,
    Evaluate,
    Evaluated,
    EvaluationDrawn,
    Event,
    ExpectationsChanged,
    Failed,
    Finish,
    Generate,
    Generated,
    Interrupted,
    Lend,
    Lent,
    LoadWeights,
    MachineReplaced,
    Observed,
    Postpone,
    Promote,
    PromptsDrawn,
    PushWeights,
    RanksRequested,
    ReplicaLeaving,
    ReplicaLost,
    ReplicaStarted,
    ReplicaStopped,
    Resize,
    RunStarted,
    Scored,
    Skip,
    StartReplica,
    Stepped,
    Stop,
    StopReplica,
    Take,
    TakeBack,
    TakenBack,
    Trained,
    TrainerJoined,
    TrainerLeaving,
    TrainerLost,
    TrainerResized,
    TrainerStarted,
    TrainerStopped,
    Truncate,
    Verified,
    Verify,
    WakeAt,
    WeightsLoaded,
    WeightsPushed,
    Woke,
)
from streamrl.engine.trainer_side import MOST_AHEAD, TrainerCommand, TrainerSide, drawn_again


@dataclass(slots=True)
class State:
    """The state; its indexes are in the module docstring. `streamrl.engine.systems` builds the initial state."""

    num_steps: int
    trainers: list[TrainerSide]
    leader: TrainerSide
    fleet: Fleet
    recent: RecentLengths
    waiting: WaitingRollouts
    failure_counts: FailureCounts
    make_side: Callable[[Sequence[TrainerSide], TrainerJoined], TrainerSide]
    """Builds the state of a trainer that joins later."""
    environments: Environments | None = None
    """None if episodes have one turn."""
    evaluations: Evaluations | None = None
    """None if no version is evaluated."""

    sync_every: int = 1
    """Versions from one push to the next."""
    now: float = 0.0
    has_started: bool = False
    num_unready: int = 0
    """Trainers that are not up."""
    promoted: int | None = None
    """Secondary trainer that was promoted: trainer 0 takes over its state once it has ended."""
    has_new_weights: bool = False
    """Whether the primary trainer's version must be pushed again: its weights changed, or the pushed ones were lost."""
    loses_pushed: bool = False
    """Whether the pushed weights are in the primary trainer's memory, and are lost with it."""
    pushed_version: int = 0
    pushing: int | None = None
    stop_reason: str | None = None
    saves_at_stop: bool = False
    """Whether trainers are saved before the run stops."""
    is_stopping: bool = False
    """Whether the run starts nothing new: it is stopping, or has all its steps."""
    next_wake: float | None = None

    groups: dict[int, Group] = field(default_factory=dict)
    rollouts: dict[int, Rollout] = field(default_factory=dict)

    prefilled: dict[int, Rollout] = field(default_factory=dict)
    """Rollouts whose context is prefilled, by id, until they are sent to replicas that decode."""
    unverified: deque[Rollout] = field(default_factory=deque)
    outlived: dict[int, Group] = field(default_factory=dict)
    """Groups of versions that the primary trainer lost, until a policy drops them."""

    num_admitted: int = 0
    """Groups requested and not dropped, including those from before a resume."""
    num_drawing: int = 0
    next_group: int = 0
    """Id of the next group in draw order."""
    num_generating: int = 0
    num_verifying: int = 0
    num_drawn: int = 0
    failure: str | None = None
    """The error that no retry can fix."""

    @property
    def is_synced(self) -> bool:
        """Whether nothing must be pushed, and every serving replica has the pushed version."""
        is_settled = self.pushing is None and not self.must_push
        return is_settled and self.fleet.is_synced(self.pushed_version)

    @property
    def must_push(self) -> bool:
        """Whether the pushed version is older than the last one due, or was lost by the primary trainer."""
        newest, pushed = self.leader.version, self.pushed_version
        is_due = newest != pushed and not newest - newest % self.sync_every <= pushed <= newest
        return is_due or self.has_new_weights or self._must_push_to_evaluate

    @property
    def _must_push_to_evaluate(self) -> bool:
        """Whether the newest version is evaluated next, and no replica can load it yet."""
        own = self.evaluations
        return own is not None and own.due == self.leader.version != self.pushed_version

    @property
    def awaits_evaluation(self) -> bool:
        """Whether a version is still to be evaluated, even if the run has all its steps."""
        own = self.evaluations
        return own is not None and own.is_pending and self.stop_reason is None

    @property
    def is_generating(self) -> bool:
        """Whether a rollout is generated now, or will be once its environment has started or answered."""
        own = self.environments
        if own is None or self.num_generating:
            return self.num_generating > 0
        if own.num_acting or own.next_to_act() is not None:
            return True
        first = self.waiting.first()
        return first is not None and self.fleet.serves(first.group)

    @property
    def has_all_steps(self) -> bool:
        """Whether the last step is done."""
        return self.leader.version >= self.num_steps

    @property
    def has_all_prompts(self) -> bool:
        """Whether enough prompts are drawn for all steps; more are drawn only if some are dropped."""
        return self.num_admitted >= self.num_steps * self.leader.prompts_per_step

    @property
    def awaits_save(self) -> bool:
        """Whether the run stops once a trainer is saved. Until then its groups stay open, so that a resume draws them."""
        return self.saves_at_stop and any(trainer.is_unsaved for trainer in self.trainers)

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to do and no command is running."""
        return (
            self.is_stopping
            and not self.rollouts
            and self.pushing is None
            and not self.num_drawing
            and not self.is_evaluating
            and not self.awaits_evaluation
            and all(trainer.command is None for trainer in self.trainers)
            and self.fleet.is_settled
        )

    @property
    def is_evaluating(self) -> bool:
        """Whether an evaluation runs, or rollouts of one that was ended have not ended."""
        own = self.evaluations
        return own is not None and (own.running is not None or own.has_open_rollouts)

    def observe(self, event: Event, now: float) -> None:
        """Record an event that happened at `now` seconds.

        Raises:
            ValueError: the event answers no running command.
        """
        self.now = now
        # by exact type, because a class pattern that does not match takes 20 times as long
        if type(event) is Generated:
            self._end_generate(event)
        elif type(event) is Verified:
            self._end_verify(event)
        else:
            self._observe(event, now)

    def _observe(self, event: Event, now: float) -> None:
        match event:
            case Generated():
                self._end_generate(event)
            case Verified():
                self._end_verify(event)
            case Observed():
                self._end_act(event)
            case Scored() | Trained():
                self.trainers[event.trainer].end_work(event, now)
            case Stepped(version, trainer):
                self._end_step(self.trainers[trainer], version)
            case PromptsDrawn():
                self._add_groups(event)
            case ExpectationsChanged(rollouts, tokens):
                self._expect(rollouts, tokens)
            case WeightsPushed(version):
                self.pushing, self.pushed_version, self.has_new_weights = None, version, False
                self.failure_counts.num_failed_pushes = 0
                self.fleet.find_outdated(version)
            case WeightsLoaded(replica_id, version):
                self.fleet.serve(replica_id, version, self.pushed_version)
            case ReplicaStarted():
                self.fleet.come_up(event, self.pushed_version, self.num_generating)
                self._look_at_lent()
            case Lent(replica_id, version):
                self.fleet.serve(replica_id, version, self.pushed_version)
            case TakenBack(replica_id):
                self.fleet.end_lending(replica_id)
                self._look_at_lent()
            case TrainerStarted(trainer, version):
                self.trainers[trainer].come_up(version)
                self._look_at_trainers()
            case TrainerStopped(trainer):
                self.trainers[trainer].stop()
            case TrainerResized(trainer, data_parallel):
                self.trainers[trainer].end_resize(data_parallel)
            case RanksRequested(data_parallel):
                self.leader.request_ranks(data_parallel)
            case TrainerJoined():
                self._join(event)
            case TrainerLeaving(trainer):
                self.trainers[trainer].is_away = True
                self._look_at_trainers()
            case RunStarted():
                self._begin(event)
            case ReplicaLost(replica_id, _) | ReplicaStopped(replica_id):
                self.fleet.lose(replica_id)
                self._look_at_lent()
            case ReplicaLeaving(replica_id, warning):
                self.fleet.leave(replica_id, warning, now)
            case MachineReplaced(replica_id):
                self.fleet.replace_machine(replica_id)
            case TrainerLost(trainer, _):
                self._lose_trainer(self.trainers[trainer])
            case CheckpointSaved(version, trainer):
                self.trainers[trainer].save(version)
            case EvaluationDrawn():
                self._draw_evaluation(event)
            case Evaluated():
                self._end_evaluate(event)
            case Woke(time):
                if time == self.next_wake:  # an earlier timer may end later than it was useful
                    self.next_wake = None
            case Failed(command, reason):
                self._fail(command, reason)
            case Interrupted(reason, saves):
                self.saves_at_stop = saves
                self._stop(reason)
            case _:
                assert_never(event)

    def commit(self, command: Command) -> None:
        """Record a command of a policy, before the next command is computed."""
        # by exact type, as in `observe`
        if type(command) is Generate:
            self._begin_generate(command)
        elif type(command) is Verify:
            self._begin_verify(command)
        elif type(command) is Take:
            self.trainers[command.trainer].take(command, self.groups[command.group])
        else:
            self._commit(command)

    def _commit(self, command: Command) -> None:
        match command:
            case Generate():
                self._begin_generate(command)
            case Verify():
                self._begin_verify(command)
            case Act():
                self._own_environments.begin(self._episode(command.rollout), command)
            case Close(rollout_id):
                self._close(self._episode(rollout_id))
            case Truncate(rollout_id):
                self._truncate(self._episode(rollout_id))
            case Take():
                self.trainers[command.trainer].take(command, self.groups[command.group])
            case _ if isinstance(command, TrainerCommand):
                self.trainers[command.trainer].begin(command, self.now)
            case Promote(trainer, version):
                self._promote(self.trainers[trainer])
                self.has_new_weights = True
                self._lose_weights(version - 1)
            case DrawPrompts(_, num_groups):
                self.num_admitted += num_groups
                self.num_drawing += num_groups
            case PushWeights(version):
                self.pushing = version
            case LoadWeights(replica_id, version):
                self.fleet.load(replica_id, version)
            case Abort(rollout_id):
                self._episode(rollout_id).is_aborting = True
            case Skip(group_id, trainer, reason):
                self._skip(self.groups[group_id], self.trainers[trainer], reason)
            case Postpone(group_id, oldest_version):
                self.groups[group_id].oldest_version = oldest_version
            case Drop(group_id, reason):
                self._drop(self.groups[group_id], reason)
            case Stop(reason):
                self._stop(reason)
            case Lend(replica_id, version):
                self.fleet.lend(replica_id, version)
                self._look_at_lent()
            case TakeBack(replica_id):
                self.fleet.take_back(replica_id)
            case StartReplica() | StopReplica() | Resize():
                self.fleet.change(command)
                self._look_at_lent()
            case DrawEvaluation(version):
                self._own_evaluations.begin(version)
            case Evaluate():
                self._begin_evaluate(command)
            case EndEvaluation():
                self._finish_evaluation()
            case WakeAt(time):
                self.next_wake = time
            case _:
                assert_never(command)

    def _begin_generate(self, command: Generate) -> None:
        rollout = self.rollouts[command.rollout]
        self.num_generating += 1
        if self.prefilled:
            self.prefilled.pop(rollout.id, None)
        self.fleet.assign(rollout, command.replica, self.now)
        self.leader.pace.begin_generation(rollout.group.step, self.now, self.fleet)

    def _begin_verify(self, command: Verify) -> None:
        rollout = self.unverified.popleft()
        if rollout.id != command.rollout:
            raise ValueError(f"{command} must wait for rollout {rollout.id}")
        rollout.phase = "verifying"
        self.num_verifying += 1

    def _begin(self, event: RunStarted) -> None:
        self.has_started = True
        self.next_group, self.pushed_version = event.groups_done, event.version
        self.num_admitted = event.version * self.leader.prompts_per_step
        self.leader.begin_at(event.version)
        for saved in event.followers:
            self.trainers[saved.trainer].begin_at(saved.version, drawn_again(event, saved))
        for trainer in event.away:
            self.trainers[trainer].is_away = True
        if event.promoted is not None:
            self._promote(self.trainers[event.promoted])
        if self.evaluations is not None and not event.is_evaluated:
            self.evaluations.see_version(event.version)
        self._look_at_trainers()

    def _promote(self, trainer: TrainerSide) -> None:
        self.promoted = trainer.id
        self.leader.become(trainer)

    def _join(self, event: TrainerJoined) -> None:
        if event.trainer < len(self.trainers):
            self.trainers[event.trainer].come_back()
        else:
            side = self.make_side(self.trainers, event)
            side.join(self.num_drawn, self.next_group + self.num_drawing)
            self.trainers.append(side)
        self._look_at_trainers()

    def _end_generate(self, event: Generated) -> None:
        rollout = self.rollouts[event.rollout]
        self.num_generating -= 1
        if self.fleet.final is not None:
            self.fleet.see_pressure(rollout, event, self.num_generating)
        replica = rollout.replica
        own = self.environments
        if own is not None and own.is_sticky and event.finish != "prefilled":
            rollout.home = None if replica is None else replica.id
        self.fleet.release(rollout)
        group = rollout.group
        self.leader.pace.end_generation(group.step, self.now)
        rollout.tokens = event.tokens
        if rollout.born is None and event.tokens:
            rollout.born = event.version
        if group.is_dropped:
            self._forget(rollout)
        elif event.finish in UNFINISHED and not rollout.is_truncated:
            self._wait_again(rollout, event.finish, replica)
        elif self.environments is None:
            self._finish(rollout)
        else:
            self._end_turn(rollout, event.finish, self.environments)

    def _wait_again(self, rollout: Rollout, finish: Finish, replica: Replica | None) -> None:
        """Record that a rollout waits for another replica; one that decodes it if `replica` has prefilled its context."""
        if finish == "prefilled" and replica is not None:
            rollout.phase, rollout.prefilled_on = "prefilled", replica.id
            self.prefilled[rollout.id] = rollout
        else:
            self.waiting.add(rollout)

    def _finish(self, rollout: Rollout) -> None:
        """Record that a rollout is generated, so that its reward can be computed."""
        self.recent.add(rollout.tokens)
        self._await_reward(rollout)

    def _await_reward(self, rollout: Rollout) -> None:
        rollout.phase = "finished"
        self.unverified.append(rollout)

    def _episode(self, number: int) -> Rollout:
        """Return an open rollout, of training or of an evaluation."""
        found = self.rollouts.get(number)
        return self._own_evaluations.episodes[number] if found is None else found

    def _end_turn(self, rollout: Rollout, finish: Finish, environments: Environments) -> None:
        """Let the environment answer a turn, unless it ends the episode."""
        is_last = finish != "stop" or environments.is_last_turn(rollout)
        if rollout.is_truncated or is_last or rollout.context >= environments.config.max_context:
            self._end_episode(rollout, environments)
        else:
            environments.end_turn(rollout)

    def _end_act(self, event: Observed) -> None:
        """Record an observation; the policy's next turn follows unless the episode is over."""
        environments, rollout = self._own_environments, self._episode(event.rollout)
        environments.end_act(rollout)
        if rollout.group.is_dropped:
            self._leave_dropped(rollout)
        elif environments.answer(rollout, event, self.now):
            self._end_episode(rollout, environments)
        elif rollout.is_held_out:
            self._own_evaluations.await_turn(rollout)
        else:
            self.waiting.add(rollout)

    def _end_episode(self, rollout: Rollout, environments: Environments) -> None:
        """Record the end of an episode. Without a token there is nothing to train on, so it failed."""
        if not rollout.tokens:
            self.failure_counts.enter("the time of an episode was over before its first token")
            self._lose_environment(rollout, environments)
            return
        environments.end(rollout)
        if not environments.config.scores_in_sandbox:
            environments.to_close.append(rollout)
        if rollout.is_held_out:
            self._await_reward(rollout)
        else:
            self._finish(rollout)

    def _truncate(self, rollout: Rollout) -> None:
        """Record that the time of an episode is over. What runs for it ends by its own event."""
        rollout.is_truncated = True
        if rollout.phase in ("waiting", "prefilled", "queued"):
            self.prefilled.pop(rollout.id, None)
            if rollout.is_held_out and rollout.phase == "waiting":
                self._own_evaluations.to_send.remove(rollout.id - HELD_OUT)
            self._end_episode(rollout, self._own_environments)

    def _close(self, rollout: Rollout) -> None:
        self._own_environments.close(rollout)
        if rollout.is_held_out and rollout.phase == "ready":
            self._own_evaluations.settle(rollout)

    def _lose_environment(self, rollout: Rollout, environments: Environments) -> None:
        """Record a failure of an episode outside the policy; it starts over, or continues elsewhere."""
        if not rollout.is_held_out:
            self.failure_counts.fail(rollout, self.now)
        elif self._own_evaluations.has_failed_too_often(rollout.id - HELD_OUT):
            self._own_evaluations.leave_out(rollout, environments)
            return
        environments.lose(rollout)

    @property
    def _own_environments(self) -> Environments:
        assert self.environments is not None, "only a run with an environment acts"
        return self.environments

    @property
    def _own_evaluations(self) -> Evaluations:
        assert self.evaluations is not None, "only a run with [evaluation] evaluates"
        return self.evaluations

    def _end_verify(self, event: Verified) -> None:
        """Pass a rollout with a reward to the trainers, alone or with its group."""
        self.num_verifying -= 1
        if event.rollout >= HELD_OUT:
            self._own_evaluations.end_episode(event.rollout, self._own_environments)
            return
        rollout = self.rollouts[event.rollout]
        if rollout.has_environment:
            self._own_environments.to_close.append(rollout)
        rollout.reward = event.reward
        group = rollout.group
        if group.is_dropped:
            self._forget(rollout)
            return
        rollout.phase = "ready"
        group.num_missing -= 1
        if self.failure_counts.failed or self.failure_counts.num_dropped:
            self.failure_counts.recover(rollout)
        for trainer in self.trainers:
            trainer.see_ready(rollout, self.leader.version)

    def _expect(self, rollouts: tuple[int, ...], tokens: tuple[int, ...]) -> None:
        """Set expected lengths; rollouts that are already gone are ignored."""
        for rollout_id, expected in zip(rollouts, tokens, strict=True):
            if rollout_id in self.rollouts:
                self.waiting.expect(self.rollouts[rollout_id], expected)

    def _end_step(self, trainer: TrainerSide, version: int) -> None:
        is_alone = len(self.trainers) == 1  # then nobody else wants the groups
        for group in trainer.end_step(version, self.now):
            if is_alone:
                self._forget_group(group)
            else:
                self._let_go(group)
        if trainer.leads:
            self.failure_counts.end_step(self.now)
            if self.evaluations is not None:
                self.evaluations.see_version(version)
        self.is_stopping = self.is_stopping or self.has_all_steps

    def _add_groups(self, event: PromptsDrawn) -> None:
        num_groups, new = len(event.groups), [drawn.group for drawn in event.groups]
        if not self.groups.keys().isdisjoint(new) or num_groups > self.num_drawing:
            raise ValueError(f"{num_groups} groups drawn for step {event.step}, not asked for")
        self.num_drawing -= num_groups
        groups = [Group.draw(drawn, event.step, event.oldest_version) for drawn in event.groups]
        drawn_groups = {group.id: group for group in groups}
        rollouts = {rollout.id: rollout for group in groups for rollout in group.rollouts}
        if groups:
            if groups[-1].id - self.next_group > MOST_AHEAD:
                raise ValueError(f"group {groups[-1].id} drawn, but {self.next_group} is next")
            self.next_group = groups[-1].id + 1
        self.groups.update(drawn_groups)
        self.num_drawn += len(rollouts)
        self.rollouts.update(rollouts)
        if self.environments is None:
            self.waiting.add_new(rollouts.values())
        else:
            for rollout in rollouts.values():
                self.environments.add(rollout)
        for trainer in self.trainers:
            trainer.see_drawn(groups)
        if event.oldest_version > self.leader.version:
            self.outlived.update(drawn_groups)

    def _skip(self, group: Group, trainer: TrainerSide, reason: str) -> None:
        if not self._leave_out(group, trainer, reason):
            raise ValueError(f"trainer {trainer.id} was not to train on group {group.id}")
        self._let_go(group)

    def _leave_out(self, group: Group, trainer: TrainerSide, reason: str) -> bool:
        is_left = trainer.leave_out(group, reason)
        if is_left and trainer.leads:
            self.num_admitted -= 1
            self.outlived.pop(group.id, None)
        return is_left

    def _let_go(self, group: Group) -> None:
        """Forget a group that a trainer is done with, unless another one may still train on it."""
        for trainer in self.trainers:
            if trainer.wants(group):
                return
        self._forget_group(group)

    def _forget_group(self, group: Group) -> None:
        del self.groups[group.id]
        for rollout in group.rollouts:
            del self.rollouts[rollout.id]
        # each rollout refers to its group: without this cycle both are freed at once
        group.rollouts.clear()

    def _drop(self, group: Group, reason: str) -> None:
        group.is_dropped = True
        self.failure_counts.drop(group)
        for trainer in self.trainers:
            self._leave_out(group, trainer, reason)
        del self.groups[group.id]
        for rollout in group.rollouts:
            if self.environments is not None:
                self.environments.end(rollout)
            if rollout.phase not in ("generating", "verifying", "acting"):
                self._forget(rollout)

    def _forget(self, rollout: Rollout) -> None:
        if rollout.phase == "finished":
            self.unverified.remove(rollout)
        self.failure_counts.failed.pop(rollout.id, None)
        self.prefilled.pop(rollout.id, None)
        del self.rollouts[rollout.id]

    # Evaluations ----------------------------------------------------------------------------------

    def _draw_evaluation(self, event: EvaluationDrawn) -> None:
        own = self._own_evaluations
        own.draw(event)
        if self.environments is not None:
            for episode in own.begin_episodes(event):
                self.environments.add(episode)

    def _begin_evaluate(self, command: Evaluate) -> None:
        self._own_evaluations.send(command)
        if self.environments is not None:
            self._own_evaluations.send_turn(command, self.fleet.replicas[command.replica])

    def _end_evaluate(self, event: Evaluated) -> None:
        own = self._own_evaluations
        if not event.is_turn:
            own.end(event.rollout)
            return
        episode = own.return_turn(event.rollout)
        episode.tokens, episode.born = event.tokens, event.version
        if episode.group.is_dropped:
            own.settle(episode)
        else:
            finish: Finish = "length" if event.is_truncated else "stop"
            self._end_turn(episode, finish, self._own_environments)

    def _fail_evaluate(self, command: Evaluate) -> None:
        """Let a failed rollout, or turn, of an evaluation be repeated, unless it failed too often."""
        own, is_lost = self._own_evaluations, command.replica not in self.fleet.replicas
        if self.environments is None:
            own.fail(command.rollout, is_lost=is_lost)
            return
        episode = own.return_turn(command.rollout)
        if episode.group.is_dropped:
            own.settle(episode)
        elif episode.is_truncated:
            self._end_episode(episode, self.environments)
        elif not is_lost and own.has_failed_too_often(command.rollout):
            own.leave_out(episode, self.environments)
        else:
            own.await_turn(episode)

    def _finish_evaluation(self) -> None:
        """Record the end of an evaluation. What runs for its episodes ends by its own events."""
        for episode in self._own_evaluations.finish(self.environments):
            self.unverified.remove(episode)

    def _leave_dropped(self, rollout: Rollout) -> None:
        """Forget a rollout that was dropped, once what ran for it has ended."""
        if rollout.is_held_out:
            self._own_evaluations.settle(rollout)
        else:
            self._forget(rollout)

    # The end of the run, and failures -------------------------------------------------------------

    def _stop(self, reason: str) -> None:
        self.stop_reason = self.stop_reason or reason
        self.is_stopping = True

    def _lose_trainer(self, trainer: TrainerSide) -> None:
        """Record that a trainer is lost. If it is the primary one, the groups of its lost versions become outlived."""
        num_steps = trainer.fall_back()
        self._look_at_trainers()
        if not trainer.leads:
            return
        self.pushing = None
        if self.loses_pushed and self.pushed_version and not self.is_stopping:
            self.has_new_weights = True
            self.fleet.excuse_loads()
        self.num_admitted -= num_steps * trainer.prompts_per_step
        if num_steps:
            self.outlived = {n: g for n, g in self.groups.items() if trainer.wants(g)}
            self._lose_weights(trainer.version)

    def _lose_weights(self, version: int) -> None:
        """Record that weights of versions after `version` are lost."""
        self.fleet.fall_back(version)
        if self.evaluations is not None:
            self.evaluations.fall_back(version)

    def _look_at_lent(self) -> None:
        """Update whether replicas have GPUs of the primary trainer."""
        self.leader.is_lent = bool(self.fleet.lent)

    def _look_at_trainers(self) -> None:
        """Update which trainers are up, and whether all steps are made; a lost trainer takes back even the last one."""
        self.is_stopping = self.stop_reason is not None or self.has_all_steps
        self.num_unready = sum(not (side.is_ready or side.is_away) for side in self.trainers)

    def _fail(self, command: Command, reason: str) -> None:
        what = f"{type(command).__name__}: {reason}"
        self.failure_counts.enter(what)
        match command:
            case Generate(rollout_id, replica_id):
                rollout = self.rollouts[rollout_id]
                self.fleet.release(rollout)
                self.num_generating -= 1
                if replica_id in self.fleet.away and not rollout.group.is_dropped:
                    self.waiting.add(rollout)  # its machine was taken away, which is no failure
                else:
                    self._retry(rollout, is_lost=replica_id not in self.fleet.replicas)
            case Verify(rollout_id):
                self.num_verifying -= 1
                self._retry(self._episode(rollout_id))
            case Act(rollout_id):
                self._fail_act(self._episode(rollout_id))
            case Evaluate():
                self._fail_evaluate(command)
            case StartReplica(replica_id) | StopReplica(replica_id):
                self.fleet.lose(replica_id)
                self._look_at_lent()
            case LoadWeights(replica_id) | Lend(replica_id) | TakeBack(replica_id) if (
                replica_id not in self.fleet.replicas
            ):
                pass  # its replica is lost, so there is nothing to load into
            case PushWeights():  # its own failure, unless its trainer is lost
                self.failure_counts.num_failed_pushes += self.pushing is not None
                self.pushing = None
            case _ if isinstance(command, TrainerCommand):
                self._fail_trainer(self.trainers[command.trainer], what)
            case _:
                self.failure = what
                self._break_off(command)

    def _fail_trainer(self, trainer: TrainerSide, what: str) -> None:
        """Record that a trainer's work failed, unless it is lost. The run continues without a failed secondary trainer."""
        trainer.end_failed(what)
        self._look_at_trainers()
        if trainer.leads:
            self.failure = self.failure or trainer.failure

    def _break_off(self, command: Command) -> None:
        """Record the end of a command whose failure no retry can fix."""
        match command:
            case LoadWeights(replica_id) | Lend(replica_id) | TakeBack(replica_id):
                self.fleet.replicas[replica_id].loading = None
            case DrawPrompts(_, num_groups):
                self.num_admitted -= num_groups
                self.num_drawing -= num_groups
            case DrawEvaluation():
                self._finish_evaluation()

    def _fail_act(self, rollout: Rollout) -> None:
        """Record that an environment was lost, or did not start."""
        environments = self._own_environments
        environments.end_act(rollout)
        if rollout.group.is_dropped:
            environments.close(rollout)
            self._leave_dropped(rollout)
        else:
            self._lose_environment(rollout, environments)

    def _retry(self, rollout: Rollout, is_lost: bool = False) -> None:
        """Let failed work be retried; a policy decides how often."""
        if rollout.group.is_dropped:
            self._leave_dropped(rollout)
            return
        if not rollout.is_held_out:
            self.failure_counts.fail(rollout, None if is_lost else self.now)
        elif self._own_evaluations.has_failed_too_often(rollout.id - HELD_OUT):
            self._own_evaluations.leave_out(rollout, self._own_environments)
            return
        if rollout.phase == "verifying":
            rollout.phase = "finished"
            self.unverified.append(rollout)
        else:
            self.waiting.add(rollout)
