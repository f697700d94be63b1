"""A random Qwen2 small enough for tests."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM


def tiny_model(vocab_size: int, **changes: Any) -> Any:
    """Make the same random two-layer model every time, with options of its config replaced."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
    }
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=vocab_size, **{**shape, **changes}))
