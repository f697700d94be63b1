"""The batch of the coming step: from a group being taken to its gradient being part of the step."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from streamrl.engine.entities import Group, Phase, Rollout
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
    num_in_gradient: int = 0
    """Rollouts whose gradient the coming step has."""

    def take(self, group: Group, step: int) -> None:
        """Enter that `group` is part of `step`, with what is ready of it."""
        group.taken_for = step
        self.groups[group.id] = group
        is_any_ready = group.num_missing < len(group.rollouts)
        if not group.num_missing or (is_any_ready and not self.trains_whole_groups):
            self._supply(*(r for r in group.rollouts if r.phase is Phase.READY))

    def add_ready(self, rollout: Rollout) -> None:
        """Enter that a rollout of a taken group has its reward."""
        if not self.trains_whole_groups:
            self._supply(rollout)
        elif not rollout.group.num_missing:
            self._supply(*rollout.group.rollouts)

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
            rollout.phase = Phase.TRAINING

    def end(self, event: Scored | Trained, rollouts: list[Rollout]) -> None:
        """Enter that the forward passes of `rollouts` are done, or that their gradient is accumulated."""
        is_trained = isinstance(event, Trained)
        for rollout in rollouts:
            rollout.phase = Phase.TRAINED if is_trained else Phase.READY
        if is_trained:
            self.num_in_gradient += len(rollouts)
        else:
            self.trainable.extend(rollouts)

    def drop(self, group: Group) -> None:
        """Leave a group out; what the trainer has in hand of it is for the trainer to end."""
        if self.groups.pop(group.id, None) is None:
            return
        self.num_in_gradient -= sum(r.phase is Phase.TRAINED for r in group.rollouts)
        self.unscored = deque(r for r in self.unscored if r.group is not group)
        self.trainable = deque(r for r in self.trainable if r.group is not group)

    def clear(self) -> list[Group]:
        """Begin the next batch; return the groups of this one."""
        groups = list(self.groups.values())
        self.groups = {}
        self.num_in_gradient = 0
        return groups

    def _supply(self, *rollouts: Rollout) -> None:
        (self.unscored if self.needs_score else self.trainable).extend(rollouts)
