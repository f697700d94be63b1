"""In which order prompts come: each once an epoch, by the run's seed or as they stand in their files."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Protocol

import numpy as np

from streamrl.runfile.config import Run

KEPT_EPOCHS = 4
"""Orders of prompts in memory: those of the epoch, of the next, and of prompts that tail batching puts off. Others are
made anew, so that memory does not grow with the run."""


class PromptOrder(Protocol):
    """Which prompt stands at which place of the data."""

    def prompt(self, place: int) -> int:
        """Return the index of the prompt at `place`, counted from the run's first."""
        ...


def make_order(run: Run, sizes: Sequence[int]) -> PromptOrder:
    """Return the order of the prompts of data sets that have `sizes` prompts, one after the other."""
    is_shuffled = run.workload.order == "shuffled"
    if len(sizes) == 1:
        return EpochOrder(run.seed, sizes[0]) if is_shuffled else FileOrder(sizes[0])
    return MixedOrder(run.seed, sizes, run.workload.source_weights, is_shuffled)


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
