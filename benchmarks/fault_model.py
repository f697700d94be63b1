"""A random two-layer model of four symbols, its tokenizer and prompts: small enough to be started a hundred times."""

from __future__ import annotations

import json
from pathlib import Path

SYMBOLS = ["<pad>", "<eos>", "4", "#"]
"""An answer is what follows the last #: "4" is right, and comes up often enough to learn from."""


def make_model(directory: Path) -> None:
    """Write `model/` and `prompts.jsonl` into a directory."""
    from tests.tiny_model import save_tiny_model

    save_tiny_model(directory / "model", SYMBOLS)
    prompts = [{"prompt": "4" * n + "#", "answer": "4"} for n in range(1, 6)]
    (directory / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in prompts))
