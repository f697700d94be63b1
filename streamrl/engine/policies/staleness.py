"""Bound staleness: which prompts may start, which groups are trained on next, and which are dropped as too stale.

Admission (which prompts start) and consumption (which groups are trained on next) bound staleness
together. Admission alone does not bound it: a straggler that younger rollouts overtake grows staler
with every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from streamrl.engine.entities import Group
from streamrl.engine.messages import Command, DrawPrompts, Generated, Skip, Take, Verified
from streamrl.engine.policies.retry import give_up
from streamrl.engine.presets import AdmissionWindow
from streamrl.engine.state import State
from streamrl.engine.trainer_side import TrainerSide

BEHIND, FAILED, AWAY = "the trainer was behind", "the trainer had failed", "it was detached"
PROMOTED = "it leads now"
"""Reasons why a secondary trainer skips a group."""


class BoundedAdmission:
    """Draw prompts while their step is within the admission window of the trainer.

    With strict-FIFO consumption no rollout is trained on past the bound. A group is trained on in
    the step that it was drawn for, or earlier if groups before it were dropped.
    """

    def __init__(self, window: AdmissionWindow, waits_for_whole_batches: bool = False) -> None:
        self.window = window
        self.waits_for_whole_batches = waits_for_whole_batches
        """Whether the next batch is drawn only after every rollout of the last one is generated.

        The replacement of a dropped group belongs to a batch that has begun, so it does not wait.
        """
        self.ignores = (Verified,) if waits_for_whole_batches else (Generated, Verified)

    def decide(self, state: State) -> Iterable[Command]:
        """Yield draws, one for each step."""
        return () if self.is_at_rest(state) else self._draw(state, self._num_allowed(state))

    def is_at_rest(self, state: State) -> bool:
        """Return whether no prompt may be drawn."""
        is_drawn = state.num_admitted >= self._num_allowed(state)
        return is_drawn or state.is_stopping or not state.leader.is_ready

    def _num_allowed(self, state: State) -> int:
        """Return the number of groups that may be drawn in total, extra ones included."""
        leader, window = state.leader, self.window
        num_allowed = window.num_allowed(leader.version, state.num_steps)
        if window.num_extra and len(leader.batch.groups) < leader.prompts_per_step:
            num_allowed += window.num_extra
        return num_allowed

    def _draw(self, state: State, num_allowed: int) -> Iterator[Command]:
        while state.num_admitted < num_allowed:
            begins_batch = state.num_admitted % self.window.prompts_per_step == 0
            if self.waits_for_whole_batches and begins_batch and _is_generating(state):
                return
            yield self._next_draw(state, num_allowed)

    def _next_draw(self, state: State, num_allowed: int) -> DrawPrompts:
        """Return the next groups of one step and one oldest version."""
        window, first = self.window, state.num_admitted
        num_planned = window.num_allowed(state.leader.version, state.num_steps)
        # extra groups have the oldest version of the last planned one
        place = min(first, num_planned - 1)
        end = num_allowed if first > place else min(num_planned, window.next_border(place))
        return DrawPrompts(window.step(place), end - first, window.oldest(place))


class TakeInLine:
    """Let a trainer take the groups of its next step in the order of its line.

    In draw order (strict-fifo) a step waits for its stragglers. In order of completion (greedy, and
    all secondary trainers) stragglers wait, and staleness is not bounded.
    """

    ignores = (Generated,)

    def __init__(self, trainer: int) -> None:
        self.trainer = trainer

    def decide(self, state: State) -> Iterable[Command]:
        """Return the available groups that fill the coming step."""
        trainer = state.trainers[self.trainer]
        if not trainer.line or self.is_at_rest(state):
            return ()
        first = islice(trainer.line, trainer.prompts_per_step - len(trainer.batch.groups))
        return [Take(group.id, trainer.version + 1, trainer.id) for group in first]

    def is_at_rest(self, state: State) -> bool:
        """Return whether the coming step is full, or takes nothing."""
        trainer = state.trainers[self.trainer]
        is_full = len(trainer.batch.groups) == trainer.prompts_per_step
        has_all = trainer.takes_unfinished and not trainer.line
        return is_full or has_all or state.is_stopping or trainer.is_away


class BoundedBacklog:
    """Let a secondary trainer skip groups that it is too slow for, oldest first, so that it delays nobody.

    A failed or detached trainer skips all groups.
    """

    ignores = (Generated,)

    def __init__(self, trainer: int, most_groups: int) -> None:
        self.trainer = trainer
        self.most_groups = most_groups
        """Complete groups that may wait for it, besides those that it has taken."""

    def decide(self, state: State) -> Iterable[Command]:
        """Yield skips of the surplus groups."""
        trainer = state.trainers[self.trainer]
        if trainer.failure is not None:
            return [Skip(group.id, trainer.id, FAILED) for group in trainer.open_groups()]
        if trainer.is_away:
            given_up = trainer.line if trainer.command is not None else trainer.open_groups()
            reason = PROMOTED if state.promoted == trainer.id else AWAY
            return [Skip(group.id, trainer.id, reason) for group in given_up]
        if len(trainer.line) <= self.most_groups or state.is_stopping:
            return ()
        return self._give_up(trainer)

    def _give_up(self, trainer: TrainerSide) -> Iterator[Command]:
        while len(trainer.line) > self.most_groups and (group := trainer.line.first()) is not None:
            yield Skip(group.id, trainer.id, BEHIND)


def _is_generating(state: State) -> bool:
    environments = state.environments
    is_queued = environments is not None and environments.has_queue
    is_waiting = is_queued or state.waiting.first() is not None
    return bool(state.num_drawing or state.is_generating or is_waiting)


STALE = "staler than policies.max_staleness"
"""Reason: the group would be trained on past the staleness bound."""


class DropStale:
    """Drop every group that the primary trainer cannot train on before its oldest token passes the bound.

    For consumption in order of completion, in which groups may overtake others. The staleness of
    the coming step's groups is fixed when they are taken. Other groups are checked when a step is
    made, and when the coming step is full. So groups that cannot be trained on in time are not
    generated further. Complete groups are also checked when they are taken, because the versions of
    all their tokens are then known.
    """

    def __init__(self, bound: int) -> None:
        self.bound = bound
        """Maximum versions that a token may be behind."""
        self._looked_at: tuple[int, bool, int] | None = None
        """State at the last check: the primary trainer's version, whether its step was full, and
        its number of losses.
        """

    def decide(self, state: State) -> Iterable[Command]:
        """Yield aborts and drops of groups that are too stale."""
        leader = state.leader
        if state.is_stopping:
            return ()
        num_lacking = leader.prompts_per_step - len(leader.batch.groups)
        looks_at = (leader.version, not num_lacking, leader.num_lost)
        if looks_at != self._looked_at:
            self._looked_at = looks_at
            return self._clear(state, [g for g in state.groups.values() if leader.wants(g)])
        if num_lacking and leader.line:
            return self._clear(state, self._next_taken(state, num_lacking))
        return ()

    def _clear(self, state: State, groups: Iterable[Group]) -> Iterator[Command]:
        for group in groups:
            if group.id not in state.leader.batch.groups and self._is_stale(state, group):
                yield from give_up(state, group, STALE)

    def _next_taken(self, state: State, num_lacking: int) -> list[Group]:
        """Return the groups of the primary trainer's line that would fill its step."""
        line = state.leader.line
        fresh = 0
        for number, group in enumerate(line, start=1):
            fresh += not self._is_stale(state, group)
            if fresh == num_lacking:
                return list(islice(line, number))
        return list(line)

    def _is_stale(self, state: State, group: Group) -> bool:
        """Return whether a group would be past the bound at its earliest possible step."""
        leader, oldest = state.leader, _oldest_token(group)
        is_full = len(leader.batch.groups) == leader.prompts_per_step
        return oldest is not None and leader.version + is_full - oldest > self.bound


def _oldest_token(group: Group) -> int | None:
    """Return the version of a group's oldest token. A running rollout without known tokens counts with its minimum version.

    None if no rollout of the group has started.
    """
    born = [rollout.born for rollout in group.rollouts if rollout.born is not None]
    if born:
        return min(born)
    runs = any(rollout.replica is not None for rollout in group.rollouts)
    return group.oldest_version if runs else None
