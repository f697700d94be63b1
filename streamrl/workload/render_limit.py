"""Limit the time of a template, which may be anybody's program: it may loop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

RENDER_TIME = 10.0
"""Seconds that one prompt or chat may take. Long chats of known templates take milliseconds."""


@contextmanager
def render_limit(template: str, remedy: str) -> Iterator[None]:
    """Interrupt the block after `RENDER_TIME` seconds. Only the main thread of a process can be interrupted.

    Args:
        template: what the error calls the template.
        remedy: what the error says to do.

    Raises:
        ValueError: the block does not end in time.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getitimer(signal.ITIMER_REAL)[0]:
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise ValueError(f"{template} takes more than {RENDER_TIME:g} s; it may loop. {remedy}")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, RENDER_TIME)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
