"""Measure the tokens per CPU second of a replica worker and of a trainer worker, one at a time.

    python -m benchmarks.bench_workers --against ../another-checkout

Each measurement is a process with one thread. With `--against DIR`, each is followed by the same one
of another checkout, with the same Python. So both see the same state of the machine. CPU seconds are
those of the whole process from the first token on, without loading. Lengths are drawn once, with a
long tail as in RL. A replica is always full, and the trainer gets rollouts in chunks, as in a
streaming run. The output is one JSON object per figure: the median of the rounds, and the smallest
and largest ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent.parent
VOCABULARY = 512
CHUNK = 32
"""Rollouts in one call of the trainer."""
PROMPT, LONGEST = 24, 128


class Shape(NamedTuple):
    """Model and load of a worker."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    rollouts: int
    max_running: int


SHAPES = {
    "quickstart": Shape(128, 2, 4, 4, 256, 64),
    "smollm2": Shape(576, 6, 9, 3, 48, 16),
}
"""The quickstart's shape, and six of the thirty layers of SmolLM2-135M."""
WORKERS = ("replica", "trainer")
SPREAD = 0.6
"""Standard deviation of log lengths. Their median is a third of the longest output."""


def main() -> None:
    """Print one JSON object per figure."""
    options = _read_arguments()
    if options.child:
        worker, name, model = options.child
        work = generate if worker == "replica" else train
        print(json.dumps(asyncio.run(work(SHAPES[name], model))))
        return
    checkouts = [HERE, *(checkout.resolve() for checkout in options.against)]
    with tempfile.TemporaryDirectory() as folder:
        for name, shape in SHAPES.items():
            model = Path(folder, name)
            write_model(shape, model)
            for worker in WORKERS:
                what = f"{worker} of the {name} shape: tokens of a CPU second"
                rounds = [
                    [run_once(checkout, worker, name, model) for checkout in checkouts]
                    for _ in range(options.rounds)
                ]
                ours, *others = zip(*rounds, strict=True)
                report(what, statistics.median(ours))
                for checkout, theirs in zip(options.against, others, strict=True):
                    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
                    facts = {"least": round(min(ratios), 3), "most": round(max(ratios), 3)}
                    report(f"{what}, of {checkout}", statistics.median(theirs))
                    report(f"{what}, ratio to {checkout}", statistics.median(ratios), **facts)


def write_model(shape: Shape, directory: Path) -> None:
    """Write a random model that never ends a rollout by itself."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=4 * shape.hidden,
        tie_word_embeddings=True,
        eos_token_id=None,
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)


def run_once(checkout: Path, worker: str, name: str, model: Path) -> float:
    """Return the tokens per CPU second of a worker of a checkout.

    Raises:
        CalledProcessError: the process failed.
    """
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), "--child", worker, name, str(model)]
    found = subprocess.run(
        command, cwd=checkout, env=environment, check=True, capture_output=True, text=True
    )
    return float(json.loads(found.stdout.splitlines()[-1]))


def draw_length(draw: random.Random) -> int:
    """Draw the output tokens of a rollout."""
    return min(LONGEST, round(draw.lognormvariate(math.log(LONGEST / 3), SPREAD)))


async def generate(shape: Shape, model: str) -> float:
    """Generate every rollout with a replica worker."""
    from streamrl.executor.roles import Request
    from streamrl.executor.rollout.replica_worker import ReplicaSettings, ReplicaWorker
    from streamrl.executor.tokens import encode_ids

    worker = ReplicaWorker(
        ReplicaSettings(
            model=model,
            max_running=shape.max_running,
            max_tokens=LONGEST,
            max_prompt_tokens=PROMPT,
            temperature=1.0,
            seed=0,
        )
    )
    await worker.start(None, 0)
    draw = random.Random(0)

    async def some(first: int, count: int) -> int:
        requests = [
            Request(
                rollout=first + index,
                prompt=encode_ids([draw.randrange(VOCABULARY) for _ in range(PROMPT)]),
                priority=0,
                max_tokens=draw_length(draw),
            )
            for index in range(count)
        ]
        await asyncio.gather(*(worker.generate(request) for request in requests))
        return sum(request.max_tokens for request in requests)

    await some(0, shape.max_running // 2)
    began_at = time.process_time()
    tokens = await some(shape.rollouts, shape.rollouts)
    seconds = time.process_time() - began_at
    await worker.stop()
    return tokens / seconds


async def train(shape: Shape, model: str) -> float:
    """Train on every rollout with a trainer worker, chunk by chunk."""
    from streamrl.executor.roles import Sample
    from streamrl.executor.tokens import TokenSegment, encode_ids, write_block
    from streamrl.executor.trainer.trainer_settings import TrainerSettings
    from streamrl.executor.trainer.trainer_worker import TrainerWorker

    settings: Any = {"learning_rate": 1e-6, "temperature": 1.0, "correction": "token-tis"}
    worker = TrainerWorker(TrainerSettings(model=model, max_tokens_per_pass=2048, **settings))
    await worker.start(None)
    draw = random.Random(0)

    def sample(rollout: int) -> Sample:
        length = draw_length(draw)
        tokens = [draw.randrange(VOCABULARY) for _ in range(PROMPT + length)]
        return Sample(
            rollout=rollout,
            prompt=encode_ids(tokens[:PROMPT]),
            output=(write_block(tokens[PROMPT:], [-6.0] * length, None),),
            segments=(TokenSegment(length, is_policy=True),),
            advantage=draw.choice((-1.0, 1.0)),
        )

    chunks = [
        [sample(rollout) for rollout in range(first, min(first + CHUNK, shape.rollouts))]
        for first in range(0, shape.rollouts, CHUNK)
    ]
    await worker.train(chunks[0])
    began_at = time.process_time()
    tokens = 0.0
    for chunk in chunks:
        tokens += (await worker.train(chunk))["tokens"]
    await worker.step(1)
    seconds = time.process_time() - began_at
    await worker.stop()
    return tokens / seconds


def report(name: str, value: float, **facts: float) -> None:
    """Print a figure."""
    print(json.dumps({"name": name, "value": round(value, 3), **facts}), flush=True)


def _read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--against", type=Path, action="append", default=[], help="another checkout to compare with"
    )
    parser.add_argument("--rounds", type=int, default=5, help="of each measurement")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
