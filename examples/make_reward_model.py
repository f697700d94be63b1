"""Write a reward model for the quickstart: a sequence classifier that recognizes right sums.

It starts from the quickstart's model, with one output per sequence. It learns from that model's outputs which ones end in
the right answer. Run `make_quickstart.py` first.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from streamrl.executor.verifier.scorers import final_answer

HELD_OUT = 0.2
"""Share of the examples that only test it."""


class Example(NamedTuple):
    """Token ids of a prompt with an output, and whether the answer is right."""

    ids: list[int]
    is_right: bool


@torch.inference_mode()
def sample(model: Any, tokenizer: Any, records: list[dict[str, Any]], most: int) -> list[Example]:
    """Return an output of each record's prompt, sampled at temperature 1."""
    inputs = tokenizer([record["prompt"] for record in records], padding=True, return_tensors="pt")
    drawn = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=most,
        do_sample=True,
    )
    outputs = drawn[:, inputs["input_ids"].shape[1] :]
    texts = tokenizer.batch_decode(outputs, skip_special_tokens=True)
    return [
        Example(
            [*tokenizer.encode(record["prompt"] + text), tokenizer.eos_token_id],
            final_answer(text) == record["answer"],
        )
        for record, text in zip(records, texts, strict=True)
    ]


def outputs_of(model: Any, batch: list[Example]) -> torch.Tensor:
    """Return the model's output for each example, [n]."""
    width = max(len(each.ids) for each in batch)
    pad = model.config.pad_token_id
    ids = torch.tensor([each.ids + [pad] * (width - len(each.ids)) for each in batch])
    found: torch.Tensor = model(input_ids=ids, attention_mask=(ids != pad).long()).logits[:, 0]
    return found


def train(model: Any, examples: list[Example], steps: int, rate: float) -> None:
    """Train the model to recognize right examples."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    source = random.Random(0)
    for _ in range(steps):
        batch = source.sample(examples, min(32, len(examples)))
        wanted = torch.tensor([float(each.is_right) for each in batch])
        loss = torch.nn.functional.binary_cross_entropy_with_logits(
            outputs_of(model, batch), wanted
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@torch.inference_mode()
def accuracy(model: Any, examples: list[Example]) -> float:
    """Return the share of examples for which the sign of its output is right."""
    found = (outputs_of(model, examples) > 0).tolist()
    return sum(a == each.is_right for a, each in zip(found, examples, strict=True)) / len(examples)


def main() -> None:
    """Sample, train, print the accuracy, and write the model with its tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("build/quickstart"))
    parser.add_argument(
        "--prompts", type=int, default=1000, help="an output of each is learned from"
    )
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    source = args.data / "model"
    causal: Any = AutoModelForCausalLM
    tokenizer: Any = AutoTokenizer.from_pretrained(source)
    lines = (args.data / "prompts.jsonl").read_text().splitlines()[: args.prompts]
    examples = sample(
        causal.from_pretrained(source).eval(),
        tokenizer,
        list(map(json.loads, lines)),
        args.max_tokens,
    )
    held = round(HELD_OUT * len(examples))
    kind: Any = AutoModelForSequenceClassification
    model = kind.from_pretrained(source, num_labels=1)
    train(model.train(), examples[held:], args.steps, args.lr)
    right = sum(each.is_right for each in examples) / len(examples)
    found = accuracy(model.eval(), examples[:held])
    print(
        f"{right:.0%} of the outputs are right; it tells {found:.0%} of {held} others by their sign"
    )
    model.save_pretrained(args.data / "reward-model")
    tokenizer.save_pretrained(args.data / "reward-model")


if __name__ == "__main__":
    main()
