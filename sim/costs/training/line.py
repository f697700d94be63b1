"""A trainer's passes one after the other, as commands bring them: when it can take more, and when all is done.

Each data-parallel rank works off what it was dealt, and waits for the others at the step. Ranks that share out
experts, or gather weights for every micro-batch, go in step instead: all wait for the slowest.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from statistics import fmean
from typing import Protocol

import numpy as np

from sim.costs.training.interleaved import interleave
from sim.costs.training.packing import deal, micro_batches
from sim.costs.training.pipeline import Pipeline
from sim.costs.training.stages import Stages
from streamrl.hardware.tables import Floats
from streamrl.runfile.sides_config import TrainerConfig


class Line(Protocol):
    """What a simulated trainer asks for seconds."""

    def score(self, lengths: Sequence[int], now: float) -> float:
        """Put rollouts (tokens of prompt and output) through forward passes; return when more can come."""
        ...

    def train(self, lengths: Sequence[int], now: float) -> float:
        """Put rollouts through forward and backward passes; return when more can come."""
        ...

    def finish(self, now: float) -> float:
        """Return when everything is done."""
        ...


class SerialLine:
    """One rank without a pipeline, whose commands take so many seconds each."""

    def __init__(self, score_time: TimeOf, train_time: TimeOf) -> None:
        self._score_time, self._train_time = score_time, train_time
        self._free_at = 0.0

    def score(self, lengths: Sequence[int], now: float) -> float:
        """See `Line`."""
        self._free_at = max(now, self._free_at) + self._score_time(lengths)
        return self._free_at

    def train(self, lengths: Sequence[int], now: float) -> float:
        """See `Line`."""
        self._free_at = max(now, self._free_at) + self._train_time(lengths)
        return self._free_at

    def finish(self, now: float) -> float:
        """See `Line`."""
        return max(now, self._free_at)


class TimeOf(Protocol):
    """Seconds of a command's rollouts."""

    def __call__(self, lengths: Sequence[int]) -> float:
        """Return the seconds of rollouts of so many tokens."""
        ...


class PipelinedLine:
    """Ranks with their pipelines."""

    def __init__(
        self,
        stages: Stages,
        trainer: TrainerConfig,
        *,
        scores: Sequence[float],
        trains: Sequence[float],
        share: float = 1.0,
        epochs: int = 1,
        mini_batch: float = inf,
        update_time: float = 0.0,
    ) -> None:
        """Begin with every rank free.

        Args:
            stages: seconds of micro-batches.
            trainer: how ranks share the work.
            scores: for every model that scores rollouts, the seconds in which it comes from host memory.
            trains: the same for every model that is trained.
            share: of the seconds of training that are spent; rollouts of advantage 0 are skipped.
            epochs: times that rollouts are trained on.
            mini_batch: rollouts between two optimizer steps; the last of a step is the trainer's own command.
            update_time: seconds of an optimizer step before that.
        """
        self._stages, self._trainer = stages, trainer
        self._scores, self._trains, self._share = scores, trains, share
        self._epochs, self._mini_batch, self._update_time = epochs, mini_batch, update_time
        self._num_trained = 0
        """Rollouts since the last optimizer step, or those of it that are under way."""
        self._goes_in_step = trainer.zero == 3 or trainer.expert_parallel > 1
        num_clocks = 1 if self._goes_in_step else trainer.data_parallel
        self._ranks = [Pipeline(trainer.pipeline_parallel) for _ in range(num_clocks)]

    def score(self, lengths: Sequence[int], now: float) -> float:
        """See `Line`."""
        for switch_time in self._scores:
            self._wait(switch_time, now)
            for rank, batches in zip(self._ranks, self._dealt(lengths, now), strict=True):
                times = self._slowest([self._stages.scored_times(b) for b in batches])
                for row, send in zip(self._by_stage(times), self._sends(batches), strict=True):
                    rank.score(row, send, now)
        return self._open_until()

    def train(self, lengths: Sequence[int], now: float) -> float:
        """See `Line`."""
        rest = list(lengths)
        while rest:
            if self._num_trained >= self._mini_batch:
                self._update()
            room = self._mini_batch - self._num_trained
            part = rest if len(rest) <= room else rest[: int(room)]
            rest = rest[len(part) :]
            self._num_trained += len(part)
            for epoch in range(self._epochs):
                if epoch:
                    self._update()
                    self._num_trained = len(part)
                self._train(part, now)
        return self._open_until()

    def finish(self, now: float) -> float:
        """See `Line`."""
        self._num_trained = 0
        return max(now, *(rank.drain() for rank in self._ranks))

    # Helpers --------------------------------------------------------------------------------------

    def _train(self, lengths: Sequence[int], now: float) -> None:
        for switch_time in self._trains:
            self._wait(switch_time, now)
            for rank, batches in zip(self._ranks, self._dealt(lengths, now), strict=True):
                forward = self._slowest([self._stages.forward_times(b) for b in batches])
                backward = self._slowest([self._stages.backward_times(b) for b in batches])
                forward, backward = forward * self._share, backward * self._share
                sends = self._sends(batches)
                if self._trainer.virtual_stages > 1:
                    self._interleave(rank, forward, backward, sends, now)
                    continue
                for one, other, send in zip(
                    forward.tolist(), backward.tolist(), sends, strict=True
                ):
                    rank.train(one, other, send, now)

    def _update(self) -> None:
        """Make an optimizer step between two mini-batches: every rank waits for the slowest."""
        done_at = max(rank.drain() for rank in self._ranks) + self._update_time
        for rank in self._ranks:
            rank.free_at = [done_at] * len(rank.free_at)
        self._num_trained = 0

    def _wait(self, seconds: float, now: float) -> None:
        """Let every stage spend seconds in which nothing else can be done."""
        if seconds:
            for rank in self._ranks:
                rank.drain()
                rank.free_at = [max(now, free) + seconds for free in rank.free_at]

    def _dealt(self, lengths: Sequence[int], now: float) -> list[list[list[tuple[int, float]]]]:
        """Return the micro-batches of each clock, by the ranks that keep it."""
        trainer = self._trainer
        if self._goes_in_step:
            loads = [0.0] * trainer.data_parallel
        else:
            loads = [max(0.0, rank.free_at[0] - now) for rank in self._ranks]
        dealt = deal(lengths, loads, self._stages.rollout_time, trainer)
        batches = [micro_batches(part, trainer) for part in dealt]
        return [batches] if self._goes_in_step else [[one] for one in batches]

    @staticmethod
    def _slowest(times: Sequence[Floats]) -> Floats:
        """Return the seconds of each micro-batch on the rank where it takes longest."""
        if len(times) == 1:
            return times[0]
        most = max(len(one) for one in times)
        padded = [np.pad(one, ((0, most - len(one)), (0, 0))) for one in times]
        return np.max(padded, axis=0)  # type: ignore[no-any-return]  # an array

    def _by_stage(self, times: Floats) -> list[list[float]]:
        """Add the slices of a stage up."""
        shape = (len(times), self._trainer.virtual_stages, self._trainer.pipeline_parallel)
        found: list[list[float]] = times.reshape(shape).sum(axis=1).tolist()
        return found

    def _sends(self, batches: Sequence[Sequence[tuple[int, float]]]) -> list[float]:
        """Return the seconds that each micro-batch of a clock takes from stage to stage."""
        longest = max(batches, key=len)
        return [self._stages.send * tokens for tokens, _ in longest]

    def _interleave(
        self, rank: Pipeline, forward: Floats, backward: Floats, sends: Sequence[float], now: float
    ) -> None:
        """Put a command through by itself; micro-batches of no work make them a multiple of the stages."""
        if not len(forward):
            return
        missing = -len(forward) % self._trainer.pipeline_parallel
        forward, backward = (np.pad(one, ((0, missing), (0, 0))) for one in (forward, backward))
        free_at = [max(now, free) for free in rank.free_at]
        rank.free_at = interleave(
            forward.tolist(),
            backward.tolist(),
            self._trainer.virtual_stages,
            free_at,
            max(sends),
        )
        rank.open_until = rank.free_at[0]

    def _open_until(self) -> float:
        """Return when a mean rank can take more."""
        return fmean(rank.open_until for rank in self._ranks)
