"""Expected output lengths in a simulation, which knows the true lengths.

    ranker    expected length of a rollout                            input
    none      the mean of all                                         nothing
    oracle    the true length                                         nothing
    recall    the true length with noise that matches a recall        `ranker_recall`
    scores    from its rank among scores of a real ranker             `ranker_scores`
    history   the mean of earlier samples of its prompt               lengths by prompt
    recorded  the expectation of the recorded run                     a trace

Dispatch and order use only ranks. A noisy rank is converted back into the length with this rank
among all lengths, so expected lengths are as skewed as true ones.
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
from streamrl.workload.data_files import parse_number, read_csv

Lengths = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]
Past = Callable[[int, Lengths, int], Lengths]
"""Returns [num_groups, n] earlier lengths of the prompts of a block, whose rollouts have the given lengths."""

STREAM = 1  # separates the random numbers of noise from those of lengths
MOST_NOISE = 64.0  # standard deviations of a normal score: the length has no influence left
HALVINGS = 24  # bisection steps for the noise: 2^-24 of the interval, far below what changes recall
NEIGHBOURS = 0.02
"""Share of a ranker's scores, on either side of a length, that it may be replaced by. Large enough to
vary, and small enough to keep how errors grow towards the tail.
"""

_PLACES = (np.arange(4096) + 0.5) / 4096


@cache
def _normal_scores() -> Numbers:
    """Return the standard normal quantile of every rank."""
    return np.array([NormalDist().inv_cdf(place) for place in _PLACES])


class Ranker(Protocol):
    """Predicts the lengths of rollouts."""

    def expect(self, block: int, lengths: Lengths, age: Numbers) -> Numbers | Lengths:
        """Return the expected lengths of a block of groups with true `lengths` [num_groups, group_size].

        `age` [num_groups] goes from 0, in the step that the ranker was trained in, to 1.
        """
        ...


class Oracle:
    """Returns the true lengths."""

    def expect(self, block: int, lengths: Lengths, age: Numbers) -> Lengths:
        """Return `lengths`."""
        return lengths


class Noisy:
    """Finds a given share of the longest 20 %, by normal noise on normal scores of length.

    For lognormal lengths this is noise on their logarithm. On StreamRL's histogram, recall@20% =
    0.87 then gives 0.84 at 10 % and 0.82 at 5 %; Table 4 has 0.82 and 0.76. Noise on the logarithm
    of these bimodal lengths would give 0.81 and 0.61.
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
        """Take lengths for the calibration, recall@20% at age 0 and at age 1, and the share of noise that a group has in common."""
        self._population = np.sort(population, axis=None)
        self._correlation = correlation
        self._seed = seed
        z = np.random.default_rng(STREAM).standard_normal(len(self._population))
        scores = normal_scores(self._population, self._population)
        self.noise = calibrate(scores, z, self._population, recall)
        """Standard deviation of the noise, relative to that of normal scores."""
        self.old_noise = self.noise
        if recall_to is not None:
            self.old_noise = calibrate(scores, z, self._population, recall_to)

    def expect(self, block: int, lengths: Lengths, age: Numbers) -> Numbers:
        """Return expected lengths, with noise that grows with `age`."""
        rng = np.random.default_rng([self._seed, STREAM, block])
        shared = np.sqrt(self._correlation) * rng.standard_normal((len(lengths), 1))
        own = np.sqrt(1 - self._correlation) * rng.standard_normal(lengths.shape)
        noise = (self.noise + age * (self.old_noise - self.noise))[:, None]
        scores = normal_scores(lengths, self._population) + noise * (shared + own)
        places = np.interp(scores / np.sqrt(1 + noise**2), _normal_scores(), _PLACES)
        return length_at(places, self._population)


class Resampled:
    """Repeats the errors of a real ranker: a length gets the score rank of one of its neighbours.

    Neighbours of a length are rollouts with nearly the same rank by length. Unlike normal noise,
    this keeps how errors depend on the length.
    """

    def __init__(
        self, population: Lengths, scores: Numbers, true_lengths: Numbers, seed: int
    ) -> None:
        self._population = np.sort(population, axis=None)
        self._seed = seed
        by_score = np.argsort(np.argsort(scores, kind="stable"), kind="stable")
        self._places = ((by_score + 0.5) / len(scores))[np.argsort(true_lengths, kind="stable")]
        """Ranks by score of the ranker's rollouts, shortest rollout first."""

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
    """Expects the mean of a prompt's earlier samples."""

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
    """Return the ranker that `workload.lengths` names, or None if expectations do not depend on lengths.

    `population` draws lengths to calibrate on; `past` is None if lengths are not known by prompt.

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

    Lengths that tie with the shortest of the longest, such as outputs cut at a limit, count as
    hits.
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
    """Return the lowest of the `count` highest values, without sorting all."""
    place = len(values) - count
    return float(np.partition(values, place)[place])


def calibrate(scores: Numbers, noise: Numbers, lengths: Lengths, recall: float) -> float:
    """Return the factor of `noise` for which noisy scores have `recall` of the longest 20 %.

    More noise lowers the recall, so bisection works; see `recall_at`.
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
    """Return the share of `ordered` values below each value, plus half of the equal ones."""
    below = np.searchsorted(ordered, values, side="left")
    upto = np.searchsorted(ordered, values, side="right")
    return (below + upto) / (2 * len(ordered))


def length_at(places: Numbers, ordered: Lengths) -> Numbers:
    """Return the length at each rank among `ordered` lengths: the inverse of `place`."""
    lengths: Numbers = np.interp(places * len(ordered) - 0.5, np.arange(len(ordered)), ordered)
    return lengths


def normal_scores(lengths: Lengths, ordered: Lengths) -> Numbers:
    """Return the normal quantile of each length's rank among `ordered`."""
    scores: Numbers = np.interp(place(lengths, ordered), _PLACES, _normal_scores())
    return scores


def read_scores(path: Path) -> tuple[Numbers, Numbers]:
    """Read a ranker's held-out scores from a CSV file, plain or .gz, with columns score and output_tokens.

    A higher score means a longer expected output. Use one task family, because a mixture makes any
    ranker look better.

    Raises:
        ValueError: the file is wrong; the message names it and the reason.
    """
    key = "workload.lengths.ranker_scores"
    try:
        rows = read_csv(path)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None
    try:
        scores = [[parse_number(row[name]) for name in ("score", "output_tokens")] for row in rows]
        pairs = np.array(scores, dtype=np.float64)
    except (KeyError, TypeError, AttributeError, ValueError):
        raise ValueError(
            f"{key}: {path} needs columns score and output_tokens with a number in every row"
        ) from None
    if len(pairs) < 2 or not np.isfinite(pairs).all():
        raise ValueError(f"{key}: {path} needs two or more rows of finite numbers")
    return pairs[:, 0], pairs[:, 1]
