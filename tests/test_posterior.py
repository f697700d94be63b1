"""What a prompt's past says: the normal model's posterior, its variances and slope from windows of groups."""

from __future__ import annotations

import numpy as np
import pytest

from streamrl.workload.length_posterior import PRIOR_SAMPLES, KnownGroup, Posterior

WITHIN, BETWEEN = 0.25, 0.5  # variances of log lengths


def groups(
    num: int, seed: int = 0, *, size: int = 8, slope: float = 1.0, level: float = 6.0
) -> list[KnownGroup]:
    """Return groups of prompts with priors of spread 1, drawn from the model."""
    rng = np.random.default_rng(seed)
    found = []
    for prompt in range(num):
        prior = float(rng.normal())
        own = level + slope * prior + rng.normal(0, np.sqrt(BETWEEN))
        lengths = tuple((own + rng.normal(0, np.sqrt(WITHIN), size)).tolist())
        found.append(KnownGroup(prompt, 100, (prior,) * size, (prior,) * size, lengths))
    return found


def group(prompt: int, prior: float, *lengths: float) -> KnownGroup:
    return KnownGroup(prompt, 10, (prior,) * len(lengths), (prior,) * len(lengths), lengths)


def test_before_anything_is_known_the_prior_is_expected() -> None:
    assert Posterior().expect(3.5, prompt=1) == 3.5


def test_known_lengths_shrink_towards_the_prior_by_their_number() -> None:
    posterior = Posterior()
    posterior.learn(
        [group(0, 1.0, 4.0), group(1, 1.0, 6.0)]
    )  # one rollout each: nothing of spreads
    assert posterior.weight == PRIOR_SAMPLES == 1
    # the level is 5; prompt 0 was 1 below it, and counts as much as the prior
    assert posterior.expect(1.0, prompt=0) == pytest.approx(4.5)
    assert posterior.expect(1.0, prompt=1) == pytest.approx(5.5)
    assert posterior.expect(1.0, prompt=2) == posterior.expect(1.0, None) == pytest.approx(5.0)
    posterior.learn([group(0, 1.0, 4.0), group(1, 1.0, 6.0)])
    assert posterior.expect(1.0, prompt=0) == pytest.approx(5 - 2 / 3)


def test_a_prompt_keeps_its_place_where_all_lengths_grow() -> None:
    posterior = Posterior()
    posterior.learn([group(0, 0.0, 4.0), group(1, 0.0, 6.0)])
    before = posterior.expect(0.0, 1) - posterior.expect(0.0, 0)
    posterior.learn([group(2, 0.0, 14.0), group(3, 0.0, 16.0)])
    assert posterior.expect(0.0, 1) - posterior.expect(0.0, 0) == pytest.approx(before)
    assert posterior.expect(0.0, 9) == pytest.approx(15.0)


def test_weight_and_slope_are_those_that_the_data_was_drawn_with() -> None:
    for slope in (1.0, 0.4):
        posterior = Posterior()
        posterior.learn(groups(4000, slope=slope))
        assert posterior.weight == pytest.approx(WITHIN / BETWEEN, rel=0.1)
        assert posterior.slope == pytest.approx(slope, abs=0.05)


def test_a_prior_that_says_the_opposite_is_given_no_weight() -> None:
    posterior = Posterior()
    posterior.learn(groups(400, slope=-1.0))
    assert posterior.slope == 0.0


def test_the_posterior_errs_less_than_prior_or_past_alone() -> None:
    posterior = Posterior()
    drawn = groups(2000)
    posterior.learn(
        [KnownGroup(g.prompt, 1, g.priors[:2], g.stated[:2], g.lengths[:2]) for g in drawn]
    )
    later = np.array([np.mean(g.lengths[2:]) for g in drawn])
    known = np.array([posterior.expect(g.prior, g.prompt) for g in drawn])
    prior = np.array([posterior.expect(g.prior, None) for g in drawn])
    past = np.array([np.mean(g.lengths[:2]) for g in drawn])
    errors = [float(np.mean((each - later) ** 2)) for each in (known, prior, past)]
    assert errors[0] < 0.9 * min(errors[1:])


def test_what_is_forgotten_counts_no_more() -> None:
    posterior = Posterior()
    posterior.learn(groups(64, slope=0.0))
    posterior.forget(keeps_prompts=True)
    posterior.learn(groups(64, seed=1))
    fresh = Posterior()
    fresh.learn(groups(64, seed=1))
    assert (posterior.slope, posterior.weight) == (fresh.slope, fresh.weight)
    assert posterior.expect(0.0, 3) != fresh.expect(0.0, 3)
    posterior.forget(keeps_prompts=False)
    posterior.learn(groups(64, seed=1))
    assert posterior.expect(0.0, 3) == fresh.expect(0.0, 3)
