"""A file of lines of which each is there as a whole or not at all, also where a disk fills up for a moment."""

from __future__ import annotations

from errno import ENOSPC
from mmap import ACCESS_READ, mmap
from os import SEEK_END, strerror
from pathlib import Path
from typing import IO


class LineFile:
    """Writes lines to an unbuffered file; after the first that fails it takes no more, so that none is missing between others."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._name = getattr(file, "name", None)  # what lives in memory has none
        self._error: OSError | None = None

    def write(self, line: bytes) -> None:
        """Add a line, its end included.

        Raises:
            OSError: it does not fit, or one before did not; what is there of it is taken back.
        """
        if self._error is not None:
            raise self._error
        size = self._file.seek(0, SEEK_END)
        try:
            if self._file.write(line) != len(line):  # a raw file says so, and raises nothing
                raise OSError(ENOSPC, strerror(ENOSPC))
        except OSError as error:
            self._file.truncate(size)
            self._error = OSError(error.errno, error.strerror, self._name)
            raise self._error from None

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def open_at_end(path: Path) -> LineFile:
    """Open a file of lines for more of them; a last one that a crash cut short is left out."""
    file = path.open("a+b", buffering=0)
    if path.stat().st_size:
        with mmap(file.fileno(), 0, access=ACCESS_READ) as data:
            end = data.rfind(b"\n") + 1
        file.truncate(end)
    return LineFile(file)
