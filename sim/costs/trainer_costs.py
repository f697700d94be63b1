"""Seconds of what a trainer does: the one that leads, and those that follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from streamrl.hardware.memory import check_trainer_memory
from streamrl.hardware.tiers import Provenance
from streamrl.runfile.config import Run
from streamrl.runfile.trainers import trainer_key
from streamrl.sim.costs.calibrated import calibrated_sources
from streamrl.sim.costs.machine import MachineCosts, MeasuredTraining
from streamrl.sim.costs.training.line import Line, SerialLine
from streamrl.sim.costs.training.training import TrainingCosts


@dataclass(frozen=True)
class NoTraining:
    """Of a trainer that only counts: nothing takes it any time, as far as anybody has measured."""

    optimizer_time: float = 0.0
    overhead_time: float = 0.0

    def line(self) -> Line:
        """Return a line that is never in the way."""
        return SerialLine(lambda lengths: 0.0, lambda lengths: 0.0)


@dataclass(frozen=True, kw_only=True)
class TrainerCosts:
    """Seconds of one trainer."""

    training: TrainingCosts | MeasuredTraining | NoTraining
    training_factor: float = 1.0
    """Seconds of score, train and the optimizer step are divided by it."""

    @property
    def step_time(self) -> float:
        """Seconds of gradient reduction, optimizer step, and what the framework does beside."""
        training = self.training
        return training.optimizer_time / self.training_factor + training.overhead_time

    def line(self) -> Line:
        """Return the trainer's passes, before the first."""
        line = self.training.line()
        return line if self.training_factor == 1.0 else ScaledLine(line, self.training_factor)


class ScaledLine:
    """Another line, so many times as fast."""

    def __init__(self, line: Line, factor: float) -> None:
        self._line, self._factor = line, factor

    def score(self, lengths: Sequence[int], now: float) -> float:
        """See `Line`."""
        return self._line.score(lengths, now * self._factor) / self._factor

    def train(self, lengths: Sequence[int], now: float) -> float:
        """See `Line`."""
        return self._line.train(lengths, now * self._factor) / self._factor

    def finish(self, now: float) -> float:
        """See `Line`."""
        return self._line.finish(now * self._factor) / self._factor


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
        name = run.followers[trainer - 1].name
        if run.only_counts(trainer):
            return cls(name=name, training=NoTraining(), provenance=Provenance(shares={}))
        check_trainer_memory(seen, trainer_key(trainer))
        training: TrainingCosts | MeasuredTraining
        if config.profile is not None:
            machine = MachineCosts.load(seen, Path(config.profile))
            training, provenance = machine.training, machine.provenance
        else:
            training = TrainingCosts.load(seen)
            provenance = training.provenance
        if (told := calibrated_sources(seen).get("train")) is not None:
            provenance = provenance.adjusted(told)
        if config.training_factor != 1.0:
            source = f"run file: costs.training_factor={config.training_factor:g}"
            provenance = provenance.adjusted(source)
        return cls(
            name=name,
            training=training,
            training_factor=config.training_factor,
            provenance=provenance,
        )
