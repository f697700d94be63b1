"""Is a ranker worth listening to, and does it still know the work? Permutation tests over windows of groups.

worse than random    its recall is below chance, and so is its order: among 1,000 in which groups swap expectations it
                     agrees with the lengths as little as the ten worst, so nobody should listen
better               the same the other way round: one that was switched off is worth listening to again
drift                beside the windows since it was fitted, in a window recall or agreement are lower, outputs longer
                     or shorter, or prompts others; groups, whose rollouts are alike, are what is permuted, so the rate
                     of false alarms is the one that was asked for, whatever the distribution (Good, Permutation
                     Tests, 2000)

Recall alone, which some six groups of 32 decide, would tell a ranker that says the opposite from chance one time in two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from streamrl.runfile.workload_config import TAIL_SHARE
from streamrl.workload.posterior import KnownGroup

Floats = npt.NDArray[np.float64]

PERMUTATIONS = 999
REFERENCE_WINDOWS = 2  # that a later window is set beside: more wait longer, fewer see less
SURE = 0.01
"""Chance that a ranker that knows nothing is switched off after a window, or on again."""
SHIFTS = (
    "it finds fewer of the longest",
    "its order agrees less with the lengths",
    "outputs have other lengths",
    "other lengths are expected",
    "prompts have other lengths",
)
LOSSES = SHIFTS[:2]
"""Those which say that what was learnt of prompts does not hold any more."""


class Judgement(NamedTuple):
    """What a window says of a ranker."""

    recall: float
    """Share of the window's longest fifth that it put in its own."""
    at_random: float
    """The same of expectations that were dealt out to groups at random."""
    is_worse: bool
    is_better: bool
    shift: str | None
    """What has changed most since it was fitted; None where nothing has, but for chance."""


class RankerWatch:
    """Judges a ranker window by window."""

    def __init__(self, false_alarms: float, seed: int) -> None:
        """Take the chance of an alarm after a window in which nothing has changed."""
        self._false_alarms = false_alarms
        self._seed = seed
        self._num_windows = 0
        self._reference: list[Floats] = []

    def judge(self, window: Sequence[KnownGroup]) -> Judgement:
        """Compare what was stated of a window's rollouts, which each group has as many of, with what they took."""
        rng = np.random.default_rng([self._seed, self._num_windows])
        self._num_windows += 1
        long = longest(np.array([group.lengths for group in window]))
        picked = longest(np.array([group.stated for group in window]))
        num_long = float(long.sum())
        recall = float((picked * long).sum()) / num_long
        at_random = float(picked.mean(axis=0) @ long.sum(axis=0)) / num_long
        stated = _ranks([sum(group.stated) for group in window])
        lengths = _ranks([group.length for group in window])
        dealt = np.argsort(rng.random((PERMUTATIONS, len(window))), axis=1)
        agrees, chance = float(stated @ lengths), stated[dealt] @ lengths
        return Judgement(
            recall=recall,
            at_random=at_random,
            is_worse=recall < at_random and _share(chance <= agrees) <= SURE,
            is_better=recall > at_random and _share(chance >= agrees) <= SURE,
            shift=self._shift(_features(window, picked * long, stated * lengths), rng),
        )

    def begin_anew(self) -> None:
        """Take the windows to come as the ones that later ones are set beside: the ranker was fitted anew."""
        self._reference.clear()

    def _shift(self, features: Floats, rng: np.random.Generator) -> str | None:
        """Return which feature of groups [groups, features] lies further from the reference than chance explains."""
        if len(self._reference) < REFERENCE_WINDOWS:
            self._reference.append(features)
            return None
        pool = np.concatenate([features, *self._reference])
        picks = np.argsort(rng.random((PERMUTATIONS, len(pool))), axis=1)[:, : len(features)]
        drawn = pool[picks].sum(axis=1)
        spread = drawn.std(axis=0)
        scale = np.divide(1.0, spread, out=np.zeros_like(spread), where=spread > 0)
        found, chance = ((s - drawn.mean(axis=0)) * scale for s in (features.sum(axis=0), drawn))
        found, chance = _one_sided(found), _one_sided(chance)
        if _share(chance.max(axis=-1) >= found.max()) > self._false_alarms:
            return None
        return SHIFTS[int(found.argmax())]


def longest(values: Floats) -> Floats:
    """Return 1 for the longest fifth of `values` [groups, rollouts] and those that tie with its shortest; of ties a share."""
    count = max(1, round(TAIL_SHARE * values.size))
    shortest = np.partition(values, values.size - count, axis=None)[values.size - count]
    above, tied = values > shortest, values == shortest
    found: Floats = above + tied * ((count - above.sum()) / tied.sum())
    return found


def _ranks(values: Sequence[float]) -> Floats:
    """Return the places of values, of those that tie their mean, with mean 0 and spread 1; all 0 where all tie."""
    ordered = np.sort(values)
    places = np.searchsorted(ordered, values, "left") + np.searchsorted(ordered, values, "right")
    spread = float(places.std())
    found: Floats = (places - places.mean()) / (spread or 1.0)
    return found


def _features(window: Sequence[KnownGroup], hits: Floats, agreement: Floats) -> Floats:
    """Return [groups, len(SHIFTS)], of which sums over groups are compared."""
    found: Floats = np.column_stack(
        [
            -hits.sum(axis=1),
            -agreement,
            [group.length for group in window],
            [group.prior for group in window],
            np.log([group.prompt_tokens for group in window]),
        ]
    )
    return found


def _one_sided(scores: Floats) -> Floats:
    """Return how far standard scores lie out: of recall and agreement, the first, only a loss counts."""
    far = np.abs(scores)
    far[..., :2] = scores[..., :2]
    return far


def _share(of: npt.NDArray[np.bool_]) -> float:
    """Return the p-value: how often chance is as far out, what was seen counted in."""
    return float((1 + of.sum()) / (1 + PERMUTATIONS))
