"""Compute the seconds of generating and training whole batches, by closed forms and lower bounds.

The planner compares thousands of trainers by the closed form. It uses the costs of
`streamrl.sim.costs.training`, but with four sums over a batch's rollouts and equal micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from streamrl.engine.systems import PASSES_PER_COMMAND, most_per_command, rollouts_that_fill
from streamrl.hardware.resolved import resolve
from streamrl.runfile.algorithm_config import AlgorithmConfig
from streamrl.runfile.config import Run
from streamrl.runfile.policies_config import StreamingName
from streamrl.runfile.roles_config import TrainerConfig
from streamrl.runfile.simulation_config import FrameworkConfig
from streamrl.sim.batch_generation import Finish, StepEnds
from streamrl.sim.costs.curves import DecodeCurve
from streamrl.sim.costs.training.layer import Pass
from streamrl.sim.costs.training.micro_batches import MicroBatch
from streamrl.sim.costs.training.training import TrainingCosts
from streamrl.workload.workload import Draw

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class GenerationTime:
    """Generation times of batches that follow each other: simulated, or by a closed form of episodes."""

    seconds: Floats
    """Seconds to the last rollout of each trained batch. If groups are rejected, replacements are
    included.
    """
    together: Floats
    """Seconds to the last rollout of each batch if all its groups start at once, as with
    overlapping steps.
    """
    turnovers: Floats
    """Sum of the end times of a batch's groups, divided by the number of trained groups. This is
    the step time if the number of groups under way is constant, so that each end starts another
    group.
    """
    shares: Floats
    """Seconds to the end of a replica's share of each batch, averaged over replicas. A batch takes
    this long if each replica starts its next share when it ends the one before.
    """
    arrivals: list[Arrivals]
    """When rollouts can be trained on, for each batch."""
    rollout_ends: list[Arrivals]
    """When rollouts end, whether or not their groups have, for computing rewards. Empty if rewards
    take no time.
    """

    @cached_property
    def mean(self) -> float:
        """Mean seconds of a batch."""
        return float(self.seconds.mean())

    @cached_property
    def _overlapping(self) -> tuple[float, float]:
        """Mean seconds of a share, and of a batch whose replicas are busy with others too."""
        return float(self.shares.mean()), float(max(self.together.mean(), self.turnovers.mean()))

    def scaled(self, factor: float) -> GenerationTime:
        """Return the times of batches that take `factor` times as long."""
        return GenerationTime(
            self.seconds * factor,
            self.together * factor,
            self.turnovers * factor,
            self.shares * factor,
            [each.scaled(factor) for each in self.arrivals],
            [each.scaled(factor) for each in self.rollout_ends],
        )

    def overlapping(self, num_batches: int) -> float:
        """Return the seconds of a step if `num_batches` batches are under way at any time."""
        share, under_way = self._overlapping
        return max(share, under_way / num_batches)

    def stream_end(self, train_time: Floats, fill: int = 1) -> Floats:
        """Return when trainers end that work on rollouts as they finish.

        A trainer that is never idle while enough work waits ends at the maximum over all commands.
        Each command adds the work that remains to the time when its last rollout can be trained on.

        Args:
            train_time: seconds of training for all rollouts, for each trainer.
            fill: rollouts that a command waits for, so that every rank has work.
        """
        return _mean_end([each.envelope(fill) for each in self.arrivals], train_time)

    def scored_end(self, seconds: float) -> float:
        """Return when all rewards are computed that take `seconds` in total."""
        envelopes = [each.envelope(1) for each in self.rollout_ends]
        return float(_mean_end(envelopes, np.array([seconds]))[0])


class Envelope(NamedTuple):
    """The arrivals of a batch that can limit those who work on it."""

    instants: Floats
    left: Floats
    """Share of all tokens that arrive at an instant or later."""


class Arrivals:
    """When the rollouts of a batch arrive at those who work on them, in order of time."""

    def __init__(self, times: Floats, tokens: Floats, counts: Floats) -> None:
        """Keep the arrivals.

        Args:
            times: seconds since the batch was distributed.
            tokens: output tokens that arrive.
            counts: rollouts that arrive.
        """
        self._times, self._tokens, self._counts = times, tokens, counts
        self._envelopes: dict[int, Envelope] = {}

    @classmethod
    def of(cls, finishes: Sequence[Finish]) -> Arrivals:
        """Return the arrivals of finished rollouts, which must be sorted by time."""
        columns = [(each.time, each.tokens * each.weight, each.weight) for each in finishes]
        return cls(*np.array(columns, dtype=float).T)

    def scaled(self, factor: float) -> Arrivals:
        """Return arrivals that take `factor` times as long."""
        return Arrivals(self._times * factor, self._tokens, self._counts)

    def envelope(self, fill: int) -> Envelope:
        """Return the arrivals that can limit a worker who waits for `fill` rollouts, or for the rest of the batch."""
        if fill not in self._envelopes:
            number = np.ceil(np.cumsum(self._counts) / fill - ROUNDING)
            lasts = np.flatnonzero(np.diff(number, append=np.inf))
            firsts = np.concatenate(([0], lasts[:-1] + 1))
            tokens = np.add.reduceat(self._tokens, firsts)
            left = np.cumsum(tokens[::-1])[::-1] / tokens.sum()
            instants = self._times[lasts]
            kept = _envelope(instants.tolist(), left.tolist())
            self._envelopes[fill] = Envelope(instants[kept], left[kept])
        return self._envelopes[fill]


ROUNDING = 1e-9
"""Error of a sum of weights, relative to one command."""


def _mean_end(envelopes: Sequence[Envelope], seconds: Floats) -> Floats:
    """Return the end of work that begins as rollouts arrive, averaged over batches."""
    ends = [(each.instants + each.left * seconds[:, None]).max(axis=1) for each in envelopes]
    mean: Floats = sum(ends) / len(ends)  # np.mean takes twice as long for so few numbers
    return mean


def summarize(
    batches: Sequence[StepEnds],
    num_replicas: int,
    *,
    waits_for_groups: bool,
    has_reward_time: bool = False,
) -> GenerationTime:
    """Return the generation time of several batches.

    Args:
        batches: when the rollouts of each batch finish.
        num_replicas: replicas to which each batch was distributed.
        waits_for_groups: whether training on a rollout waits until its whole group has finished.
        has_reward_time: whether rewards take time.
    """
    arrivals = [_by_group(ends.in_turn) if waits_for_groups else ends.in_turn for ends in batches]
    return GenerationTime(
        seconds=np.array([ends.in_turn[-1].time for ends in batches]),
        together=np.array([ends.at_once[-1].time for ends in batches]),
        turnovers=np.array([_turnover(ends) for ends in batches]),
        shares=np.array([_mean_share(ends.at_once, num_replicas) for ends in batches]),
        arrivals=[Arrivals.of(ends) for ends in arrivals],
        rollout_ends=[Arrivals.of(ends.in_turn) for ends in batches] if has_reward_time else [],
    )


def _turnover(ends: StepEnds) -> float:
    """Return the sum of the end times of all groups, divided by the number of trained groups."""
    complete = {finish.group: finish.time for finish in ends.at_once}
    return sum(complete.values()) / len({finish.group for finish in ends.in_turn})


def _mean_share(finishes: Sequence[Finish], num_replicas: int) -> float:
    """Return the time at which a replica ends its share, averaged over replicas. Finishes must be sorted by time."""
    ends = {finish.replica: finish.time * finish.weight for finish in finishes}
    return sum(ends.values()) / num_replicas


def _by_group(finishes: Sequence[Finish]) -> list[Finish]:
    """Return the finishes, each moved to the end of its group."""
    ends = {finish.group: finish.time for finish in finishes}
    return sorted(Finish(ends[finish.group], *finish[1:]) for finish in finishes)


def _envelope(instants: list[float], left: list[float]) -> list[int]:
    """Return the indices that maximize `instants + left * x` for some x >= 0: an upper hull."""
    hull: list[int] = []
    for place in range(len(instants) - 1, -1, -1):  # `left` rises, `instants` fall
        while len(hull) > 1 and _is_below(instants, left, hull[-2], hull[-1], place):
            hull.pop()
        hull.append(place)
    return hull


def _is_below(x: list[float], y: list[float], first: int, middle: int, last: int) -> bool:
    """Whether the middle one of three lines is nowhere above both others."""
    across = (x[middle] - x[first]) * (y[last] - y[first])
    return across <= (x[last] - x[first]) * (y[middle] - y[first])


class DealtBatch(NamedTuple):
    """Prompt and output tokens of the rollouts in a batch."""

    prompts: Floats
    outputs: Floats
    observed: Floats
    """Tokens of observations; zero without an environment."""

    @classmethod
    def of(cls, batch: Sequence[Draw]) -> DealtBatch:
        """Return the prompt and output tokens of every rollout."""
        pairs = [(draw.drawn.prompt_tokens, n) for draw in batch for n in draw.lengths]
        array = np.array(pairs, dtype=float)
        episodes = [each for draw in batch for each in draw.episodes]
        observed = [float(each.tokens - each.ends[-1]) for each in episodes]
        return cls(array[:, 0], array[:, 1], np.array(observed or [0.0] * len(array)))

    @property
    def lengths(self) -> list[int]:
        """Tokens of each rollout that a trainer reads: prompt, output and observations."""
        return [int(length) for length in self.prompts + self.outputs + self.observed]


class LeastTimes(NamedTuple):
    """Lower bounds on the seconds of replicas, for any distribution of rollouts."""

    longest: float
    """Seconds of the slowest rollout, alone on a replica."""
    work: float
    """Seconds of all tokens at the best decode batch, multiplied by the number of replicas."""


def least_times(curve: DecodeCurve, kv_capacity: float, work: DealtBatch) -> LeastTimes:
    """Return lower bounds on the decode of a batch.

    A step with b rollouts and S context tokens takes a(b) + c(b) S seconds. Prefill makes the first
    token of each rollout. No step holds more than `kv_capacity` output tokens, which bounds the
    number of steps from below. A convex function below a(b) at the mean batch size then bounds
    their time.
    """
    base, slope = np.array(curve.base[1:]), np.array(curve.per_context_token[1:])
    steps = work.outputs - 1
    held = steps * (steps + 1) / 2
    context = steps * work.prompts + held
    alone = steps * base.min() + context * slope.min()
    num_tokens = float(steps.sum())
    num_steps = max(num_tokens / len(base), float(held.sum()) / kv_capacity)
    together = num_steps * _convex_below(base, num_tokens / max(num_steps, 1.0))
    return LeastTimes(float(alone.max()), together + float(context.sum() * slope.min()))


def _convex_below(values: Floats, place: float) -> float:
    """Return the convex lower hull of values at 1, 2, ... and 0 at 0, evaluated at `place`."""
    places = np.arange(len(values) + 1.0)
    points = np.concatenate(([0.0], values))
    hull = [0]
    for right in range(1, len(points)):
        while len(hull) > 1 and _is_above(places, points, hull[-2], hull[-1], right):
            hull.pop()
        hull.append(right)
    return float(np.interp(place, places[hull], points[hull]))


def _is_above(x: Floats, y: Floats, left: int, middle: int, right: int) -> bool:
    """Whether the middle one of three points is not below the line through both others."""
    return bool(
        (y[middle] - y[left]) * (x[right] - x[left]) >= (y[right] - y[left]) * (x[middle] - x[left])
    )


PART, PART_FILLS = 4096, 16
"""Rollouts of a batch by which its closed form is checked. The second value is how many times they
fill all ranks.
"""


class Sums(NamedTuple):
    """Sums over rollouts that training costs depend on."""

    num_rollouts: int
    tokens: float
    squares: float
    longest: int


class FallingLengths:
    """Lengths of the rollouts in a step, in falling order."""

    def __init__(self, lengths: Sequence[int]) -> None:
        falling = np.sort(np.asarray(lengths, dtype=float))[::-1]
        self._tokens, self._squares = np.cumsum(falling), np.cumsum(falling**2)
        self._longest = int(falling[0])
        self.all = self.longest(len(falling))
        """Every rollout."""

    def longest(self, count: int) -> Sums:
        """Return the sums over the `count` longest rollouts."""
        last = min(count, len(self._tokens)) - 1
        return Sums(last + 1, float(self._tokens[last]), float(self._squares[last]), self._longest)


class BatchTimes(NamedTuple):
    """Seconds of training on a complete batch, without the optimizer; see `TrainTimes`."""

    whole: float
    stream: float
    optimizer: float


class TrainTimes(NamedTuple):
    """Seconds of a step's training, without the optimizer."""

    whole: float
    """Seconds of a complete batch, in one command of each kind."""
    stream: float
    """Seconds of a batch in the commands of a stream, if rollouts are available whenever the
    trainer is free.
    """
    last: float
    """Seconds of the last command of a stream, in which the longest rollouts come."""
    least: float
    """Seconds of the arithmetic alone, spread evenly over ranks."""
    optimizer: float
    """Seconds of gradient reduction and the optimizer step."""


def train_times(
    costs: TrainingCosts,
    framework: FrameworkConfig,
    factor: float,
    batches: Sequence[FallingLengths],
) -> TrainTimes:
    """Return the seconds of training on a batch, averaged over several; `least` is their minimum.

    Args:
        costs: the trainer's costs, without `factor`.
        framework: the section of the run file.
        factor: `costs.training_factor`, by which training is faster than its costs.
        batches: the rollouts of each step.
    """
    whole, stream, optimizer = batch_times(costs, framework, factor, batches)
    last = np.array([_last(costs, batch) for batch in batches]) / factor
    least = np.array([_least(costs, batch) for batch in batches]) / factor
    return TrainTimes(whole, stream, float(last.mean()), float(least.min()), optimizer)


def batch_times(
    costs: TrainingCosts,
    framework: FrameworkConfig,
    factor: float,
    batches: Sequence[FallingLengths],
) -> BatchTimes:
    """Return the part of `train_times` that compares trainers. The planner computes it for thousands of them."""
    updates = framework.optimizer_steps * framework.epochs
    turns = [_turns(costs, batch.all) for batch in batches]
    wholes = [_whole(costs, each, updates) for each in turns]
    streams = [_stream(costs, each, updates) for each in turns]
    whole, stream = (np.array([wholes, streams]) / factor).mean(axis=1).tolist()
    between = (updates - 1) * costs.optimizer_time / factor
    return BatchTimes(
        whole + between,
        stream + between,
        costs.optimizer_time / factor + costs.overhead_time,
    )


def times_of_trainer(
    run: Run, trainer: TrainerConfig, batches: Sequence[FallingLengths]
) -> BatchTimes:
    """Return the seconds of training on a batch with another trainer; see `batch_times`."""
    costs = TrainingCosts.load(resolve(replace(run, trainer=trainer)))
    return batch_times(costs, run.framework, run.costs.training_factor, batches)


def passes_time(
    costs: TrainingCosts,
    algorithm: AlgorithmConfig,
    batch: Sequence[int],
    streaming: StreamingName,
) -> float:
    """Return the seconds of a trainer's passes over a complete batch, computed one by one.

    Args:
        costs: the trainer's costs.
        algorithm: the section of the run file.
        batch: prompt and output tokens of each rollout, in order of arrival.
        streaming: the streaming mode, which decides the number of rollouts in a command.
    """
    line, now = costs.line(), 0.0
    most = most_per_command(costs.trainer, algorithm.rollouts_per_step, streaming)
    for start in range(0, len(batch), most):
        lengths = list(batch[start : start + most])
        if algorithm.needs_score:
            now = line.score(lengths, now)
        now = line.train(lengths, now)
    return line.finish(now)


def closed_form_error(
    costs: TrainingCosts,
    framework: FrameworkConfig,
    algorithm: AlgorithmConfig,
    batch: Sequence[int],
    streaming: StreamingName,
) -> float:
    """Return the ratio of a batch's passes, computed one by one, to their closed form.

    The closed form is up to a third too low if ranks wait for each other at each pass, as with ZeRO
    3 or expert ranks. Only a part of a large batch is computed.
    """
    part = batch[: max(PART, PART_FILLS * rollouts_that_fill(costs.trainer))]
    closed = _stream if streaming == "stream" else _whole
    updates = framework.optimizer_steps * framework.epochs
    seconds = closed(costs, _turns(costs, FallingLengths(part).all), updates)
    return passes_time(costs, algorithm, part, streaming) / seconds if seconds else 1.0


def _whole(costs: TrainingCosts, batch: Turns, updates: int) -> float:
    """Return the seconds of a batch in one command, with a number of optimizer updates."""
    return _commands(costs, batch, commands=1, fills=updates)


def _stream(costs: TrainingCosts, batch: Turns, updates: int) -> float:
    """Return the seconds of a batch whose commands keep the pipeline full.

    Scoring before a command empties the pipeline.
    """
    most = PASSES_PER_COMMAND * rollouts_that_fill(costs.trainer)
    commands = max(1, ceil(batch.num_rollouts / most))
    fills = max(updates, commands) if costs.num_scored else updates
    return _commands(costs, batch, commands=commands, fills=fills)


def _last(costs: TrainingCosts, batch: FallingLengths) -> float:
    """Return the seconds of a stream's last command, of the longest rollouts.

    A trainer that waits for rollouts takes as many as fill its ranks, and the remainder last. Commands
    of a busy one have more rollouts, so that the last one may have any number: the middle is taken.
    """
    fill = rollouts_that_fill(costs.trainer)
    remainder = (batch.all.num_rollouts - 1) % fill + 1
    longest = batch.longest((remainder + fill + 1) // 2)
    return _commands(costs, _turns(costs, longest), commands=1, fills=1)


def _least(costs: TrainingCosts, batch: FallingLengths) -> float:
    """Return the seconds of arithmetic on the slowest pipeline stage."""
    tokens, pairs = batch.all.tokens, batch.all.squares / 2
    num_stages = costs.trainer.pipeline_parallel
    work = [
        costs.epochs * costs.num_trained * costs.informative_share * seconds
        for seconds in _of_stages(_bare(costs.stages.forward, tokens, pairs), num_stages)
        + _of_stages(_bare(costs.stages.backward, tokens, pairs), num_stages)
    ]
    scored = (
        costs.num_scored
        * costs.informative_share
        * _of_stages(_bare(costs.stages.scored, tokens, pairs), num_stages)
    )
    return float(np.max(np.array(work) + scored)) / costs.trainer.data_parallel


class Turns(NamedTuple):
    """Times of a rank whose micro-batches are equal."""

    num_rollouts: int
    """Rollouts of all ranks."""
    scored: float
    """Seconds of the slowest stage for scoring all micro-batches."""
    trained: float
    """Seconds of the slowest stage for training on all micro-batches."""
    fill: float
    """Seconds to fill the pipeline with training and to empty it again."""
    score_fill: float = 0.0
    """The same with a scoring pass, if the scores of all stages are gathered after it."""


def _turns(costs: TrainingCosts, batch: Sums) -> Turns:
    """Return the times of scoring and training a batch, spread evenly over ranks and micro-batches.

    A rank needs at least the seconds of the longest rollout alone.
    """
    trainer, stages = costs.trainer, costs.stages
    num_micro, micro = _even_passes(trainer, batch)
    trained = stages.forward_times(micro) + stages.backward_times(micro)
    mean, longest = _of_stages(trained, trainer.pipeline_parallel)
    slowest = float(mean.max())
    fill = (float(mean.sum()) - slowest) / trainer.virtual_stages
    turns = max(num_micro * slowest, float(longest.max()))
    scored = score_fill = 0.0
    if costs.num_scored:
        num_micro, micro = _even_passes(trainer.scorer, batch)
        mean, longest = _of_stages(stages.scored_times(micro), trainer.pipeline_parallel)
        scored = max(num_micro * float(mean.max()), float(longest.max()))
        if costs.gathers_scores:
            score_fill = float(mean.sum() - mean.max()) / trainer.virtual_stages
    return Turns(batch.num_rollouts, scored, turns, fill, score_fill)


def _even_passes(trainer: TrainerConfig, batch: Sums) -> tuple[int, list[MicroBatch]]:
    """Return the micro-batches of a rank if all are equal, and the sizes of one and of the longest rollout alone."""
    ranks, is_packed = trainer.data_parallel, trainer.packing == "packed"
    longest = (batch.longest, batch.longest**2 / 2, batch.longest * is_packed)
    room = max(trainer.max_tokens_per_pass, batch.longest)
    num_micro = max(
        ceil(batch.num_rollouts / (ranks * trainer.micro_batch)), ceil(batch.tokens / ranks / room)
    )
    share = ranks * num_micro
    tokens = round(batch.tokens / share)
    repeats = round(tokens * batch.num_rollouts / share) * is_packed
    mean = (tokens, batch.squares / 2 / share, repeats)
    return num_micro, [mean, longest]


def _commands(costs: TrainingCosts, batch: Turns, *, commands: int, fills: int) -> float:
    """Return the seconds of scoring and training rollouts, given the number of commands and pipeline fills.

    Training fills a pipeline while scoring leaves it, unless scores are gathered. Models that take turns fill it one
    after the other.
    """
    switches, trained = costs.switches, costs.num_trained * costs.epochs
    if switches.train_time:
        fills *= costs.num_trained
    switched = costs.num_scored * switches.score_time + trained * switches.train_time
    turns = costs.num_scored * (batch.scored + batch.score_fill) + trained * batch.trained
    return commands * switched + costs.informative_share * (turns + fills * batch.fill)


def _bare(passes: Sequence[Pass], tokens: float, pairs: float) -> Floats:
    return np.array([one.per_token * tokens + one.per_pair * pairs for one in passes])


def _of_stages(slices: Floats, num_stages: int) -> Floats:
    """Return (..., stages) seconds from (..., slices): the sum over the slices of each stage."""
    if slices.shape[-1] == num_stages:
        return slices
    summed: Floats = slices.reshape(*slices.shape[:-1], -1, num_stages).sum(axis=-2)
    return summed
