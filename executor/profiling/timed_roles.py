"""The replica and the trainer with a stopwatch: they do what they always do, and say how long each part took.

On a CUDA device instants are events of the device's stream, so nothing waits for the stopwatch; elsewhere
they are readings of the host's clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, TypeVar

import msgspec
import torch

from executor.rollout.batching import BY_SEQUENCE
from executor.rollout.replica_worker import ReplicaSettings, ReplicaWorker
from executor.samples import Manifest
from executor.trainer.trainer_worker import Learner, TrainerSettings, TrainerWorker

R = TypeVar("R")


class TimedPass(msgspec.Struct, frozen=True, kw_only=True):
    """One forward pass of a replica, from its start to the start of the next."""

    running: int
    """Rollouts that decoded."""
    context: int
    """Tokens that they attended to, in all."""
    prefixes: list[int]
    """New prefix tokens of each rollout whose prefix, or a part of it, was computed."""
    seconds: float


class Stopwatch:
    """Marks instants of one device."""

    def __init__(self, device: str) -> None:
        self._is_cuda = torch.device(device).type == "cuda"

    def mark(self) -> Any:
        """Return this instant."""
        if not self._is_cuda:
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        event.record()
        return event

    def between(self, start: Any, end: Any) -> float:
        """Return the seconds from one mark to a later one."""
        if not self._is_cuda:
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000  # milliseconds


class TimedReplica(ReplicaWorker):
    """A replica that records its forward passes."""

    def __init__(self, config: ReplicaSettings) -> None:
        super().__init__(config)
        self._stopwatch = Stopwatch(config.device)
        self._marks: list[tuple[Any, torch.Tensor, torch.Tensor]] = []

    async def start(self, manifest: Manifest | None, version: int) -> None:
        """Begin to serve, with a mark before each forward pass."""
        await super().start(manifest, version)
        self._model.register_forward_pre_hook(self._mark, with_kwargs=True)

    async def pads_context(self) -> bool:
        """Return whether decode steps pad every rollout to the longest: our attention does, flash kernels do not."""
        return bool(self._model.config._attn_implementation == BY_SEQUENCE)

    async def passes(self) -> list[TimedPass]:
        """Return the passes since the last call; the last one has no end, so it is left out."""
        marks, self._marks = self._marks, []
        return list(self._passes(marks))

    def _mark(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        keys = kwargs["cu_seq_lens_k"]  # by kind of layer where there is more than one
        longest = max(keys.values(), key=len) if isinstance(keys, dict) else keys
        ends = kwargs["cu_seq_lens_q"].clone(), longest.clone()  # the tensors are used again
        self._marks.append((self._stopwatch.mark(), *ends))

    def _passes(self, marks: list[tuple[Any, torch.Tensor, torch.Tensor]]) -> Iterator[TimedPass]:
        for (start, query_ends, key_ends), (end, _, _) in pairwise(marks):
            queries, keys = query_ends.diff().tolist(), key_ends.diff().tolist()
            decoding = [k for q, k in zip(queries, keys, strict=True) if q == 1]
            yield TimedPass(
                running=len(decoding),
                context=sum(decoding),
                prefixes=[q for q in queries if q > 1],
                seconds=self._stopwatch.between(start, end),
            )


class TimedTrainer(TrainerWorker):
    """A trainer that records how long the work of each call took, the way to it and back left out."""

    def __init__(self, config: TrainerSettings) -> None:
        super().__init__(config)
        self._stopwatch = Stopwatch(config.device)
        self._seconds: list[float] = []

    async def seconds(self) -> list[float]:
        """Return the seconds of each call since the last time, in order."""
        seconds, self._seconds = self._seconds, []
        return seconds

    async def _run(self, work: Callable[[Learner], R]) -> R:
        def timed(learner: Learner) -> R:
            start = self._stopwatch.mark()
            result = work(learner)
            self._seconds.append(self._stopwatch.between(start, self._stopwatch.mark()))
            return result

        return await super()._run(timed)
