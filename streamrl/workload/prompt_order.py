"""In which order prompts are drawn: epochs, mixtures of data sets, and tail batching.

Tail batching: the prompts expected to be longest, of several steps, make up one of these steps.

After RollPacker (arXiv 2509.21009): a step takes as long as its longest rollout, so one long step in
`tail_every` and short ones beside it generate sooner than steps that each have a few long rollouts.

    step of a cycle           is made of
    1 … tail_every - 1        the other groups, in data order
    tail_every                the `prompts_per_step` groups expected to be longest, in data order

What this changes in training is the order of the data and nothing else: over a cycle each group is trained on
once, as without it, but a step's mean length, and with it whatever goes with length such as difficulty, is not
that of the data. A group's number is its place in the new order: engine and policies draw, bound staleness and
consume as ever, nothing is put off once it has started, and a resumed run goes on where it was. RollPacker
starts more rollouts than it needs and puts off those that turn out long; here a ranker says so beforehand.
Groups that are dropped shift those after them by as many places, across the border of two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Protocol

import numpy as np

from streamrl.runfile.workload_config import WorkloadConfig

KEPT_EPOCHS = 4
"""Orders of prompts in memory: those of the epoch, of the next, and of prompts that tail batching puts off. Others are
made anew, so that memory does not grow with the run."""


class PromptOrder(Protocol):
    """Which prompt stands at which place of the data."""

    def prompt(self, place: int) -> int:
        """Return the index of the prompt at `place`, counted from the run's first."""
        ...


def make_order(workload: WorkloadConfig, seed: int, sizes: Sequence[int]) -> PromptOrder:
    """Return the order of the prompts of data sets that have `sizes` prompts, one after the other."""
    is_shuffled = workload.order == "shuffled"
    if len(sizes) == 1:
        return EpochOrder(seed, sizes[0]) if is_shuffled else FileOrder(sizes[0])
    return MixedOrder(seed, sizes, workload.source_weights, is_shuffled)


class FileOrder:
    """Prompts as they stand in their file, epoch after epoch."""

    def __init__(self, num_prompts: int) -> None:
        self._num_prompts = num_prompts

    def prompt(self, place: int) -> int:
        """Return the index of the prompt at `place`, counted from the run's first."""
        return place % self._num_prompts


class EpochOrder:
    """Prompts shuffled anew in every epoch.

    Args:
        seed: of the run.
        num_prompts: of an epoch.
        stream: tells orders of one seed apart.
    """

    def __init__(self, seed: int, num_prompts: int, stream: tuple[int, ...] = ()) -> None:
        self._seed = seed
        self._num_prompts = num_prompts
        self._stream = stream
        self._orders: dict[int, list[int]] = {}

    def prompt(self, place: int) -> int:
        """Return the index of the prompt at `place`, counted from the run's first."""
        epoch, position = divmod(place, self._num_prompts)
        if epoch not in self._orders:
            if len(self._orders) == KEPT_EPOCHS:
                del self._orders[min(self._orders)]
            rng = np.random.default_rng([self._seed, epoch, *self._stream])
            self._orders[epoch] = rng.permutation(self._num_prompts).tolist()
        return self._orders[epoch][position]


class MixedOrder:
    """Prompts of several data sets by weight, each in an order and in epochs of its own.

    Places come in rounds, as many of each data set as its share of the weights makes of all prompts, and at least one.
    Shuffled, a round's places are dealt out at random; in order of the files, each data set's evenly over the round.

    Args:
        seed: of the run.
        sizes: prompts of each data set, one after the other.
        weights: of each, above 0.
        is_shuffled: whether by the seed, or in order of the files.
    """

    def __init__(
        self, seed: int, sizes: Sequence[int], weights: Sequence[float], is_shuffled: bool
    ) -> None:
        self._own: list[PromptOrder] = [
            EpochOrder(seed, size, (1 + place,)) if is_shuffled else FileOrder(size)
            for place, size in enumerate(sizes)
        ]
        self._firsts = [sum(sizes[:place]) for place in range(len(sizes))]
        self._counts = apportion(sum(sizes), weights)
        self._dealt = _dealt(self._counts)
        self._round = (
            EpochOrder(seed, len(self._dealt)) if is_shuffled else FileOrder(len(self._dealt))
        )

    def prompt(self, place: int) -> int:
        """Return the index of the prompt at `place`, counted from the run's first."""
        data_set, number = self._dealt[self._round.prompt(place)]
        nth = place // len(self._dealt) * self._counts[data_set] + number
        return self._firsts[data_set] + self._own[data_set].prompt(nth)


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Return about `total` places shared out by weights: the nearest whole number for each, and at least one."""
    whole = sum(map(Fraction, weights))
    return [max(1, round(total * Fraction(weight) / whole)) for weight in weights]


def _dealt(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Return (data set, how many of it came before) at each place of a round, each data set's evenly over it."""
    places = [(each, number) for each, count in enumerate(counts) for number in range(count)]
    return sorted(places, key=lambda place: ((2 * place[1] + 1) / counts[place[0]], place))


Expect = Callable[[int, int], list[int]]
"""Gives the expected tokens of the longest rollout of each of `num` groups of the data from `first` on."""


class TailBatches:
    """Which group of the data stands at which place of the order that is trained on."""

    def __init__(self, prompts_per_step: int, tail_every: int, expect: Expect) -> None:
        self._num_long = prompts_per_step
        self._size = prompts_per_step * tail_every
        self._expect = expect
        self._cycles: dict[int, list[int]] = {}

    def source(self, group: int) -> int:
        """Return the place in the data of the group that is drawn as number `group`."""
        cycle, place = divmod(group, self._size)
        if cycle not in self._cycles:
            self._cycles[cycle] = self._order(cycle * self._size)
        return self._cycles[cycle][place]

    def _order(self, first: int) -> list[int]:
        """Put the longest groups of a cycle behind the others; of equals the later ones are put off."""
        expected = self._expect(first, self._size)
        places = sorted(range(self._size), key=lambda place: (expected[place], place))
        num_short = self._size - self._num_long
        order = sorted(places[:num_short]) + sorted(places[num_short:])
        return [first + place for place in order]
