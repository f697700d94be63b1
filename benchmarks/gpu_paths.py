"""GPU checks of further paths: weights from process to process, FSDP2 on one GPU, and a run with held-out evaluations."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu_models import DEVICE, ON_GPU, SIZES, model_directory, vocabulary_of
from benchmarks.gpu_record import Recorder
from benchmarks.gpu_rollout import (
    GAP,
    LEARNING_RATE,
    MOVED,
    REPEATS,
    Prompts,
    replica_of,
    timed,
    trainer_of,
)
from benchmarks.gpu_run import JOBS, make_job_run, report_gap
from streamrl.engine.messages import PushWeights
from streamrl.executor.execute import execute
from streamrl.executor.launchers.handles import Handle, LocalProcess, remote
from streamrl.executor.launchers.launcher import REPLICA, TRAINER, worker_environment
from streamrl.executor.launchers.processes import begin_for
from streamrl.executor.roles import BroadcastRank, Channel, Manifest, ReplicaRole, TrainerRole
from streamrl.executor.transfer.direct_transfer import DirectTransfer

CHANNEL: Channel = "cuda-ipc" if ON_GPU else "gloo"
"""One GPU has no second one for NCCL, which allows one process a GPU."""
PATIENCE = 30.0
NEAR = 1e-3
"""Largest relative difference of two gradient norms: rounding of another order of sums."""


def check_weights(recorder: Recorder, scratch: Path) -> None:
    """Send the weights of the largest model from the trainer's process to a replica's."""
    recorder.check(f"weights by {CHANNEL}", 90, _run_weights, scratch)


def _run_weights(recorder: Recorder, name: str, scratch: Path) -> None:
    asyncio.run(_weights(recorder, name, model_directory(scratch, "large")))


@dataclass
class Source:
    """A trainer in a process of its own."""

    worker: Handle
    role: TrainerRole

    async def push(self, version: int, directory: Path) -> Manifest:
        """Write the weights to a directory."""
        return await self.role.push(version, str(directory))

    async def pack(self, version: int, kept: list[int]) -> Manifest:
        """Pack the weights in memory."""
        return await self.role.pack(version, kept)

    async def listen(self) -> str:
        """Open a rendezvous, and return its address."""
        return await self.role.listen()

    async def send(self, version: int, seat: BroadcastRank) -> None:
        """Send a packed version to a group."""
        await self.role.send(version, seat)


@dataclass
class Target:
    """A replica in a process of its own, which has started."""

    role: ReplicaRole
    is_up = True

    async def receive(self, manifest: Manifest, seat: BroadcastRank, kept: list[int]) -> None:
        """Receive a packed version from a group."""
        await self.role.receive(manifest, seat, kept)


async def _weights(recorder: Recorder, name: str, path: Path) -> None:
    prompts, dtype = Prompts(vocabulary_of(path)), "bfloat16"
    common = {"model": str(path), "temperature": 1.0, "dtype": dtype, "device": DEVICE}
    limits = {
        "max_running": SIZES.running,
        "max_tokens": SIZES.output,
        "max_prompt_tokens": SIZES.prompt,
        "memory_utilization": 0.4,
    }
    trains = {"learning_rate": LEARNING_RATE, "correction": "token-tis"}
    async with (
        _process(TRAINER, {**common, **trains}) as trainer_handle,
        _process(REPLICA, {**common, **limits, "seed": 0}) as replica_handle,
    ):
        trainer, replica = remote(TrainerRole, trainer_handle), remote(ReplicaRole, replica_handle)
        await asyncio.gather(trainer.start(None), replica.start(None, 0))
        transfer = DirectTransfer(Source(trainer_handle, trainer), CHANNEL, PATIENCE)
        transfer.join(0, "", Target(replica))
        samples = await prompts.generate(replica, SIZES.running, SIZES.output)
        await trainer.train(samples[::2])
        await trainer.step(1)
        old = (await trainer.train(samples[1::2]))["logprob_gap"]
        pushes, loads = [], []
        for _ in range(REPEATS):
            pushed, seconds = await timed(transfer.push(PushWeights(1, 0)))
            pushes.append(seconds)
            manifest = await transfer.fetch(1, 0)
            assert manifest is not None
            loaded, seconds = await timed(replica.load(manifest, True))
            loads.append(seconds)
        is_same = loaded.checksum == pushed.checksum
        for part, times in (("push", pushes), ("load", loads)):
            rate = pushed.num_bytes / median(times) / 1e9
            detail = f"{pushed.num_bytes / 1e9:.2f} GB, {rate:.2f} GB/s; {', '.join(f'{s:.2f}' for s in times)} s"
            recorder.add(f"{name}: {part}", median(times), "s", is_same, detail)
        after = await prompts.generate(replica, SIZES.running // 2, SIZES.output)
        gap = (await trainer.train(after))["logprob_gap"]
        detail = f"largest {GAP[dtype]:g}; {old:.3g} for tokens of the old weights"
        is_right = gap < GAP[dtype] and old > MOVED * gap
        recorder.add(f"{name}: logprob_gap after a load", gap, "nats", is_right, detail)


@asynccontextmanager
async def _process(role: str, config: dict[str, Any]) -> AsyncIterator[LocalProcess]:
    threads = 4 if ON_GPU else 1
    handle = await LocalProcess.start(
        role,
        {**config, "num_threads": threads},
        Path("/dev/stderr"),
        worker_environment(threads),
        PATIENCE,
        begin_for(DEVICE, "transformers"),
    )
    try:
        yield handle
    finally:
        await handle.close()


def check_fsdp2(recorder: Recorder, scratch: Path) -> None:
    """Compare a step of FSDP2 on one rank with one of the torch back end."""
    recorder.check("fsdp2 on one rank", 90, _run_fsdp2, scratch)


def _run_fsdp2(recorder: Recorder, name: str, scratch: Path) -> None:
    asyncio.run(_fsdp2(recorder, name, scratch, model_directory(scratch, "small")))


async def _fsdp2(recorder: Recorder, name: str, scratch: Path, path: Path) -> None:
    prompts, dtype = Prompts(vocabulary_of(path)), "bfloat16" if ON_GPU else "float32"
    async with replica_of(path, dtype) as replica:
        samples = await prompts.generate(replica, SIZES.running, SIZES.output)
    found = {}
    for backend in ("torch", "fsdp2"):
        meeting = scratch / f"meeting-{backend}"
        meeting.unlink(missing_ok=True)
        rendezvous = f"file://{meeting}" if backend == "fsdp2" else None
        async with trainer_of(
            path, dtype, recompute="none", backend=backend, rendezvous=rendezvous
        ) as worker:
            figures, seconds = await timed(worker.train(samples))
            step, step_time = await timed(worker.step(1))
        found[backend] = figures["logprob_gap"], step["grad_norm"], seconds + step_time
    gap, norm, seconds = found["fsdp2"]
    _, expected, other = found["torch"]
    recorder.add(f"{name}: logprob_gap", gap, "nats", gap < GAP[dtype], f"largest {GAP[dtype]:g}")
    error = abs(norm / expected - 1)
    detail = f"{norm:.5g}, and {expected:.5g} of torch; {seconds:.2f} s and {other:.2f} s"
    bound = 20 * NEAR if dtype == "bfloat16" else NEAR
    recorder.add(f"{name}: gradient norm", error, "relative", error < bound, detail)


def check_evaluated_run(recorder: Recorder, scratch: Path) -> None:
    """Execute a run on one GPU with held-out evaluations, whose weights go from process to process."""
    recorder.check("run with evaluations", 110, _run_evaluated, scratch)


def _run_evaluated(recorder: Recorder, name: str, scratch: Path) -> None:
    run = make_job_run(
        scratch,
        JOBS["small"],
        "colocated",
        {
            "evaluation": {"share": 0.05, "every": 2},
            "sync": {"wire": "cuda-ipc" if ON_GPU else "broadcast"},
        },
    )
    output = Path(run.execute.output)
    shutil.rmtree(output, ignore_errors=True)
    execute(run)
    lines = (output / "evaluations.jsonl").read_text().splitlines()
    seconds = [json.loads(line)["seconds"] for line in lines]
    wanted = run.algorithm.steps // 2 + 1
    detail = f"{len(lines)} evaluations, expected {wanted}"
    recorder.add(f"{name}: an evaluation", median(seconds), "s", len(lines) == wanted, detail)
    report_gap(recorder, name, output)
