"""When the run is written down so that it can resume."""

from __future__ import annotations

from collections.abc import Iterator

from streamrl.messages import Command, SaveCheckpoint
from streamrl.state import State


class CheckpointEvery:
    """Save after every `num_steps` steps, and after the last one."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps

    def decide(self, state: State) -> Iterator[Command]:
        """Yield a save where one is due and the trainer is between two steps."""
        if not state.trainer_is_free or state.num_in_gradient or state.failure is not None:
            return
        is_due = state.version - state.checkpoint_version >= self.num_steps or state.has_all_steps
        if is_due and state.version > state.checkpoint_version:
            yield SaveCheckpoint(state.version, min(state.groups, default=state.next_group))
