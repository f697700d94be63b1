"""When the run is written down so that it can resume."""

from __future__ import annotations

from collections.abc import Iterable

from streamrl.engine.messages import Command, SaveCheckpoint
from streamrl.engine.state import State


class CheckpointEvery:
    """Save after every `num_steps` steps, and after the last one."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps

    def decide(self, state: State) -> Iterable[Command]:
        """Yield a save where one is due and the trainer is between two steps."""
        num_unsaved = state.version - state.checkpoint_version
        if not num_unsaved or (num_unsaved < self.num_steps and not state.has_all_steps):
            return ()
        if not state.trainer_is_free or state.batch.num_in_gradient or state.failure is not None:
            return ()
        groups_done = min(state.groups, default=state.next_group)
        return (SaveCheckpoint(state.version, groups_done),)
