"""GPU checks of the replica with the trainer: log-probability gaps, weight loads, the colocated switch, weight sync.

`logprob_gap` is the mean absolute difference of two log-probabilities of the same tokens under the
same weights: the replica's and the trainer's. The replica and the trainer run in this process.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.gpu_models import DEVICE, ON_GPU, SIZES, model_directory, token_ids, vocabulary_of
from benchmarks.gpu_record import Recorder
from streamrl.executor.roles import Completion, ReplicaRole, Request, Sample
from streamrl.executor.rollout.inference_engine import ReplicaSettings
from streamrl.executor.rollout.replica_worker import ReplicaWorker
from streamrl.executor.tokens import encode_ids, read_blocks
from streamrl.executor.trainer.trainer_settings import TrainerSettings
from streamrl.executor.trainer.trainer_worker import TrainerWorker
from streamrl.executor.transfer.shared_directory import SharedDirectory

GAP = {"float32": 1e-4, "bfloat16": 2e-2}
"""Largest accepted `logprob_gap` in nats, by dtype."""
MOVED = 2.0
"""Least ratio of the gap under the old weights to the gap after the load. Below it, the load
changed nothing.
"""
LEARNING_RATE = 1e-3
"""Learning rate at which one step changes the weights by more than rounding."""
REPEATS = 3
"""Number of weight syncs and colocated switches that are timed."""


class Cell(NamedTuple):
    """A replica that is compared with the trainer."""

    model: str
    dtype: str
    backend: str = "transformers"


CELLS = (
    Cell("small", "float32"),
    Cell("small", "bfloat16"),
    Cell("medium", "float32"),
    Cell("medium", "bfloat16"),
    Cell("mixture", "bfloat16"),
    Cell("window", "bfloat16"),
    Cell("small", "bfloat16", "static"),
)
VLLM_CELL = Cell("medium", "bfloat16", "vllm")


@asynccontextmanager
async def replica_of(
    path: Path, dtype: str, backend: str = "transformers", **settings: Any
) -> AsyncIterator[ReplicaWorker]:
    """Start a replica, and stop it when the context ends."""
    longest = {"max_tokens": SIZES.output, "max_prompt_tokens": SIZES.prompt}
    worker = ReplicaWorker(
        ReplicaSettings(
            model=str(path),
            temperature=1.0,
            seed=0,
            dtype=dtype,
            device=DEVICE,
            backend=backend,
            num_threads=4 if ON_GPU else 1,
            **{"max_running": SIZES.running, "memory_utilization": 0.4, **longest, **settings},
        )
    )
    try:
        await worker.start(None, 0)
        yield worker
    finally:
        await worker.stop()


@asynccontextmanager
async def trainer_of(path: Path, dtype: str, **settings: Any) -> AsyncIterator[TrainerWorker]:
    """Start a trainer, and stop it when the context ends."""
    worker = TrainerWorker(
        TrainerSettings(
            model=str(path),
            learning_rate=LEARNING_RATE,
            temperature=1.0,
            correction="token-tis",
            dtype=dtype,
            device=DEVICE,
            num_threads=4 if ON_GPU else 1,
            **{"recompute": "full" if ON_GPU else "none", **settings},
        )
    )
    try:
        await worker.start(None)
        yield worker
    finally:
        await worker.stop()


class Prompts:
    """Requests rollouts of random prompts from a replica, each with its own id."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._random = random.Random(0)
        self._next = 0

    async def generate(self, replica: ReplicaRole, count: int, tokens: int) -> list[Sample]:
        """Generate `count` rollouts of at most `tokens` tokens at the same time, and return them as samples."""
        requests = [self._request(tokens) for _ in range(count)]
        completions = await asyncio.gather(*(replica.generate(request) for request in requests))
        return [
            _sample(request, completion, 1.0 if request.rollout % 2 else -0.7)
            for request, completion in zip(requests, completions, strict=True)
        ]

    def _request(self, tokens: int) -> Request:
        self._next += 1
        length = self._random.randint(2, SIZES.prompt)
        prompt = token_ids(self._random, self._vocabulary, length)
        return Request(rollout=self._next, prompt=encode_ids(prompt), priority=0, max_tokens=tokens)


def _sample(request: Request, completion: Completion, advantage: float) -> Sample:
    return Sample(
        rollout=request.rollout,
        prompt=request.prompt,
        output=(completion.output,),
        segments=completion.segments,
        advantage=advantage,
    )


def num_tokens(samples: list[Sample]) -> int:
    """Return the output tokens of samples."""
    return sum(block.num_tokens for sample in samples for block in sample.output)


async def timed(work: Awaitable[Any]) -> tuple[Any, float]:
    """Await work and the completion of its GPU kernels; return its result and seconds."""
    _wait()
    began_at = time.perf_counter()
    found = await work
    _wait()
    return found, time.perf_counter() - began_at


def _wait() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def allocated() -> int:
    """Return the bytes of GPU memory that torch holds, including its cache; 0 on a CPU."""
    return torch.cuda.memory_reserved() if ON_GPU else 0


# Log-probability gaps -----------------------------------------------------------------------------


def check_gaps(recorder: Recorder, scratch: Path) -> None:
    """Compare each replica's log-probabilities with the trainer's, before and after it loads new weights."""
    for cell in CELLS:
        name = f"replica/{cell.model}, {cell.dtype}, {cell.backend}"
        recorder.check(name, 45, run_gaps, scratch, cell)
        free()
    recorder.check("replica/load in flight", 30, _run_load_in_flight, scratch)
    free()
    if importlib.util.find_spec("vllm") is None:
        recorder.skip("replica/vllm", "vllm is not installed")
    else:
        recorder.check("replica/vllm", 120, run_gaps, scratch, VLLM_CELL)


def free() -> None:
    """Free the memory of objects that are no longer used."""
    gc.collect()
    torch.cuda.empty_cache()


def run_gaps(recorder: Recorder, name: str, scratch: Path, cell: Cell) -> None:
    asyncio.run(_gaps(recorder, name, model_directory(scratch, cell.model), cell))


async def _gaps(recorder: Recorder, name: str, path: Path, cell: Cell) -> None:
    prompts, most = Prompts(vocabulary_of(path)), GAP[cell.dtype]
    async with (
        replica_of(path, cell.dtype, cell.backend) as replica,
        trainer_of(path, cell.dtype) as trainer,
    ):
        await prompts.generate(replica, SIZES.running, SIZES.output // 4)  # warm-up
        samples, seconds = await timed(prompts.generate(replica, SIZES.running, SIZES.output))
        speed = num_tokens(samples) / seconds
        detail = f"{num_tokens(samples)} tokens of {len(samples)} rollouts in {seconds:.2f} s"
        recorder.add(f"{name}: generation", speed, "tokens/s", None, detail)
        fresh, stale = samples[::2], samples[1::2]
        figures = await trainer.train(fresh)
        gap = figures["logprob_gap"]
        detail = f"largest {most:g}; mean_ratio {figures['mean_ratio']:.5f}"
        recorder.add(f"{name}: logprob_gap", gap, "nats", gap < most, detail)
        step = await trainer.step(1)
        old = (await trainer.train(stale))["logprob_gap"]
        load_time = await _push_and_load(trainer, replica, 1)
        after = await prompts.generate(replica, SIZES.running // 2, SIZES.output)
        gap = (await trainer.train(after))["logprob_gap"]
        detail = (
            f"largest {most:g}; {old:.3g} for tokens of the old weights; grad_norm {step['grad_norm']:.3g}; "
            f"the replica stood still for {load_time:.3f} s"
        )
        is_right = gap < most and old > MOVED * gap
        recorder.add(f"{name}: logprob_gap after a load", gap, "nats", is_right, detail)


async def _push_and_load(trainer: TrainerWorker, replica: ReplicaWorker, version: int) -> float:
    directory = SharedDirectory("gpu-checks")
    try:
        manifest = await trainer.push(version, str(directory.path))
        loaded = await replica.load(manifest, drain=True)
    finally:
        directory.remove()
    return loaded.load_time


def _run_load_in_flight(recorder: Recorder, name: str, scratch: Path) -> None:
    asyncio.run(_load_in_flight(recorder, name, model_directory(scratch, "medium")))


async def _load_in_flight(recorder: Recorder, name: str, path: Path) -> None:
    """Load weights while rollouts run, without a drain. The rollouts continue with the new version."""
    prompts, directory = Prompts(vocabulary_of(path)), SharedDirectory("gpu-checks")
    async with (
        replica_of(path, "bfloat16") as replica,
        trainer_of(path, "bfloat16") as trainer,
    ):
        samples = await prompts.generate(replica, SIZES.running, SIZES.output)
        await trainer.train(samples)
        await trainer.step(1)
        try:
            manifest = await trainer.push(1, str(directory.path))
            requests = [prompts._request(SIZES.output) for _ in range(SIZES.running)]
            running = [asyncio.create_task(replica.generate(request)) for request in requests]
            await asyncio.sleep(0.2 if ON_GPU else 0.02)
            loaded = await replica.load(manifest, drain=False)
            completions = await asyncio.gather(*running)
        finally:
            directory.remove()
    blocks = [read_blocks((each.output,))[1] for each in completions]
    is_finite = all(np.isfinite(block).all() for block in blocks)
    mixed = sum(len(each.versions) == 2 for each in completions)
    detail = f"{mixed} of {len(completions)} rollouts have tokens of both versions"
    recorder.add(name, loaded.load_time, "s", is_finite, detail)


# The colocated switch and weight sync ----------------------------------------------------------------


def check_switch(recorder: Recorder, scratch: Path, rows: Path) -> None:
    """Time the moves of a colocated system, and the weight sync of the largest model."""
    recorder.check("colocated switch", 90, _run_switch, scratch, rows)


def _run_switch(recorder: Recorder, name: str, scratch: Path, rows: Path) -> None:
    asyncio.run(_switch(recorder, name, model_directory(scratch, "large"), rows))


async def _switch(recorder: Recorder, name: str, path: Path, rows: Path) -> None:
    prompts = Prompts(vocabulary_of(path))
    async with replica_of(path, "bfloat16", takes_turns=True) as replica:
        samples = await prompts.generate(replica, SIZES.running, SIZES.output // 4)
        await _move(recorder, f"{name}: replica sleeps, alone", replica.sleep)
        async with trainer_of(path, "bfloat16") as trainer:
            gap = (await trainer.train(samples))["logprob_gap"]
            await trainer.step(1)
            for turn in range(REPEATS - 1):
                await _move(recorder, f"{name}: trainer sleeps, turn {turn}", trainer.sleep)
                await _move(recorder, f"{name}: replica wakes, turn {turn}", replica.wake)
                old = await prompts.generate(replica, SIZES.running // 2, SIZES.output // 4)
                await _move(recorder, f"{name}: replica sleeps, turn {turn}", replica.sleep)
                await _move(recorder, f"{name}: trainer wakes, turn {turn}", trainer.wake)
            await trainer.train(old)
            await trainer.step(2)
            await replica.wake()
            await _sync(recorder, trainer, replica, rows, path)
            samples = await prompts.generate(replica, SIZES.running // 2, SIZES.output // 4)
            after = (await trainer.train(samples))["logprob_gap"]
            is_right = after < GAP["bfloat16"]
            detail = f"largest {GAP['bfloat16']:g}; {gap:.3g} before the first switch"
            recorder.add(f"{name}: logprob_gap after all", after, "nats", is_right, detail)


async def _move(recorder: Recorder, name: str, move: Callable[[], Awaitable[None]]) -> None:
    before = allocated()
    _, seconds = await timed(move())
    freed = before - allocated()
    verb = "freed" if freed >= 0 else "taken"
    detail = (
        f"{abs(freed) / 1e9:.2f} GB of GPU memory {verb}, {allocated() / 1e9:.2f} GB left in use"
    )
    is_right = None if not ON_GPU else (freed > 0) == ("sleeps" in name)
    recorder.add(name, seconds, "s", is_right, detail)


async def _sync(
    recorder: Recorder, trainer: TrainerWorker, replica: ReplicaWorker, rows: Path, path: Path
) -> None:
    pushes, loads = [], []
    for _ in range(REPEATS):
        directory = SharedDirectory("gpu-checks")
        try:
            manifest, push_time = await timed(trainer.push(2, str(directory.path)))
            _, load_time = await timed(replica.load(manifest, drain=True))
        finally:
            directory.remove()
        pushes.append(push_time)
        loads.append(load_time)
    for part, seconds in (("push", pushes), ("load", loads)):
        rate = manifest.num_bytes / median(seconds) / 1e9
        detail = f"{manifest.num_bytes / 1e9:.2f} GB, {rate:.2f} GB/s; {', '.join(f'{s:.2f}' for s in seconds)} s"
        recorder.add(f"weight sync: {part}", median(seconds), "s", None, detail)
    _write_sync_row(rows, path, manifest.num_bytes, pushes, loads)


def _write_sync_row(
    rows: Path, path: Path, num_bytes: int, pushes: list[float], loads: list[float]
) -> None:
    """Write a row in the format of profiles/measured/weight_sync.csv: seconds of a push with its load."""
    both = sorted(push + load for push, load in zip(pushes, loads, strict=True))
    device = torch.cuda.get_device_name().removeprefix("NVIDIA ") if ON_GPU else "CPU"
    head = "hardware,model,num_bytes,num_tensors,payload_bytes,senders,receivers,ways,method,seconds,low,high,use,note,source"
    seconds = f"{median(both):.4g},{both[0]:.4g},{both[-1]:.4g}"
    note = "one GPU; checksums of both sides counted"
    rows.write_text(
        f"{head}\n{device},{path.name},{num_bytes:.4g},,,1,1,1,shared-memory,{seconds},not modelled,{note},make gpu\n",
        encoding="utf-8",
    )
