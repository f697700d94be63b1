"""Admission (what may start) and consumption (what is trained next): two decisions that bound staleness together.

Capping admission alone does not bound it: a straggler that younger rollouts overtake grows staler with
every step that passes it by.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from streamrl.engine.messages import Command, DrawPrompts, Take
from streamrl.engine.state import State


class BoundedAdmission:
    """Draw prompts for a step once the trainer is at most `max_staleness` steps away from it.

    The rollouts of step s train from version s - 1, so they may not start under a version older than
    s - 1 - max_staleness. With strict FIFO consumption no rollout is trained on past the bound: a group
    is trained in the step it was drawn for, or in an earlier one where groups before it were dropped.
    """

    def __init__(self, max_staleness: int, waits_for_whole_batches: bool = False) -> None:
        self.max_staleness = max_staleness
        self.waits_for_whole_batches = waits_for_whole_batches
        """Whether the next batch is drawn only after every rollout of the last one is generated."""

    def decide(self, state: State) -> Iterable[Command]:
        """Yield draws, one for each step they are meant for."""
        last_step = state.version + 1 + self.max_staleness
        if last_step > state.num_steps:
            last_step = state.num_steps
        num_allowed = last_step * state.prompts_per_step
        if state.num_admitted >= num_allowed or state.is_stopping or not state.trainer_is_ready:
            return ()
        return self._draw(state, num_allowed)

    def _draw(self, state: State, num_allowed: int) -> Iterator[Command]:
        while state.num_admitted < num_allowed:
            if self.waits_for_whole_batches and _is_generating(state):
                return
            batches, rest = divmod(state.num_admitted, state.prompts_per_step)
            yield DrawPrompts(
                step=batches + 1,
                num_groups=state.prompts_per_step - rest,
                oldest_version=max(0, batches - self.max_staleness),
            )


class StrictFifo:
    """Train on groups in the order they were drawn; a step waits for its stragglers."""

    def decide(self, state: State) -> Iterable[Command]:
        """Yield the groups of the coming step as soon as they are drawn."""
        if len(state.batch.groups) == state.prompts_per_step or not state.untaken:
            return ()
        return self._take(state)

    def _take(self, state: State) -> Iterator[Command]:
        while _has_room(state) and (group := state.untaken.first()) is not None:
            yield Take(group.id, state.version + 1)


class Greedy:
    """Train on groups in the order they became complete; stragglers wait, and no bound on staleness holds."""

    def decide(self, state: State) -> Iterable[Command]:
        """Yield complete groups until the coming step is full."""
        return self._take(state) if _has_room(state) and state.complete else ()

    def _take(self, state: State) -> Iterator[Command]:
        while _has_room(state) and (group := state.complete.first()) is not None:
            yield Take(group.id, state.version + 1)


def _has_room(state: State) -> bool:
    return len(state.batch.groups) < state.prompts_per_step and not state.is_stopping


def _is_generating(state: State) -> bool:
    return bool(state.num_drawing or state.num_generating or state.waiting.first() is not None)
