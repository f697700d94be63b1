"""Losses and gradients are TRL's, on the same tensors and the same weights: make test-trl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from streamrl.executor.roles import Sample
from streamrl.executor.tokens import decode_ids, read_blocks
from streamrl.executor.trainer.learner import load_learner
from tests.test_trainer import TEMPERATURE, logprobs_of, make_config, make_samples, with_logprobs
from tests.tiny_model import changed_weights, reference, save_tiny_model

pytestmark = pytest.mark.trl
TOLERANCE = 1e-5
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789+-"
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "PPO's clip, a mean over rollouts": (
        {"correction": "none", "loss_mean": "rollout"},
        {"loss_type": "grpo"},
    ),
    "clip-higher, a mean over tokens": (
        {"correction": "none", "clip_high": 0.28},
        {"loss_type": "dapo", "epsilon_high": 0.28},
    ),
    "GSPO": (
        {"correction": "gspo", "loss_mean": "rollout", "clip": 0.05, "clip_high": 0.06},
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon": 0.05,
            "epsilon_high": 0.06,
        },
    ),
    "CISPO": (
        {"correction": "cispo", "clip_high": 0.28},
        {"loss_type": "cispo", "epsilon_high": 1.28},
    ),
    "a KL term": (
        {"correction": "none", "kl_coefficient": 0.2, "kl_estimator": "k3"},
        {"loss_type": "bnpo", "beta": 0.2, "use_bias_correction_kl": False},
    ),
    "an entropy bonus": (
        {"correction": "none", "entropy_coefficient": 0.1},
        {"loss_type": "bnpo", "entropy_coef": 0.1},
    ),
}
CORRECTED: dict[str, Any] = {
    "loss_type": "dapo",
    "epsilon_high": 0.28,
    "vllm_importance_sampling_mode": "token_truncate",
    "vllm_importance_sampling_clip_max": 1.2,
}
"""TRL's importance correction: PPO's clip to the policy before the first optimizer step, times a weight of that one."""


@pytest.fixture(scope="module")
def initial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("initial")
    save_tiny_model(path, ["<pad>", "<eos>", *CHARACTERS])
    return path


@pytest.fixture(scope="module")
def trained(initial: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights: what is trained on, a little away from who sampled."""
    path = tmp_path_factory.mktemp("trained")
    save_tiny_model(path, ["<pad>", "<eos>", *CHARACTERS])
    reference(initial, changed_weights(initial)).save_pretrained(path)
    return path


def rollouts_near(path: Path) -> list[Sample]:
    """Return rollouts whose ratios lie around 1, within and beyond every clip."""
    generator = torch.Generator().manual_seed(3)
    model, found = reference(path), []
    for sample in make_samples(11, 12):
        chosen = logprobs_of(model, sample).detach()
        away = 0.3 * torch.randn(chosen.shape, generator=generator)
        found.append(with_logprobs(sample, (chosen - away).tolist()))
    return found


def ours(
    initial: Path,
    trained: Path,
    samples: list[Sample],
    changes: dict[str, Any],
    is_scored_first: bool = False,
) -> Any:
    """Return the loss of one batch, its gradient and its figures, by the trainer's own way."""
    config = make_config(str(initial), **changes)
    learner = load_learner(config, None)
    if is_scored_first:
        learner.score(samples)
    learner.backend.model.load_state_dict(reference(trained).state_dict())
    if not is_scored_first:
        learner.score(samples)
    learner.train(samples)
    count = learner.batch.count
    gradient = {n: p.grad / count for n, p in learner.backend.model.named_parameters()}
    return learner.batch.sums["loss"] / count, gradient, learner.batch.summary()


def padded(rows: list[list[float]], left: bool = False, value: float = 0.0) -> torch.Tensor:
    width = max(map(len, rows))
    fill = [[value] * (width - len(row)) for row in rows]
    return torch.tensor([f + row if left else row + f for f, row in zip(fill, rows, strict=True)])


def inputs_of(samples: list[Sample], initial: Path) -> dict[str, torch.Tensor]:
    """Return the rollouts as TRL has them after generation."""
    prompts = [decode_ids(s.prompt).tolist() for s in samples]
    outputs = [read_blocks(s.output)[0].tolist() for s in samples]
    model = reference(initial)
    with torch.no_grad():
        others = [logprobs_of(model, s).tolist() for s in samples]
    return {
        "prompt_ids": padded(prompts, left=True).long(),
        "prompt_mask": padded([[1] * len(p) for p in prompts], left=True).long(),
        "completion_ids": padded(outputs).long(),
        "completion_mask": padded([[1] * len(o) for o in outputs]).long(),
        "advantages": torch.tensor([s.advantage for s in samples]),
        "old_per_token_logps": padded([read_blocks(s.output)[1].tolist() for s in samples]),
        "ref_per_token_logps": padded(others),
        "num_items_in_batch": torch.tensor(sum(map(len, outputs))),
    }


def theirs(trained: Path, inputs: dict[str, torch.Tensor], folder: Path, **changes: Any) -> Any:
    """Return the loss of TRL's GRPOTrainer, its gradient and its figures."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        output_dir=str(folder),
        **{"epsilon": 0.2, "beta": 0.0, "temperature": TEMPERATURE, **changes},
        per_device_train_batch_size=2,
        num_generations=2,
        bf16=False,
        use_cpu=True,
        report_to=[],
    )
    models: Any = AutoModelForCausalLM
    trainer = GRPOTrainer(
        model=models.from_pretrained(str(trained), dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "a"}] * 4),
        processing_class=AutoTokenizer.from_pretrained(str(trained)),
    )
    if "importance_sampling_ratio" in inputs:
        trainer.use_vllm = True  # whose log-probabilities they are; nothing generates here
    model = trainer.model.eval()
    loss = trainer._compute_loss(model, inputs)
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters()}, trainer._metrics["eval"]


@pytest.mark.parametrize("name", CASES)
def test_the_loss_and_its_gradient_are_trls(
    initial: Path, trained: Path, tmp_path: Path, name: str
) -> None:
    changes, their_changes = CASES[name]
    samples = rollouts_near(trained)
    found, gradient, figures = ours(initial, trained, samples, changes)
    expected, their_gradient, their_figures = theirs(
        trained, inputs_of(samples, initial), tmp_path, **their_changes
    )
    if changes["correction"] == "cispo":  # there it is of -A log p, here of -A at a ratio of 1
        expected = found
    assert found == pytest.approx(expected, abs=TOLERANCE)
    check(gradient, their_gradient)
    kl = [figures["reference_kl"]] if "reference_kl" in figures else []
    assert kl == pytest.approx(their_figures["kl"], rel=1e-4)


def test_a_decoupled_clip_is_trls_with_its_importance_correction(
    initial: Path, trained: Path, tmp_path: Path
) -> None:
    """Scored at the initial weights, and trained on at others, as a batch's later optimizer steps are."""
    changes = {"correction": "decoupled", "clip_high": 0.28, "correction_cap": 1.2}
    samples = rollouts_near(trained)
    found, gradient, _ = ours(initial, trained, samples, changes, is_scored_first=True)
    inputs = inputs_of(samples, initial)
    sampled, scored = inputs["old_per_token_logps"], inputs["ref_per_token_logps"]
    inputs["old_per_token_logps"] = scored
    inputs["importance_sampling_ratio"] = (scored - sampled).exp().clamp(max=1.2)
    expected, their_gradient, _ = theirs(trained, inputs, tmp_path, **CORRECTED)
    assert found == pytest.approx(expected, abs=TOLERANCE)
    check(gradient, their_gradient)


def check(gradient: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    size = max(float(g.abs().max()) for g in expected.values())
    assert size > 1e-3
    for name, tensor in gradient.items():
        torch.testing.assert_close(
            tensor,
            expected[name],
            atol=TOLERANCE * size,
            rtol=TOLERANCE,
            msg=lambda m, n=name: n + m,
        )


def test_the_dpo_loss_and_its_gradient_are_trls(
    initial: Path, trained: Path, tmp_path: Path
) -> None:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    base = [s for s in make_samples(5, 12) if len(read_blocks(s.output)[0]) > 2][:8]
    pairs = []
    for place, sample in enumerate(base):
        is_best = place < 4
        pairs.append(
            replace(
                sample,
                rollout=place,
                prompt=base[place % 4].prompt,
                advantage=1.0 if is_best else -1.0,
                partner=place + 4 if is_best else place - 4,
            )
        )
    changes = {"algorithm": "dpo", "correction": None, "beta": 0.3, "temperature": 1.0}
    _, gradient, _ = ours(initial, trained, pairs, changes)
    models: Any = AutoModelForCausalLM
    trainer = DPOTrainer(
        model=models.from_pretrained(str(trained), dtype=torch.float32),
        ref_model=models.from_pretrained(str(initial), dtype=torch.float32),
        args=DPOConfig(output_dir=str(tmp_path), beta=0.3, bf16=False, use_cpu=True, report_to=[]),
        train_dataset=Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}] * 4),
        processing_class=AutoTokenizer.from_pretrained(str(trained)),
    )
    prompts = [decode_ids(s.prompt).tolist() for s in pairs]
    outputs = [read_blocks(s.output)[0].tolist() for s in pairs]
    rows = [p + o for p, o in zip(prompts, outputs, strict=True)]
    inputs = {
        "input_ids": padded(rows).long(),
        "attention_mask": padded([[1] * len(row) for row in rows]).long(),
        "completion_mask": padded(
            [[0] * len(p) + [1] * len(o) for p, o in zip(prompts, outputs, strict=True)]
        ).long(),
    }
    model = trainer.model.eval()
    loss = trainer._compute_loss(model, inputs, return_outputs=False)
    loss.backward()
    check(gradient, {n: p.grad for n, p in model.named_parameters()})
