"""Seconds of work on a device, and of the forward passes of an engine.

On a CUDA device instants are events of the device's stream, so nothing waits for the stopwatch; elsewhere
they are readings of the host's clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from streamrl.executor.rollout.inference_engine import TimedPass


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


class PassContent(NamedTuple):
    """What a forward pass computes."""

    decoding: list[int]
    """Tokens that each decoding rollout attends to."""
    prefixes: list[int]
    """New prefix tokens of each other rollout."""


class PassLog:
    """The forward passes of one engine, each from its start to the start of the next."""

    def __init__(self, device: str) -> None:
        self._stopwatch = Stopwatch(device)
        self._starts: list[tuple[Any, Callable[[], PassContent]]] = []

    def begin(self, content: Callable[[], PassContent]) -> None:
        """Mark the start of a pass; what it computes is asked for when the passes are, off its path."""
        self._starts.append((self._stopwatch.mark(), content))

    def take(self) -> list[TimedPass]:
        """Return the passes since the last time; the last one has no end, so it is left out."""
        starts, self._starts = self._starts, []
        return [
            _timed(content(), self._stopwatch.between(start, end))
            for (start, content), (end, _) in pairwise(starts)
        ]


def _timed(content: PassContent, seconds: float) -> TimedPass:
    return TimedPass(
        running=len(content.decoding),
        context=sum(content.decoding),
        longest=max(content.decoding, default=0),
        prefixes=content.prefixes,
        seconds=seconds,
    )
