"""A column of one number a step is a list whose memory does not grow."""

from __future__ import annotations

import tracemalloc
from bisect import bisect_left
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.record import long_column
from streamrl.record.long_column import NUM_RECENT, LongColumn
from streamrl.sim.steady_state import measure_steady
from tests.runs import small_run

CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("extend"), st.integers(0, 3 * NUM_RECENT)),
        st.tuples(st.just("set"), st.floats(0, 1, exclude_max=True)),
        st.tuples(st.just("cut"), st.floats(0, 1)),
    ),
    max_size=8,
)


@settings(max_examples=40)
@given(CHANGES, st.floats(0, 1), st.floats(0, 1))
def test_a_long_column_is_a_list(changes: list[tuple[str, float]], low: float, high: float) -> None:
    column, expected = LongColumn[float]("d"), list[float]()
    for what, share in changes:
        place = int(share * len(expected))
        if what == "extend":
            values = [float(len(expected) + n) for n in range(int(share))]
            column.extend(values)
            expected.extend(values)
        elif what == "cut":
            column.cut(place)
            del expected[place:]
        elif expected:
            column[place] += 0.25
            expected[place] += 0.25
        column.append(float(len(expected)))
        expected.append(float(len(expected)))
    assert (column.tolist(), [*column], len(column)) == (expected, expected, len(expected))
    first, last = int(low * len(expected)), int(high * len(expected))
    assert column[first:last].tolist() == expected[first:last]
    assert [column[n] for n in range(-len(expected), 0, 97)] == expected[::97]
    if expected:
        assert bisect_left(column, 0.5 * expected[-1]) == bisect_left(expected, 0.5 * expected[-1])


def test_the_memory_of_a_long_column_does_not_grow() -> None:
    column = LongColumn[int]("q", range(4 * NUM_RECENT))
    tracemalloc.start()
    column.extend([])
    before, _ = tracemalloc.get_traced_memory()
    for number in range(20 * NUM_RECENT):
        column.append(number)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 16 * NUM_RECENT < 8 * 20 * NUM_RECENT
    assert column[-1] == 20 * NUM_RECENT - 1 and column[4 * NUM_RECENT - 1] == 4 * NUM_RECENT - 1


def test_a_long_column_without_a_disk_stays_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(long_column.tempfile, "TemporaryFile", refuse)
    assert LongColumn[int]("q", range(9 * NUM_RECENT)).tolist() == [*range(9 * NUM_RECENT)]


def test_results_do_not_depend_on_what_is_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    run = small_run(
        {
            "simulate.max_steps": 40,
            "simulate.interval": 1e-9,
            "failures.per_gpu_day": 2000,
            "failures.trainers": True,
            "policies.system": "stream-async",
            "policies.max_restarts": 10**6,
            "policies.max_attempts": 10**6,
        }
    )
    in_memory = measure_steady(run)
    monkeypatch.setattr(long_column, "NUM_RECENT", 1)
    written = measure_steady(run)
    assert in_memory.dropped.get("rolled back"), "columns are also cut"
    assert msgspec.json.encode(written) == msgspec.json.encode(in_memory)
