"""The rollouts that a simulated world must still know: those of every group that some trainer may train on."""

from __future__ import annotations

from collections.abc import Iterable

from streamrl.engine.done_with import DoneWith
from streamrl.engine.trainer_side import LEADER
from streamrl.sim.surroundings import DrawnRollout, rollouts_of
from streamrl.workload.workload import Draw

KEPT_STEPS = 2
"""Steps of the leader's for which a group is still known after the last trainer is done with it: what replicas still
make of a dropped one is looked up until it is aborted."""


class Drawn:
    """What was drawn and is not done with, so that a long run takes no more memory than a short one."""

    def __init__(self, num_trainers: int) -> None:
        self.rollouts: dict[int, DrawnRollout] = {}
        """By id; looked up where a rollout is generated or trained on."""
        self._groups: dict[int, tuple[int, ...]] = {}
        self._done_with = DoneWith(num_trainers)
        self._leaving: dict[int, int] = {}
        """By group: the leader's version when the last trainer was done with it."""
        self._version = 0

    def add(self, draws: list[Draw]) -> None:
        """Take groups that were drawn."""
        self.rollouts.update(rollouts_of(draws))
        self._groups.update((draw.drawn.group, draw.drawn.rollouts) for draw in draws)

    def end_step(self, version: int, groups: Iterable[int], trainer: int) -> None:
        """Take note that a trainer has made a step of groups; forget what all were done with long before."""
        for group in groups:
            self.leave(group, trainer)
        if trainer == LEADER:
            self._version = version
            gone = [g for g, since in self._leaving.items() if since <= version - KEPT_STEPS]
            for group in gone:
                self._forget(group)

    def leave(self, group: int, trainer: int) -> None:
        """Take note that a trainer is done with a group."""
        if self._done_with.leave(group, trainer):
            self.drop(group)

    def drop(self, group: int) -> None:
        """Take note that nobody trains on a group any more."""
        self._done_with.drop(group)
        if group in self._groups:
            self._leaving[group] = self._version

    def _forget(self, group: int) -> None:
        del self._leaving[group]
        for rollout in self._groups.pop(group):
            del self.rollouts[rollout]
