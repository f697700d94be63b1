"""Expected output lengths: what a ranker would say of rollouts whose true lengths a simulation knows.

ranker    a rollout's expected length                             what it needs
none      the mean of all                                         nothing
oracle    its true one                                            nothing
recall    its true one with as much noise as the recall allows    `ranker_recall`
scores    by its place among real scores of a real ranker         `ranker_scores`
history   the mean of earlier samples of its prompt               lengths by prompt
recorded  what the recorded run expected                          a trace

Dispatch and order use only who comes before whom. A noisy place is turned back into the length that has
this place among all lengths, so expected lengths are as skewed as true ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Protocol, assert_never

import numpy as np
import numpy.typing as npt

from streamrl.runfile.workload_config import TAIL_SHARE, LengthsConfig
from streamrl.workload.data_files import read_csv

Lengths = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]
Past = Callable[[int, Lengths, int], Lengths]
"""Gives [num_groups, n] earlier lengths of the prompts of a block, of which these lengths were drawn."""

STREAM = 1  # keeps the noise's random numbers apart from those that draw lengths
MOST_NOISE = 64.0  # standard deviations of a normal score: nothing is left of the length
HALVINGS = 24  # of the interval that holds the noise: 4e-6 of it is far below what recall shows
NEIGHBOURS = 0.02
"""Share of a ranker's scores, to either side of a length, that stand for it: enough to vary, near enough to
keep how errors grow towards the tail."""

_PLACES = (np.arange(4096) + 0.5) / 4096


@cache
def _normal_scores() -> Numbers:
    """Return the standard normal quantile of every place."""
    return np.array([NormalDist().inv_cdf(place) for place in _PLACES])


class Ranker(Protocol):
    """Says what to expect of rollouts."""

    def expect(self, block: int, lengths: Lengths, age: Numbers) -> Numbers | Lengths:
        """Return the expected lengths of a block of groups with true `lengths` [num_groups, group_size].

        `age` [num_groups] goes from 0, in the step that the ranker was trained in, to 1.
        """
        ...


class Oracle:
    """Knows true lengths."""

    def expect(self, block: int, lengths: Lengths, age: Numbers) -> Lengths:
        """Return `lengths`."""
        return lengths


class Noisy:
    """Finds a given share of the longest 20 %, with normal noise on normal scores of length.

    For lognormal lengths this is noise on their logarithm. On StreamRL's histogram recall@20% = 0.87 then
    gives 0.84 and 0.82 at 10 and 5 %, where Table 4 has 0.82 and 0.76; noise on the logarithm of these
    bimodal lengths would give 0.81 and 0.61.
    """

    def __init__(
        self,
        population: Lengths,
        recall: float,
        seed: int,
        *,
        recall_to: float | None = None,
        correlation: float = 0.0,
    ) -> None:
        """Take lengths to calibrate on, recall@20% when new and at age 1, and what a group's noise shares."""
        self._population = np.sort(population, axis=None)
        self._correlation = correlation
        self._seed = seed
        z = np.random.default_rng(STREAM).standard_normal(len(self._population))
        scores = normal_scores(self._population, self._population)
        self.noise = calibrate(scores, z, self._population, recall)
        """Standard deviation of the noise, where that of normal scores is 1."""
        self.old_noise = self.noise
        if recall_to is not None:
            self.old_noise = calibrate(scores, z, self._population, recall_to)

    def expect(self, block: int, lengths: Lengths, age: Numbers) -> Numbers:
        """Return expected lengths, noisier with `age`."""
        rng = np.random.default_rng([self._seed, STREAM, block])
        shared = np.sqrt(self._correlation) * rng.standard_normal((len(lengths), 1))
        own = np.sqrt(1 - self._correlation) * rng.standard_normal(lengths.shape)
        noise = (self.noise + age * (self.old_noise - self.noise))[:, None]
        scores = normal_scores(lengths, self._population) + noise * (shared + own)
        places = np.interp(scores / np.sqrt(1 + noise**2), _normal_scores(), _PLACES)
        return length_at(places, self._population)


class Resampled:
    """Errs as a real ranker did: a length takes the place that the ranker gave to one of its neighbours.

    The neighbours of a length are those with nearly the same place in length. This keeps what normal noise
    does not: how errors depend on the length.
    """

    def __init__(
        self, population: Lengths, scores: Numbers, true_lengths: Numbers, seed: int
    ) -> None:
        self._population = np.sort(population, axis=None)
        self._seed = seed
        by_score = np.argsort(np.argsort(scores, kind="stable"), kind="stable")
        self._places = ((by_score + 0.5) / len(scores))[np.argsort(true_lengths, kind="stable")]
        """Places by score of the ranker's rollouts, shortest rollout first."""

    def expect(self, block: int, lengths: Lengths, age: Numbers) -> Numbers:
        """Return expected lengths."""
        rng = np.random.default_rng([self._seed, STREAM, block])
        size = len(self._places)
        reach = max(1.0, NEIGHBOURS * size)
        near = place(lengths, self._population) * size + rng.uniform(-reach, reach, lengths.shape)
        picked = self._places[np.clip(near, 0, size - 1).astype(np.int64)]
        jittered = picked + rng.uniform(-0.5, 0.5, lengths.shape) / size
        return length_at(jittered, self._population)


class History:
    """Expects of a prompt what its earlier samples were, on average."""

    def __init__(self, past: Past, num_samples: int) -> None:
        self._past = past
        self._num_samples = num_samples

    def expect(self, block: int, lengths: Lengths, age: Numbers) -> Numbers:
        """Return expected lengths, the same for all rollouts of a group."""
        means = self._past(block, lengths, self._num_samples).mean(axis=1, keepdims=True)
        return np.broadcast_to(means, lengths.shape)


def load_ranker(
    config: LengthsConfig, population: Callable[[], Lengths], past: Past | None, seed: int
) -> Ranker | None:
    """Make the ranker that `workload.lengths` names, or None where lengths tell nothing of what is expected.

    `population` draws lengths to calibrate on; `past` is None where lengths are not known by prompt.

    Raises:
        ValueError: the scores cannot be read.
    """
    match config.ranker:
        case "none" | "recorded":
            return None
        case "oracle":
            return Oracle()
        case "recall":
            return Noisy(
                population(),
                config.ranker_recall,
                seed,
                recall_to=config.ranker_recall_to,
                correlation=config.ranker_correlation,
            )
        case "scores":
            assert config.ranker_scores is not None, "check_run wants a file with scores"
            scores, lengths = read_scores(Path(config.ranker_scores))
            return Resampled(population(), scores, lengths, seed)
        case "history":
            assert past is not None, "check_run wants lengths by prompt"
            return History(past, config.ranker_history)
        case _:
            assert_never(config.ranker)


def recall_at(scores: Numbers | Lengths, lengths: Lengths, share: float) -> float:
    """Return the share of the longest `share` that is among the highest `share` by score.

    Lengths that tie with the shortest of the longest, such as those cut at a limit, count as found.
    """
    if len(scores) != len(lengths) or not len(lengths):
        raise ValueError(f"recall needs a score for each length, got {len(scores)}, {len(lengths)}")
    count = max(1, round(share * len(lengths)))
    shortest, lowest = _highest(lengths, count), _highest(scores, count)
    above = np.flatnonzero(scores > lowest)
    tied = np.flatnonzero(scores == lowest)[: count - len(above)]
    num_found = np.sum(lengths[above] >= shortest) + np.sum(lengths[tied] >= shortest)
    return float(num_found / count)


def _highest(values: Numbers | Lengths, count: int) -> float:
    """Return the lowest of the `count` highest values, in less time than it takes to sort them."""
    place = len(values) - count
    return float(np.partition(values, place)[place])


def calibrate(scores: Numbers, noise: Numbers, lengths: Lengths, recall: float) -> float:
    """Return what to multiply `noise` with so that noisy scores have `recall` of the longest 20 %.

    More noise finds fewer, so halving the interval finds it; see `recall_at`.
    """
    low, high = 0.0, MOST_NOISE
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if recall_at(scores + middle * noise, lengths, TAIL_SHARE) >= recall:
            low = middle
        else:
            high = middle
    return low


def place(values: Numbers | Lengths, ordered: Numbers | Lengths) -> Numbers:
    """Return the share of `ordered` values below each value, half of those equal to it counted."""
    below = np.searchsorted(ordered, values, side="left")
    upto = np.searchsorted(ordered, values, side="right")
    return (below + upto) / (2 * len(ordered))


def length_at(places: Numbers, ordered: Lengths) -> Numbers:
    """Return the length that has each place among `ordered` lengths: the inverse of `place`."""
    lengths: Numbers = np.interp(places * len(ordered) - 0.5, np.arange(len(ordered)), ordered)
    return lengths


def normal_scores(lengths: Lengths, ordered: Lengths) -> Numbers:
    """Return each length's place among `ordered` as the normal quantile that has this place."""
    scores: Numbers = np.interp(place(lengths, ordered), _PLACES, _normal_scores())
    return scores


def read_scores(path: Path) -> tuple[Numbers, Numbers]:
    """Read a ranker's held-out scores: a CSV file, or one in .gz, with columns score and output_tokens.

    Higher means expected to be longer; use one task family, since a mixture flatters any ranker.

    Raises:
        ValueError: naming the file and what is wrong with it.
    """
    key = "workload.lengths.ranker_scores"
    try:
        rows = read_csv(path)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None
    try:
        scores = [(row["score"], row["output_tokens"]) for row in rows]
        pairs = np.array(scores, dtype=np.float64)
    except (KeyError, TypeError, ValueError):
        raise ValueError(
            f"{key}: {path} needs columns score and output_tokens with a number in every row"
        ) from None
    if len(pairs) < 2 or not np.isfinite(pairs).all():
        raise ValueError(f"{key}: {path} needs two or more rows of finite numbers")
    return pairs[:, 0], pairs[:, 1]
