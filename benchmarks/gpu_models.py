"""Models with random weights, prompts and samples for the GPU checks, and the sizes that a device allows.

| model    | shape                                                                  |
|----------|------------------------------------------------------------------------|
| small    | the quickstart's Qwen2: 2 layers of 128 channels, with a tokenizer      |
| mixture  | Qwen3-MoE: 4 layers, 8 experts, 2 of them per token                     |
| window   | Mistral: 4 layers that attend to the last 64 tokens                     |
| medium   | Qwen3 with 12 layers of 1,024 channels: 222 million parameters          |
| large    | Qwen3-0.6B: 28 layers, 596 million parameters, 1.2 GB in bfloat16       |
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from streamrl.executor.roles import Sample
from streamrl.executor.tokens import TokenSegment, encode_ids, write_block

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_GPU = DEVICE == "cuda"
SYMBOLS = ["<pad>", "<eos>", *string.digits, *"+-=;# ", *string.ascii_lowercase[:14]]
FIRST_MORE, MOST_SYMBOLS = 0x4E00, 2**15
"""First of the additional symbols' characters, and most symbols. A model has as many symbols as
token ids, up to the limit.
"""
REWARD_PATTERN = rf"[0-9+=;\-{chr(FIRST_MORE)}-{chr(FIRST_MORE + MOST_SYMBOLS // 2)}]\s*$"
"""Scorer of the executed runs. About half of random completions match, so that advantages differ
from 0.
"""
GPU_NAMES = ("h200", "h100", "h20", "h800", "a100")
"""Names in profiles/gpus. The first one that the device's name contains counts."""


class Sizes(NamedTuple):
    """Sizes of the checks on this device."""

    rollouts: int
    """Rollouts of a training batch that is compared with the CPU's."""
    prompt: int
    output: int
    """Longest output, in tokens."""
    running: int
    """Rollouts that a replica generates at once."""
    memory: tuple[int, int]
    """Rollouts of the step whose memory is measured, and tokens of each."""
    matrix: int
    """Side of the matrix product."""
    copied: int
    """Bytes of the copy."""


SIZES = (
    Sizes(16, 48, 208, 64, (8, 1024), 8192, 4 * 2**30)
    if ON_GPU
    else Sizes(4, 6, 18, 4, (2, 32), 256, 2**22)
)


def gpu_name() -> str:
    """Return the GPU's name in profiles/gpus; without a GPU, return h200, for predictions."""
    if not ON_GPU:
        return "h200"
    device_name = torch.cuda.get_device_name().lower()
    names = [name for name in GPU_NAMES if name in device_name.replace("-", " ").split()]
    if not names:
        raise ValueError(
            f"profiles/gpus has no profile of the device {device_name!r}; add one and its name to GPU_NAMES"
        )
    return names[0]


def model_directory(scratch: Path, name: str) -> Path:
    """Return the directory of a model of the table above; write the model if it does not exist."""
    path = scratch / "models" / name
    if not (path / "config.json").is_file():
        torch.manual_seed(0)
        with torch.device(DEVICE):
            model = BUILDERS[name]()
        if name == "large":
            model = model.to(torch.bfloat16)
        save_tokenizer(path, model.config.vocab_size)
        model.save_pretrained(path)
    return path


def vocabulary_of(path: Path) -> int:
    """Return the number of token ids of a model directory."""
    return int(json.loads((path / "config.json").read_text(encoding="utf-8"))["vocab_size"])


def save_tokenizer(path: Path, vocabulary: int) -> None:
    """Write a tokenizer with one token for each symbol."""
    more = range(min(vocabulary, MOST_SYMBOLS) - len(SYMBOLS))
    symbols = [*SYMBOLS, *(chr(FIRST_MORE + index) for index in more)]
    core = Tokenizer(models.WordLevel({s: i for i, s in enumerate(symbols)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained(path)


def write_prompts(path: Path, count: int) -> None:
    """Write prompts that are sums, like the quickstart's."""
    rng = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            terms = "+".join(f"{rng.choice('abcdefgh')}{rng.randrange(10)}" for _ in range(5))
            file.write(json.dumps({"prompt": f"{terms}=", "answer": "0"}) + "\n")


def token_ids(rng: random.Random, vocabulary: int, count: int) -> list[int]:
    """Return random token ids, without those of padding and end."""
    return [rng.randrange(2, vocabulary) for _ in range(count)]


def make_samples(
    vocabulary: int, count: int, prompt: int, output: int, *, is_even: bool = False
) -> list[Sample]:
    """Return random rollouts with advantages around 0. Their lengths differ unless `is_even`."""
    rng = random.Random(0)
    uniform = -float(torch.tensor(float(vocabulary)).log())
    samples = []
    for rollout in range(count):
        num_prompt = prompt if is_even else rng.randint(max(1, prompt // 4), prompt)
        num_output = output if is_even else rng.randint(max(1, output // 8), output)
        logprobs = [uniform + rng.uniform(-0.3, 0.3) for _ in range(num_output)]
        samples.append(
            Sample(
                rollout=rollout,
                prompt=encode_ids(token_ids(rng, vocabulary, num_prompt)),
                output=(write_block(token_ids(rng, vocabulary, num_output), logprobs, None),),
                segments=(TokenSegment(num_output, is_policy=True),),
                advantage=1.0 if rollout % 2 else -0.7,
            )
        )
    return samples


def _small() -> Any:
    return Qwen2ForCausalLM(
        Qwen2Config(
            **_common(vocab_size=len(SYMBOLS), hidden_size=128, intermediate_size=512),
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            initializer_range=0.06,
        )
    )


def _mixture() -> Any:
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **_common(vocab_size=512, hidden_size=256, intermediate_size=512),
            **_heads(4, 2, 64),
            num_hidden_layers=4 if ON_GPU else 2,
            moe_intermediate_size=128,
            num_experts=8,
            num_experts_per_tok=2,
            initializer_range=0.06,
        )
    )


def _window() -> Any:
    return MistralForCausalLM(
        MistralConfig(
            **_common(vocab_size=512, hidden_size=256, intermediate_size=512),
            **_heads(8, 2, 32),
            num_hidden_layers=4 if ON_GPU else 2,
            sliding_window=64 if ON_GPU else 8,
            initializer_range=0.06,
        )
    )


def _medium() -> Any:
    sizes = {"vocab_size": 32768, "hidden_size": 1024, "intermediate_size": 3072}
    heads, layers = _heads(16, 8, 128), 12
    if not ON_GPU:
        sizes, heads = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96}, {}
        heads, layers = _heads(4, 2, 16), 2
    return Qwen3ForCausalLM(Qwen3Config(**_common(**sizes), **heads, num_hidden_layers=layers))


def _large() -> Any:
    if not ON_GPU:
        return _medium()
    sizes = {"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072}
    return Qwen3ForCausalLM(
        Qwen3Config(**_common(**sizes), **_heads(16, 8, 128), num_hidden_layers=28)
    )


def _common(**sizes: int) -> dict[str, Any]:
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    return {**sizes, **ids, "max_position_embeddings": 4096, "tie_word_embeddings": True}


def _heads(queries: int, keys: int, size: int) -> dict[str, int]:
    return {"num_attention_heads": queries, "num_key_value_heads": keys, "head_dim": size}


BUILDERS: dict[str, Callable[[], Any]] = {
    "small": _small,
    "mixture": _mixture,
    "window": _window,
    "medium": _medium,
    "large": _large,
}
