"""Seconds in which a trainer works off whole batches, in closed form: what screens thousands of trainers.

The same costs as `streamrl.sim.costs.training` has, with the rollouts of a batch put together into four sums, and all
micro-batches alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamrl.engine.systems import PASSES_PER_COMMAND, most_per_command, rollouts_that_fill
from streamrl.runfile.config import Run
from streamrl.runfile.policies_config import StreamingName
from streamrl.sim.costs.training.pass_time import Pass
from streamrl.sim.costs.training.training import TrainingCosts

Floats = NDArray[np.float64]
PART, PART_FILLS = 4096, 16
"""Rollouts of a batch by which its closed form is checked, and times that they fill all ranks."""


class Sums(NamedTuple):
    """Rollouts, prompts and outputs counted, by what costs depend on."""

    num_rollouts: int
    tokens: float
    squares: float
    longest: int


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
    framework = run.framework
    between = (framework.optimizer_steps * framework.epochs - 1) * costs.optimizer_time / factor
    return TrainTimes(
        float(whole.mean()) + between,
        float(stream.mean()) + between,
        float(last.mean()),
        float(least.min()),
        costs.optimizer_time / factor + costs.overhead_time,
    )


def passes_time(
    run: Run, costs: TrainingCosts, batch: Sequence[int], streaming: StreamingName
) -> float:
    """Return the seconds of the passes that a trainer is told to make for a batch that waits for it, one by one.

    Args:
        run: the run file, with the trainer's degrees.
        costs: the trainer's.
        batch: prompt and output tokens of each rollout, in the order in which they come.
        streaming: how many rollouts a command has.
    """
    line, now = costs.line(), 0.0
    most = most_per_command(run, streaming)
    for start in range(0, len(batch), most):
        lengths = list(batch[start : start + most])
        if run.algorithm.needs_score:
            now = line.score(lengths, now)
        now = line.train(lengths, now)
    return line.finish(now)


def closed_form_error(
    run: Run, costs: TrainingCosts, batch: Sequence[int], streaming: StreamingName
) -> float:
    """Return the seconds of a batch's passes, one by one, over what the closed form has.

    Where ranks go in step, as with ZeRO 3 or expert ranks, the closed form is up to a third low. Of a large batch a part
    tells.
    """
    part = batch[: max(PART, PART_FILLS * rollouts_that_fill(run))]
    closed = _stream if streaming == "stream" else _whole
    seconds = closed(run, costs, FallingLengths(part))
    return passes_time(run, costs, part, streaming) / seconds if seconds else 1.0


def _whole(run: Run, costs: TrainingCosts, batch: FallingLengths) -> float:
    fills = run.framework.optimizer_steps * run.framework.epochs
    return _commands(run, costs, batch.all, commands=1, fills=fills)


def _stream(run: Run, costs: TrainingCosts, batch: FallingLengths) -> float:
    """Seconds of a batch whose commands keep the pipeline full; with scores before each it runs dry in between."""
    most = PASSES_PER_COMMAND * rollouts_that_fill(run)
    commands = max(1, ceil(batch.all.num_rollouts / most))
    fills = run.framework.optimizer_steps * run.framework.epochs
    if costs.num_scored:
        fills = max(fills, commands)
    return _commands(run, costs, batch.all, commands=commands, fills=fills)


def _last(run: Run, costs: TrainingCosts, batch: FallingLengths) -> float:
    longest = batch.longest(rollouts_that_fill(run))
    return _commands(run, costs, longest, commands=1, fills=1)


def _least(run: Run, costs: TrainingCosts, batch: FallingLengths) -> float:
    """Seconds of arithmetic on the stage that has most."""
    tokens, pairs = batch.all.tokens, batch.all.squares / 2
    work = [
        run.framework.epochs * costs.num_trained * costs.informative_share * seconds
        for seconds in _of_stages(run, _bare(costs.stages.forward, tokens, pairs))
        + _of_stages(run, _bare(costs.stages.backward, tokens, pairs))
    ]
    scored = (
        costs.num_scored
        * costs.informative_share
        * _of_stages(run, _bare(costs.stages.scored, tokens, pairs))
    )
    return float(np.max(np.array(work) + scored)) / run.trainer.data_parallel


class Turns(NamedTuple):
    """A rank's micro-batches, all alike."""

    turns: float
    """Seconds of the slowest stage for all of them."""
    fill: float
    """Seconds until a pipeline is full, and until it is empty again."""


def _turns(run: Run, costs: TrainingCosts, batch: Sums) -> tuple[float, Turns]:
    """Return the score turns and train passes of a batch, spread evenly over ranks and micro-batches."""
    trainer, stages = run.trainer, costs.stages
    ranks, longest = trainer.data_parallel, (batch.longest, batch.longest**2 / 2)
    room = max(trainer.max_tokens_per_pass, batch.longest)
    num_micro = max(
        ceil(batch.num_rollouts / (ranks * trainer.micro_batch)), ceil(batch.tokens / ranks / room)
    )
    share = ranks * num_micro
    mean = (round(batch.tokens / share), batch.squares / 2 / share)
    micro = [mean, longest]
    scored = stages.scored_times(micro)
    trained = stages.forward_times(micro) + stages.backward_times(micro)
    return _turn(run, scored, num_micro).turns, _turn(run, trained, num_micro)


def _turn(run: Run, times: Floats, num_micro: int) -> Turns:
    """Add the slices of a stage up; the longest rollout takes a rank no less than it takes alone."""
    mean, longest = (_of_stages(run, row) for row in times)
    slowest = float(mean.max())
    fill = (float(mean.sum()) - slowest) / run.trainer.virtual_stages
    return Turns(max(num_micro * slowest, float(longest.max())), fill)


def _commands(
    run: Run, costs: TrainingCosts, rollouts: Sums, *, commands: int, fills: int
) -> float:
    """Seconds of scoring and training rollouts in so many commands, in which pipelines fill so often.

    Training fills a pipeline while scores leave it; models that take turns fill it one by one.
    """
    switches, trained = costs.switches, costs.num_trained * run.framework.epochs
    score_turns, train = _turns(run, costs, rollouts)
    if switches.train_time:
        fills *= costs.num_trained
    switched = costs.num_scored * switches.score_time + trained * switches.train_time
    turns = costs.num_scored * score_turns + trained * train.turns
    return commands * switched + costs.informative_share * (turns + fills * train.fill)


def _bare(passes: Sequence[Pass], tokens: float, pairs: float) -> Floats:
    return np.array([one.per_token * tokens + one.per_pair * pairs for one in passes])


def _of_stages(run: Run, slices: Floats) -> Floats:
    """Add the slices of each stage up."""
    summed: Floats = slices.reshape(-1, run.trainer.pipeline_parallel).sum(axis=0)
    return summed
