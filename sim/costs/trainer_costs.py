"""Seconds of what a trainer does: the one that leads, and those that follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sim.costs.machine import MachineCosts, MeasuredTraining
from sim.costs.training import TrainingCosts
from streamrl.hardware.memory import check_trainer_memory
from streamrl.hardware.tiers import Provenance
from streamrl.runfile.config import Run
from streamrl.runfile.trainers import trainer_key


@dataclass(frozen=True, kw_only=True)
class TrainerCosts:
    """Seconds of one trainer."""

    training: TrainingCosts | MeasuredTraining
    training_factor: float = 1.0
    """Seconds of score, train and the optimizer step are divided by it."""

    @property
    def optimizer_time(self) -> float:
        """Seconds of gradient reduction and optimizer step."""
        return self.training.optimizer_time / self.training_factor

    def score_time(self, lengths: Sequence[int], *, is_continued: bool = False) -> float:
        """Return the seconds of the forward passes that these rollouts (prompt + output tokens) need first.

        `is_continued` says that the trainer comes from other passes without a break.
        """
        seconds = self.training.score_time(lengths, is_continued=is_continued)
        return seconds / self.training_factor

    def train_time(self, lengths: Sequence[int], *, is_continued: bool = False) -> float:
        """Return the seconds of forward and backward passes over rollouts (prompt + output tokens)."""
        seconds = self.training.train_time(lengths, is_continued=is_continued)
        return seconds / self.training_factor


@dataclass(frozen=True, kw_only=True)
class FollowerCosts(TrainerCosts):
    """Of a trainer that follows, from its own section of the run file."""

    name: str
    provenance: Provenance

    @classmethod
    def load(cls, run: Run, trainer: int) -> FollowerCosts:
        """Put the costs of one trainer of a run together.

        Raises:
            ValueError: a profile is missing, or the trainer does not fit its memory.
        """
        seen, config = run.as_seen_by(trainer), run.costs
        check_trainer_memory(seen, trainer_key(trainer))
        training: TrainingCosts | MeasuredTraining
        if config.profile is not None:
            machine = MachineCosts.load(seen, Path(config.profile))
            training, provenance = machine.training, machine.provenance
        else:
            training = TrainingCosts.load(seen)
            provenance = Provenance.of(training.tier, training.sources)
        if config.training_factor != 1.0:
            source = f"run file: costs.training_factor={config.training_factor:g}"
            provenance = provenance.adjusted(source)
        return cls(
            name=run.followers[trainer - 1].name,
            training=training,
            training_factor=config.training_factor,
            provenance=provenance,
        )
