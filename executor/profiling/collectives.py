"""Time all-reduce and all-gather over the GPUs of this machine, with one process for each: NCCL, or gloo on CPUs.

A process reads a question from standard input. Rank 0 writes the seconds to standard output.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import torch

from streamrl.executor.directory_lock import OwnedDirectory
from streamrl.hardware.node_readings import NodePoint

WARM_UP, REPEATS = 5, 10
"""Uncounted calls before a measurement, and counted ones. Memory clocks rise during the first ones."""
PATIENCE = timedelta(seconds=60)
"""Longest wait for another rank."""
LONGEST = 180.0
"""Seconds after which the processes are killed."""


class _Question(msgspec.Struct, frozen=True):
    """One rank's part."""

    rank: int
    size: int
    store: str
    """File where the ranks find each other."""
    points: list[NodePoint]


def time_collectives(points: Sequence[NodePoint], num_gpus: int) -> list[float]:
    """Return the median seconds of collectives over all GPUs of this machine.

    Raises:
        RuntimeError: a process failed, or the ranks did not meet.
    """
    ends_at = time.monotonic() + LONGEST
    with OwnedDirectory("accept") as scratch:
        store = str(Path(scratch, "store"))
        ranks = [_start(_Question(n, num_gpus, store, list(points))) for n in range(num_gpus)]
        try:
            answers = [rank.communicate(timeout=ends_at - time.monotonic()) for rank in ranks]
        except subprocess.TimeoutExpired:
            raise RuntimeError(
                f"collectives over {num_gpus} GPUs took over {LONGEST:g} s"
            ) from None
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    for number, (rank, (_, errors)) in enumerate(zip(ranks, answers, strict=True)):
        if rank.returncode:
            last = (errors.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
            raise RuntimeError(f"collectives failed on rank {number} of {num_gpus}: {last}")
    return msgspec.json.decode(answers[0][0], type=list[float])


def _start(question: _Question) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", __name__]
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe)
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(question))
    process.stdin.close()
    process.stdin = None  # `communicate` would flush it
    return process


def _answer(question: _Question) -> list[float]:
    """Join the group as one rank, and return the seconds of each point."""
    dist: Any = torch.distributed  # its functions have no types
    device = f"cuda:{question.rank}" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.set_num_threads(1)  # a core stands in for a GPU
    else:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if device == "cpu" else "nccl",
        init_method=f"file://{question.store}",
        rank=question.rank,
        world_size=question.size,
        timeout=PATIENCE,
    )
    try:
        return [_time(dist, point, device, question.size) for point in question.points]
    finally:
        dist.destroy_process_group()


def _time(dist: Any, point: NodePoint, device: str, size: int) -> float:
    """Return the median seconds of a collective whose whole message has `point.size` bytes."""
    dtype = getattr(torch, point.dtype)
    count = max(1, int(point.size) // dtype.itemsize // size)
    part = torch.zeros(count, device=device, dtype=dtype)
    whole = torch.zeros(count * size, device=device, dtype=dtype)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch < 2.13
    calls = {
        "all_reduce": partial(dist.all_reduce, whole),
        "all_gather": partial(gather, whole, part),
    }
    found = []
    for _ in range(WARM_UP + REPEATS):
        dist.barrier()
        found.append(_seconds(calls[point.kind], device))
    return median(found[WARM_UP:])


def _seconds(call: Callable[[], object], device: str) -> float:
    if device != "cpu":
        return event_seconds(call)
    began_at = time.perf_counter()
    call()
    return time.perf_counter() - began_at


def event_seconds(call: Callable[[], object]) -> float:
    """Return the seconds of a call on the current GPU, between two CUDA events."""
    event: Any = torch.cuda.Event  # without types
    began, ended = (event(enable_timing=True) for _ in range(2))
    began.record()
    call()
    ended.record()
    torch.cuda.synchronize()
    return float(began.elapsed_time(ended)) / 1e3


def _main() -> None:
    found = _answer(msgspec.json.decode(sys.stdin.buffer.read(), type=_Question))
    sys.stdout.buffer.write(msgspec.json.encode(found))


if __name__ == "__main__":
    _main()
