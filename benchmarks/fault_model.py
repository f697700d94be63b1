"""A random two-layer model of four symbols, its tokenizer and prompts: small enough to be started a hundred times."""

from __future__ import annotations

import json
from pathlib import Path

SYMBOLS = ["<pad>", "<eos>", "4", "#"]
"""An answer is what follows the last #: "4" is right, and comes up often enough to learn from."""


def make_model(directory: Path) -> None:
    """Write `model/` and `prompts.jsonl` into a directory."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from tests.tiny_model import tiny_model

    core = Tokenizer(models.WordLevel({s: i for i, s in enumerate(SYMBOLS)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")
    tokenizer.save_pretrained(directory / "model")
    model = tiny_model(len(SYMBOLS), max_position_embeddings=64, pad_token_id=0, eos_token_id=1)
    model.save_pretrained(directory / "model")
    prompts = [{"prompt": "4" * n + "#", "answer": "4"} for n in range(1, 6)]
    (directory / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in prompts))
