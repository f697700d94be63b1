"""Seconds in which a trainer works off whole batches, in closed form: what screens thousands of trainers.

The same costs as `sim.costs.training` has, with the rollouts of a batch put together into four sums; commands of a
stream are taken to be equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.costs.passes import Pass
from sim.costs.training import TrainingCosts
from streamrl.engine.systems import PASSES_PER_COMMAND, rollouts_that_fill
from streamrl.runfile.config import Run

Floats = NDArray[np.float64]


class Sums(NamedTuple):
    """Rollouts, prompts and outputs counted, by what costs depend on."""

    num_rollouts: int
    tokens: float
    squares: float
    longest: int

    def part(self, share: float) -> Sums:
        """Return a command with a share of the rollouts, long and short ones alike."""
        return Sums(
            max(1, round(self.num_rollouts * share)),
            self.tokens * share,
            self.squares * share,
            self.longest,
        )


class FallingLengths:
    """The rollouts of a step."""

    def __init__(self, lengths: Sequence[int]) -> None:
        falling = np.sort(np.asarray(lengths, dtype=float))[::-1]
        self._tokens, self._squares = np.cumsum(falling), np.cumsum(falling**2)
        self._longest = int(falling[0])
        self.all = self.longest(len(falling))
        """Every rollout."""

    def longest(self, count: int) -> Sums:
        """Return the longest rollouts."""
        last = min(count, len(self._tokens)) - 1
        return Sums(last + 1, float(self._tokens[last]), float(self._squares[last]), self._longest)


class TrainTimes(NamedTuple):
    """Seconds of a step's training, the optimizer left out."""

    whole: float
    """Of a batch that is there at once, in one command a kind."""
    stream: float
    """Of a batch that is always there when the trainer is free, in the commands of a stream."""
    last: float
    """Of what a stream ends with: it waits for as many rollouts as fill the GPUs, and the longest come last."""
    least: float
    """Of the arithmetic alone, spread evenly over ranks."""
    optimizer: float
    """Of gradient reduction and optimizer step."""


def train_times(run: Run, costs: TrainingCosts, batches: Sequence[FallingLengths]) -> TrainTimes:
    """Return what a trainer takes for a batch, the mean over several; `least` is the least of them."""
    factor = run.costs.training_factor
    whole, stream, last, least = (
        np.array([one(run, costs, batch) for batch in batches]) / factor
        for one in (_whole, _stream, _last, _least)
    )
    return TrainTimes(
        float(whole.mean()),
        float(stream.mean()),
        float(last.mean()),
        float(least.min()),
        costs.optimizer_time / factor,
    )


def _whole(run: Run, costs: TrainingCosts, batch: FallingLengths) -> float:
    return _command(run, costs, batch.all, is_continued=False)


def _stream(run: Run, costs: TrainingCosts, batch: FallingLengths) -> float:
    most = PASSES_PER_COMMAND * rollouts_that_fill(run)
    num_commands = max(1, ceil(batch.all.num_rollouts / most))
    part = batch.all.part(1 / num_commands)
    first = _command(run, costs, part, is_continued=False)
    return first + (num_commands - 1) * _command(run, costs, part, is_continued=True)


def _last(run: Run, costs: TrainingCosts, batch: FallingLengths) -> float:
    return _command(run, costs, batch.longest(rollouts_that_fill(run)), is_continued=False)


def _least(run: Run, costs: TrainingCosts, batch: FallingLengths) -> float:
    score, train = (_even(run, one, batch.all) for one in (costs.forward, costs.train))
    return costs.num_scored * score + costs.num_trained * costs.informative_share * train


def _command(run: Run, costs: TrainingCosts, batch: Sums, *, is_continued: bool) -> float:
    """Seconds of scoring and training; training continues what scoring began."""
    seconds = 0.0
    if costs.num_scored:
        score = _pass(run, costs.forward, batch, is_continued=is_continued)
        seconds += costs.num_scored * (costs.switches.score_time + score)
        is_continued = True
    train = _pass(run, costs.train, batch, is_continued=is_continued)
    return seconds + costs.num_trained * (
        costs.switches.train_time + costs.informative_share * train
    )


def _pass(run: Run, one: Pass, batch: Sums, *, is_continued: bool) -> float:
    """Seconds of one pass, as `TrainingCosts.pass_time` has them."""
    trainer = run.trainer
    ranks = trainer.data_parallel
    room = max(trainer.max_tokens_per_pass, batch.longest)
    num_micro = max(
        ceil(batch.num_rollouts / (ranks * trainer.micro_batch)), ceil(batch.tokens / ranks / room)
    )
    even, gathered = _even(run, one, batch), num_micro * one.per_micro_batch
    if is_continued:
        return even + gathered
    bubble = (trainer.pipeline_parallel - 1) / num_micro
    return (max(even, one.rollout_time(batch.longest)) + gathered) * (1 + bubble)


def _even(run: Run, one: Pass, batch: Sums) -> float:
    seconds = one.per_token * batch.tokens + one.per_pair * batch.squares / 2
    return seconds / run.trainer.data_parallel
