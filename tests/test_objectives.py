"""Algorithms that are more than an advantage: the best of a group, pairs of it, and a critic."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForTokenClassification

from streamrl.executor.checksums import find_damage
from streamrl.executor.roles import Sample
from streamrl.executor.tokens import decode_ids, read_blocks
from streamrl.executor.trainer.advantages import pair_of
from streamrl.executor.trainer.objectives import gae
from streamrl.runfile.algorithms import algorithm_named
from streamrl.runfile.config import Run
from streamrl.runfile.errors import RunError
from tests.runs import small_run
from tests.test_trainer import (
    distance,
    initial_weights,
    load_model,
    logprobs_of,
    make_config,
    make_samples,
    make_step,
    model_path,
    split,
    started,
    step_once,
    weights,
)

__all__ = ["model_path"]
BETA = 0.3
NUM_PAIRS = 6


def dpo_config(path: str, **changes: Any) -> Any:
    defaults = {"algorithm": "dpo", "correction": None, "beta": BETA, "max_grad_norm": 1e9}
    return make_config(path, **{**defaults, **changes})


def ppo_config(path: str, **changes: Any) -> Any:
    defaults = {"algorithm": "ppo", "critic_learning_rate": 1e-2, "max_grad_norm": 1e9}
    return make_config(path, **{**defaults, **changes})


def pairs(seed: int) -> list[Sample]:
    """Groups of four: the first is the best, the third the worst."""
    samples = make_samples(seed, 4 * NUM_PAIRS)
    found = []
    for place, sample in enumerate(samples):
        sign = {0: 1.0, 2: -1.0}.get(place % 4, 0.0)
        partner = {0: place + 2, 2: place - 2}.get(place % 4)
        found.append(replace(sample, advantage=sign, partner=partner))
    return found


def moved(path: str) -> str:
    """A checkpoint that has left the initial weights, so that log-ratios are not all 0."""
    directory = Path(path).parent / "moved"

    async def run() -> None:
        async with started(make_config(path, learning_rate=1e-2)) as trainer:
            await make_step(trainer, 1, [make_samples(3)])
            await trainer.save(str(directory))

    if not directory.exists():
        asyncio.run(run())
    return str(directory)


def step_from(config: Any, checkpoint: str, parts: list[list[Sample]], out: Path) -> Any:
    async def run() -> Any:
        async with started(config, checkpoint, 1) as trainer:
            figures = await make_step(trainer, 2, parts)
            return await weights(trainer, 2, out), figures

    return asyncio.run(run())


def test_the_best_of_a_group_and_its_worst_are_chosen_and_of_equal_ones_the_first() -> None:
    assert algorithm_named("raft").advantages([0.0, 2.0, 2.0, 1.0]) == [0, 1, 0, 0]
    assert algorithm_named("dpo").advantages([1.0, 0.0, 2.0, 0.0]) == [0, -1, 1, 0]
    assert pair_of([1.0, 0.0, 2.0, 0.0]) == (2, 1)


@pytest.mark.parametrize("name", ["raft", "dpo"])
def test_nothing_is_chosen_of_equal_rewards(name: Any) -> None:
    assert algorithm_named(name).advantages([1.0, 1.0, 1.0]) == [0, 0, 0]


@pytest.mark.parametrize("split_seed", [None, 1, 2])
def test_the_dpo_step_is_that_of_the_written_out_loss(
    model_path: str, tmp_path: Path, split_seed: int | None
) -> None:
    """However pairs are cut apart: -log sigmoid(beta * difference of log-ratios), the mean over pairs."""
    samples, checkpoint = pairs(7), moved(model_path)
    parts = [samples] if split_seed is None else split(samples, split_seed)
    _, figures = step_from(dpo_config(model_path), checkpoint, parts, tmp_path)
    model, reference = load_model(checkpoint), load_model(model_path)
    margins = []
    for better, worse in zip(samples[::4], samples[2::4], strict=True):
        ratios = [
            logprobs_of(model, s).sum() - logprobs_of(reference, s).sum().detach()
            for s in (better, worse)
        ]
        margins.append(BETA * (ratios[0] - ratios[1]))
    losses = [-torch.nn.functional.logsigmoid(margin) for margin in margins]
    loss: Any = torch.stack(losses).mean()
    loss.backward()
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
    assert figures["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert figures["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert figures["preference_margin"] == pytest.approx(
        float(torch.stack(margins).mean().detach()), rel=1e-4
    )
    accuracy = sum(float(margin.detach()) > 0 for margin in margins) / NUM_PAIRS
    assert 0 < accuracy < 1
    assert figures["preference_accuracy"] == pytest.approx(accuracy)


def test_a_step_of_pairs_widens_their_margins(model_path: str, tmp_path: Path) -> None:
    async def run() -> list[float]:
        async with started(dpo_config(model_path, learning_rate=1e-2)) as trainer:
            return [
                (await make_step(trainer, version, [pairs(7)]))["preference_margin"]
                for version in (1, 2, 3)
            ]

    first, *others = asyncio.run(run())
    assert first == pytest.approx(0, abs=1e-6)
    assert first < others[0] < others[1]


def test_rejection_sampling_raises_the_mean_likelihood_of_what_was_chosen(
    model_path: str, tmp_path: Path
) -> None:
    samples = [replace(s, advantage=float(s.rollout % 4 == 0)) for s in make_samples(5)]
    config = make_config(model_path, algorithm="raft", correction=None, max_grad_norm=1e9)
    _, figures = step_once(config, split(samples, 2), tmp_path)
    model = load_model(model_path)
    loss: Any = -torch.cat([logprobs_of(model, s) for s in samples if s.advantage]).mean()
    loss.backward()
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
    assert figures["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert figures["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert figures["rollouts"] == len(samples)


def test_a_step_of_which_nothing_was_chosen_changes_nothing(
    model_path: str, tmp_path: Path
) -> None:
    samples = [replace(s, advantage=0.0) for s in make_samples(5)]
    config = make_config(model_path, algorithm="raft", correction=None)
    found, figures = step_once(config, [samples], tmp_path)
    assert (figures["loss"], figures["grad_norm"]) == (0, 0)
    assert distance(found, initial_weights(model_path)) == 0


def at_end(values: torch.Tensor, reward: float) -> torch.Tensor:
    """Return the rewards of tokens of which the last one has the rollout's."""
    return torch.tensor([*[0.0] * (len(values) - 1), reward])


def test_advantages_of_a_critic_follow_their_formula() -> None:
    values = torch.tensor([0.1, 0.5, 0.2])
    rewards = at_end(values, 1.0)
    assert gae(values, rewards, 1.0).tolist() == pytest.approx([0.9, 0.5, 0.8])
    assert gae(values, rewards, 0.0).tolist() == pytest.approx([0.4, -0.3, 0.8])
    assert gae(values, rewards, 0.5).tolist() == pytest.approx([0.4 + 0.5 * 0.1, -0.3 + 0.4, 0.8])


@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_the_ppo_step_is_that_of_the_written_out_losses(
    model_path: str, tmp_path: Path, packing: str
) -> None:
    """Of an actor by GAE, and of a critic by half the squared error of its values."""
    first, second = make_samples(7), make_samples(8)
    config = ppo_config(model_path, gae_lambda=0.9, packing=packing)
    directory = tmp_path / "checkpoint"

    async def run() -> dict[str, float]:
        async with started(config) as trainer:
            await make_step(trainer, 1, [first])
            await trainer.save(str(directory))
            return await make_step(trainer, 2, split(second, 1))

    figures = asyncio.run(run())
    actor = load_model(str(directory))
    critic: Any = AutoModelForTokenClassification.from_pretrained(directory / "critic").eval()
    terms, errors, every_return = [], [], []
    for sample in second:
        values = values_of(critic, sample)
        found = gae(values.detach(), at_end(values, sample.advantage), 0.9)
        chosen = logprobs_of(actor, sample)
        behaviour = torch.tensor(read_blocks(sample.output)[1])
        terms.append(-(chosen.detach() - behaviour).exp().clamp(max=2.0) * found * chosen)
        errors.append((values - found - values.detach()).square() / 2)
        every_return.append(found + values.detach())
    for model, parts, key in ((actor, terms, "grad_norm"), (critic, errors, "critic_grad_norm")):
        loss: Any = torch.cat(parts).mean()
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        assert figures[key] == pytest.approx(float(norm), rel=1e-3), key
    value_loss = float(torch.cat(errors).mean().detach())
    assert figures["value_loss"] == pytest.approx(value_loss, rel=1e-3)
    assert value_loss > 0
    targets = torch.cat(every_return)
    residuals = torch.cat([(2 * each.detach()).sqrt() for each in errors])
    assert figures["explained_variance"] <= 1
    assert float(targets.var()) > 0 and float(residuals.var()) > 0


def values_of(critic: Any, sample: Sample) -> torch.Tensor:
    prompt, tokens = decode_ids(sample.prompt).tolist(), read_blocks(sample.output)[0].tolist()
    values: torch.Tensor = critic(torch.tensor([prompt + tokens])).logits[0, :, 0]
    return values[len(prompt) - 1 : -1]


def test_a_critic_that_knows_nothing_leaves_the_rewards_and_then_learns_them(
    model_path: str, tmp_path: Path
) -> None:
    samples = [replace(s, advantage=0.75) for s in make_samples(5)]

    async def run() -> list[dict[str, float]]:
        async with started(ppo_config(model_path)) as trainer:
            return [await make_step(trainer, version, [samples]) for version in range(1, 21)]

    figures = asyncio.run(run())
    assert figures[0]["value_mean"] == 0
    assert figures[0]["value_loss"] == pytest.approx(0.75**2 / 2)
    assert figures[-1]["value_mean"] == pytest.approx(0.75, abs=0.2)
    assert figures[-1]["value_loss"] < figures[0]["value_loss"] / 5


def test_a_critic_goes_on_from_its_checkpoint_which_has_its_checksums(
    model_path: str, tmp_path: Path
) -> None:
    config, checkpoint = ppo_config(model_path), tmp_path / "checkpoint"

    async def run() -> tuple[dict[str, float], dict[str, float]]:
        async with started(config) as trainer:
            await make_step(trainer, 1, [make_samples(1)])
            await trainer.save(str(checkpoint))
            straight = await make_step(trainer, 2, [make_samples(2)])
        async with started(config, str(checkpoint), 1) as trainer:
            return straight, await make_step(trainer, 2, [make_samples(2)])

    straight, resumed = asyncio.run(run())
    assert resumed == pytest.approx(straight, rel=1e-6)
    assert not math.isclose(straight["value_mean"], 0)
    assert find_damage(checkpoint, reads_all=True) == ""
    weights_file = checkpoint / "critic" / "model.safetensors"
    data = bytearray(weights_file.read_bytes())
    data[-1] ^= 1
    weights_file.write_bytes(data)
    assert "critic/model.safetensors" in find_damage(checkpoint, reads_all=True)


@pytest.mark.parametrize("name", ["raft", "dpo"])
def test_a_correction_of_what_is_chosen_whoever_made_it_is_refused(name: str) -> None:
    changes = {"algorithm.name": name, "algorithm.group_size": 4}
    assert small_run(changes).algorithm.corrected_by is None
    with pytest.raises(RunError, match=r"algorithm\.correction must be absent for"):
        small_run({**changes, "algorithm.correction": "token-tis"})


def test_a_run_knows_what_its_algorithm_computes() -> None:
    def run(name: str, **changes: Any) -> Run:
        more = {f"algorithm.{key}": value for key, value in changes.items()}
        return small_run({"algorithm.name": name, "algorithm.group_size": 8, **more})

    assert [run(name).computed_share for name in ("grpo", "raft", "dpo", "ppo")] == [
        1,
        1 / 8,
        1 / 4,
        1,
    ]
    assert run("dpo").algorithm.num_scored == 2
    assert run("dpo", kl_coefficient=0.1).computed_share == 1 / 4
    assert run("grpo", kl_coefficient=0.1).algorithm.num_scored == 1
