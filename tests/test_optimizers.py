"""Optimizers and schedules against torch, transformers and bitsandbytes; and what goes on after a checkpoint."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from transformers import get_scheduler

from streamrl.executor.launchers.role_configs import RoleConfigs
from streamrl.executor.trainer import losses
from streamrl.executor.trainer.optimizers import make_optimizer, rate_of, restate
from streamrl.executor.trainer.trainer_settings import TrainerSettings
from streamrl.executor.trainer.trainer_worker import TrainerWorker
from streamrl.executor.transfer.shared_memory import read_buckets
from streamrl.runfile.files import load_run
from streamrl.targets.execute_limits import check_back_ends
from tests.test_sampling import RUN
from tests.test_trainer import make_config, make_samples
from tests.tiny_model import WIDE_HEADS, tiny_model

PEAK, STEPS, WARMUP = 2e-3, 12, 3
SHARDED = {"trainer.backend": "deepspeed", "trainer.zero": 2}
OPTIONS: dict[str, Any] = {
    "learning_rate": 0.01,
    "betas": (0.8, 0.95),
    "epsilon": 1e-5,
    "weight_decay": 0.2,
    "momentum": 0.9,
}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Save a model whose weights are large enough for 8-bit moments (4,096 values)."""
    path = tmp_path_factory.mktemp("model")
    shape = {"intermediate_size": 128, "max_position_embeddings": 64, "eos_token_id": 1}
    tiny_model(40, **WIDE_HEADS, **shape).save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("name", ["linear", "cosine", "constant"])
@pytest.mark.parametrize("warmup", [0, WARMUP])
def test_schedules_fall_as_those_of_transformers(name: str, warmup: int) -> None:
    own = make_config("", schedule=name, warmup_steps=warmup, num_steps=STEPS)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    theirs = get_scheduler(
        name if name != "constant" else "constant_with_warmup", optimizer, warmup, STEPS
    )
    for step in range(STEPS):
        rate = rate_of(own, PEAK, step)
        if step >= warmup:
            assert rate == pytest.approx(theirs.get_last_lr()[0], rel=1e-12)
        else:
            assert rate == pytest.approx(PEAK * (step + 1) / (warmup + 1))
        optimizer.step()
        theirs.step()


def test_a_schedule_ends_at_its_final_share_and_stays_there() -> None:
    own = make_config("", schedule="cosine", final_rate_share=0.1, num_steps=STEPS)
    assert rate_of(own, PEAK, STEPS) == pytest.approx(0.1 * PEAK)
    assert rate_of(own, PEAK, 5 * STEPS) == pytest.approx(0.1 * PEAK)
    assert rate_of(own, PEAK, 0) == PEAK > rate_of(own, PEAK, 1)


def gradients_of(model: Any, seed: int) -> None:
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)


def test_muon_moves_matrices_of_layers_and_adamw_moves_the_rest() -> None:
    ours, theirs = (tiny_model(40, **WIDE_HEADS, tie_word_embeddings=False) for _ in range(2))
    optimizer = make_optimizer(make_config("", optimizer="muon", **OPTIONS), ours)
    named = dict(theirs.named_parameters())
    inner = [w for n, w in named.items() if "_proj" in n and n.endswith("weight")]
    outer = [w for n, w in named.items() if not ("_proj" in n and n.endswith("weight"))]
    decay = OPTIONS["weight_decay"]
    muon = torch.optim.Muon(
        inner, lr=0.01, weight_decay=decay, momentum=0.9, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(outer, lr=0.01, betas=(0.8, 0.95), eps=1e-5, weight_decay=decay)
    for seed in range(3):
        gradients_of(ours, seed)
        gradients_of(theirs, seed)
        optimizer.step()
        muon.step()
        adamw.step()
    for name, weight in ours.named_parameters():
        torch.testing.assert_close(weight, named[name])
    moments = {name for each in optimizer.state.values() for name in each}
    assert {"momentum_buffer", "exp_avg"} <= moments


@pytest.mark.parametrize("name", ["adamw", "muon", "adamw-8bit"])
def test_options_of_the_run_replace_those_of_a_checkpoint(name: str) -> None:
    if name == "adamw-8bit":
        pytest.importorskip("bitsandbytes")
    model = tiny_model(40, **WIDE_HEADS)
    saved = make_optimizer(make_config("", optimizer=name), model).state_dict()
    own = make_config("", optimizer=name, **OPTIONS)
    optimizer = make_optimizer(own, model)
    optimizer.load_state_dict(saved)
    restate(optimizer, own)
    for group in optimizer.param_groups:
        assert (group["lr"], group["weight_decay"]) == (0.01, 0.2)
        if "betas" in group:
            assert (tuple(group["betas"]), group["eps"]) == ((0.8, 0.95), 1e-5)
        else:
            assert (group["momentum"], group["eps"]) == (0.9, 1e-7)


def test_8_bit_moments_are_close_to_32_bit_ones_and_those_of_embeddings_are_not_in_8_bits() -> None:
    pytest.importorskip("bitsandbytes")
    ours, theirs = (tiny_model(80, **WIDE_HEADS, intermediate_size=128) for _ in range(2))
    own = make_config("", optimizer="adamw-8bit", **OPTIONS)
    optimizer, exact = make_optimizer(own, ours), make_optimizer(make_config("", **OPTIONS), theirs)
    for seed in range(3):
        gradients_of(ours, seed)
        gradients_of(theirs, seed)
        optimizer.step()
        exact.step()
    inner, outer = ours.model.layers[0].mlp.up_proj.weight, ours.get_input_embeddings().weight
    assert optimizer.state[inner]["state1"].dtype == torch.uint8
    assert optimizer.state[outer]["state1"].dtype == torch.float32
    torch.testing.assert_close(outer, theirs.get_input_embeddings().weight)
    other = theirs.model.layers[0].mlp.up_proj.weight
    assert 0 < (inner - other).abs().max() < 0.01


Weights = dict[str, torch.Tensor]


def train_two(
    config: TrainerSettings, path: Path, checkpoint: Path | None, steps: list[int]
) -> tuple[Weights, list[dict[str, float]]]:
    """Make steps, each on other samples; return the weights and the figures of each step."""
    found: list[dict[str, float]] = []

    async def go() -> Weights:
        trainer = TrainerWorker(config)
        await trainer.start(None if checkpoint is None else str(checkpoint))
        for step in steps:
            samples = make_samples(step)
            await trainer.score(samples)
            await trainer.train(samples)
            found.append(await trainer.step(step))
        await trainer.save(str(path / f"step-{steps[-1]}"))
        (path / "pushed").mkdir(exist_ok=True)
        manifest = await trainer.push(steps[-1], str(path / "pushed"))
        weights = {name: tensor.clone() for name, tensor in read_buckets(manifest)}
        await trainer.stop()
        return weights

    return asyncio.run(go()), found


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "muon", "schedule": "cosine", "warmup_steps": 1},
        {"optimizer": "adamw-8bit", "schedule": "linear"},
        {"algorithm": "ppo", "critic_learning_rate": 0.02, "schedule": "linear"},
    ],
    ids=["muon", "8-bit", "ppo"],
)
def test_a_checkpoint_goes_on_exactly(
    model_path: str, tmp_path: Path, changes: dict[str, Any]
) -> None:
    if changes.get("optimizer") == "adamw-8bit":
        pytest.importorskip("bitsandbytes")
    config = make_config(model_path, num_steps=4, deterministic=True, **{**OPTIONS, **changes})
    straight, figures = train_two(config, tmp_path / "straight", None, [1, 2, 3])
    train_two(config, tmp_path / "halves", None, [1])
    resumed, rest = train_two(config, tmp_path / "halves", tmp_path / "halves" / "step-1", [2, 3])
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    rates = [rate_of(config, 0.01, step) for step in range(3)]
    assert [step["learning_rate"] for step in figures] == pytest.approx(rates)
    assert [step["learning_rate"] for step in rest] == pytest.approx(rates[1:])
    flat, _ = train_two(replace(config, schedule="constant"), tmp_path / "flat", None, [1, 2, 3])
    assert not all(torch.equal(straight[name], flat[name]) for name in straight)


def test_the_critic_follows_the_schedule(model_path: str, tmp_path: Path) -> None:
    """With a rate of almost 0 after the first step, the critic of a second step is that of the first."""
    config = make_config(model_path, algorithm="ppo", critic_learning_rate=0.02, num_steps=2)
    falling = replace(config, schedule="linear")
    figures = [
        train_two(each, tmp_path / each.schedule, None, [1, 2, 3])[1] for each in (config, falling)
    ]
    assert figures[0][1]["value_loss"] == pytest.approx(figures[1][1]["value_loss"])
    assert figures[0][2]["value_loss"] != pytest.approx(figures[1][2]["value_loss"])


@pytest.mark.parametrize("correction", ["none", "gspo", "decoupled"])
def test_the_dual_clip_bounds_the_loss_of_bad_tokens(correction: Any) -> None:
    logprobs = torch.tensor([0.0, 2.0, 0.0, 2.0], requires_grad=True)
    tokens = losses.Tokens(
        logprobs=logprobs,
        behaviour=torch.zeros(4),
        advantages=torch.tensor([-1.0, -1.0, 1.0, 1.0]),
        rollouts=torch.arange(4),
        proximal=torch.zeros(4),
    )
    how: dict[str, Any] = {"clip": 0.2, "cap": 2.0, "clip_dual": 3.0}
    found = losses.policy_losses(tokens, correction, **how)
    torch.testing.assert_close(found, torch.tensor([1.0, 3.0, -1.0, -1.2]))
    (gradient,) = torch.autograd.grad(found.sum(), logprobs)
    assert gradient[1] == gradient[3] == 0 != gradient[0]
    assert losses.diagnostic_sums(tokens, correction, **how)["clipped"] == 2


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"algorithm.optimizer.name": "sgd"}, "algorithm.optimizer.name must be"),
        ({"algorithm.optimizer.betas": [0.9, 1.0]}, "betas must be two numbers"),
        ({"algorithm.optimizer.final_rate_share": 0.1}, "no effect with schedule 'constant'"),
        ({"algorithm.optimizer.warmup_steps": 9}, "must be below algorithm.steps=1, got 9"),
        ({"algorithm.clip_dual": 3.0}, "algorithm.clip_dual has no effect"),
        ({"algorithm.clip_dual": 1.0, "algorithm.correction": "none"}, "clip_dual must be above 1"),
        ({"algorithm.name": "dpo", "algorithm.mask_truncated": True}, "mask_truncated has no"),
        ({"algorithm.optimizer.name": "adamw-paged"}, "without pages on a CPU"),
        (
            {**SHARDED, "algorithm.optimizer.name": "muon"},
            "must be 'adamw' for backend deepspeed",
        ),
    ],
)
def test_what_has_no_effect_or_no_back_end_is_refused(
    model_path: str, changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        check_back_ends(load_run(RUN, {"model.path": model_path, **changes}))


def test_the_trainer_gets_the_optimizer_of_its_own_algorithm(model_path: str) -> None:
    own = {"algorithm.optimizer.schedule": "linear", "algorithm.optimizer.betas": [0.8, 0.9]}
    run = load_run(RUN, {"model.path": model_path, "algorithm.loss_mean": "constant", **own})
    config = RoleConfigs(run).trainer(0, "cpu")
    assert (config["schedule"], config["betas"], config["num_steps"]) == ("linear", (0.8, 0.9), 1)
    assert (config["loss_mean"], config["max_tokens"]) == ("constant", 8)
