"""The Chrome trace that is written while a run goes on: whole at its end, and readable wherever it is cut."""

from __future__ import annotations

import errno
import json
import tracemalloc
from collections import Counter, defaultdict
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.engine.messages import Drop, Failed, StartTrainer, Stepped
from streamrl.engine.trace import Trace
from streamrl.executor.monitoring import LONGEST, LiveTrace
from streamrl.record.chrome_trace import CHROME_TRACE, ChromeReader, chrome_trace
from streamrl.record.decode_efficiency import FullBatches
from streamrl.runfile.config import Run
from streamrl.sim.steady_state import simulate_steady
from tests.hand_traces import HandTrace
from tests.random_runs import FaultyWorld, failures, runs_of_several
from tests.runs import small_run
from tests.test_blocks import KINDS, STEPS, blocks
from tests.test_underfilled import FLAT

Event = dict[str, Any]
COUNTERS = ("running rollouts", "underfilled GPUs")


def exported(trace: Trace) -> list[Event]:
    events: list[Event] = json.loads(chrome_trace(trace))["traceEvents"]
    return events


def read_chrome(trace: Trace) -> ChromeReader:
    """Return a reader of the entries of a trace."""
    return ChromeReader(FullBatches.of(trace), trace.run.followers, trace.run.verifier)


def by_blocks(trace: Trace, size: int) -> list[Event]:
    """Return the events that a reader makes of blocks of `size` entries."""
    reader = read_chrome(trace)
    found = list(reader.names())
    for block in blocks(trace.entries, size):
        found += [*reader.read(block), *reader.settle()]
    found += reader.finish()
    events: list[Event] = msgspec.to_builtins(found)
    return events


def write_live(trace: Trace, directory: Path) -> LiveTrace:
    live = LiveTrace(directory, read_chrome(trace))
    for entry in trace.entries:
        live.take(entry)
    return live


def opened(data: bytes) -> list[Event]:
    """Return the events of an array as viewers open it: its end may be missing, and its last event be cut short."""
    lines = data.decode(errors="ignore").splitlines()
    assert lines[0] == "["
    if lines[-1] == "]":
        events: list[Event] = json.loads(data)
        return events
    whole = [line.removesuffix(",") for line in lines[1:-1]]
    return [json.loads(line) for line in whole]


def check_same(found: list[Event], expected: list[Event]) -> None:
    """Compare what viewers show, whose order is that of time; sums of pieces differ in their last digits."""
    (one, counted), (other, expected_counts) = _shown(found), _shown(expected)
    assert one == other
    assert counted.keys() == expected_counts.keys()
    for name, values in counted.items():
        assert [time for time, _ in values] == [time for time, _ in expected_counts[name]]
        assert [value for _, value in values] == pytest.approx(
            [value for _, value in expected_counts[name]], abs=2e-3
        )


def _shown(events: list[Event]) -> tuple[Counter[str], dict[str, list[tuple[float, float]]]]:
    counted = defaultdict(list)
    others: Counter[str] = Counter()
    for event in sorted(events, key=lambda event: event["ts"]):
        if event["name"] in COUNTERS:
            counted[event["name"]].append((event["ts"], event["args"]["value"]))
        else:
            times = {key: round(event[key], 1) for key in ("ts", "dur") if key in event}
            others[json.dumps({**event, **times}, sort_keys=True)] += 1
    return others, counted


# The same events ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_events_by_blocks_are_those_of_the_whole(kind: str) -> None:
    trace = simulate_steady(small_run({**STEPS, **KINDS[kind], "simulate.max_steps": 12}))
    expected = exported(trace)
    assert any(event["name"] == "underfilled GPUs" for event in expected)
    for size in (1, 7, 100):
        check_same(by_blocks(trace, size), expected)


@settings(max_examples=30, deadline=None)
@given(run=runs_of_several(), faults=failures, size=st.sampled_from([1, 9, 100]))
def test_so_they_are_of_several_trainers_whatever_fails(
    run: Run, faults: frozenset[int], size: int
) -> None:
    trace = FaultyWorld(run, faults).run()
    if trace.decode:
        check_same(by_blocks(trace, size), exported(trace))


def test_two_spans_that_touch_stay_two_wherever_a_block_ends() -> None:
    hand = HandTrace(algorithm__prompts_per_step=2)
    hand.trace.decode = [FLAT]
    hand.begin()
    hand.draw(0.0, 1, 2)
    hand.generate(0.0, 0, 1)
    hand.generated(4.0, 0, run_time=4.0)
    hand.generated(6.0, 1, run_time=6.0)
    hand.train(6.0, 9.0, 1, 0, 1)
    hand.at(9.0, Failed(StartTrainer(0, 0), "twice"))
    hand.sort()
    for size in range(1, len(hand.trace.entries)):
        check_same(by_blocks(hand.trace, size), exported(hand.trace))


def test_what_nobody_will_train_on_is_told_at_once() -> None:
    hand = HandTrace(algorithm__prompts_per_step=2)
    hand.begin()
    hand.draw(0.0, 1, 2)
    hand.generate(0.0, 0, 1)
    hand.generated(4.0, 0, run_time=4.0)
    hand.command(5.0, Drop(0, "of no use"))
    hand.command(5.0, Drop(1, "of no use"))
    hand.generated(6.0, 1, run_time=6.0)
    reader = read_chrome(hand.trace)
    begun = [event for event in reader.read(hand.trace.entries) if event.ph == "b"]
    assert [event.args["rollout"] for event in begun if event.args] == [0, 1]


def test_memory_does_not_grow_with_steps() -> None:
    changes = {**STEPS, "policies.system": "fully-async"}
    few, many = (
        simulate_steady(small_run({**changes, "simulate.max_steps": steps})) for steps in (20, 200)
    )
    assert len(many.entries) > 8 * len(few.entries)
    most_kept(few)  # what is made once and for all
    assert most_kept(many) < 3 * most_kept(few)


def most_kept(trace: Trace) -> int:
    """Return the bytes that a reader keeps at most."""
    reader = read_chrome(trace)
    tracemalloc.start()
    try:
        for block in blocks(trace.entries, 50):
            for _ in chain(reader.read(block), reader.settle()):
                pass
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# The file -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trace() -> Trace:
    return simulate_steady(small_run({**STEPS, "policies.system": "stream-async"}))


def test_the_file_is_whole_once_the_run_is_over(trace: Trace, tmp_path: Path) -> None:
    write_live(trace, tmp_path).close()
    check_same(json.loads((tmp_path / CHROME_TRACE).read_bytes()), exported(trace))


def test_a_run_that_is_killed_leaves_all_but_the_last_seconds(trace: Trace, tmp_path: Path) -> None:
    write_live(trace, tmp_path)  # and nobody closes it
    data = (tmp_path / CHROME_TRACE).read_bytes()
    assert data.startswith(b"[\n{") and data.endswith(b"}"), "an array without its bracket"
    events = json.loads(data + b"]")
    steps = [event["name"] for event in events if event["ph"] == "i"]
    stepped = [event for time, event, _ in trace.entries if isinstance(event, Stepped)]
    assert steps == [f"step {event.version}" for event in stepped][: len(steps)]
    assert len(stepped) - len(steps) <= 2
    last = max(event["ts"] / 1e6 for event in events)
    assert last > trace.entries[-1].time - 2 * LONGEST


def test_wherever_a_full_disk_cuts_the_file_what_stands_before_is_read(
    trace: Trace, tmp_path: Path
) -> None:
    write_live(trace, tmp_path).close()
    data = (tmp_path / CHROME_TRACE).read_bytes()
    whole = opened(data)
    for end in range(10_000, 10_300):
        found = opened(data[:end])
        assert found == whole[: len(found)] and len(found) > 10


def test_a_full_disk_costs_the_run_nothing_and_is_told_once(
    trace: Trace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    live = LiveTrace(tmp_path, read_chrome(trace))

    def fail(*args: object, **others: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "open", fail)
    for entry in trace.entries:
        live.take(entry)
    live.close()
    path = tmp_path / CHROME_TRACE
    assert caplog.messages == [
        f"{path} is no longer written: OSError: [Errno 28] No space left on device"
    ]


def test_a_directory_that_cannot_be_written_to_costs_the_run_nothing(
    trace: Trace, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    live = write_live(trace, tmp_path / "nowhere")
    live.close()
    assert caplog.text.count("is no longer written") == 1
