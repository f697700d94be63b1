"""A random Qwen2 small enough for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen2ForTokenClassification,
)

Weights = dict[str, torch.Tensor]
SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
}
WIDE_HEADS = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
"""A shape that every engine computes: vLLM's kernels for CPUs take no heads of less than 32."""


def tiny_model(vocab_size: int, **changes: Any) -> Any:
    """Make the same random two-layer model every time, with options of its config replaced."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=vocab_size, **{**SHAPE, **changes}))


def save_tiny_model(directory: Path, symbols: Sequence[str]) -> None:
    """Write such a model and its tokenizer, to which each symbol is a token: "<pad>" and "<eos>" first, then characters."""
    save_tiny_tokenizer(directory, symbols)
    ids = {"pad_token_id": 0, "eos_token_id": 1}
    model = tiny_model(len(symbols), max_position_embeddings=64, **WIDE_HEADS, **ids)
    model.save_pretrained(directory)


def save_tiny_reward_model(
    directory: Path, symbols: Sequence[str], *, by_token: bool = False, outputs: int = 1
) -> Path:
    """Write a random model that scores sequences, or tokens, with a tokenizer as `save_tiny_model` does; return where."""
    save_tiny_tokenizer(directory, symbols)
    torch.set_num_threads(1)
    torch.manual_seed(1)
    kind: Any = Qwen2ForTokenClassification if by_token else Qwen2ForSequenceClassification
    shape = {**SHAPE, **WIDE_HEADS, "max_position_embeddings": 64, "pad_token_id": 0}
    kind(Qwen2Config(vocab_size=len(symbols), num_labels=outputs, **shape)).save_pretrained(
        directory
    )
    return directory


def save_tiny_tokenizer(directory: Path, symbols: Sequence[str]) -> None:
    """Write a tokenizer to which each symbol is a token, "<pad>" and "<eos>" first."""
    core = Tokenizer(models.WordLevel({s: i for i, s in enumerate(symbols)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")
    tokenizer.save_pretrained(directory)


def reference(path: Path, weights: Weights | None = None) -> Any:
    """Load a saved model, with other weights where given, for full forward passes."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    if weights is not None:
        model.load_state_dict(weights)
    return model.eval()


def changed_weights(path: Path, seed: int = 1) -> Weights:
    """Make weights that a saved model takes, each a tenth or so from its own, the same every time by seed."""
    torch.manual_seed(seed)
    old = reference(path).state_dict()
    return {name: tensor + 0.1 * torch.randn_like(tensor) for name, tensor in old.items()}
