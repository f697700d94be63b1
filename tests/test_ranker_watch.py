"""Drift is found and rarely imagined; a ranker that is worse than chance is told from one that is merely poor."""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest

from streamrl.workload.length_posterior import KnownGroup
from streamrl.workload.online_ranker import SHIFTS, RankerMonitor, longest

GROUPS, SIZE = 32, 8


def window(
    rng: np.random.Generator,
    *,
    skill: float = 0.7,
    growth: float = 0.0,
    prompts: float = 0.0,
    num: int = GROUPS,
) -> list[KnownGroup]:
    """Return groups whose ranker knows a share of what makes prompts differ; `skill` -1 says the opposite of all."""
    found = []
    for prompt in range(num):
        own, error = rng.normal(0, 0.7, 2)
        stated = skill * own + sqrt(1 - skill * skill) * error
        lengths = tuple((7 + growth + own + rng.normal(0, 0.5, SIZE)).tolist())
        tokens = max(1, int(np.exp(5 + prompts + rng.normal(0, 0.3))))
        found.append(KnownGroup(prompt, tokens, (stated,) * SIZE, (stated,) * SIZE, lengths))
    return found


def test_the_longest_fifth_shares_what_ties() -> None:
    assert longest(np.array([[1.0, 2, 3, 4, 5]])).tolist() == [[0, 0, 0, 0, 1]]
    assert longest(np.array([[1.0, 9], [9, 9], [3, 4], [5, 6], [7, 8]])).sum() == 2
    assert longest(np.full((2, 5), 3.0)).tolist() == [[0.2] * 5] * 2


def test_recall_is_that_of_the_longest_fifth_and_chance_finds_a_fifth() -> None:
    rng = np.random.default_rng(0)
    perfect = [
        KnownGroup(g.prompt, 1, g.priors, g.lengths, g.lengths) for g in window(rng, num=200)
    ]
    judgement = RankerMonitor(0.01, 0).judge(perfect)
    assert judgement.recall == 1.0
    assert judgement.is_better and not judgement.is_worse
    blind = [KnownGroup(g.prompt, 1, g.priors, (0.0,) * SIZE, g.lengths) for g in perfect]
    judgement = RankerMonitor(0.01, 0).judge(blind)
    assert judgement.recall == pytest.approx(0.2, abs=0.01)
    assert not judgement.is_better and not judgement.is_worse


def test_the_opposite_of_a_ranker_is_found_out_in_one_window() -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        assert RankerMonitor(0.01, seed).judge(window(rng, skill=-1.0)).is_worse


def test_a_ranker_that_knows_nothing_is_called_neither_worse_nor_better() -> None:
    rng = np.random.default_rng(1)
    watch = RankerMonitor(0.01, 1)
    found = [watch.judge(window(rng, skill=0.0)) for _ in range(300)]
    # each is one in a hundred by chance: 95 % of binomials of 300 lie below 8
    assert sum(judgement.is_worse for judgement in found) <= 7
    assert sum(judgement.is_better for judgement in found) <= 7


@pytest.mark.parametrize("rate", [0.01, 0.05])
def test_a_thousand_windows_without_drift_raise_as_many_alarms_as_was_asked_for(
    rate: float,
) -> None:
    alarms = judged = 0
    seed = 0
    while judged < 1000:
        rng = np.random.default_rng([7, seed])
        watch = RankerMonitor(rate, seed)
        seed += 1
        for number in range(12):  # a watch whose reference is not for ever: refits begin it anew
            judgement = watch.judge(window(rng, num=12))
            judged += number > 1
            alarms += judgement.shift is not None
    sigma = sqrt(1000 * rate * (1 - rate))
    assert abs(alarms - 1000 * rate) <= 1.96 * sigma


@pytest.mark.parametrize(
    ("change", "shift"),
    [
        ({"skill": -0.5}, SHIFTS[1]),
        ({"growth": 0.7}, SHIFTS[2]),
        ({"prompts": 0.5}, SHIFTS[4]),
    ],
)
def test_what_changed_is_found_soon_and_named(change: dict[str, float], shift: str) -> None:
    delays = []
    for seed in range(10):
        rng = np.random.default_rng([3, seed])
        watch = RankerMonitor(0.01, seed)
        assert [watch.judge(window(rng)).shift for _ in range(2)] == [None, None]
        for delay in range(1, 6):
            found = watch.judge(window(rng, **change)).shift
            if found is not None:
                delays.append(delay)
                assert found == shift
                break
    assert len(delays) == 10 and np.median(delays) <= 2


def test_a_ranker_that_grows_better_raises_no_alarm() -> None:
    rng = np.random.default_rng(5)
    watch = RankerMonitor(0.01, 5)
    for _ in range(2):
        watch.judge(window(rng, skill=0.1))
    assert [watch.judge(window(rng, skill=0.95)).shift for _ in range(3)] == [None] * 3


def test_after_a_refit_the_windows_to_come_are_what_later_ones_are_set_beside() -> None:
    rng = np.random.default_rng(6)
    watch = RankerMonitor(0.01, 6)
    for _ in range(2):
        watch.judge(window(rng))
    assert watch.judge(window(rng, growth=2.0)).shift is not None
    watch.restart_reference()
    assert [watch.judge(window(rng, growth=2.0)).shift for _ in range(4)] == [None] * 4
