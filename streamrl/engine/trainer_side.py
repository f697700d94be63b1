"""One trainer in the engine's state: its version, its batch, its line of groups, and its share of the stream.

Groups are a stream that every trainer reads with its own cursor; `line` contains the groups ahead
of it. The primary trainer sees a group when it is drawn or when it is complete, depending on
consumption. A secondary trainer sees only complete groups. Each trainer takes the groups of its
next step at its own pace.

A secondary trainer may take only a share of the stream. A group is judged once it is complete, by
these criteria in order: staleness of its oldest token, mean reward, family of its prompt, and the
number of groups that passed before it. Groups outside the share are lost to that trainer, with the
reason.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter

from streamrl.engine.entities import Group, GroupLine, Rollout
from streamrl.engine.estimates import StepTimer
from streamrl.engine.messages import (
    Command,
    ResizeTrainer,
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
    """Taken groups, and their rollouts in the order in which they became ready."""

    trains_whole_groups: bool
    needs_score: bool
    groups: dict[int, Group] = field(default_factory=dict)
    unscored: deque[Rollout] = field(default_factory=deque)
    """Rollouts that need forward passes."""
    trainable: deque[Rollout] = field(default_factory=deque)
    """Rollouts to train on."""
    in_hand: list[Rollout] = field(default_factory=list)
    """Rollouts that the trainer works on."""
    in_gradient: list[Rollout] = field(default_factory=list)
    """Rollouts in the gradient of the coming step."""
    is_begun: bool = False
    """Whether the trainer has computed anything for the coming step, even of groups that have left it."""

    def take(self, group: Group) -> None:
        """Add `group` to the step, with its ready rollouts."""
        self.groups[group.id] = group
        if not group.num_missing:
            self._supply(group.rollouts)
        elif group.num_missing < len(group.rollouts) and not self.trains_whole_groups:
            self._supply(r for r in group.rollouts if r.phase == "ready")

    def add_ready(self, rollout: Rollout) -> None:
        """Add a rollout that has its reward, if its group was taken."""
        if rollout.group.id not in self.groups:
            return
        if not self.trains_whole_groups:
            (self.unscored if self.needs_score else self.trainable).append(rollout)
        elif not rollout.group.num_missing:
            self._supply(rollout.group.rollouts)

    def begin(self, command: Command) -> None:
        """Move the rollouts of a command from the head of their queue to the trainer."""
        match command:
            case Score(rollouts):
                self._hand_over(self.unscored, rollouts)
            case Train(rollouts):
                self._hand_over(self.trainable, rollouts)
            case _:
                pass  # the command has no rollouts

    def _hand_over(self, line: deque[Rollout], rollouts: tuple[int, ...]) -> None:
        """Move `rollouts` from the head of `line` into `in_hand`."""
        self.is_begun = True
        for rollout_id in rollouts:
            rollout = line.popleft()
            if rollout.id != rollout_id:
                raise ValueError(f"rollout {rollout.id} comes before {rollout_id}")
            self.in_hand.append(rollout)

    def end(self, event: Scored | Trained) -> None:
        """Record that forward passes, or the gradient, of rollouts are done.

        Rollouts that left the batch in the meantime are ignored.
        """
        held, self.in_hand = self.in_hand, []
        if [rollout.id for rollout in held] != list(event.rollouts):
            raise ValueError(f"the trainer was not given rollouts {event.rollouts}")
        wanted = [rollout for rollout in held if rollout.group.id in self.groups]
        (self.trainable if isinstance(event, Scored) else self.in_gradient).extend(wanted)

    def has_begun(self, group: Group) -> bool:
        """Return whether the trainer works, or has worked, on a rollout of `group`."""
        return any(rollout.group is group for rollout in (*self.in_hand, *self.in_gradient))

    def leave_out(self, group: Group) -> bool:
        """Remove a group, if it was taken. The trainer finishes the rollouts of it that it works on."""
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
        self.is_begun = False
        return groups

    def abandon(self) -> list[Group]:
        """Discard the trainer's work on this batch; return its groups."""
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
"""Reasons for leaving a group out, by the key that excludes it; the first one if several do."""

ROUNDING = 1e-9
"""Tolerance of bounds on mean rewards: a mean of values such as 0.1 has a rounding error of about
1e-17.
"""


@dataclass(slots=True)
class StreamShare:
    """The share of the stream that a secondary trainer takes; it counts the groups that pass its other criteria."""

    every: int = 1
    min_staleness: int = 0
    max_staleness: float = math.inf
    min_reward: float = -math.inf
    max_reward: float = math.inf
    families: frozenset[str] = frozenset()
    """Families of prompts; empty for all."""
    num_passed: int = 0
    """Groups that passed all other criteria so far. Every n-th of them is taken, beginning with the
    first.
    """

    @classmethod
    def of(cls, follower: SecondaryTrainerConfig) -> StreamShare | None:
        """Return the share in a trainer's section; None where it takes all groups."""
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
        """Return why a complete group is left out, with the primary trainer at `version`; None where it is taken."""
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
    """Raise `RunError` if no group can be as stale as a trainer requires, because the primary trainer's bound is lower."""
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
    """Return how many versions the oldest token of a group is behind the primary trainer."""
    born = [rollout.born for rollout in group.rollouts if rollout.born is not None]
    return version - min(born, default=version)


def _mean_reward(group: Group) -> float:
    return math.fsum(rollout.reward for rollout in group.rollouts) / len(group.rollouts)


LEADER = 0
"""The primary trainer: replicas load its versions."""

ROLLED_BACK = "rolled back"
"""Reason: the step was rolled back, because its trainer was lost after its last checkpoint."""
DONE_BEFORE = "done before"
"""Reason: a secondary trainer skips a group that a resume draws again, because its own checkpoint
contains it.
"""

ABSENT = "it had not joined"
"""Reason: the group was drawn before the trainer joined."""

UNIFORM = "all its rewards are equal"
"""Reason: the group has no learning signal."""

TrainerCommand = Score | Train | Step | StartTrainer | StopTrainer | ResizeTrainer | SaveCheckpoint


MOST_AHEAD = 10**7
"""Maximum groups between two positions of one run. Assumption: more are damage; their numbers would fill the memory."""


def drawn_again(begun: RunStarted, saved: SaveCheckpoint) -> frozenset[int]:
    """Return the groups that a resumed run draws again although a trainer's checkpoint contains them.

    Raises:
        ValueError: the checkpoint is too many groups ahead of the run.
    """
    first = begun.groups_done
    if saved.groups_done - first > MOST_AHEAD:
        raise ValueError(
            f"trainer {saved.trainer} continues from group {saved.groups_done}, and the run from group {first}"
        )
    return frozenset(range(first, saved.groups_done)).union(
        g for g in saved.done_ahead if g >= first
    )


@dataclass(slots=True)
class TrainerSide:
    """State of one trainer; `state` updates it."""

    id: int
    prompts_per_step: int
    rollouts_per_step: int
    batch: Batch
    takes_unfinished: bool
    """Whether its next step may take groups with unfinished rollouts."""
    sizes: list[tuple[int, int]]
    """Data-parallel ranks from a step on, as (first step, ranks) in order of steps. Step 0 is the run file's size."""

    data_parallel: int = 1
    """Data-parallel ranks of its last start or resize."""
    borrowable: int = 0
    """Data-parallel ranks that replicas' GPUs can add; 0 if it borrows none."""
    version: int = 0
    checkpoint_version: int = 0
    is_ready: bool = False
    is_up: bool = False
    """Whether its worker is running, even if that worker has failed."""
    is_lent: bool = False
    """Whether replicas have some of its GPUs, so that it can do nothing."""
    is_away: bool = False
    """Whether it was detached. It then finishes its work, is saved and stopped, and skips all new
    groups.
    """
    joined_as: Run | None = None
    """The run with its section, if it joined after the run began."""
    first_group: int = 0
    """The first group that was drawn after it joined."""
    command: TrainerCommand | None = None
    """Its running command; after a loss, the command that ran, until it has failed."""
    is_lost: bool = False
    """Whether it is lost and its command has not failed yet. It is restarted only after that."""
    num_lost: int = 0
    """Number of losses."""
    num_failed_saves: int = 0
    """Consecutive failed checkpoints."""
    failure: str | None = None
    """The error that no retry can fix."""

    line: GroupLine = field(default_factory=GroupLine)
    pace: StepTimer = field(default_factory=StepTimer)
    num_trained: int = 0
    """Rollouts in its steps, without rolled-back steps."""
    lost: dict[str, int] = field(default_factory=dict)
    """Rollouts that it will never train on, by reason, including those of rolled-back steps."""
    done_before: frozenset[int] = frozenset()
    """Groups that it finished before a resume, which draws them again for other trainers."""
    share: StreamShare | None = None
    """Its share of the complete groups; None for all."""
    outside: dict[int, tuple[Group, str]] = field(default_factory=dict)
    """Groups outside its share that it has not skipped yet, by id, each with the reason."""
    most_gen_batches: int = 1
    """Maximum batches generated for one step. Batches beyond the first replace groups that it
    skips.
    """
    uniform: dict[int, Group] = field(default_factory=dict)
    """Groups of equal rewards that it has not skipped yet, by id, if it skips them."""
    num_uniform: int = 0
    """Groups of equal rewards skipped since its last step."""
    _trained_until: dict[int, int] = field(default_factory=lambda: {0: 0})
    """Rollouts trained on, by version since the last checkpoint: a loss takes them back."""

    @property
    def leads(self) -> bool:
        """Whether it is the primary trainer."""
        return self.id == LEADER

    @property
    def leaves_out_uniform(self) -> bool:
        """Whether it skips groups whose rewards are all equal."""
        return self.most_gen_batches > 1

    @property
    def is_free(self) -> bool:
        """Whether it can start a command now."""
        return self.can_lend and not self.is_lent

    @property
    def can_lend(self) -> bool:
        """Whether replicas may have its GPUs now."""
        return self.is_ready and self.command is None

    @property
    def wanted_ranks(self) -> int:
        """Data-parallel ranks with which it should make its next step."""
        return [ranks for first, ranks in self.sizes if first <= self.version + 1][-1]

    @property
    def started_ranks(self) -> int | None:
        """The same for a start now; None if they are those of its section in the run file."""
        wanted = self.wanted_ranks
        return None if wanted == self.sizes[0][1] else wanted

    @property
    def can_resize(self) -> bool:
        """Whether its ranks may change now: it is free, and has computed nothing for its next step."""
        return self.is_free and not self.batch.is_begun

    @property
    def has_borrowed(self) -> bool:
        """Whether GPUs of replicas are among its ranks, or join or leave them now."""
        if not self.borrowable:
            return False
        is_larger = self.is_up and self.data_parallel > self.wanted_ranks
        return is_larger or isinstance(self.command, ResizeTrainer)

    @property
    def is_unsaved(self) -> bool:
        """Whether it has steps since its last checkpoint, and can be saved as far as is known."""
        is_able = self.is_ready and not self.num_failed_saves
        return is_able and (
            self.version > self.checkpoint_version or isinstance(self.command, Step)
        )

    def wants(self, group: Group) -> bool:
        """Return whether it may still train on `group`."""
        if group.num_missing and self._may_see(group):
            return True
        return group.id in self.batch.groups or group in self.line

    def _may_see(self, group: Group) -> bool:
        return group.id >= self.first_group and group.id not in self.done_before

    def is_stepping_on(self, group: Group) -> bool:
        """Return whether its running step contains `group`."""
        return isinstance(self.command, Step) and group.id in self.batch.groups

    def open_groups(self) -> Iterator[Group]:
        """Yield every group that it has taken or could take now."""
        yield from self.batch.groups.values()
        yield from self.line

    # Changes --------------------------------------------------------------------------------------

    def begin_at(self, version: int, done_before: frozenset[int] = frozenset()) -> None:
        """Set its first version, and the groups that it has finished among those that will be drawn again."""
        self.version = self.checkpoint_version = version
        self.done_before = done_before
        self._trained_until = {version: 0}

    def join(self, num_drawn: int, next_group: int) -> None:
        """Record that it joins a run in which `num_drawn` rollouts were drawn without it."""
        self.first_group = next_group
        if num_drawn:
            self._lose(num_drawn, ABSENT)

    def come_back(self) -> None:
        """Record that it is attached again, from its own checkpoint."""
        self.is_away = False
        self.num_lost = self.num_failed_saves = 0
        self.failure = None

    def become(self, other: TrainerSide) -> None:
        """Take over the state of another trainer before a restart, with that trainer's batches and step size.

        Groups taken since its own loss return to its line, because the other trainer's steps decide
        about them.
        """
        self._put_back()
        self.batch = Batch(other.batch.trains_whole_groups, other.batch.needs_score)
        self.most_gen_batches = other.most_gen_batches
        found = (group for group in self.line if self.leaves_out_uniform and group.is_uniform)
        self.uniform = {group.id: group for group in found}
        self.num_lost = self.num_failed_saves = 0

    def see_drawn(self, groups: Iterable[Group]) -> None:
        """Enter that groups were drawn."""
        if not self.takes_unfinished and not self.done_before:
            return
        for group in groups:
            if group.id in self.done_before:
                self._lose(len(group.rollouts), DONE_BEFORE)
            elif self.takes_unfinished:
                self.line.add(group)

    def see_ready(self, rollout: Rollout, version: int) -> None:
        """Record that a rollout has its reward, which may complete its group; the primary trainer is at `version`."""
        group = rollout.group
        if self.takes_unfinished:
            self.batch.add_ready(rollout)
        elif not group.num_missing and self._may_see(group):
            self._see_complete(group, version)
        if self.most_gen_batches > 1 and group.is_uniform and self.wants(group):
            self.uniform[group.id] = group

    def _see_complete(self, group: Group, version: int) -> None:
        self.line.add(group)
        reason = None if self.share is None else self.share.leaves_out(group, version)
        if reason is not None:
            self.outside[group.id] = group, reason

    def take(self, command: Take, group: Group) -> None:
        """Add `group` to its coming step."""
        if command.step != self.version + 1 or not self.line.remove(group):
            raise ValueError(
                f"trainer {self.id} cannot take group {group.id} for step {command.step}"
            )
        self.batch.take(group)

    def request_ranks(self, data_parallel: int) -> None:
        """Record the data-parallel ranks from its next step on; a later step of the run file may change them again."""
        insort(self.sizes, (self.version + 1, data_parallel), key=itemgetter(0))

    def end_resize(self, data_parallel: int) -> None:
        """Record that it continues with this number of data-parallel ranks."""
        self.command = None
        self.data_parallel = data_parallel

    def begin(self, command: TrainerCommand, now: float) -> None:
        """Record that it starts a command."""
        self.command = command
        if isinstance(command, StartTrainer):
            self.data_parallel = command.data_parallel or self.sizes[0][1]
        self.pace.begin_work(now)
        self.batch.begin(command)

    def come_up(self, version: int) -> None:
        """Record that it is ready at the expected version."""
        if version != self.version:
            raise ValueError(f"trainer {self.id} came up at {version}, expected {self.version}")
        self.command = None
        self.is_ready = self.is_up = True

    def end_work(self, event: Scored | Trained, now: float) -> None:
        """Record that forward passes or a gradient are done."""
        self.command = None
        self.pace.end_work(now)
        self.batch.end(event)

    def end_step(self, version: int, now: float) -> list[Group]:
        """Record that it made `version`; return the groups of that step."""
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
        """Record that its checkpoint of `version` is on disk."""
        self.command = None
        self.num_failed_saves = 0
        self.checkpoint_version = version
        self._trained_until = {v: n for v, n in self._trained_until.items() if v >= version}

    def leave_out(self, group: Group, reason: str) -> bool:
        """Record that it will not train on `group`; return whether it would have."""
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
        """Record that it is lost and restarts from its last checkpoint; return the number of steps lost."""
        self.is_lost = self.command is not None
        self.num_lost += 1
        return self._go_back()

    def stop(self) -> None:
        """Record that it stopped as commanded; it would restart from its last checkpoint."""
        self.is_lost = False
        self.command = None
        self._go_back()

    def _go_back(self) -> int:
        """Go back to the last checkpoint; return the number of steps lost."""
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
        """Return the groups of its coming step to the front of its line."""
        begun = self.batch.abandon()
        line, self.line = self.line, GroupLine()
        for group in (*begun, *line):
            self.line.add(group)

    def end_failed(self, reason: str) -> None:
        """Record that its command failed. It is then unusable, unless it was lost and restarts.

        A failed checkpoint changes nothing: the one before it stays valid, and the primary trainer
        continues.
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
