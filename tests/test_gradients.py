"""Gradients against finite differences, in float64: of each correction, of the terms beside it, of each objective."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch.autograd import gradcheck

from streamrl.executor.roles import Sample
from streamrl.executor.tokens import ID, LOGPROB, decode_ids, read_blocks
from streamrl.executor.trainer import losses
from streamrl.executor.trainer.objectives import objective_of
from streamrl.executor.trainer.sequences import TokenSequence
from streamrl.executor.trainer.trainer_settings import TrainerSettings
from streamrl.runfile.algorithm_config import CorrectionName
from tests.test_trainer import (
    TEMPERATURE,
    Weights,
    distance,
    initial_weights,
    load_model,
    logprobs_of,
    make_config,
    make_samples,
    make_step,
    model_path,
    started,
    step_by_hand,
    step_once,
    weights,
)

__all__ = ["model_path"]  # a fixture
CLIP, CLIP_HIGH, CAP = 0.2, 0.28, 2.0
NUM = 12


def tokens_at(logprobs: torch.Tensor) -> losses.Tokens:
    """Return tokens of three rollouts whose ratios lie on both sides of every clip and cap, none next to one."""
    log_ratios = torch.tensor([0.1, -0.1, 0.5, -0.5, 0.9, -0.9, 0.03, -0.03, 1.5, -1.5, 0.0, 0.15])
    base = torch.linspace(-3, -0.6, NUM, dtype=torch.float64)
    return losses.Tokens(
        logprobs=logprobs,
        behaviour=base - log_ratios.double(),
        advantages=torch.tensor([1.0, -0.7, 0.4], dtype=torch.float64).repeat_interleave(4),
        rollouts=torch.arange(3).repeat_interleave(4),
        proximal=base - log_ratios.flip(0).double() / 2,
    )


def logprobs() -> torch.Tensor:
    return torch.linspace(-3, -0.6, NUM, dtype=torch.float64).requires_grad_()


def slopes(function: Callable[[torch.Tensor], torch.Tensor], at: torch.Tensor) -> torch.Tensor:
    """Return central differences of a scalar function by each number."""
    step, found = 1e-6, []
    for place in range(at.numel()):
        by = torch.zeros_like(at).flatten()
        by[place] = step
        by = by.reshape(at.shape)
        found.append((function(at + by) - function(at - by)) / (2 * step))
    return torch.stack(found).reshape(at.shape)


@pytest.mark.parametrize("correction", losses.CORRECTIONS)
def test_the_gradient_of_a_correction_is_that_of_its_formula_with_its_weights_held(
    correction: CorrectionName,
) -> None:
    """What an importance weight is made of has no gradient: it is a number while the policy moves."""
    cap = {"cispo": 1 + CLIP_HIGH, "m2po": 0.04}.get(correction, CAP)
    here = logprobs()
    tokens = tokens_at(here)
    found = losses.policy_losses(tokens, correction, clip=CLIP, cap=cap, clip_high=CLIP_HIGH).sum()
    (gradient,) = torch.autograd.grad(found, here)
    weights = losses.correction_weights(tokens, correction, cap).double()
    proximal = losses.proximal_logprobs(tokens, correction).detach()

    def written_out(moved: torch.Tensor) -> torch.Tensor:
        log_ratios = moved - proximal
        if correction == "gspo":
            log_ratios = log_ratios.reshape(3, 4).mean(1).repeat_interleave(4)
        ratios = log_ratios.exp()
        clipped = ratios.clamp(1 - CLIP, 1 + CLIP_HIGH)
        if correction == "m2po":
            clipped = ratios
        return -(
            weights * torch.minimum(ratios * tokens.advantages, clipped * tokens.advantages)
        ).sum()

    expected = slopes(written_out, here.detach())
    torch.testing.assert_close(gradient, expected, atol=1e-7, rtol=1e-6)
    assert gradient.abs().max() > 0.1


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_gradient_of_a_kl_term_is_that_of_its_formula(estimator: str) -> None:
    reference = torch.linspace(-2, -1, NUM, dtype=torch.float64)
    assert gradcheck(lambda here: losses.kl_losses(here, reference, estimator), (logprobs(),))


def test_the_gradient_of_the_entropy_is_that_of_its_formula() -> None:
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def entropy(moved: torch.Tensor) -> torch.Tensor:
        p = (moved / 0.7).softmax(-1)
        return -(p * p.log()).sum()

    here = logits.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(losses.token_entropies(here, 0.7).sum(), here)
    torch.testing.assert_close(gradient, slopes(entropy, logits), atol=1e-4, rtol=1e-3)
    assert losses.token_entropies(torch.zeros(1, 8), 1.0).item() == pytest.approx(
        torch.tensor(8.0).log()
    )


# Corrections that have no test of their own in test_losses ----------------------------------------


def test_m2po_leaves_out_the_largest_until_the_mean_of_squares_is_within_its_bound() -> None:
    tokens = dataclasses.replace(
        tokens_at(torch.zeros(6)),
        behaviour=torch.tensor([0.1, -0.3, 0.2, 0.05, -0.05, 0.0]),
        advantages=torch.ones(6),
        rollouts=torch.tensor([0, 0, 0, 1, 1, 1]),
    )
    kept = losses.correction_weights(tokens, "m2po", 0.03)
    assert kept.tolist() == [
        1,
        0,
        1,
        1,
        1,
        1,
    ]  # squares 0.01, 0.09, 0.04: their mean is 0.047, of two 0.025
    sums = losses.diagnostic_sums(tokens, "m2po", clip=CLIP, cap=0.03)
    assert losses.diagnostics(sums)["truncated_fraction"] == pytest.approx(1 / 6)


# Objectives ---------------------------------------------------------------------------------------

SETTINGS = TrainerSettings(
    model="none", learning_rate=1e-3, temperature=1.0, correction="token-tis"
)


def sequence_of(logprobs: list[float], advantage: float, rollout: int = 0) -> TokenSequence:
    num = len(logprobs)
    return TokenSequence(
        rollout=rollout,
        prompt=np.zeros(1, ID),
        tokens=np.zeros(num, ID),
        logprobs=np.array(logprobs, LOGPROB),
        is_policy=np.ones(num, bool),
        advantage=advantage,
    )


def changed(**changes: object) -> TrainerSettings:
    return replace(SETTINGS, **changes)


def test_a_kl_term_in_the_reward_is_taken_off_what_comes_from_a_token_on() -> None:
    settings = changed(
        algorithm="reinforce++", kl_coefficient=0.5, kl_in="reward", kl_estimator="k1"
    )
    scores = {0: {"reference": torch.tensor([-1.0, -3.0, -2.0])}}
    found = objective_of(settings).advantages(sequence_of([-1.0, -1.0, -1.5], 2.0), scores)
    # log-ratios to the reference: 0, 2 and 0.5
    assert found.tolist() == pytest.approx([2 - 0.5 * 2.5, 2 - 0.5 * 2.5, 2 - 0.5 * 0.5])
    in_loss = objective_of(changed(algorithm="reinforce++", kl_coefficient=0.5))
    assert in_loss.advantages(sequence_of([-1.0, -1.0], 2.0), scores).tolist() == [2.0]


def test_a_critic_sees_the_kl_term_in_the_rewards_of_tokens() -> None:
    settings = changed(
        algorithm="ppo", kl_coefficient=0.5, kl_in="reward", kl_estimator="k1", gae_lambda=1.0
    )
    scores = {
        0: {"reference": torch.tensor([-1.0, -3.0, -2.0]), "values": torch.tensor([0.1, 0.2, 0.3])}
    }
    found = objective_of(settings).advantages(sequence_of([-1.0, -1.0, -1.5], 2.0), scores)
    returns = [2 - 0.5 * 2.5, 2 - 0.5 * 2.5, 2 - 0.5 * 0.5]
    assert found.tolist() == pytest.approx([returns[0] - 0.1, returns[1] - 0.2, returns[2] - 0.3])


# Steps --------------------------------------------------------------------------------------------


def test_the_entropy_bonus_moves_weights_as_its_written_out_loss_does(
    model_path: str, tmp_path: Path
) -> None:
    samples = make_samples(5)
    config = make_config(model_path, entropy_coefficient=0.3, max_grad_norm=1e9)
    found, figures = step_once(config, [samples], tmp_path)
    model = load_model(model_path)
    terms = []
    for sample in samples:
        chosen = logprobs_of(model, sample)
        ratio = (chosen.detach() - torch.tensor(read_blocks(sample.output)[1])).exp().clamp(max=2.0)
        terms.append(-ratio * sample.advantage * chosen - 0.3 * entropies_of(model, sample))
    norm = step_by_hand(model, terms, "token")
    assert figures["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert distance(found, dict(model.state_dict())) < 1e-5


def entropies_of(model: Any, sample: Sample) -> torch.Tensor:
    prompt, tokens = decode_ids(sample.prompt).tolist(), read_blocks(sample.output)[0].tolist()
    logits = model(torch.tensor([prompt + tokens])).logits[0]
    p = (logits[len(prompt) - 1 : -1] / TEMPERATURE).softmax(-1)
    entropies: torch.Tensor = -(p * p.log()).sum(-1)
    return entropies


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_several_optimizer_steps_of_a_batch_are_those_steps_and_one_version(
    model_path: str, tmp_path: Path, is_deterministic: bool
) -> None:
    """Weights that are pushed meanwhile are those of the version, not of what came after it."""
    samples, size = make_samples(6, 12), 4
    config = make_config(
        model_path, max_grad_norm=1e9, rollouts_per_update=size, deterministic=is_deterministic
    )

    async def run() -> tuple[Weights, Weights, dict[str, float]]:
        async with started(config) as trainer:
            for first in range(0, len(samples), size):
                await trainer.train(samples[first : first + size])
            before = await weights(trainer, 0, tmp_path / "before")
            figures = await trainer.step(1)
            return before, await weights(trainer, 1, tmp_path / "after"), figures

    before, after, figures = asyncio.run(run())
    assert distance(before, initial_weights(model_path)) == 0
    model = load_model(model_path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    norms = []
    for first in range(0, len(samples), size):
        optimizer.zero_grad()
        terms = []
        for sample in samples[first : first + size]:
            chosen = logprobs_of(model, sample)
            behaviour = torch.tensor(read_blocks(sample.output)[1])
            ratio = (chosen.detach() - behaviour).exp().clamp(max=2.0)
            terms.append(-ratio * sample.advantage * chosen)
        torch.cat(terms).mean().backward()
        norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])))
        optimizer.step()
    assert distance(after, dict(model.state_dict())) < 1e-5
    assert figures["grad_norm"] == pytest.approx(sum(norms) / 3, rel=1e-4)
    assert figures["rollouts"] == 12


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_a_decoupled_clip_keeps_later_optimizer_steps_near_the_weights_that_the_batch_began_with(
    model_path: str, tmp_path: Path, is_deterministic: bool
) -> None:
    """Rollouts that are scored once weights have changed are scored at those of the batch's beginning."""
    samples, size, clip, clip_high = make_samples(6, 12), 4, 0.002, 0.003
    config = make_config(
        model_path,
        correction="decoupled",
        clip=clip,
        clip_high=clip_high,
        max_grad_norm=1e9,
        rollouts_per_update=size,
        deterministic=is_deterministic,
    )

    async def run() -> tuple[Weights, dict[str, float]]:
        async with started(config) as trainer:
            for first in range(0, len(samples), size):
                await trainer.score(samples[first : first + size])
                await trainer.train(samples[first : first + size])
            figures = await trainer.step(1)
            return await weights(trainer, 1, tmp_path), figures

    found, figures = asyncio.run(run())
    initial, model = load_model(model_path), load_model(model_path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    for first in range(0, len(samples), size):
        optimizer.zero_grad()
        terms = []
        for sample in samples[first : first + size]:
            chosen, before = logprobs_of(model, sample), logprobs_of(initial, sample).detach()
            weight = (before - torch.tensor(read_blocks(sample.output)[1])).exp().clamp(max=2.0)
            ratio = (chosen - before).exp()
            kept = torch.minimum(
                ratio * sample.advantage,
                ratio.clamp(1 - clip, 1 + clip_high) * sample.advantage,
            )
            terms.append(-weight * kept)
        torch.cat(terms).mean().backward()
        optimizer.step()
    assert figures["clip_fraction"] > 0.1
    assert distance(found, dict(model.state_dict())) < 1e-5


@pytest.mark.parametrize(
    ("estimator", "changes"),
    [("k3", {}), ("k1", {"kl_in": "reward", "algorithm": "reinforce++"})],
)
def test_a_step_tells_the_mean_kl_of_its_tokens_from_the_initial_policy(
    model_path: str, tmp_path: Path, estimator: str, changes: dict[str, Any]
) -> None:
    config = make_config(model_path, kl_coefficient=0.1, kl_estimator=estimator, **changes)
    samples = make_samples(6, 12)

    async def run() -> tuple[list[dict[str, float]], Weights]:
        async with started(config) as trainer:
            first = await make_step(trainer, 1, [samples])
            between = await weights(trainer, 1, tmp_path)
            return [first, await make_step(trainer, 2, [samples[:5], samples[5:]])], between

    (first, second), between = asyncio.run(run())
    initial, model = load_model(model_path), load_model(model_path)
    model.load_state_dict(between)
    with torch.no_grad():
        away = torch.cat([logprobs_of(model, s) - logprobs_of(initial, s) for s in samples])
    expected = away if estimator == "k1" else away.neg().exp() - 1 + away
    assert first["reference_kl"] == pytest.approx(0, abs=1e-6)
    assert second["reference_kl"] == pytest.approx(float(expected.mean()), rel=1e-3)
    assert abs(second["reference_kl"]) > 1e-6


def test_a_step_without_a_reference_tells_no_kl_from_it(model_path: str, tmp_path: Path) -> None:
    _, figures = step_once(make_config(model_path), [make_samples(6, 4)], tmp_path)
    assert "reference_kl" not in figures and "kl_k3" in figures
