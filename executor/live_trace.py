"""The Chrome trace of a run while it goes on, in an array that has no end until the run has one.

A run that is killed leaves what ui.perfetto.dev opens: the format lets the closing bracket be missing. It lacks the last
seconds, and where full batches are not known beforehand (`costs.profile`) the counter of underfilled GPUs. It cannot
hurt a run: what fails is said once, and no more is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from streamrl.executor.notices import tell
from streamrl.record.chrome_events import ChromeReader
from streamrl.record.chrome_format import TraceEvent
from streamrl.record.chrome_trace import CHROME_TRACE
from streamrl.record.decode_yield import DecodeYield
from streamrl.record.entries import Entry
from streamrl.runfile.config import Run

MOST_ENTRIES = 500
"""Of a block; each block looks at all that is under way."""
LONGEST = 5.0
"""Seconds of a block, and so about what a run that is killed lacks."""
SEPARATOR = b",\n"


class LiveTrace:
    """Writes events block by block; what is under way is kept."""

    def __init__(self, directory: Path, run: Run, decode: Sequence[DecodeYield]) -> None:
        """Begin the file anew in a run's directory."""
        self._path = directory / CHROME_TRACE
        self._reader = ChromeReader(run, decode)
        self._block: list[Entry] = []
        self._is_open = True
        self._try(self._begin)

    def take(self, entry: Entry) -> None:
        """Take what has happened, and write what is known by now once a block is full."""
        if not self._is_open:
            return
        self._block.append(entry)
        if len(self._block) >= MOST_ENTRIES or entry.time >= self._block[0].time + LONGEST:
            self._try(self._write_block)

    def close(self) -> None:
        """Write what is left, and the end."""
        if self._is_open:
            self._try(self._end)
            self._is_open = False

    def _begin(self) -> None:
        self._path.write_bytes(b"[\n" + _encode(self._reader.names()))

    def _write_block(self) -> None:
        block, self._block = self._block, []
        self._add([*self._reader.read(block), *self._reader.settle()])

    def _end(self) -> None:
        self._add([*self._reader.read(self._block), *self._reader.finish()], end=b"\n]\n")

    def _add(self, events: Sequence[TraceEvent], end: bytes = b"") -> None:
        """Write on; a file that is opened anew for each block holds what it says, whatever becomes of this process."""
        with self._path.open("ab") as file:
            file.write((SEPARATOR if events else b"") + _encode(events) + end)

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._is_open = False
            self._block.clear()
            what = f"{self._path} is no longer written: {type(error).__name__}: {error}"
            tell(what)


def _encode(events: Iterable[TraceEvent]) -> bytes:
    return SEPARATOR.join(map(_ENCODER.encode, events))


_ENCODER = msgspec.json.Encoder()
