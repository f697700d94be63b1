"""Which steps count, their mean, and how often its interval holds what it should."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from streamrl.hardware.operator_tables import Floats
from streamrl.record.steady_state import (
    LEAST_STEPS,
    START,
    end_of_transient,
    find_steady,
    half_width,
    student,
)

SEEDS = 200

ROUNDED = 1e-12
"""Share of a mean that the order of a sum may change."""


def autoregressive(correlation: float, spread: float, num: int, seed: int) -> Floats:
    """Return a sequence around 1, each value `correlation` times the one before it plus noise."""
    rng = np.random.default_rng([seed, round(100 * correlation) + 100])
    noise = rng.normal(size=num + 100) * spread * np.sqrt(1 - correlation**2)
    values = np.zeros(num + 100)
    for place in range(1, len(values)):
        values[place] = correlation * values[place - 1] + noise[place]
    found: Floats = 1 + values[100:]
    return found


def coverage(interval_of: Callable[[int], tuple[float, float]]) -> float:
    """Return how often an interval holds 1."""
    found = [interval_of(seed) for seed in range(SEEDS)]
    return sum(low <= 1 <= high for low, high in found) / SEEDS


# The interval -------------------------------------------------------------------------------------


@pytest.mark.parametrize("correlation", [-0.6, -0.3, 0.0, 0.3, 0.6, 0.8])
def test_the_interval_of_a_sequence_that_depends_on_itself_holds_its_mean(
    correlation: float,
) -> None:
    def interval(seed: int) -> tuple[float, float]:
        found = find_steady(autoregressive(correlation, 0.1, 400, seed)).interval
        assert found is not None
        return found

    assert 0.90 <= coverage(interval) <= 0.99


@pytest.mark.parametrize("values", [[1.7, 7.2], [10.0] * 4 + [22.0], [3.0, 1.0, 8.0]])
def test_steps_that_take_turns_come_to_their_mean_with_an_interval_that_holds_it(
    values: list[float],
) -> None:
    for cycles in (9, 24, 60):
        durations = (values * cycles)[: cycles * len(values)]
        found = find_steady(durations)
        assert found.interval is not None
        low, high = found.interval
        assert low * (1 - ROUNDED) <= np.mean(values) <= high * (1 + ROUNDED)
        assert found.step_time == pytest.approx(np.mean(values), rel=0.1 if cycles == 9 else 0.04)


def test_cycles_that_are_known_are_compared_whole() -> None:
    found = find_steady([10.0, 10.0, 22.0] * 12, cycle=3)
    assert (found.step_time, found.half_width) == (14.0, 0.0)
    assert found.first % 3 == 0


def test_a_mean_is_known_better_from_more_steps() -> None:
    widths = [find_steady(autoregressive(0.0, 0.1, num, 3)).half_width for num in (30, 120, 480)]
    assert None not in widths and sorted(widths, reverse=True) == widths  # type: ignore[type-var]


def test_too_few_steps_have_a_mean_and_no_interval() -> None:
    found = find_steady([50.0, 10.0, 12.0])
    assert (found.first, found.step_time, found.interval) == (1, 11.0, None)
    assert not found.is_within(1.0)
    assert find_steady([50.0]).step_time == 50.0


def test_the_scatter_about_a_drift_is_not_the_drift() -> None:
    drift = np.linspace(10, 20, 100)
    noise = np.random.default_rng(0).normal(size=100) * 0.1
    found = find_steady([99.0, *(drift + noise)], drifts=True)
    assert found.first == 1 and found.step_time == pytest.approx(15, abs=0.05)
    assert found.half_width is not None and 0.01 < found.half_width < 0.05


def test_students_quantile_is_that_of_tables() -> None:
    for freedom, quantile in ((4, 2.776), (9, 2.262), (19, 2.093), (120, 1.980)):
        assert student(freedom) == pytest.approx(quantile, rel=3e-3)


# The transient ------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [5, 15, 30])
def test_the_end_of_a_transient_is_found(length: int) -> None:
    ends = []
    for seed in range(50):
        values = autoregressive(0.0, 0.05, 100, seed)
        values[:length] += np.linspace(2, 0.5, length)
        ends.append(end_of_transient(values))
    assert min(end for end, _ in ends) == length
    assert np.median([end for end, _ in ends]) <= length + 10
    assert sum(is_over for _, is_over in ends) >= 40


def test_what_has_no_transient_loses_little_and_what_still_grows_has_not_settled() -> None:
    ends = [end_of_transient(autoregressive(0.0, 0.05, 100, seed))[0] for seed in range(100)]
    assert np.mean(ends) < 20
    growing = [10.0 + step for step in range(60)]
    assert not find_steady(growing).has_settled and not find_steady(growing).is_within(1.0)


def test_equal_steps_after_a_start_are_known_as_soon_as_there_are_enough() -> None:
    found = find_steady([300.0, *[100.0 + 1e-9 * (step % 3) for step in range(LEAST_STEPS - 1)]])
    assert found.first == 5 and found.is_within(1e-6)


def test_it_lasts_until_what_is_generated_meanwhile_is_steady_too() -> None:
    durations = autoregressive(0.0, 0.01, 60, 0)
    generated = np.full(60, 64.0)
    generated[:15] += 40
    assert find_steady(durations).first < 15 <= find_steady(durations, generated).first


def test_values_of_a_batch_do_not_make_an_interval_alone() -> None:
    assert half_width([1.0] * 9) is None and half_width([1.0] * 10) == 0.0
    assert half_width([0.3 + 1e-16 * (number % 3) for number in range(200)]) == 0.0
    assert (half_width([0.3 + 1e-6 * (number % 7) for number in range(200)]) or 0.0) > 0.0


@pytest.mark.parametrize(("num", "first"), [(1, 0), (2, 1), (5, 2), (8, START), (19, START)])
def test_of_few_steps_the_start_is_left_out_half_of_them_at_most(num: int, first: int) -> None:
    found = find_steady([300.0, 90.0, 95.0, *[100.0] * 17][:num])
    assert (found.first, found.last) == (first, num)
    drifting = find_steady([100.0] * num, drifts=True)
    assert drifting.first == min(1, num // 2)
