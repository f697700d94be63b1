"""One trainer as the engine sees it: its version, its batch, its queue of groups, and the share of the stream that it takes.

What part of the stream a trainer that follows takes: what is left out is lost to it, with the reason.

A group is judged once it is complete, by what is known then: how far behind its oldest token is, its mean reward, the
family of its prompt, and last how many came before it that all else lets pass.

One trainer as the engine sees it: what it has made, what it does, and what of the stream lies ahead of it.

Groups are a stream that every trainer reads with a cursor of its own: `line` is what lies ahead of it. The trainer
that leads sees a group from its draw on, or from when it is complete, as its consumption wants; one that follows
sees it once it is complete. Each takes what its next step is made of, in its own time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from streamrl.engine.entities import Group, GroupLine, Rollout
from streamrl.engine.estimates import StepTimer
from streamrl.engine.messages import (
    Command,
    RunStarted,
    SaveCheckpoint,
    Score,
    Scored,
    StartTrainer,
    Step,
    StopTrainer,
    Take,
    Train,
    Trained,
)
from streamrl.engine.presets import choose_system
from streamrl.runfile.config import Run
from streamrl.runfile.errors import Bounds, RunError
from streamrl.runfile.keys import join_key, trainer_key
from streamrl.runfile.policies_config import PoliciesConfig
from streamrl.runfile.roles_config import SecondaryTrainerConfig


@dataclass(slots=True)
class Batch:
    """Taken groups, and their rollouts in the order in which they became fit for the trainer."""

    trains_whole_groups: bool
    needs_score: bool
    groups: dict[int, Group] = field(default_factory=dict)
    unscored: deque[Rollout] = field(default_factory=deque)
    """Rollouts to run forward passes of."""
    trainable: deque[Rollout] = field(default_factory=deque)
    """Rollouts to train on."""
    in_hand: list[Rollout] = field(default_factory=list)
    """Rollouts that the trainer works on."""
    in_gradient: list[Rollout] = field(default_factory=list)
    """Rollouts whose gradient the coming step has."""

    def take(self, group: Group) -> None:
        """Enter that `group` is part of the step, with what is ready of it."""
        self.groups[group.id] = group
        is_any_ready = group.num_missing < len(group.rollouts)
        if not group.num_missing or (is_any_ready and not self.trains_whole_groups):
            self._supply(r for r in group.rollouts if r.phase == "ready")

    def add_ready(self, rollout: Rollout) -> None:
        """Enter that a rollout has its reward, if its group was taken."""
        if rollout.group.id not in self.groups:
            return
        if not self.trains_whole_groups:
            self._supply((rollout,))
        elif not rollout.group.num_missing:
            self._supply(rollout.group.rollouts)

    def begin(self, command: Command) -> None:
        """Take what a command to the trainer is about from the head of its line."""
        match command:
            case Score(rollouts):
                self._hand_over(self.unscored, rollouts)
            case Train(rollouts):
                self._hand_over(self.trainable, rollouts)
            case _:
                pass  # is about no rollout

    def _hand_over(self, line: deque[Rollout], rollouts: tuple[int, ...]) -> None:
        """Take `rollouts` from the head of `line` into the trainer's hands."""
        for rollout_id in rollouts:
            rollout = line.popleft()
            if rollout.id != rollout_id:
                raise ValueError(f"rollout {rollout.id} comes before {rollout_id}")
            self.in_hand.append(rollout)

    def end(self, event: Scored | Trained) -> None:
        """Enter that the forward passes of rollouts are done, or that their gradient is accumulated.

        What was left out of the batch meanwhile stays out.
        """
        held, self.in_hand = self.in_hand, []
        if tuple(rollout.id for rollout in held) != event.rollouts:
            raise ValueError(f"the trainer was not given rollouts {event.rollouts}")
        wanted = [rollout for rollout in held if rollout.group.id in self.groups]
        (self.trainable if isinstance(event, Scored) else self.in_gradient).extend(wanted)

    def has_begun(self, group: Group) -> bool:
        """Return whether the trainer works, or has worked, on any rollout of `group`."""
        return any(rollout.group is group for rollout in (*self.in_hand, *self.in_gradient))

    def leave_out(self, group: Group) -> bool:
        """Leave a group out, if it was taken; what the trainer has in hand of it is for the trainer to end."""
        if self.groups.pop(group.id, None) is None:
            return False
        self.in_gradient = [r for r in self.in_gradient if r.group is not group]
        self.unscored = deque(r for r in self.unscored if r.group is not group)
        self.trainable = deque(r for r in self.trainable if r.group is not group)
        return True

    def clear(self) -> list[Group]:
        """Begin the next batch; return the groups of this one."""
        groups = list(self.groups.values())
        self.groups = {}
        self.in_gradient = []
        return groups

    def abandon(self) -> list[Group]:
        """Forget what the trainer has worked on; return the groups that it was to train on."""
        self.unscored.clear()
        self.trainable.clear()
        self.in_hand = []
        return self.clear()

    def _supply(self, rollouts: Iterable[Rollout]) -> None:
        (self.unscored if self.needs_score else self.trainable).extend(rollouts)


OF_FAMILY = "outside its share: family"
OF_STALENESS = "outside its share: staleness"
OF_REWARD = "outside its share: reward"
OF_COUNT = "outside its share: every"
"""Why groups are left out: by the key that leaves them out, and the first that does where several would."""

ROUNDING = 1e-9
"""A mean of rewards such as 0.1 is off by some 1e-17: so much beyond a bound is still within it."""


@dataclass(slots=True)
class StreamShare:
    """See the module; counts what it lets pass."""

    every: int = 1
    min_staleness: int = 0
    max_staleness: float = math.inf
    min_reward: float = -math.inf
    max_reward: float = math.inf
    families: frozenset[str] = frozenset()
    """Of prompts; all where there are none."""
    num_passed: int = 0
    """Groups that all else let pass so far: every so many one is taken, the first of them too."""

    @classmethod
    def of(cls, follower: SecondaryTrainerConfig) -> StreamShare | None:
        """Return what a trainer's section says; None where it takes all."""
        if not follower.takes_share:
            return None
        least, most = follower.min_staleness, follower.max_staleness
        return cls(
            every=follower.every,
            min_staleness=0 if least is None else least,
            max_staleness=math.inf if most is None else most,
            min_reward=-math.inf if follower.min_reward is None else follower.min_reward,
            max_reward=math.inf if follower.max_reward is None else follower.max_reward,
            families=frozenset(follower.families),
        )

    def leaves_out(self, group: Group, version: int) -> str | None:
        """Return why a complete group is left out, the leading trainer being at `version`; None where it is taken."""
        if self.families and group.family not in self.families:
            return OF_FAMILY
        if not self.min_staleness <= _staleness(group, version) <= self.max_staleness:
            return OF_STALENESS
        reward = _mean_reward(group)
        if not self.min_reward - ROUNDING <= reward <= self.max_reward + ROUNDING:
            return OF_REWARD
        self.num_passed += 1
        return None if (self.num_passed - 1) % self.every == 0 else OF_COUNT


def check_reach(policies: PoliciesConfig, followers: tuple[SecondaryTrainerConfig, ...]) -> None:
    """Raise `RunError` where no group is ever as stale as a trainer wants it: the leader's bound holds for all."""
    system = choose_system(policies)
    if not system.keeps_bound:
        return
    most = system.staleness_bound
    for number, follower in enumerate(followers, start=1):
        if (least := follower.min_staleness) is not None and least > most:
            key = join_key(trainer_key(number), "min_staleness")
            why = f"as policies.system {policies.system!r} lets no rollout be further behind"
            text = f"{key} must be at most {most}, {why}, got {least}"
            raise RunError(key, least, Bounds(0, most), text, ("policies.max_staleness",))


def _staleness(group: Group, version: int) -> int:
    """Return how many versions the oldest token of a group is behind the leader's."""
    born = [rollout.born for rollout in group.rollouts if rollout.born is not None]
    return version - min(born, default=version)


def _mean_reward(group: Group) -> float:
    return math.fsum(rollout.reward for rollout in group.rollouts) / len(group.rollouts)


LEADER = 0
"""Trainer whose versions replicas load."""

ROLLED_BACK = "rolled back"
"""Why rollouts of steps after the last checkpoint are lost with a trainer."""
DONE_BEFORE = "done before"
"""Why a trainer that follows passes over what a resume draws again: its own checkpoint has it."""

ABSENT = "it had not joined"
"""Why what was drawn before a trainer joined a run is lost to it."""

UNIFORM = "all its rewards are equal"
"""Why a group is left out that teaches nothing."""

TrainerCommand = Score | Train | Step | StartTrainer | StopTrainer | SaveCheckpoint


def drawn_again(begun: RunStarted, saved: SaveCheckpoint) -> frozenset[int]:
    """Return the groups that a run which goes on draws again though a trainer's checkpoint has them."""
    first = begun.groups_done
    return frozenset(range(first, saved.groups_done)).union(
        g for g in saved.done_ahead if g >= first
    )


@dataclass(slots=True)
class TrainerSide:
    """See the module; `state` tells it what happens."""

    id: int
    prompts_per_step: int
    rollouts_per_step: int
    batch: Batch
    takes_unfinished: bool
    """Whether its next step may hold groups of which rollouts are still missing."""

    version: int = 0
    checkpoint_version: int = 0
    is_ready: bool = False
    is_up: bool = False
    """Whether there is a worker, be it one that can do nothing any more."""
    is_away: bool = False
    """Whether it was detached: it ends what it does, is saved and stopped, and gives up all that comes."""
    joined_as: Run | None = None
    """The run with its section, where it joined later than the run began."""
    first_group: int = 0
    """The first that was drawn since it joined."""
    command: TrainerCommand | None = None
    """What it does now, or did when it was lost, until that has failed."""
    is_lost: bool = False
    """Whether it is gone and what it did has yet to fail: before that nothing takes its place."""
    num_lost: int = 0
    """How often it was lost."""
    num_failed_saves: int = 0
    """Checkpoints that failed in a row."""
    failure: str | None = None
    """What broke beyond what a retry can mend."""

    line: GroupLine = field(default_factory=GroupLine)
    pace: StepTimer = field(default_factory=StepTimer)
    num_trained: int = 0
    """Rollouts that its steps were made of, those of steps that were rolled back left out."""
    lost: dict[str, int] = field(default_factory=dict)
    """Rollouts that it will never train on, by reason, those of steps that were rolled back among them."""
    done_before: frozenset[int] = frozenset()
    """Groups that it was done with before a resume, which draws them again for others."""
    share: StreamShare | None = None
    """What part of the complete groups it takes; None where all."""
    outside: dict[int, tuple[Group, str]] = field(default_factory=dict)
    """Those outside of it that it has not given up yet, by id, and why."""
    most_gen_batches: int = 1
    """Batches that are generated at most for one of its steps: what is beyond the first are groups that it passes over."""
    uniform: dict[int, Group] = field(default_factory=dict)
    """Those of them that it has not passed over, by id, where it does."""
    num_uniform: int = 0
    """How many it has passed over since its last step."""
    _trained_until: dict[int, int] = field(default_factory=lambda: {0: 0})
    """Rollouts trained on by version, from the last checkpoint on: what a loss takes back."""

    @property
    def leads(self) -> bool:
        """Whether its versions are what replicas load."""
        return self.id == LEADER

    @property
    def leaves_out_uniform(self) -> bool:
        """Whether it passes over groups whose rewards are all equal."""
        return self.most_gen_batches > 1

    @property
    def is_free(self) -> bool:
        """Whether it could begin something now."""
        return self.is_ready and self.command is None

    def wants(self, group: Group) -> bool:
        """Return whether it may still train on `group`."""
        is_coming = group.num_missing > 0 and self._may_see(group)
        return is_coming or group.id in self.batch.groups or group in self.line

    def _may_see(self, group: Group) -> bool:
        return group.id >= self.first_group and group.id not in self.done_before

    def is_stepping_on(self, group: Group) -> bool:
        """Return whether the step that it makes right now is made of `group`."""
        return isinstance(self.command, Step) and group.id in self.batch.groups

    def open_groups(self) -> Iterator[Group]:
        """Yield every group that it has taken or could take now."""
        yield from self.batch.groups.values()
        yield from self.line

    # Changes --------------------------------------------------------------------------------------

    def begin_at(self, version: int, done_before: frozenset[int] = frozenset()) -> None:
        """Enter the version that it begins with, and what it is done with of the groups that are to be drawn."""
        self.version = self.checkpoint_version = version
        self.done_before = done_before
        self._trained_until = {version: 0}

    def join(self, num_drawn: int, next_group: int) -> None:
        """Enter that it joins a run of which so many rollouts were drawn without it."""
        self.first_group = next_group
        if num_drawn:
            self._lose(num_drawn, ABSENT)

    def come_back(self) -> None:
        """Enter that it is to follow again, from its own checkpoint."""
        self.is_away = False
        self.num_lost = self.num_failed_saves = 0
        self.failure = None

    def become(self, other: TrainerSide) -> None:
        """Enter that it is what another was, before it begins anew: with that one's batches, in steps as large as before.

        What was taken since it was lost lies ahead of it again: the step that it is for is that one's to make.
        """
        self._put_back()
        self.batch = Batch(other.batch.trains_whole_groups, other.batch.needs_score)
        self.most_gen_batches = other.most_gen_batches
        found = (group for group in self.line if self.leaves_out_uniform and group.is_uniform)
        self.uniform = {group.id: group for group in found}
        self.num_lost = self.num_failed_saves = 0

    def see_drawn(self, group: Group) -> None:
        """Enter that a group was drawn."""
        if group.id in self.done_before:
            self._lose(len(group.rollouts), DONE_BEFORE)
        elif self.takes_unfinished:
            self.line.add(group)

    def see_ready(self, rollout: Rollout, version: int) -> None:
        """Enter that a rollout has its reward, and with it perhaps its group all, the leader being at `version`."""
        group = rollout.group
        if self.takes_unfinished:
            self.batch.add_ready(rollout)
        elif not group.num_missing and self._may_see(group):
            self._see_complete(group, version)
        if self.leaves_out_uniform and group.is_uniform and self.wants(group):
            self.uniform[group.id] = group

    def _see_complete(self, group: Group, version: int) -> None:
        self.line.add(group)
        reason = None if self.share is None else self.share.leaves_out(group, version)
        if reason is not None:
            self.outside[group.id] = group, reason

    def take(self, command: Take, group: Group) -> None:
        """Enter that its coming step will be made of `group` too."""
        if command.step != self.version + 1 or not self.line.remove(group):
            raise ValueError(
                f"trainer {self.id} cannot take group {group.id} for step {command.step}"
            )
        self.batch.take(group)

    def begin(self, command: TrainerCommand, now: float) -> None:
        """Enter that it was told to do something."""
        self.command = command
        self.pace.begin_work(now)
        self.batch.begin(command)

    def come_up(self, version: int) -> None:
        """Enter that it is ready, at the version that it was told."""
        if version != self.version:
            raise ValueError(f"trainer {self.id} came up at {version}, expected {self.version}")
        self.command = None
        self.is_ready = self.is_up = True

    def end_work(self, event: Scored | Trained, now: float) -> None:
        """Enter that forward passes are done, or that a gradient is accumulated."""
        self.command = None
        self.pace.end_work(now)
        self.batch.end(event)

    def end_step(self, version: int, now: float) -> list[Group]:
        """Enter that it has made `version`; return the groups of that step."""
        if version != self.version + 1:
            raise ValueError(f"step made version {version}, expected {self.version + 1}")
        self.command = None
        self.pace.end_step(version, now)
        self.version = version
        self.num_trained += len(self.batch.in_gradient)
        self._trained_until[version] = self.num_trained
        self.num_uniform = 0
        groups = self.batch.clear()
        for group in groups:
            self.uniform.pop(group.id, None)
        return groups

    def save(self, version: int) -> None:
        """Enter that its checkpoint of `version` is on disk."""
        self.command = None
        self.num_failed_saves = 0
        self.checkpoint_version = version
        self._trained_until = {v: n for v, n in self._trained_until.items() if v >= version}

    def leave_out(self, group: Group, reason: str) -> bool:
        """Enter that it will not train on `group`; return whether it would have."""
        if self.is_stepping_on(group):
            raise ValueError(f"trainer {self.id} makes a step of group {group.id}")
        is_left = self.wants(group)
        self.batch.leave_out(group)
        self.line.remove(group)
        self.uniform.pop(group.id, None)
        self.outside.pop(group.id, None)
        self.num_uniform += is_left and reason == UNIFORM
        if is_left:
            self._lose(len(group.rollouts), reason)
        return is_left

    def fall_back(self) -> int:
        """Enter that it is gone, and begins again at its last checkpoint; return the steps that this takes back."""
        self.is_lost = self.command is not None
        self.num_lost += 1
        return self._go_back()

    def stop(self) -> None:
        """Enter that it has ended as it was told to, and would begin again at its last checkpoint."""
        self.is_lost = False
        self.command = None
        self._go_back()

    def _go_back(self) -> int:
        """Go back to the last checkpoint, and return the steps that this takes back."""
        self._put_back()
        self.is_ready = self.is_up = False
        self.pace.forget()
        num_steps = self.version - self.checkpoint_version
        self.version = self.checkpoint_version
        taken_back = self.num_trained - self._trained_until[self.version]
        if taken_back:
            self._lose(taken_back, ROLLED_BACK)
        self.num_trained -= taken_back
        return num_steps

    def _put_back(self) -> None:
        """Let what its coming step was to be made of lie ahead of it again, before all else."""
        begun = self.batch.abandon()
        line, self.line = self.line, GroupLine()
        for group in (*begun, *line):
            self.line.add(group)

    def end_failed(self, reason: str) -> None:
        """Enter that what it did has failed: it can do nothing any more, unless it was lost and begins again.

        A checkpoint that fails changes nothing: the one before it stands, and the trainer that leads goes on.
        """
        if self.is_lost:
            self.is_lost = False
            self.command = None
            return
        if isinstance(self.command, StopTrainer):
            self.stop()
            return
        if isinstance(self.command, SaveCheckpoint) and self.leads:
            self.num_failed_saves += 1
            self.command = None
            return
        self.failure = reason
        self.is_ready = False
        self.command = None
        self.batch.in_hand = []

    def _lose(self, num_rollouts: int, reason: str) -> None:
        self.lost[reason] = self.lost.get(reason, 0) + num_rollouts
