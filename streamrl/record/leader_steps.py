"""When the leading trainer made its steps, read entry by entry: what a run's steady state is found from."""

from __future__ import annotations

from array import array

import numpy as np

from streamrl.engine.messages import (
    CheckpointSaved,
    Command,
    Event,
    Generated,
    ReplicaLost,
    RunStarted,
    Stepped,
    TrainerLost,
)
from streamrl.engine.trainer_side import LEADER
from streamrl.hardware.tables import Floats
from streamrl.record.trace import Trace


def read_steps(trace: Trace) -> LeaderSteps:
    """Read the leader's steps out of a trace."""
    steps = LeaderSteps()
    for time, event, commands in trace.entries:
        steps.record(time, event, commands)
    return steps


OF_STEPS = {Generated, Stepped, CheckpointSaved, RunStarted, TrainerLost, ReplicaLost}
"""Events that say something of steps: most do not, and every one passes here."""


class LeaderSteps:
    """The leader's steps so far, those that its loss took back left out.

    The step that comes after a loss has taken all the time since the last one that stayed.
    """

    def __init__(self) -> None:
        self.ended_at = array("d")
        self.num_generated = array("q")
        """Rollouts that ended in each step's time."""
        self.num_made = 0
        """Steps that were made, taken back or not."""
        self.num_failures = 0
        """Replicas and trainers that were lost."""
        self.num_before = 0
        """Steps of the training before the first of these, which legs before this one made."""
        self._num_saved = 0
        self._generated = 0
        self._generated_before = 0

    def __len__(self) -> int:
        return len(self.ended_at)

    @property
    def version(self) -> int:
        """The newest version that stayed."""
        return self.num_before + len(self)

    def record(self, time: float, event: Event, commands: list[Command]) -> None:
        """Take one entry of a trace."""
        if type(event) not in OF_STEPS:
            return
        match event:
            case Generated():
                self._generated += event.finish != "aborted"
            case Stepped(_, trainer) if trainer == LEADER:
                self._end_step(time)
            case CheckpointSaved(version, trainer) if trainer == LEADER:
                self._num_saved = version - self.num_before
            case RunStarted(version):
                self.num_before = version
            case TrainerLost(trainer):
                self.num_failures += 1
                if trainer == LEADER:
                    del self.ended_at[self._num_saved :]
                    del self.num_generated[self._num_saved :]
            case ReplicaLost():
                self.num_failures += 1
            case _:
                pass  # says nothing of steps

    def durations(self) -> Floats:
        """Return the seconds of each step: those since the one before it."""
        return np.diff(np.array(self.ended_at), prepend=0.0)

    def _end_step(self, time: float) -> None:
        self.ended_at.append(time)
        self.num_made += 1
        self.num_generated.append(self._generated - self._generated_before)
        self._generated_before = self._generated
