"""Write a small agent: a model that computes sums with two tools, and stops too early; and prompts to train it on.

The task is reasoning-gym's `chain_sum`. A prompt labels the terms of the sum with letters (`a5+b8-c7=`). In each turn the
agent names a term and calls a tool for it. The answer of the tool is the running sum. A turn without a call is the answer:

    a5+b8-c7=  b<tool_call>{"name": "add", "arguments": {"a": 5, "b": 8}}</tool_call>  13;  c<tool_call>...  6;  6

In some demonstrations the agent answers with a running sum. So long sums score worst, and RL has something to improve.
"""

from __future__ import annotations

import argparse
import random
import string
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from make_quickstart import (
    BOS,
    EOS,
    IGNORED,
    PAD,
    STOP_RATE,
    Example,
    Task,
    batches,
    build_model,
    entries,
    format_prompt,
    parse_terms,
    train,
    write_prompts,
)
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TASK = Task(6, 40, 96, 700, 0.15, 2000, 0, 0)
HELD_OUT = 256
"""Prompts that are not trained on."""
UNKNOWN = "<unk>"
CALL = {
    sign: f'<tool_call>{{"name": "{name}", "arguments": {{"a": '
    for sign, name in (("+", "add"), ("-", "subtract"))
}
SECOND, END = ', "b": ', "}}</tool_call>"
TEMPLATE = (
    '{# A call is <tool_call>{"name": NAME, "arguments": {...}}</tool_call>. #}'
    "{%- for message in messages -%}"
    "{%- if message.role == 'user' -%}<bos>{{ message.content }}"
    "{%- elif message.role == 'assistant' -%}{{ message.content }}<eos>"
    "{%- else -%}{{ message.content }};{%- endif -%}"
    "{%- endfor -%}"
)


def build_tokenizer(task: Task) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each character and for each part of a tool call."""
    parts = [*CALL.values(), SECOND, END]
    symbols = [PAD, BOS, EOS, UNKNOWN, *string.digits, *"+-=;"]
    symbols += [*string.ascii_lowercase[: task.max_terms], *parts]
    core = Tokenizer(models.WordLevel({s: i for i, s in enumerate(symbols)}, unk_token=UNKNOWN))
    core.add_tokens(parts)
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")  # type: ignore[assignment]
    core.decoder = decoders.Fuse()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        chat_template=TEMPLATE,
    )


def turns(
    terms: list[tuple[str, int]], stop_rate: float, rng: random.Random
) -> Iterator[tuple[str, bool]]:
    """Yield the texts of a demonstration, each with whether the agent wrote it."""
    total = terms[0][1]
    labelled = list(zip(string.ascii_lowercase, terms, strict=False))
    for name, (sign, number) in labelled[1:]:
        yield f"{name}{CALL[sign]}{total}{SECOND}{number}{END}{EOS}", True
        total += number if sign == "+" else -number
        yield f"{total};", False
        if rng.random() < stop_rate:
            break
    yield f"{total}{EOS}", True


def examples(
    tokenizer: PreTrainedTokenizerFast, seed: int, stop_rate: float, task: Task
) -> Iterator[Example]:
    """Yield token ids and labels of demonstrations; only what the agent wrote is in the loss."""
    rng = random.Random(seed)
    for entry in entries(seed, task):
        terms = parse_terms(entry["metadata"]["expression"])
        ids = tokenizer.encode(BOS + format_prompt(terms), add_special_tokens=False)
        labels = [IGNORED] * len(ids)
        for text, is_own in turns(terms, stop_rate, rng):
            more = tokenizer.encode(text, add_special_tokens=False)
            ids += more
            labels += more if is_own else [IGNORED] * len(more)
        yield ids, labels


def make_record(entry: dict[str, Any]) -> dict[str, Any]:
    """Return one line of prompts.jsonl."""
    terms = parse_terms(entry["metadata"]["expression"])
    prompt = [{"role": "user", "content": format_prompt(terms)}]
    return {"prompt": prompt, "answer": entry["answer"]}


def main() -> None:
    """Train the model, and write it with its prompts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=TASK.num_steps, help="supervised steps")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)

    tokenizer = build_tokenizer(TASK)
    model = build_model(tokenizer, TASK)
    taught_from = 1_000_000_000 * (args.seed + 1)
    good = batches(examples(tokenizer, taught_from, 0.0, TASK), 8, args.seed)
    stops = examples(tokenizer, taught_from + 250_000_000, STOP_RATE, TASK)
    bad = batches(stops, 8, args.seed)
    data = chain(islice(good, round((1 - TASK.bad_share) * args.steps)), bad)
    train(model, data, args.steps, 3e-3)
    model.save_pretrained(args.out / "model")
    tokenizer.save_pretrained(args.out / "model")

    unseen = entries(taught_from + 500_000_000, TASK)
    records = [make_record(next(unseen)) for _ in range(TASK.num_prompts + HELD_OUT)]
    write_prompts(args.out / "prompts.jsonl", records[HELD_OUT:])
    write_prompts(args.out / "held_out.jsonl", records[:HELD_OUT])


if __name__ == "__main__":
    main()
