"""A run that is measured block by block as it goes: the figures of the whole, in memory that does not grow."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simpy import Store

from streamrl.engine.messages import LoadWeights, PushWeights, WeightsLoaded, WeightsPushed
from streamrl.engine.presets import SYSTEMS
from streamrl.engine.trace import Entry, Trace
from streamrl.record.attribution import AttributionReader, attribute_sides
from streamrl.record.interval_sums import IntervalSums
from streamrl.record.metrics import Metrics, RunReader, measure, measure_read, measure_speed
from streamrl.record.steady_state import read_steps
from streamrl.record.timeline import Span, TimelineReader, read_timeline
from streamrl.runfile.config import Run
from streamrl.runfile.files import load_run
from streamrl.runfile.gpu_pools import sides_of
from streamrl.sim.steady_state import (
    Enough,
    measure_steady,
    open_world,
    simulate_speed,
    simulate_steady,
)
from streamrl.sim.trace import MeasuredTrace, SpeedTrace
from tests.command_line import streamrl
from tests.hand_traces import HandTrace
from tests.random_runs import FaultyWorld, failures, runs, runs_of_several
from tests.runs import small_run
from tests.test_underfilled import FLAT

MOST_BYTES = 6000
"""Bytes of a step: its entries take 50 kB, and a figure by step 8, in a column with room for thousands of steps."""
EXAMPLE = Path(__file__).parent.parent / "examples" / "h20-h800.toml"
STEPS: dict[str, Any] = {
    "algorithm.prompts_per_step": 8,
    "rollout.max_running": 8,
    "simulate.interval": 1e-9,
    "simulate.max_steps": 30,
}
FAILING: dict[str, Any] = {
    "failures.per_gpu_day": 3000.0,
    "failures.trainers": True,
    "policies.max_restarts": 10_000,
    "policies.max_attempts": 10_000,
    "execute.checkpoint_every": 3,
    "rollout.start_time": "3 s",
}
KINDS: dict[str, dict[str, Any]] = {
    **{system: {"policies.system": system} for system in sorted(SYSTEMS)},
    "failures": FAILING,
    "failures, fully-async": {**FAILING, "policies.system": "fully-async"},
    "greedy": {"policies.system": "fully-async", "policies.consumption": "greedy"},
    "resized": {
        "policies.resize": "adjust",
        "policies.resize_unit": 1,
        "policies.resize_window": 1,
    },
}


def blocks(entries: list[Entry], size: int) -> Iterator[list[Entry]]:
    """Yield entries in blocks of `size`, the last as long as it is."""
    for start in range(0, len(entries), size):
        yield entries[start : start + size]


def measure_blocks(trace: Trace, size: int) -> Metrics:
    """Measure a trace as a simulation does that keeps none of it."""
    reader = RunReader(trace)
    for block in blocks(trace.entries, size):
        reader.read(block)
        reader.settle()
    reader.finish()
    return measure_read(reader, read_steps(trace))


def check_alike(found: object, expected: object, place: str = "metrics") -> None:
    """Compare what figures are made of, numbers to 1e-9."""
    if isinstance(expected, dict):
        assert isinstance(found, dict), place
        for key in {**found, **expected}:  # a share that is left out is 0, or all but
            check_alike(found.get(key, 0.0), expected.get(key, 0.0), f"{place}.{key}")
    elif isinstance(expected, list):
        assert isinstance(found, list) and len(found) == len(expected), place
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            check_alike(one, other, f"{place}[{number}]")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-9), place
    else:
        assert found == expected, place


def check_same_figures(found: Metrics, expected: Metrics) -> None:
    check_alike(msgspec.to_builtins(found), msgspec.to_builtins(expected))


# The same figures ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_figures_by_blocks_are_those_of_the_whole(kind: str) -> None:
    trace = simulate_steady(small_run({**STEPS, **KINDS[kind]}))
    whole = measure(trace)
    for size in (1, 50, 10**6):
        check_same_figures(measure_blocks(trace, size), whole)


@settings(max_examples=40, deadline=None)
@given(run=runs_of_several(), faults=failures, size=st.sampled_from([1, 9, 100]))
def test_so_they_are_of_several_trainers_whatever_fails(
    run: Run, faults: frozenset[int], size: int
) -> None:
    trace = FaultyWorld(run, faults).run()
    if len(read_steps(trace)):
        check_same_figures(measure_blocks(trace, size), measure(trace))


@settings(max_examples=40, deadline=None)
@given(run=runs(consumption=None), size=st.integers(1, 60))
def test_so_they_are_of_any_run_that_is_simulated_as_it_is_measured(run: Run, size: int) -> None:
    run = msgspec.structs.replace(run, simulate=msgspec.structs.replace(run.simulate, max_steps=4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("streamrl.sim.trace.BLOCK", size)
        check_same_figures(measure_steady(run), measure(simulate_steady(run)))


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_speed_by_blocks_is_exactly_that_of_the_whole_trace(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamrl.sim.trace.BLOCK", 50)
    run = small_run({**STEPS, "simulate.max_steps": 8, **KINDS[kind]})
    whole = simulate_steady(run, num_more=0)
    for counted in (None, (2, 5)):
        trace = simulate_speed(open_world(run, trace_type=SpeedTrace))
        assert trace.measure(counted) == measure_speed(whole, counted)


def test_without_a_decode_curve_full_batches_are_looked_for_in_all_blocks() -> None:
    trace = simulate_steady(small_run({**STEPS, "policies.system": "stream-async"}))
    trace.decode = ()
    whole = measure(trace)
    assert whole.underfilled_from == "observed" and whole.busy["underfilled"] > 0
    check_same_figures(measure_blocks(trace, 50), whole)


def test_the_command_prints_what_the_whole_trace_says() -> None:
    few = ("--set", "algorithm.prompts_per_step=16", "--set", "simulate.max_steps=6")
    expected = measure(simulate_steady(load_run(EXAMPLE, [few[1], few[3]])))
    found = msgspec.json.decode(streamrl("simulate", EXAMPLE, *few, "--json").stdout, type=Metrics)
    check_same_figures(found, expected)


# Where blocks end ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["failures", "fully-async"])
def test_what_a_resource_does_is_cut_where_blocks_end_and_nothing_of_it_is_lost(kind: str) -> None:
    trace = simulate_steady(small_run({**STEPS, **KINDS[kind]}))
    whole, reader = read_timeline(trace), TimelineReader()
    parts = []
    for block in blocks(trace.entries, 40):
        reader.read(block)
        parts.append(reader.take(reader.known_until))
    parts.append(reader.finish())
    for replica, spans in whole.replicas.items():
        cut = [span for part in parts for span in part.replicas.get(replica, [])]
        for activity in ("start-up", "generate", "sync"):
            lasted = [_seconds(each, activity) for each in (cut, spans)]
            assert lasted[0] == pytest.approx(lasted[1], abs=1e-6), (replica, activity)
    ends = [part.end for part in parts]
    assert ends == sorted(ends) and len(parts) > 10 and ends[-1] == whole.end


def test_a_load_in_a_stretch_of_decoding_that_goes_on_past_the_block_is_no_decoding() -> None:
    hand = HandTrace(replicas=2, algorithm__prompts_per_step=2)
    hand.trace.decode = [FLAT]
    hand.begin()
    hand.draw(0.0, 1, 2)
    hand.generate(0.0, 0)
    hand.command(4.0, PushWeights(1, 0))
    hand.at(5.0, WeightsPushed(1, 8), LoadWeights(0, 1, drain=False))
    hand.at(9.0, WeightsLoaded(0, 1, 4.0))
    hand.generate(12.0, 1, replica=1)
    hand.generated(20.0, 0, run_time=20.0, prefill_time=2.0)
    hand.generated(25.0, 1, run_time=10.0)
    hand.train(25.0, 30.0, 1, 0, 1)
    whole = measure(hand.trace)
    assert whole.busy["underfilled"] > 0
    check_same_figures(measure_blocks(hand.trace, 1), whole)


def _seconds(spans: list[Span], activity: str) -> float:
    return sum(span.end - span.start for span in spans if span.activity == activity)


def test_any_window_between_marks_can_be_asked_for_once_a_run_is_read() -> None:
    trace = simulate_steady(small_run({**STEPS, "simulate.max_steps": 8}))
    marks, reader = read_steps(trace).ended_at, AttributionReader(trace)
    reader.mark(marks)
    reader.read(trace.entries)
    reader.finish()
    num_gpus = sum(side.num_gpus for side in sides_of(trace.run))
    for window in ((0.0, marks[0]), (marks[1], marks[4]), (marks[2], marks[3]), (0.0, marks[-1])):
        found = reader.between(*window).whole
        assert found.gpu_seconds == pytest.approx(num_gpus * (window[1] - window[0]))
        check_alike(found._asdict(), attribute_sides(trace, window).whole._asdict())


def test_a_ledger_cuts_what_spans_marks() -> None:
    ledger = IntervalSums[str]([1.0, 2.0, 2.0, 5.0])
    pieces = ledger.cut(np.array([0.5, 2.0, 6.0]), np.array([3.0, 5.0, 7.0]))
    ledger.add_pieces("it", pieces.slot, pieces.end - pieces.start)
    assert ledger.between(0.0, inf) == {"it": 0.5 + 1 + 1 + 3 + 1}
    assert ledger.between(0.0, 1.0) == {"it": 0.5}
    assert ledger.between(1.0, 2.0) == {"it": 1.0}
    assert ledger.between(2.0, 5.0) == {"it": 4.0}
    assert ledger.between(5.0, inf) == {"it": 1.0}


# Memory -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["fully-async", "failures"])
def test_measuring_a_long_run_takes_a_few_numbers_a_step(kind: str) -> None:
    def measure_steps(most: int) -> None:
        measure_steady(small_run({**STEPS, **KINDS[kind], "simulate.max_steps": most}))

    assert _bytes_a_step(measure_steps) < MOST_BYTES


def test_the_command_takes_a_few_numbers_a_step() -> None:
    def simulate_steps(most: int) -> None:
        few = ("algorithm.prompts_per_step=16", f"simulate.max_steps={most}")
        changes = [f"--set={change}" for change in (*few, "simulate.interval=1e-9")]
        assert streamrl("simulate", EXAMPLE, *changes, "--json").returncode == 0

    assert _bytes_a_step(simulate_steps) < MOST_BYTES


def test_nothing_is_kept_of_replicas_that_were_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.sim.trace.BLOCK", 64)
    often = {"failures.per_gpu_day": 20_000.0, "failures.trainers": False}
    changes = {**STEPS, **FAILING, **often, "simulate.max_steps": 300}
    world = open_world(small_run(changes), trace_type=MeasuredTrace)
    sizes: dict[int, list[int]] = {}

    def watch(version: int) -> None:
        if world.steps.num_made in (100, 200, 300):
            for number, size in _sizes(world).items():
                sizes.setdefault(number, []).append(size)

    world.run(watch, Enough(world).is_there)
    assert world.steps.num_failures > 120
    twice = [each for each in sizes.values() if len(each) == 3]
    assert not [each for each in twice if each[0] + 40 < each[1] < each[2] - 40]


def test_cycles_of_trainers_that_were_lost_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.sim.world.COLLECTED_STEPS", 2)
    monkeypatch.setattr("streamrl.sim.world.ALL_COLLECTED_STEPS", 50)
    often = {"failures.per_gpu_day": 20_000.0, "algorithm.prompts_per_step": 2}
    world = open_world(small_run({**STEPS, **FAILING, **often, "simulate.max_steps": 100}))
    before = _num_inboxes()
    world.run(is_enough=lambda: world.steps.num_made >= 100)
    assert world.steps.num_failures > 80
    assert _num_inboxes() - before < 20


def _num_inboxes() -> int:
    return sum(type(each) is Store for each in gc.get_objects())


def _sizes(start: object) -> dict[int, int]:
    """Return the sizes of all dictionaries, lists and sets that an object refers to, by `id`; figures by step are arrays."""
    seen, todo, sizes = {id(start)}, [start], dict[int, int]()
    while todo:
        each = todo.pop()
        if isinstance(each, dict | list | set):
            sizes[id(each)] = len(each)
        for other in gc.get_referents(each):
            if id(other) not in seen and not isinstance(other, type | ModuleType | FunctionType):
                seen.add(id(other))
                todo.append(other)
    return sizes


def _bytes_a_step(work: Callable[[int], None]) -> float:
    """Return by how much the most bytes that a work of so many steps takes grow with each, in small blocks."""
    peaks = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("streamrl.sim.trace.BLOCK", 512)
        work(20)  # what is loaded once
        for most in (30, 110):
            tracemalloc.start()
            try:
                work(most)
                peaks.append(tracemalloc.get_traced_memory()[1])
            finally:
                tracemalloc.stop()
    return (peaks[1] - peaks[0]) / 80
