"""Write a random two-layer model of four symbols, with tokenizer and prompts. It is small enough for many restarts."""

from __future__ import annotations

import json
from pathlib import Path

SYMBOLS = ["<pad>", "<eos>", "4", "#"]
"""Symbols of the model. An answer is the text after the last #. "4" is right, and is frequent
enough to learn from.
"""


def make_model(directory: Path) -> None:
    """Write `model/` and `prompts.jsonl` into a directory."""
    from tests.tiny_model import save_tiny_model

    save_tiny_model(directory / "model", SYMBOLS)
    prompts = [{"prompt": "4" * n + "#", "answer": "4"} for n in range(1, 6)]
    (directory / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in prompts))
