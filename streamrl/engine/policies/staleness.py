"""Admission (what may start) and consumption (what is trained next): two decisions that bound staleness together.

Capping admission alone does not bound it: a straggler that younger rollouts overtake grows staler with
every step that passes it by.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from streamrl.engine.messages import Command, DrawPrompts, Skip, Take
from streamrl.engine.state import State
from streamrl.engine.trainer_side import TrainerSide
from streamrl.engine.window import AdmissionWindow

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
