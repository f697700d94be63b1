"""Which groups may start ahead of training: the closed forms of admission, over many places and versions."""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from math import ceil

import pytest

from streamrl.engine.presets import AdmissionWindow, System, window_of
from streamrl.runfile.config import whole_groups
from tests.runs import small_run

MANY = 10**6
SHARES = (0, 0.25, 0.5, 1, 1.5, 2)


def windows() -> list[tuple[AdmissionWindow, float]]:
    """Return windows of several batches, shares of a step ahead and pushes."""
    return [
        (AdmissionWindow(prompts, whole_groups(share, prompts), every), share)
        for prompts, share, every in product((1, 2, 4, 6), SHARES, (1, 2, 4))
    ]


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_whole_steps_ahead_and_a_push_a_step_admit_the_next_batches(staleness: int) -> None:
    prompts = 3
    window = AdmissionWindow(prompts, staleness * prompts)
    for version, place in product(range(7), range(40)):
        batches = place // prompts
        assert window.oldest(place) == max(0, batches - staleness)
        assert window.next_border(place) == (batches + 1) * prompts
        assert window.num_allowed(version, 5) == min(version + 1 + staleness, 5) * prompts


def test_what_may_be_drawn_is_what_may_start_under_the_version_that_is_pushed() -> None:
    for (window, _), version in product(windows(), range(9)):
        pushed = version - version % window.sync_every
        allowed = window.num_allowed(version, MANY)
        for place in range(allowed + 3 * window.prompts_per_step):
            assert (place < allowed) == (window.oldest(place) <= pushed)


def test_a_draw_ends_where_the_step_or_the_oldest_version_changes() -> None:
    for window, _ in windows():
        kinds = [(window.step(place), window.oldest(place)) for place in range(120)]
        for place in range(60):
            border = window.next_border(place)
            assert set(kinds[place:border]) == {kinds[place]} and kinds[border] != kinds[place]


def test_what_is_trained_in_its_place_is_never_staler_than_the_bound_and_reaches_it() -> None:
    for window, share in windows():
        lags = [window.step(place) - 1 - window.oldest(place) for place in range(240)]
        bound = System(max_staleness=share, sync_every=window.sync_every).staleness_bound
        assert bound == ceil(share) + window.sync_every - 1
        is_exact = Fraction(share) * window.prompts_per_step == window.num_ahead
        assert max(lags) == bound or not is_exact
        assert max(lags) <= bound and min(lags) >= 0


def test_a_share_of_groups_is_counted_by_its_digits() -> None:
    assert [whole_groups(0.29, 100), int(0.29 * 100)] == [29, 28]
    assert [whole_groups(share, 3) for share in (0.5, 1, 1.4, 2.0)] == [1, 3, 4, 6]


def test_a_run_file_says_how_far_ahead_groups_may_start() -> None:
    changes = {
        "policies.max_staleness": 0.5,
        "policies.sync_every": 3,
        "policies.consumption": "greedy",
        "policies.oversampling": 1.5,
        "algorithm.prompts_per_step": 5,
    }
    run = small_run(changes)
    assert window_of(run.policies, run.algorithm.prompts_per_step) == AdmissionWindow(
        5, 2, 3, num_extra=2
    )
