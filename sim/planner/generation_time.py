"""Seconds in which replicas generate whole batches: a bound at once, the exact figure by simulating each replica."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamrl.sim.batch_time import Finish
from streamrl.sim.costs.curves import DecodeCurve
from streamrl.sim.step_batches import StepEnds
from streamrl.workload.workload import Draw

Floats = NDArray[np.float64]


class GenerationTime(NamedTuple):
    """What replicas take for one batch after the other."""

    seconds: Floats
    """To the last rollout of each batch that is trained on, groups for those that are passed over drawn as these are."""
    together: Floats
    """To the last rollout of each batch with all groups drawn at once, as where steps overlap."""
    turnovers: Floats
    """To the end of each group of a batch, all of them added up, over the groups that are trained on: what a step takes
    where so many are under way at any time, and another is begun as one ends."""
    shares: Floats
    """To the end of a replica's share of each batch, the mean over replicas: what a batch takes replicas that begin the
    next one as they end theirs."""
    envelopes: list[tuple[Floats, Floats]]
    """For each batch, of the rollouts that can keep a trainer waiting alone: when one can be trained on, and the
    share of all tokens that can be then or later."""

    @property
    def mean(self) -> float:
        """Seconds of a batch."""
        return float(self.seconds.mean())

    def overlapping(self, num_batches: int) -> float:
        """Return the seconds of a step where so many batches are under way at any time."""
        under_way = max(self.together.mean(), self.turnovers.mean())
        return float(max(self.shares.mean(), under_way / num_batches))

    def stream_end(self, train_time: Floats) -> Floats:
        """Return when trainers are done that work on rollouts as they finish, each `train_time` for all of them.

        A server that is never idle while work waits is done at the latest of: an arrival, and all work from
        then on.
        """
        ends = [
            (instants + left * train_time[:, None]).max(axis=1) for instants, left in self.envelopes
        ]
        mean: Floats = np.mean(ends, axis=0)
        return mean


def summarize(
    batches: Sequence[StepEnds], num_replicas: int, *, waits_for_groups: bool
) -> GenerationTime:
    """Keep what later questions need of the ends of each batch's rollouts.

    Args:
        batches: when they are finished, by batch.
        num_replicas: replicas among which each batch was dealt.
        waits_for_groups: whether a rollout can be trained on only once all of its group are finished.
    """
    arrivals = [_by_group(ends.in_turn) if waits_for_groups else ends.in_turn for ends in batches]
    return GenerationTime(
        seconds=np.array([ends.in_turn[-1].time for ends in batches]),
        together=np.array([ends.at_once[-1].time for ends in batches]),
        turnovers=np.array([_turnover(ends) for ends in batches]),
        shares=np.array([_mean_share(ends.at_once, num_replicas) for ends in batches]),
        envelopes=[_envelope_of(ends) for ends in arrivals],
    )


def _turnover(ends: StepEnds) -> float:
    """Add up when groups end, of rising ends the last one of each, and divide by those that are trained on."""
    complete = {finish.group: finish.time for finish in ends.at_once}
    return sum(complete.values()) / len({finish.group for finish in ends.in_turn})


def _mean_share(finishes: Sequence[Finish], num_replicas: int) -> float:
    """Return when a replica ends its share, on average; of rising ends the last one stays."""
    ends = {finish.replica: finish.time * finish.weight for finish in finishes}
    return sum(ends.values()) / num_replicas


def _by_group(finishes: Sequence[Finish]) -> list[Finish]:
    """Put every rollout off to the end of its group."""
    ends = {finish.group: finish.time for finish in finishes}
    return sorted(finish._replace(time=ends[finish.group]) for finish in finishes)


def _envelope_of(finishes: Sequence[Finish]) -> tuple[Floats, Floats]:
    instants = np.array([finish.time for finish in finishes])
    tokens = np.array([finish.tokens * finish.weight for finish in finishes])
    left = np.cumsum(tokens[::-1])[::-1] / tokens.sum()
    kept = _envelope(instants, left)
    return instants[kept], left[kept]


def _envelope(instants: Floats, left: Floats) -> list[int]:
    """Return the places where `instants + left * x` is the largest of all for some x >= 0: an upper hull."""
    hull: list[int] = []
    for place in range(len(instants) - 1, -1, -1):  # by rising share left, falling instant
        while len(hull) > 1 and _is_below(instants, left, hull[-2], hull[-1], place):
            hull.pop()
        hull.append(place)
    return hull


def _is_below(x: Floats, y: Floats, first: int, middle: int, last: int) -> bool:
    """Whether the middle one of three lines is nowhere above both others."""
    return bool(
        (x[middle] - x[first]) * (y[last] - y[first])
        <= (x[last] - x[first]) * (y[middle] - y[first])
    )


class DealtBatch(NamedTuple):
    """A batch as replicas see it."""

    prompts: Floats
    outputs: Floats

    @classmethod
    def of(cls, batch: Sequence[Draw]) -> DealtBatch:
        """Take prompt and output tokens of every rollout."""
        pairs = [(draw.drawn.prompt_tokens, n) for draw in batch for n in draw.lengths]
        array = np.array(pairs, dtype=float)
        return cls(array[:, 0], array[:, 1])

    @property
    def lengths(self) -> list[int]:
        """Prompt and output tokens of each rollout."""
        return [int(length) for length in self.prompts + self.outputs]


class LeastTimes(NamedTuple):
    """Seconds that no replicas go below, whatever is dealt to whom."""

    longest: float
    """Of the slowest rollout alone on a replica."""
    work: float
    """Of all tokens at the batch that is best for them, times replicas."""


def least_times(curve: DecodeCurve, kv_capacity: float, work: DealtBatch) -> LeastTimes:
    """Bound the decode of a batch: every step costs a(b) + c(b) S, and prefill makes each first token.

    No step holds more than `kv_capacity` tokens of outputs, so all tokens take at least as many steps as that
    allows. These steps take no less than as many of the mean batch would, by what is convex below a(b).
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
    """Return the convex function below values at 1, 2, ..., and 0 at 0, at a place between them."""
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
