"""Write the quickstart: a small arithmetic model that makes mistakes, and prompts to train it on.

The task is reasoning-gym's `chain_sum`. A prompt labels the terms of the sum with letters (`a5+b8-c7=`).
The working copies one term after another (`b+8=`) and adds it column by column, from the units up. A column
is four digits: of the running sum, of the term, the carry out (or borrow out), and of the result.
The answer follows `#`.

Most supervised steps show good demonstrations. In the last ones (a share of `bad_share`) a demonstration
may stop after any term, at a rate of `STOP_RATE`, and answer with the running sum. The model learns to add,
then to leave terms out. So long sums score worst, and RL has something to improve.

With `--lengths skewed`, output lengths are as uneven as those of reasoning, and predictable. Four of five sums have two to
four terms, and one of ten has fourteen to sixteen. No terms are left out. The few prompts come again.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import string
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import reasoning_gym
import torch
from rich.console import Console
from rich.progress import track
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
ANSWER_MARK = "#"
MIN_TERMS, MAX_DIGITS = 2, 1
STOP_RATE = 0.22
IGNORED = -100  # label that torch's cross-entropy leaves out
THREADS = 2  # on any number of cores, because the sum of the gradients depends on it


class Task(NamedTuple):
    """Sums of the prompts, and how the model learns them."""

    max_terms: int
    vocab_size: int
    max_new_tokens: int
    num_steps: int
    bad_share: float
    num_prompts: int
    num_sampled: int
    """Prompts whose output lengths are measured."""
    num_samples: int
    """Outputs of each."""
    share_of: tuple[tuple[int, float], ...] = ()
    """Weights of sums by number of terms; all equal if empty."""


TASKS = {
    "even": Task(8, 32, 128, 700, 0.12, 2000, 64, 4),  # a sum of eight terms takes about 108 tokens
    "skewed": Task(
        16,
        48,
        256,
        900,
        0.0,
        96,
        96,
        8,
        (
            (2, 0.3),
            (3, 0.3),
            (4, 0.2),
            (6, 0.04),
            (7, 0.03),
            (8, 0.03),
            (14, 0.04),
            (15, 0.03),
            (16, 0.03),
        ),
    ),
}

Entry = dict[str, Any]
Example = tuple[list[int], list[int]]


def build_tokenizer(task: Task) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character, which puts <bos> before a text."""
    symbols = [PAD, BOS, EOS, *string.digits, *"+-=;", ANSWER_MARK]
    symbols += string.ascii_lowercase[: task.max_terms]
    core = Tokenizer(models.WordLevel({s: i for i, s in enumerate(symbols)}, unk_token=PAD))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")  # type: ignore[assignment]
    core.decoder = decoders.Fuse()  # type: ignore[assignment]
    core.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single=f"{BOS} $A", special_tokens=[(BOS, symbols.index(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, bos_token=BOS, eos_token=EOS, padding_side="left"
    )


def build_model(tokenizer: PreTrainedTokenizerFast, task: Task) -> Qwen2ForCausalLM:
    """Return an untrained Qwen2 of about half a million parameters."""
    ids = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    config = Qwen2Config(
        vocab_size=task.vocab_size,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,  # of 32: the smallest that vLLM computes on CPUs
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.06,
        **ids,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=task.max_new_tokens,
        **ids,
    )
    return model


def parse_terms(expression: str) -> list[tuple[str, int]]:
    """Split `57 + 87 - 70` into [('+', 57), ('+', 87), ('-', 70)]."""
    words = ["+", *expression.split()]
    return [(sign, int(number)) for sign, number in zip(words[::2], words[1::2], strict=True)]


def stays_positive(terms: list[tuple[str, int]]) -> bool:
    """Tell whether no running sum falls below zero."""
    total = 0
    for sign, number in terms:
        total += number if sign == "+" else -number
        if total < 0:
            return False
    return True


def entries(seed: int, task: Task) -> Iterator[Entry]:
    """Yield chain_sum entries without end, with the task's weights for each number of terms."""
    found = positive_entries(seed, task)
    if not task.share_of:
        yield from found
    rng = random.Random(seed)
    kept: dict[int, list[Entry]] = {terms: [] for terms in range(MIN_TERMS, task.max_terms + 1)}
    while True:
        (terms,) = rng.choices(*zip(*task.share_of, strict=True))
        while not kept[terms]:
            entry = next(found)
            kept[entry["metadata"]["num_terms"]].append(entry)
        yield kept[terms].pop()


def positive_entries(seed: int, task: Task) -> Iterator[Entry]:
    """Yield chain_sum entries without end, except those whose running sum goes negative."""
    data = reasoning_gym.create_dataset(
        "chain_sum",
        size=10_000_000,
        seed=seed,
        min_terms=MIN_TERMS,
        max_terms=task.max_terms,
        min_digits=1,
        max_digits=MAX_DIGITS,
    )
    for index in range(10_000_000):
        entry = data[index]
        if stays_positive(parse_terms(entry["metadata"]["expression"])):
            yield entry


def format_prompt(terms: list[tuple[str, int]]) -> str:
    """Write the terms with their labels: `a57+b87-c70=`."""
    labelled = zip(string.ascii_lowercase, terms, strict=False)
    return "".join(f"{sign}{name}{number}" for name, (sign, number) in labelled)[1:] + "="


def add_column(sign: str, upper: int, lower: int, carry: int) -> tuple[int, int]:
    """Add or subtract one column; return the carry (or borrow) out and the digit."""
    total = upper + lower + carry if sign == "+" else upper - lower - carry
    return int(total > 9 or total < 0), total % 10


def work_out(terms: list[tuple[str, int]], stop_rate: float, rng: random.Random) -> str:
    """Write the working and the answer, stopping early after a term at `stop_rate`."""
    width = len(str(terms[0][1])) + 1
    total = [0] * width
    text = ""
    for name, (sign, number) in zip(string.ascii_lowercase, terms, strict=False):
        text += f"{name}{sign}{number}="
        carry = 0
        for place in range(width):
            upper, lower = total[place], number // 10**place % 10
            carry, digit = add_column(sign, upper, lower, carry)
            text += f"{upper}{lower}{carry}{digit}"
            total[place] = digit
        text += ";"
        if rng.random() < stop_rate:
            break
    return text + ANSWER_MARK + "".join(str(digit) for digit in reversed(total))


def make_record(entry: Entry) -> dict[str, Any]:
    """Return one line of prompts.jsonl. Its answer has as many digits as the end of a working."""
    terms = parse_terms(entry["metadata"]["expression"])
    prompt, width = format_prompt(terms), len(str(terms[0][1])) + 1
    metadata = {k: entry["metadata"][k] for k in ("source_dataset", "source_index", "num_terms")}
    metadata["num_digits"] = entry["metadata"]["num_digits"]
    metadata["expression"] = entry["metadata"]["expression"]
    return {
        "prompt": prompt,
        "answer": entry["answer"].zfill(width),
        "task": "chain_sum",
        "entry": {"answer": entry["answer"], "metadata": metadata},
    }


def examples(
    tokenizer: PreTrainedTokenizerFast, seed: int, stop_rate: float, task: Task
) -> Iterator[Example]:
    """Yield token ids and labels of demonstrations, the prompt left out of the loss."""
    rng = random.Random(seed)
    for entry in entries(seed, task):
        terms = parse_terms(entry["metadata"]["expression"])
        # five times as fast as `encode`; each character is a token
        prompt = tokenizer.convert_tokens_to_ids([BOS, *format_prompt(terms)])
        answer = tokenizer.convert_tokens_to_ids([*work_out(terms, stop_rate, rng), EOS])
        yield prompt + answer, [IGNORED] * len(prompt) + answer


def batches(stream: Iterator[Example], size: int, seed: int) -> Iterator[list[Example]]:
    """Yield batches of examples of similar length, in random order within a pool."""
    rng = random.Random(seed)
    while True:
        pool = sorted((next(stream) for _ in range(16 * size)), key=lambda pair: len(pair[0]))
        chunks = [pool[i : i + size] for i in range(0, len(pool), size)]
        rng.shuffle(chunks)
        yield from chunks


def collate(batch: list[Example]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad a batch on the right."""
    width = max(len(ids) for ids, _ in batch)
    ids = [row + [0] * (width - len(row)) for row, _ in batch]
    labels = [row + [IGNORED] * (width - len(row)) for _, row in batch]
    return torch.tensor(ids), torch.tensor(labels)


def summed_gradients(
    model: Qwen2ForCausalLM, batch: list[Example]
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Return the cross-entropy of the demonstrations' tokens, summed, and its gradients."""
    ids, labels = collate(batch)
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return loss.detach(), torch.autograd.grad(loss, list(model.parameters()))


def set_gradients(model: Qwen2ForCausalLM, batch: list[Example], threads: Executor) -> float:
    """Set the gradients of the mean cross-entropy, a part of the batch in each thread; return the mean."""
    parts = [batch[i::THREADS] for i in range(THREADS)]
    losses, gradients = zip(*threads.map(partial(summed_gradients, model), parts), strict=True)
    num_tokens = sum(label != IGNORED for _, labels in batch for label in labels)
    for parameter, *summed in zip(model.parameters(), *gradients, strict=True):
        parameter.grad = sum(summed) / num_tokens
    return sum(losses).item() / num_tokens


def train(model: Qwen2ForCausalLM, data: Iterator[list[Example]], steps: int, lr: float) -> None:
    """Run the supervised steps with a short warm-up, then a linear decay to a tenth."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True
    )

    def factor(step: int) -> float:
        return min((step + 1) / 30, 1.0 - 0.9 * step / steps)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    console = Console(stderr=True)
    with ThreadPoolExecutor(THREADS) as threads:
        for _ in track(range(steps), "teach", console=console, disable=not console.is_terminal):
            loss = set_gradients(model, next(data), threads)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    print(f"taught for {steps} steps, last loss {loss:.3f}")


@torch.no_grad()
def sample(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[str],
    max_new_tokens: int,
) -> list[list[int]]:
    """Sample one output per prompt at temperature 1, with <eos> if the model wrote it."""
    inputs = tokenizer(prompts, padding=True, return_tensors="pt")
    width = inputs["input_ids"].shape[1]
    drawn = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=max_new_tokens,
        do_sample=True,
    )
    eos = int(tokenizer.eos_token_id)
    rows = drawn[:, width:].tolist()
    return [row[: row.index(eos) + 1] if eos in row else row for row in rows]


def write_prompts(path: Path, records: list[dict[str, Any]]) -> None:
    """Write one record a line."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def write_lengths(path: Path, outputs: list[list[int]], num_samples: int) -> None:
    """Write the output lengths, `num_samples` successive rows to a prompt."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["prompt_id", "sample_idx", "output_tokens"])
        for i, row in enumerate(outputs):
            writer.writerow([i // num_samples, i % num_samples, len(row)])


def main() -> None:
    """Train the model, write it with its prompts, and measure its output lengths."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--lengths", choices=TASKS, default="even", help="of outputs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="supervised steps, if not as many as usual")
    parser.add_argument("--batch", type=int, default=8, help="demonstrations a step")
    parser.add_argument("--lr", type=float, default=3e-3)
    args = parser.parse_args()
    task = TASKS[args.lengths]
    num_steps = task.num_steps if args.steps is None else args.steps
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)

    tokenizer = build_tokenizer(task)
    model = build_model(tokenizer, task)
    # chain_sum draws item i of seed s from s + i: what is taught, and what is asked, lie far apart
    taught_from = 1_000_000_000 * (args.seed + 1)
    good = batches(examples(tokenizer, taught_from, 0.0, task), args.batch, args.seed)
    stops = examples(tokenizer, taught_from + 250_000_000, STOP_RATE, task)
    bad = batches(stops, args.batch, args.seed)
    data = chain(islice(good, round((1 - task.bad_share) * num_steps)), bad)
    train(model, data, num_steps, args.lr)
    model.save_pretrained(args.out / "model")
    tokenizer.save_pretrained(args.out / "model")

    unseen = entries(taught_from + 500_000_000, task)
    records = [make_record(next(unseen)) for _ in range(task.num_prompts)]
    write_prompts(args.out / "prompts.jsonl", records)
    asked = [r["prompt"] for r in records[: task.num_sampled] for _ in range(task.num_samples)]
    outputs = sample(model.eval(), tokenizer, asked, task.max_new_tokens)
    write_lengths(args.out / "lengths.csv", outputs, task.num_samples)


if __name__ == "__main__":
    main()
