"""Which groups teach nothing, because all their rewards are equal, and are left out for others (DAPO's dynamic sampling)."""

from __future__ import annotations

from collections.abc import Iterable

from streamrl.engine.messages import Command, Skip
from streamrl.engine.state import State
from streamrl.engine.trainer_side import UNIFORM


class LeaveOutUniform:
    """Let a trainer pass over groups of one reward, as they are complete, until a step has cost too many of them.

    What the trainer that leads passes over is drawn anew, as anything that it lost, so that its steps are full.
    """

    def __init__(self, trainer: int) -> None:
        self.trainer = trainer

    def decide(self, state: State) -> Iterable[Command]:
        """Yield the groups that are left out; what comes beyond those that a step may cost is trained on."""
        trainer = state.trainers[self.trainer]
        if not trainer.uniform or state.is_stopping:
            return ()
        most_groups = (trainer.most_gen_batches - 1) * trainer.prompts_per_step
        num_left = most_groups - trainer.num_uniform
        if num_left <= 0:
            return ()
        found = [g for g in trainer.uniform.values() if not trainer.batch.has_begun(g)]
        return [Skip(group.id, trainer.id, UNIFORM) for group in found[:num_left]]
