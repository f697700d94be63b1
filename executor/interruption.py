"""Ctrl-C and SIGTERM: a run is asked to end, and where it does not, whatever hangs in this process, it is ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

from streamrl.engine.world import RunInterruptedError

LAST_TIME = 14.0
"""Seconds from the first signal to the end of this process: a run that obeys takes less, see `STOP_TIME` of its world."""
NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "terminated"}


class Ending(NamedTuple):
    """How a run that goes on is ended; all but `ask` may be called while its event loop hangs."""

    loop: asyncio.AbstractEventLoop
    ask: Callable[[str], None]
    """Lets it end soon; to be called on its loop."""
    abandon: Callable[[], None]
    """Leaves no process and no shared memory behind."""
    say: Callable[[], str]
    """Says how far it is, what is saved, and how to go on; stands after the name of the signal."""


class Interruption:
    """A context in which signals are obeyed; tell it of the run as soon as there is one."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        """The first one that came."""
        self._ending: Ending | None = None
        self._last: threading.Timer | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interruption:
        for number in NAMES:
            self._before[number] = signal.signal(number, self._obey)
        return self

    def __exit__(self, *error: object) -> None:
        if self._last is not None:
            self._last.cancel()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def watch_over(self, ending: Ending) -> None:
        """Take note of a run that begins."""
        self._ending = ending

    @property
    def error(self) -> RunInterruptedError:
        """What to raise once the run has ended of the signal."""
        assert self.signal is not None, "nothing came"
        said = ": nothing was begun" if self._ending is None else self._ending.say()
        return RunInterruptedError(f"{NAMES[self.signal]}{said}", self.signal)

    def _obey(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or signal.Signals(number)
        if self._ending is None:
            raise self.error
        if self._ending.loop.is_closed():
            return  # it has ended
        self._ending.loop.call_soon_threadsafe(self._ending.ask, NAMES[self.signal])
        if self._last is None:
            self._last = threading.Timer(LAST_TIME, self._end)
            self._last.daemon = True
            self._last.start()

    def _end(self) -> None:
        """End this process, in which something hangs that no Python code can end; its last line says what was saved."""
        assert self._ending is not None and self.signal is not None
        try:
            self._ending.abandon()
        finally:
            with contextlib.suppress(OSError):
                print(f"streamrl: {self.error}", file=sys.stderr, flush=True)
            os._exit(128 + self.signal)
