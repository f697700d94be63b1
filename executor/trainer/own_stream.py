"""A stream of a GPU for work beside what is queued on it, such as a push beside training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def stream_of_its_own(device: torch.device) -> Iterator[None]:
    """Let the calling thread's work wait for what is queued so far, and for nothing that others queue from now on.

    Threads share one stream otherwise, and each copy to the host would wait for the passes queued before it.
    """
    if device.type != "cuda":
        yield
        return
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    stream.wait_stream(torch.cuda.default_stream(device))
    with torch.cuda.stream(stream):
        yield
