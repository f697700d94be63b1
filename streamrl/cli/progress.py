"""Show the progress of a command on standard error: a bar on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from threading import Event, Thread

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)

EVERY = 5.0
"""Seconds between plain lines, and before the first: commands that are done by then stay silent."""
STDERR = 2


def make_progress() -> Progress:
    """Make a progress bar that shows on a terminal, and tells in plain lines where there is none."""
    console = Console(stderr=True)
    if not console.is_terminal:
        return PlainProgress()
    return Progress(*bar_columns(), console=console)


def bar_columns() -> list[ProgressColumn]:
    """Make what a bar on a terminal is made of."""
    return [
        TextColumn("{task.description}"),
        BarColumn(bar_width=12),
        MofNCompleteColumn(),
        TextColumn("{task.fields[facts]}"),
        TimeElapsedColumn(),
    ]


class PlainProgress(Progress):
    """Says for a log what a bar would show: what is done, how much of how much, since when."""

    def __init__(self, every: float = EVERY) -> None:
        super().__init__(disable=True)
        self._every = every
        self._has_ended = Event()
        self._began_at = 0.0
        self._thread = Thread(target=self._tell, daemon=True)

    def start(self) -> None:
        """Begin to tell."""
        self._began_at = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """Tell nothing any more."""
        self._has_ended.set()
        self._thread.join()

    def _tell(self) -> None:
        """Write past Python's buffers, whose locks a process that is forked meanwhile would inherit."""
        while not self._has_ended.wait(self._every):
            seconds = time.monotonic() - self._began_at
            for task in self.tasks:
                if not task.finished:
                    with suppress(OSError):
                        os.write(STDERR, f"{line_of(task)}, {seconds:.0f} s\n".encode())


def line_of(task: Task) -> str:
    """Return a task in a line: its name, what it is at, how much is done."""
    facts = str(task.fields.get("facts") or "")
    total = "" if task.total is None else f"/{task.total:.0f}"
    at = f"{facts}, " if facts else ""
    return f"{task.description}: {at}{task.completed:.0f}{total} done"
