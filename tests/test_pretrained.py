"""Models are loaded as their files say, also where several roles of one process load at the same time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from streamrl.executor.pretrained import load_pretrained, load_reward_model
from tests.tiny_model import save_tiny_reward_model, tiny_model


def test_models_that_load_at_the_same_time_keep_their_weights_tied(tmp_path: Path) -> None:
    tiny_model(40, tie_word_embeddings=True).save_pretrained(tmp_path)
    with ThreadPoolExecutor(3) as pool:
        models = list(pool.map(load_pretrained, [str(tmp_path)] * 6))
    for model in models:
        assert model.lm_head.weight is model.model.embed_tokens.weight


NAME = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (None, rf"lacks weights of {NAME}$"),
        (torch.zeros(31, 64), rf"other shapes .*: {NAME} \(31, 64\) for \(32, 64\)$"),
        (torch.full((32, 64), float("nan")), rf"no numbers: {NAME}$"),
        (torch.full((32, 64), float("-inf")), rf"no numbers: {NAME}$"),
    ],
    ids=["lacking", "of another shape", "nan", "infinite"],
)
@pytest.mark.parametrize("has_values", [False, True])
def test_weights_that_would_be_drawn_at_random_or_are_no_numbers_are_refused(
    damage: torch.Tensor | None, said: str, has_values: bool, tmp_path: Path
) -> None:
    tiny_model(40).save_pretrained(tmp_path)
    options = {"num_labels": 1} if has_values else {}
    load_pretrained(str(tmp_path), has_values=has_values, **options)
    weights = load_file(tmp_path / "model.safetensors")
    del weights[NAME]
    if damage is not None:
        weights[NAME] = damage
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=said):
        load_pretrained(str(tmp_path), has_values=has_values, **options)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (torch.zeros(1, 5), r"^verifier\.reward_model\.model .* other shapes .*: score"),
        (torch.full((1, 64), float("nan")), r"^verifier\.reward_model\.model .* no numbers: score"),
    ],
)
def test_a_reward_model_whose_weights_are_not_its_own_is_refused(
    damage: torch.Tensor, said: str, tmp_path: Path
) -> None:
    directory = save_tiny_reward_model(tmp_path / "judge", ["<pad>", "<eos>", *"0123456789"])
    load_reward_model(str(directory), by_token=False)
    weights = load_file(directory / "model.safetensors")
    weights["score.weight"] = damage
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=said):
        load_reward_model(str(directory), by_token=False)
