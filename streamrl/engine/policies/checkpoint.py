"""When checkpoints are saved."""

from __future__ import annotations

from collections.abc import Iterable

from streamrl.engine.messages import Command, Generated, SaveCheckpoint, Verified
from streamrl.engine.state import State
from streamrl.runfile.evaluation_config import EvaluationConfig


class CheckpointEvery:
    """Save a trainer after every `num_steps` of its steps, and after its last one.

    The last one is that of the run, that before a detach, or that before an interruption. A failed save is retried until
    `max_attempts` in a row have failed; after an interruption it is not. With `evaluated`, each
    version that this section evaluates is saved too, because it may be the best one.
    """

    ignores = (Generated, Verified)

    def __init__(
        self,
        trainer: int,
        num_steps: int,
        max_attempts: int,
        evaluated: EvaluationConfig | None = None,
    ) -> None:
        self.trainer = trainer
        self.num_steps = num_steps
        self.max_attempts = max_attempts
        self.evaluated = evaluated

    def decide(self, state: State) -> Iterable[Command]:
        """Yield a due save, if the trainer is between two steps or the end of the run left its step unfinished."""
        trainer = state.trainers[self.trainer]
        if not trainer.is_free:
            return ()
        if state.saves_at_stop and not trainer.is_unsaved:
            return ()
        is_last = state.has_all_steps or trainer.is_away or state.saves_at_stop
        if trainer.batch.in_gradient and not is_last:
            return ()
        num_unsaved = trainer.version - trainer.checkpoint_version
        is_due = num_unsaved >= self.num_steps or is_last
        if self.evaluated is not None:
            is_due |= self.evaluated.is_due(trainer.version, state.num_steps)
        if not num_unsaved or not is_due:
            return ()
        if state.failure is not None or trainer.num_failed_saves >= self.max_attempts:
            return ()
        open_groups = {group.id for group in state.groups.values() if trainer.wants(group)}
        groups_done = min(open_groups, default=state.next_group)
        done_ahead = {g for g in range(groups_done, state.next_group) if g not in open_groups}
        done_ahead.update(group for group in trainer.done_before if group >= groups_done)
        ahead = tuple(sorted(done_ahead))
        return (SaveCheckpoint(trainer.version, groups_done, self.trainer, ahead),)
