"""Files of lines on a disk that fills up: each line is there as a whole or not at all, and none is missing in between."""

from __future__ import annotations

from errno import ENOSPC
from io import BytesIO, FileIO
from pathlib import Path

import pytest

from streamrl.engine.trace import LineFile, Trace, read_trace
from tests.runs import small_run


class FullDisk(FileIO):
    """A raw file that takes so many bytes, and of the rest as much as fits, without a word."""

    room = 10**9

    def write(self, data: bytes) -> int:  # type: ignore[override]  # bytes are all that is written here
        fits = data[: max(0, self.room)]
        self.room -= len(fits)
        return super().write(fits) or 0


def test_a_line_that_does_not_fit_is_taken_back_and_said(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    raw = FullDisk(path, "w")
    raw.room = 12
    lines = LineFile(raw)  # type: ignore[arg-type]  # a raw file
    lines.write(b"0123456\n")
    with pytest.raises(OSError, match="No space left") as error:
        lines.write(b"abcdefg\n")
    assert error.value.errno == ENOSPC and str(path) in str(error.value)
    assert path.read_bytes() == b"0123456\n"
    raw.room = 10**9  # somebody makes room
    with pytest.raises(OSError, match="No space left"):
        lines.write(b"later\n")
    lines.close()
    assert path.read_bytes() == b"0123456\n"


def test_lines_are_added_where_there_are_some(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b"one\n")
    lines = LineFile(path.open("a+b", buffering=0))
    lines.write(b"two\n")
    lines.close()
    assert path.read_bytes() == b"one\ntwo\n"


def test_a_trace_begins_in_such_a_file() -> None:
    buffer = BytesIO()
    Trace(small_run(), "real", file=LineFile(buffer))
    assert buffer.getvalue().startswith(b'{"format"') and buffer.getvalue().endswith(b"\n")


def test_a_trace_that_ends_inside_a_line_says_so(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    whole = Trace(small_run(), "simulated").encode()
    path.write_bytes(whole)
    assert not read_trace(path).is_cut
    path.write_bytes(whole + b'[1.0, {"type"')
    assert read_trace(path).is_cut
