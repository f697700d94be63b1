"""Traces too large for memory: what is read of them is what would be read of all entries at once."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from pytest import approx

from streamrl.engine import trace as trace_module
from streamrl.engine.trace import Trace, WrittenEntries, read_trace, replay
from streamrl.record.metrics import measure, measure_speed, read_run
from streamrl.record.restarts import ledger_of_run
from streamrl.sim.world import simulate
from tests.runs import small_run

BLOCK = 512
"""Entries of a block here, so that a short trace has a few."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of a few blocks."""
    run = small_run({"algorithm.steps": 500, "rollout.max_tokens": 64})
    found = tmp_path_factory.mktemp("traces") / "trace.jsonl"
    found.write_bytes(simulate(run).encode())
    return found


@pytest.fixture
def whole(path: Path) -> Trace:
    trace = read_trace(path)
    assert isinstance(trace.entries, list)
    return trace


@pytest.fixture
def written(path: Path, monkeypatch: pytest.MonkeyPatch) -> Trace:
    monkeypatch.setattr(trace_module, "LARGE", 1)
    monkeypatch.setattr("streamrl.engine.trace.BLOCK", BLOCK)
    trace = read_trace(path)
    assert isinstance(trace.entries, WrittenEntries) and len(trace.entries) > 3 * BLOCK
    return trace


def test_entries_that_stay_in_the_file_are_the_same(whole: Trace, written: Trace) -> None:
    assert list(written.entries) == whole.entries
    assert (written.entries[0], written.entries[-1]) == (whole.entries[0], whole.entries[-1])
    assert written.entries[5:9] == whole.entries[5:9]
    with pytest.raises(IndexError):
        written.entries[len(whole.entries)]
    blocks = list(written.blocks())
    assert [entry for block in blocks for entry in block] == whole.entries
    assert max(map(len, blocks)) == BLOCK


def test_figures_and_books_are_the_same(path: Path, whole: Trace, written: Trace) -> None:
    one, other = measure(whole), measure(written)
    assert other.busy == approx(one.busy, abs=1e-9) and other.idle == approx(one.idle, abs=1e-9)
    assert other.step_times == one.step_times and other.ledger == one.ledger
    assert measure_speed(written) == measure_speed(whole)
    assert ledger_of_run(written, path.parent) == ledger_of_run(whole, path.parent)
    assert replay(written) is None


def test_what_is_kept_of_a_longer_trace_is_a_few_numbers_a_step(
    path: Path, written: Trace, tmp_path: Path
) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    shorter = tmp_path / "trace.jsonl"
    shorter.write_bytes(b"".join(lines[: 2 * len(lines) // 3]))
    short = read_trace(shorter)
    read_run(short)  # what is loaded once is there from now on
    kept = most_memory(lambda: read_run(written)) - most_memory(lambda: read_run(short))
    entries = most_memory(lambda: list(written.entries)) - most_memory(lambda: list(short.entries))
    assert kept < 0.2 * entries


def most_memory(work: Callable[[], object]) -> int:
    """Return the most bytes that are taken at once meanwhile."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_last_line_that_was_cut_short_is_left_out(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_module, "LARGE", 1)
    cut = tmp_path / "trace.jsonl"
    cut.write_bytes(path.read_bytes()[:-3])
    trace, uncut = read_trace(cut), read_trace(path)
    assert (trace.is_cut, uncut.is_cut) == (True, False)
    assert list(trace.entries) == list(uncut.entries)[:-1]


def test_damage_is_told_as_the_file_is_opened(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_module, "LARGE", 1)
    lines = path.read_bytes().splitlines(keepends=True)
    file = tmp_path / "trace.jsonl"
    file.write_bytes(b"".join([*lines[:40], b"[1,2\n", *lines[41:]]))
    with pytest.raises(ValueError, match=r"trace\.jsonl:41: not a trace entry"):
        read_trace(file)
    file.write_bytes(b"".join([lines[0], lines[500], *lines[1:]]))
    with pytest.raises(ValueError, match=r"trace\.jsonl:3: a damaged trace"):
        read_trace(file)
