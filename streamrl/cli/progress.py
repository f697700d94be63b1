"""Show the progress of a command on standard error: a bar on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)

from streamrl.cli.consoles import SafeConsole

EVERY = 5.0
"""Seconds between plain lines, and before the first one, so that short commands print none."""
STDERR = 2


def make_progress() -> Progress:
    """Return a progress bar for a terminal, or plain lines otherwise."""
    console = SafeConsole(stderr=True)
    if not console.is_terminal:
        return PlainProgress()
    return Progress(*bar_columns(), console=console)


@contextmanager
def plan_progress() -> Iterator[Callable[[int, str], None]]:
    """Show the progress of a search, which calls what this yields."""
    with make_progress() as progress:
        task = progress.add_task("plan", total=None, facts="screening")

        def watch(done: int, what: str) -> None:
            progress.update(task, completed=done, facts=what)

        yield watch


def bar_columns() -> list[ProgressColumn]:
    """Return the columns of a bar on a terminal."""
    return [
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=12),
        MofNCompleteColumn(),
        TextColumn("{task.fields[facts]}", markup=False),
        TimeElapsedColumn(),
    ]


class PlainProgress(Progress):
    """Writes the content of a bar to a log: what is done, how much of the total, and since when."""

    def __init__(self, every: float = EVERY) -> None:
        super().__init__(disable=True)
        self._every = every
        self._has_ended = Event()
        self._began_at = 0.0
        self._thread = Thread(target=self._tell, daemon=True)

    def start(self) -> None:
        """Start to write lines."""
        self._began_at = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """Stop writing lines."""
        self._has_ended.set()
        self._thread.join()

    def _tell(self) -> None:
        """Write without Python's buffers, because a process that is forked meanwhile would inherit their locks."""
        while not self._has_ended.wait(self._every):
            seconds = time.monotonic() - self._began_at
            for task in self.tasks:
                if not task.finished:
                    with suppress(OSError):
                        os.write(STDERR, f"{line_of(task)}, {seconds:.0f} s\n".encode())


def line_of(task: Task) -> str:
    """Return a task as a line: its name, its current item, how much is done."""
    facts = str(task.fields.get("facts") or "")
    total = "" if task.total is None else f"/{task.total:.0f}"
    at = f"{facts}, " if facts else ""
    return f"{task.description}: {at}{task.completed:.0f}{total} done"
