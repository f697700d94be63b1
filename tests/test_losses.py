"""Losses and advantages against their formulas, and against each other on-policy."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.executor.trainer import losses
from streamrl.runfile.algorithms import algorithm_named

CLIP, CAP = 0.2, 2.0


def make_tokens(log_ratios: list[float], values: list[float] | None = None) -> losses.Tokens:
    """Tokens of two rollouts whose policy / behaviour ratio is `exp(log_ratios)`."""
    count = len(log_ratios)
    behaviour = torch.linspace(-3.0, -0.5, count)
    logprobs = (behaviour + torch.tensor(log_ratios)).requires_grad_()
    return losses.Tokens(
        logprobs=logprobs,
        behaviour=behaviour,
        advantages=torch.tensor(values or [1.0, -0.5] * (count // 2)),
        rollouts=torch.arange(count) * 2 // count,
        proximal=logprobs.detach().clone(),
    )


def gradient(tokens: losses.Tokens, correction: str) -> torch.Tensor:
    """The loss's gradient by the log-probabilities."""
    loss = losses.policy_losses(tokens, correction, clip=CLIP, cap=CAP).sum()
    return torch.autograd.grad(loss, tokens.logprobs)[0]


def test_token_logprobs_are_the_log_softmax_at_the_temperature() -> None:
    logits = torch.randn(5, 11, generator=torch.Generator().manual_seed(0))
    chosen = torch.tensor([0, 10, 3, 3, 7])
    expected = (logits / 0.7).log_softmax(-1)[torch.arange(5), chosen]
    torch.testing.assert_close(losses.token_logprobs(logits, chosen, 0.7), expected)


def test_on_policy_every_correction_has_the_policy_gradient() -> None:
    for correction in losses.CORRECTIONS:
        tokens = make_tokens([0.0] * 6, [1.0] * 3 + [-0.5] * 3)
        torch.testing.assert_close(gradient(tokens, correction), -tokens.advantages)


def test_none_stops_the_gradient_exactly_where_the_ppo_clip_binds() -> None:
    ratios = [math.log(1.3), math.log(1.3), math.log(0.7), math.log(0.7)]
    tokens = make_tokens(ratios, [1.0, -1.0, 1.0, -1.0])
    expected = torch.tensor([0.0, 1.3, -0.7, 0.0])
    torch.testing.assert_close(gradient(tokens, "none"), expected)
    sums = losses.diagnostic_sums(tokens, "none", clip=CLIP, cap=CAP)
    assert losses.diagnostics(sums)["clip_fraction"] == 0.5


def test_token_tis_weighs_by_the_ratio_up_to_the_cap() -> None:
    tokens = make_tokens([math.log(0.1), 0.0, math.log(1.5), math.log(50)], [1.0] * 4)
    weights = losses.correction_weights(tokens, "token-tis", CAP)
    torch.testing.assert_close(weights, torch.tensor([0.1, 1.0, 1.5, CAP]))
    torch.testing.assert_close(gradient(tokens, "token-tis"), -weights)


def test_seq_tis_weighs_a_rollout_by_the_capped_product_of_its_ratios() -> None:
    tokens = make_tokens([math.log(4), math.log(0.25), math.log(3), 0.0, math.log(0.5), 0.0])
    weights = losses.correction_weights(tokens, "seq-tis", CAP)
    torch.testing.assert_close(weights, torch.tensor([CAP, CAP, CAP, 0.5, 0.5, 0.5]))


def test_icepop_masks_tokens_outside_its_band_on_both_sides() -> None:
    tokens = make_tokens([math.log(0.4), math.log(0.6), math.log(1.9), math.log(2.1)])
    weights = losses.correction_weights(tokens, "icepop", CAP)
    torch.testing.assert_close(weights, torch.tensor([0.0, 0.6, 1.9, 0.0]))
    assert gradient(tokens, "icepop")[[0, 3]].eq(0).all()
    sums = losses.diagnostic_sums(tokens, "icepop", clip=CLIP, cap=CAP)
    assert losses.diagnostics(sums)["truncated_fraction"] == 0.5


def test_decoupled_clips_against_the_proximal_and_weighs_proximal_by_behaviour() -> None:
    tokens = make_tokens([0.0] * 4, [1.0] * 4)
    away = torch.tensor([1.1, 1.5, 1.0, 1.0]).log()
    stale = torch.tensor([1.0, 1.0, 0.5, 9.0]).log()
    tokens = dataclasses.replace(
        tokens,
        proximal=tokens.logprobs.detach() - away,
        behaviour=tokens.logprobs.detach() - away - stale,
    )
    torch.testing.assert_close(gradient(tokens, "decoupled"), -torch.tensor([1.1, 0.0, 0.5, CAP]))


def test_decoupled_without_a_score_pass_is_refused() -> None:
    tokens = dataclasses.replace(make_tokens([0.0] * 2), proximal=None)
    with pytest.raises(ValueError, match="score pass"):
        losses.policy_losses(tokens, "decoupled", clip=CLIP, cap=CAP)


@settings(deadline=None)  # a busy machine is no failure
@given(st.lists(st.floats(-200, 200), min_size=2, max_size=8), st.sampled_from(losses.CORRECTIONS))
def test_no_ratio_makes_a_loss_or_a_gradient_that_is_not_finite(
    log_ratios: list[float], correction: str
) -> None:
    tokens = make_tokens(log_ratios, [-1.0] * len(log_ratios))
    assert losses.policy_losses(tokens, correction, clip=CLIP, cap=CAP).isfinite().all()
    assert gradient(tokens, correction).isfinite().all()


def test_both_kl_estimators_are_unbiased_and_k3_is_never_negative() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(30, generator=generator).log_softmax(-1) for _ in range(2))
    kl = (q.exp() * (q - p)).sum()
    torch.testing.assert_close((q.exp() * losses.k1(p, q)).sum(), kl)
    torch.testing.assert_close((q.exp() * losses.k3(p, q)).sum(), kl)
    assert (losses.k3(p, q) >= 0).all()
    assert losses.k3(p, p).eq(0).all()


def test_diagnostics_of_halves_add_up_to_those_of_the_whole() -> None:
    ratios = [0.3, -0.4, 1.2, 0.0]
    whole = losses.diagnostic_sums(make_tokens(ratios), "token-tis", clip=CLIP, cap=CAP)
    found = losses.diagnostics(whole)
    values = [math.exp(ratio) for ratio in ratios]
    squares = sum(value**2 for value in values)
    assert found["mean_ratio"] == pytest.approx(sum(values) / 4)
    assert found["effective_sample_share"] == pytest.approx(sum(values) ** 2 / (4 * squares))
    assert found["logprob_gap"] == pytest.approx(1.9 / 4)
    assert found["kl_k1"] == pytest.approx(-1.1 / 4)
    tokens = [make_tokens(ratios[:2]), make_tokens(ratios[2:])]
    parts = [losses.diagnostic_sums(t, "token-tis", clip=CLIP, cap=CAP) for t in tokens]
    for key, value in whole.items():
        assert sum(part[key] for part in parts) == pytest.approx(value, abs=1e-6), key


@pytest.mark.parametrize(("max_norm", "expected"), [(10.0, [3.0, 4.0]), (1.0, [0.6, 0.8])])
def test_a_summed_gradient_becomes_the_clipped_mean(max_norm: float, expected: list[float]) -> None:
    layer = torch.nn.Linear(2, 1, bias=False)
    layer.weight.grad = torch.tensor([[6.0, 8.0]])
    assert losses.average_gradients(layer, 2, max_norm) == 5.0
    torch.testing.assert_close(layer.weight.grad, torch.tensor([expected]))


def test_advantages_follow_their_formulas() -> None:
    rewards = [1.0, 0.0, 0.0, 1.0, 1.0]
    assert algorithm_named("dr-grpo").advantages(rewards) == pytest.approx(
        [0.4, -0.6, -0.6, 0.4, 0.4]
    )
    assert algorithm_named("rloo").advantages(rewards) == pytest.approx(
        [0.5, -0.75, -0.75, 0.5, 0.5]
    )
    std = math.sqrt(1.2 / 4)
    grpo = [value / std for value in (0.4, -0.6, -0.6, 0.4, 0.4)]
    assert algorithm_named("grpo").advantages(rewards) == pytest.approx(grpo, rel=1e-5)
    assert algorithm_named("reinforce++").advantages(rewards) == rewards
    assert algorithm_named("reinforce++").advantages(rewards, 0.25) == [
        0.75,
        -0.25,
        -0.25,
        0.75,
        0.75,
    ]


@settings(deadline=None)  # a busy machine is no failure
@given(st.floats(-1e3, 1e3), st.integers(1, 9), st.sampled_from(["grpo", "dr-grpo", "rloo"]))
def test_equal_rewards_have_advantages_of_exactly_zero(reward: float, size: int, name: str) -> None:
    assert algorithm_named(name).advantages([reward] * size) == [0.0] * size


def test_a_critic_is_given_the_rewards_themselves() -> None:
    assert algorithm_named("ppo").advantages([1.0, 0.5], baseline=0.7) == [1.0, 0.5]


# Later methods -------------------------------------------------------------------------------------


def test_gspo_clips_the_geometric_mean_of_a_rollouts_ratios() -> None:
    """Of the first rollout the mean ratio is (2 * 0.5 * 1.331)^(1/3) = 1.1, of the second (1.2 * 1.2 * 1.2)^(1/3)."""
    ratios = [2.0, 0.5, 1.331, 1.2, 1.2, 1.2]
    tokens = make_tokens([math.log(r) for r in ratios], [1.0] * 3 + [2.0] * 3)
    loss = losses.policy_losses(tokens, "gspo", clip=0.1, clip_high=0.15, cap=CAP)
    torch.testing.assert_close(loss, torch.tensor([-1.1, -1.1, -1.1, -2.3, -2.3, -2.3]))
    (found,) = torch.autograd.grad(loss.sum(), tokens.logprobs)
    torch.testing.assert_close(found, torch.tensor([-1.1, -1.1, -1.1, 0.0, 0.0, 0.0]))
    sums = losses.diagnostic_sums(tokens, "gspo", clip=0.1, clip_high=0.15, cap=CAP)
    assert losses.diagnostics(sums)["clip_fraction"] == 0.5


def test_topr_tapers_what_is_bad_and_leaves_what_is_good() -> None:
    """Products of ratios are 6 and 1/8 of the good rollout and the bad one; then 1/8 and 6."""
    good_first = [1.0] * 3 + [-1.0] * 3
    for ratios, weights, share in (
        ([2.0, 3.0, 1.0, 0.5, 0.5, 0.5], [1.0, 1.0, 1.0, 0.125, 0.125, 0.125], 0.0),
        ([0.5, 0.5, 0.5, 2.0, 3.0, 1.0], [1.0] * 6, 0.5),
    ):
        tokens = make_tokens([math.log(r) for r in ratios], good_first)
        found = losses.correction_weights(tokens, "topr", CAP)
        torch.testing.assert_close(found, torch.tensor(weights))
        expected = -torch.tensor(weights) * tokens.advantages
        torch.testing.assert_close(gradient(tokens, "topr"), expected)
        sums = losses.diagnostic_sums(tokens, "topr", clip=CLIP, cap=CAP)
        assert losses.diagnostics(sums)["truncated_fraction"] == share


def test_clip_higher_lets_good_tokens_grow_further() -> None:
    tokens = make_tokens([math.log(1.25), math.log(1.35), math.log(0.75), math.log(0.9)], [1.0] * 4)
    narrow = losses.policy_losses(tokens, "none", clip=0.2, cap=CAP)
    wide = losses.policy_losses(tokens, "none", clip=0.2, clip_high=0.3, cap=CAP)
    torch.testing.assert_close(narrow, torch.tensor([-1.2, -1.2, -0.75, -0.9]))
    torch.testing.assert_close(wide, torch.tensor([-1.25, -1.3, -0.75, -0.9]))


def test_token_tis_with_a_cap_of_1_and_its_upper_clip_is_cispo() -> None:
    """CISPO's loss is -sg(min(ratio, 1 + high)) * A * log-probability: its gradient at ratios 1.1 and 1.5, high 0.28."""
    tokens = make_tokens([math.log(1.1), math.log(1.5)], [2.0, -1.0])
    loss = losses.policy_losses(tokens, "token-tis", clip=CLIP, cap=1.28).sum()
    (found,) = torch.autograd.grad(loss, tokens.logprobs)
    torch.testing.assert_close(found, torch.tensor([-2.2, 1.28]))


def test_estimates_of_the_kl_at_a_token() -> None:
    """At log-ratios of 0.1 and -0.2: k1 is the log-ratio, k2 half its square, k3 exp(-it) - 1 + it."""
    policy = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.1, -1.8], dtype=torch.float64)
    expected = {
        "k1": ([0.1, -0.2], [1.0, 1.0]),
        "k2": ([0.005, 0.02], [0.1, -0.2]),
        "k3": ([0.00483742, 0.02140276], [0.09516258, -0.22140276]),
    }
    for estimator, (values, slopes) in expected.items():
        found = losses.kl_losses(policy, reference, estimator)
        torch.testing.assert_close(
            found, torch.tensor(values, dtype=torch.float64), atol=1e-8, rtol=0
        )
        (slope,) = torch.autograd.grad(found.sum(), policy)
        torch.testing.assert_close(
            slope, torch.tensor(slopes, dtype=torch.float64), atol=1e-8, rtol=0
        )


@pytest.mark.parametrize("correction", losses.CORRECTIONS)
def test_rollouts_in_one_pass_or_in_two_have_the_same_gradient(correction: str) -> None:
    ratios = [0.3, 1.7, 1.1, 0.8, 2.5, 1.0]
    together = make_tokens([math.log(r) for r in ratios], [1.0] * 3 + [-0.5] * 3)
    whole = gradient(together, correction)
    for number in (0, 1):
        own = together.rollouts == number
        alone = losses.Tokens(
            logprobs=together.logprobs.detach()[own].requires_grad_(),
            behaviour=together.behaviour[own],
            advantages=together.advantages[own],
            rollouts=torch.zeros(3, dtype=torch.int64),
            proximal=None if together.proximal is None else together.proximal[own],
        )
        torch.testing.assert_close(gradient(alone, correction), whole[own])
