"""Compute the order of prompts: epochs, mixtures of data sets, and tail batching.

Tail batching collects the groups expected to be longest from several steps into one step
(RollPacker, arXiv 2509.21009). A step takes as long as its longest rollout. So one long step and
several short ones in a cycle of `tail_every` steps finish earlier than steps that each have a few
long rollouts.

    step of a cycle           groups
    1 … tail_every - 1        the other groups, in data order
    tail_every                the `prompts_per_step` groups expected to be longest, in data order

Tail batching changes only the order of the data. In a cycle, each group is trained on once, as
without tail batching. But the mean length of a step is not the mean of the data, and neither is
anything that correlates with length, such as difficulty.

A group's number is its position in the new order. So the engine and its policies work as usual:
they draw, bound staleness and consume, started rollouts are never postponed, and a restarted run
continues at its position. RollPacker instead starts surplus rollouts and postpones those that turn
out long; here a ranker predicts them. A dropped group shifts later groups by one position, also
across the border of two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Protocol

import numpy as np

from streamrl.runfile.evaluation_config import EvaluationConfig
from streamrl.runfile.workload_config import WorkloadConfig
from streamrl.workload.data_files import count_rows

KEPT_EPOCHS = 4
"""Number of orders in memory: of this epoch, the next one, and prompts that tail batching postpones.
Older orders are computed again, so that memory does not grow with the run.
"""


class PromptOrder(Protocol):
    """The prompt at each position of the data."""

    def prompt(self, place: int) -> int:
        """Return the index of the prompt at `place`, counted from the first one of the run."""
        ...


def make_order(workload: WorkloadConfig, seed: int, sizes: Sequence[int]) -> PromptOrder:
    """Return the order of the prompts of data sets with `sizes` prompts, concatenated."""
    is_shuffled = workload.order == "shuffled"
    if len(sizes) == 1:
        return EpochOrder(seed, sizes[0]) if is_shuffled else FileOrder(sizes[0])
    return MixedOrder(seed, sizes, workload.source_weights, is_shuffled)


def held_out_lines(sizes: Sequence[int], share: float | None, seed: int) -> list[int]:
    """Return the lines that are held out: a random share of each data set, at least one line, in order.

    Args:
        sizes: prompts of each data set; lines count through all of them.
        share: share of each that is held out; None for none.
        seed: the run's seed.
    """
    found: list[int] = []
    first = 0
    for size in sizes if share is not None else ():
        assert share is not None
        num = _num_held_out(size, share)
        chosen = np.random.default_rng([seed, first, size]).permutation(size)[:num]
        found += [first + int(line) for line in sorted(chosen)]
        first += size
    return found


def count_held_out(config: EvaluationConfig, workload: WorkloadConfig) -> int | None:
    """Return the number of prompts of an evaluation; None if it follows from data sets that are not on this machine.

    Prompts that are too long are counted too, because only a tokenizer finds them.

    Raises:
        ValueError: a data set cannot be read.
    """
    if config.num_prompts is not None:
        return config.num_prompts
    if config.source is not None:
        return count_rows(config.source, "evaluation.prompts")
    assert config.share is not None, "checked with the run file"
    numbered = enumerate(workload.sources)
    sizes = [count_rows(source, workload.key(place)) for place, source in numbered]
    known = [_num_held_out(size, config.share) for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def _num_held_out(size: int, share: float) -> int:
    return min(size - 1, max(1, round(share * size)))


class FileOrder:
    """Prompts in file order, epoch after epoch."""

    def __init__(self, num_prompts: int) -> None:
        self._num_prompts = num_prompts

    def prompt(self, place: int) -> int:
        """Return the index of the prompt at `place`, counted from the first one of the run."""
        return place % self._num_prompts


class EpochOrder:
    """Prompts shuffled again in every epoch.

    Args:
        seed: the run's seed.
        num_prompts: prompts of an epoch.
        stream: separates several orders of one seed.
    """

    def __init__(self, seed: int, num_prompts: int, stream: tuple[int, ...] = ()) -> None:
        self._seed = seed
        self._num_prompts = num_prompts
        self._stream = stream
        self._orders: dict[int, list[int]] = {}

    def prompt(self, place: int) -> int:
        """Return the index of the prompt at `place`, counted from the first one of the run."""
        epoch, position = divmod(place, self._num_prompts)
        if epoch not in self._orders:
            if len(self._orders) == KEPT_EPOCHS:
                del self._orders[min(self._orders)]
            rng = np.random.default_rng([self._seed, epoch, *self._stream])
            self._orders[epoch] = rng.permutation(self._num_prompts).tolist()
        return self._orders[epoch][position]


class MixedOrder:
    """Prompts of several data sets by weight; each data set has its own order and epochs.

    Positions come in rounds. A round has prompts of each data set in proportion to its weight, at
    least one. If shuffled, the positions of a round are assigned to data sets at random. Otherwise
    each data set is spread evenly over the round.

    Args:
        seed: the run's seed.
        sizes: prompts of each data set, concatenated.
        weights: weight of each data set, above 0.
        is_shuffled: whether to shuffle by the seed, or keep the order of the files.
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
        self._dealt = _spread_evenly(self._counts)
        self._round = (
            EpochOrder(seed, len(self._dealt)) if is_shuffled else FileOrder(len(self._dealt))
        )

    def prompt(self, place: int) -> int:
        """Return the index of the prompt at `place`, counted from the first one of the run."""
        data_set, number = self._dealt[self._round.prompt(place)]
        nth = place // len(self._dealt) * self._counts[data_set] + number
        return self._firsts[data_set] + self._own[data_set].prompt(nth)


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Return integers that sum to about `total`, in proportion to the weights, each at least one."""
    whole = sum(map(Fraction, weights))
    return [max(1, round(total * Fraction(weight) / whole)) for weight in weights]


def _spread_evenly(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Return (data set, its prompts so far) for each position of a round, each data set spread evenly."""
    places = [(each, number) for each, count in enumerate(counts) for number in range(count)]
    return sorted(places, key=lambda place: ((2 * place[1] + 1) / counts[place[0]], place))


Expect = Callable[[int, int], list[int]]
"""Returns the expected tokens of the longest rollout for each of `num` groups of the data, from `first` on."""


class TailBatches:
    """The order of groups with tail batching."""

    def __init__(self, prompts_per_step: int, tail_every: int, expect: Expect) -> None:
        self._num_long = prompts_per_step
        self._size = prompts_per_step * tail_every
        self._expect = expect
        self._cycles: dict[int, list[int]] = {}

    def source(self, group: int) -> int:
        """Return the position in the data of the group that is drawn as number `group`."""
        cycle, place = divmod(group, self._size)
        if cycle not in self._cycles:
            self._cycles[cycle] = self._order(cycle * self._size)
        return self._cycles[cycle][place]

    def _order(self, first: int) -> list[int]:
        """Return the order of a cycle: the longest groups last. On a tie, the later groups are postponed."""
        expected = self._expect(first, self._size)
        places = sorted(range(self._size), key=lambda place: (expected[place], place))
        num_short = self._size - self._num_long
        order = sorted(places[:num_short]) + sorted(places[num_short:])
        return [first + place for place in order]
