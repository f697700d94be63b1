"""Time work on a device, and the forward passes of an engine.

On a CUDA device instants are events of the device's stream, so timing never makes the host wait. On other devices
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
    """Mark instants on one device."""

    def __init__(self, device: str) -> None:
        self._is_cuda = torch.device(device).type == "cuda"

    def mark(self) -> Any:
        """Return a mark of the current instant."""
        if not self._is_cuda:
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        event.record()
        return event

    def between(self, start: Any, end: Any) -> float:
        """Return the seconds between two marks."""
        if not self._is_cuda:
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000  # milliseconds


class PassContent(NamedTuple):
    """Tokens that a forward pass computes."""

    decoding: list[int]
    """Number of tokens that each decoding rollout attends to."""
    prefixes: list[int]
    """Number of new prefix tokens of each other rollout."""


class PassLog:
    """Log of one engine's forward passes, each measured from its start to the start of the next."""

    def __init__(self, device: str) -> None:
        self._stopwatch = Stopwatch(device)
        self._starts: list[tuple[Any, Callable[[], PassContent]]] = []

    def begin(self, content: Callable[[], PassContent]) -> None:
        """Mark the start of a pass.

        `content` is called later, in `take`, so that it does not slow the pass down.
        """
        self._starts.append((self._stopwatch.mark(), content))

    def take(self) -> list[TimedPass]:
        """Return the completed passes since the last call; the newest pass has no end yet."""
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
