"""Bound staleness: which prompts may start, which groups are trained on next, and which are too stale.

Admission (what may start) and consumption (what is trained next): two decisions that bound staleness together.

Capping admission alone does not bound it: a straggler that younger rollouts overtake grows staler with
every step that passes it by.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from streamrl.engine.entities import Group
from streamrl.engine.messages import Command, DrawPrompts, Skip, Take
from streamrl.engine.policies.retry import give_up
from streamrl.engine.presets import AdmissionWindow
from streamrl.engine.state import State
from streamrl.engine.trainer_side import TrainerSide

BEHIND, FAILED, AWAY = "the trainer was behind", "the trainer had failed", "it was detached"
PROMOTED = "it leads now"
"""Why a trainer that follows gives a group up."""


class BoundedAdmission:
    """Draw prompts once the trainer is no further away from their step than the window allows.

    With strict FIFO consumption no rollout is trained on past the bound: a group is trained in the step it was drawn
    for, or in an earlier one where groups before it were dropped.
    """

    def __init__(self, window: AdmissionWindow, waits_for_whole_batches: bool = False) -> None:
        self.window = window
        self.waits_for_whole_batches = waits_for_whole_batches
        """Whether the next batch is drawn only after every rollout of the last one is generated.

        What takes the place of a group that was dropped belongs to a batch that has begun, and waits for nobody.
        """

    def decide(self, state: State) -> Iterable[Command]:
        """Yield draws, one for each step they are meant for."""
        leader, window = state.leader, self.window
        num_allowed = window.num_allowed(leader.version, state.num_steps)
        if window.num_extra and len(leader.batch.groups) < leader.prompts_per_step:
            num_allowed += window.num_extra
        if state.num_admitted >= num_allowed or state.is_stopping or not leader.is_ready:
            return ()
        return self._draw(state, num_allowed)

    def _draw(self, state: State, num_allowed: int) -> Iterator[Command]:
        while state.num_admitted < num_allowed:
            begins_batch = state.num_admitted % self.window.prompts_per_step == 0
            if self.waits_for_whole_batches and begins_batch and _is_generating(state):
                return
            yield self._next_draw(state, num_allowed)

    def _next_draw(self, state: State, num_allowed: int) -> DrawPrompts:
        """Return the next groups that are of one step and may start under one version."""
        window, first = self.window, state.num_admitted
        num_planned = window.num_allowed(state.leader.version, state.num_steps)
        place = min(first, num_planned - 1)  # what is beyond stands beside the last of them
        end = num_allowed if first > place else min(num_planned, window.next_border(place))
        return DrawPrompts(window.step(place), end - first, window.oldest(place))


class TakeInLine:
    """Let a trainer take the groups of its next step in the order in which they stand in its line.

    Of groups in order of their draw (strict-fifo) a step waits for its stragglers. In order of completion
    (greedy, and whoever follows) stragglers wait, and no bound on staleness holds.
    """

    def __init__(self, trainer: int) -> None:
        self.trainer = trainer

    def decide(self, state: State) -> Iterable[Command]:
        """Return the groups that fill the coming step, as far as there are any."""
        trainer = state.trainers[self.trainer]
        num_lacking = trainer.prompts_per_step - len(trainer.batch.groups)
        if not num_lacking or not trainer.line or state.is_stopping or trainer.is_away:
            return ()
        first = islice(trainer.line, num_lacking)
        return [Take(group.id, trainer.version + 1, trainer.id) for group in first]


class BoundedBacklog:
    """Let a trainer that follows give up what it is too slow for, oldest first, so that it holds nobody up.

    What a trainer has no use for any more, because it failed or was detached, it gives up as it comes.
    """

    def __init__(self, trainer: int, most_groups: int) -> None:
        self.trainer = trainer
        self.most_groups = most_groups
        """Complete groups that may wait for it beside those that it has taken."""

    def decide(self, state: State) -> Iterable[Command]:
        """Yield the groups that are too many."""
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
    return bool(state.num_drawing or state.num_generating or state.waiting.first() is not None)


STALE = "staler than policies.max_staleness"
"""Why a group is given up that would be trained on past the bound."""


class DropStale:
    """Give up every group that the leader has no place for before its oldest token passes the bound.

    For consumption in order of completion, which lets groups be overtaken. What the coming step holds is as stale as
    when it was taken. All others are looked at when a step is made, and when the coming one is full, so that what
    cannot be trained on in time is generated no further; and what is complete as it is taken, when all its tokens'
    versions are known.
    """

    def __init__(self, bound: int) -> None:
        self.bound = bound
        """Versions that a token may be behind."""
        self._looked_at: tuple[int, bool, int] | None = None
        """The leader's version, whether its step was full, and how often it was lost, when all were looked at."""

    def decide(self, state: State) -> Iterable[Command]:
        """Yield aborts and drops of what is too stale."""
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
        """Return the groups of the leader's line up to those that fill its step."""
        line = state.leader.line
        fresh = 0
        for number, group in enumerate(line, start=1):
            fresh += not self._is_stale(state, group)
            if fresh == num_lacking:
                return list(islice(line, number))
        return list(line)

    def _is_stale(self, state: State, group: Group) -> bool:
        """Return whether a group outside of the coming step is past the bound when it could be trained on at best."""
        leader, oldest = state.leader, _oldest_token(group)
        is_full = len(leader.batch.groups) == leader.prompts_per_step
        return oldest is not None and leader.version + is_full - oldest > self.bound


def _oldest_token(group: Group) -> int | None:
    """Return the version of the oldest known token of a group; of one that runs, and has none known, the least it may be.

    None where nothing of it has begun.
    """
    born = [rollout.born for rollout in group.rollouts if rollout.born is not None]
    if born:
        return min(born)
    runs = any(rollout.replica is not None for rollout in group.rollouts)
    return group.oldest_version if runs else None
