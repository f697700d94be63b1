"""The batch of a trainer's coming step: from a group being taken to its gradient being part of the step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from streamrl.engine.entities import Group, Rollout
from streamrl.engine.messages import Command, Score, Scored, Train, Trained


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
