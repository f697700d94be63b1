"""What batches that are not full lose: by pencil and paper, step by step, and in traces that cannot tell."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from streamrl.engine.messages import (
    Generated,
    LoadWeights,
    PushWeights,
    WeightsLoaded,
    WeightsPushed,
)
from streamrl.engine.presets import SYSTEMS
from streamrl.engine.trace import DecodeYield, Trace, read_trace
from streamrl.hardware.measured_profile import write_measured
from streamrl.hardware.memory import kv_capacity
from streamrl.hardware.resolved import resolve
from streamrl.record.attribution import attribute
from streamrl.record.chrome_trace import chrome_trace
from streamrl.record.decode_efficiency import measured_yield, share_lost
from streamrl.record.metrics import measure
from streamrl.report.bubbles import bubble_notes, bubble_table, read_bubbles
from streamrl.report.run_tables import compare, metrics_table
from streamrl.runfile.config import Run
from streamrl.sim.costs.costs import Costs
from streamrl.sim.world import SimWorld, simulate
from streamrl.workload.workload import SimulatedWorkload
from tests.hand_traces import HandTrace
from tests.measured_profile import base, make_profile, measured_run, model_directory, slope
from tests.runs import run_with_capacity, small_run
from tests.test_attribution import gpu_seconds

FLAT = DecodeYield(batches=[1, 4], base=[1.0, 1.0], per_context_token=[0.0, 0.0], most_running=4)
"""A step takes a second, whatever the batch: a rollout alone of four wastes three quarters."""


def hand_trace(decode: DecodeYield | None, num_rollouts: int = 4, **changes: Any) -> HandTrace:
    """Return a trace whose one replica has `num_rollouts`, of which the n-th ends after 10 n seconds."""
    hand = HandTrace(algorithm__prompts_per_step=num_rollouts, **changes)
    hand.trace.decode = [] if decode is None else [decode]
    hand.begin()
    hand.draw(0.0, 1, num_rollouts)
    hand.generate(0.0, *range(num_rollouts))
    for rollout in range(num_rollouts):
        ends = 10.0 * (rollout + 1)
        hand.generated(ends, rollout, run_time=ends, tokens=10 * (rollout + 1))
    hand.train(10.0 * num_rollouts, 10.0 * num_rollouts + 5, 1, *range(num_rollouts))
    return hand


def lost_and_decoded(hand: HandTrace) -> tuple[float, float]:
    """Return the GPU-seconds that were underfilled, and the others of decoding."""
    found = gpu_seconds(hand)
    return found.get("underfilled", 0.0), found["decode"]


@pytest.mark.parametrize("num_rollouts", [1, 2, 3, 4])
def test_lengths_of_1_to_n_lose_what_full_batches_would_not_have_needed(num_rollouts: int) -> None:
    lost = sum(10 * (1 - running / 4) for running in range(1, num_rollouts + 1))
    found = lost_and_decoded(hand_trace(FLAT, num_rollouts))
    assert found == (pytest.approx(lost), pytest.approx(10 * num_rollouts - lost))


def test_a_small_batch_whose_steps_are_short_loses_less() -> None:
    curve = msgspec.structs.replace(FLAT, base=[3.0, 4.0], batches=[1, 2], most_running=2)
    assert lost_and_decoded(hand_trace(curve, 2))[0] == pytest.approx(10 * (1 - (1 / 3) / (2 / 4)))
    linear = msgspec.structs.replace(FLAT, base=[1.0, 4.0])
    assert lost_and_decoded(hand_trace(linear))[0] == 0.0  # each rollout costs as much in any batch


def test_a_batch_is_full_where_memory_holds_no_more_of_its_rollouts() -> None:
    of_two = msgspec.structs.replace(FLAT, kv_capacity=170.0)  # 40 of a prompt, 10 to 40 of output
    assert lost_and_decoded(hand_trace(of_two))[0] == pytest.approx(10 * (1 - 1 / 2))


def test_context_slows_both_batches_down_alike() -> None:
    curve = msgspec.structs.replace(FLAT, base=[1.0, 1.0], per_context_token=[0.01, 0.01])
    middle = 40 + (1 + 10) / 2  # of one rollout of ten tokens, of which prefill made the first
    alone, full = 1 + 0.01 * middle, (1 + 0.01 * 4 * middle) / 4
    lost = lost_and_decoded(hand_trace(curve, 1))[0]
    assert lost == pytest.approx(10 * (1 - full / alone), rel=1e-6)


def test_what_prefill_and_loads_take_is_not_decoded_and_not_lost() -> None:
    hand = HandTrace()
    hand.trace.decode = [FLAT]
    hand.begin()
    hand.draw(0.0, 1, 1)
    hand.generate(0.0, 0)
    hand.command(4.0, PushWeights(1, 0))
    hand.at(5.0, WeightsPushed(1, 8), LoadWeights(0, 1, drain=False))
    hand.at(9.0, WeightsLoaded(0, 1, 4.0))
    hand.generated(20.0, 0, run_time=20.0, prefill_time=2.0)
    hand.train(20.0, 30.0, 1, 0)
    assert gpu_seconds(hand)["prefill"] == 2
    assert lost_and_decoded(hand) == (0.75 * (20 - 2 - 4), 0.25 * (20 - 2 - 4))
    before, after = (attribute(hand.trace, w) for w in ((0.0, 6.0), (6.0, 99.0)))
    parts = [part.busy["underfilled"] * part.gpu_seconds for part in (before, after)]
    assert parts == [pytest.approx(0.75 * (5 - 2)), pytest.approx(0.75 * (20 - 9))]


def test_a_trace_that_saw_full_batches_tells_by_their_tokens_a_second() -> None:
    hand = hand_trace(None)
    metrics = measure(hand.trace)
    assert metrics.underfilled_from == "observed"
    rates = [(ends - 1) / ends for ends in (10, 20, 30, 40)]  # prefill made a token of each
    lost = sum(10 * sum(rates[:ended]) / sum(rates) for ended in range(4))
    assert lost_and_decoded(hand)[0] == pytest.approx(lost, abs=1e-5)


def test_a_trace_that_cannot_tell_says_so_and_calls_nothing_underfilled() -> None:
    hand = hand_trace(None, 3)
    metrics = measure(hand.trace)
    assert metrics.underfilled_from == "unknown" and "underfilled" not in metrics.busy
    assert gpu_seconds(hand)["decode"] == 30
    console = Console(width=200, record=True, file=StringIO())
    console.print(metrics_table(metrics))
    assert "underfilled" in (text := console.export_text()) and "?" in text
    assert not any(event["name"] == "underfilled GPUs" for event in events_of(hand.trace))


# Simulated runs -----------------------------------------------------------------------------------


def one_replica(admission: str, siblings: int) -> Run:
    return run_with_capacity(
        2000,
        {
            "rollout.replicas": 1,
            "rollout.max_running": 24,
            "rollout.admission": admission,
            "algorithm.name": "reinforce++",
            "algorithm.steps": 1,
            "algorithm.prompts_per_step": 6 // siblings,
            "algorithm.group_size": siblings,
            "workload.max_prompt_tokens": 64,
            "policies.system": "stream-sync",
        },
    )


@pytest.mark.parametrize("admission", ["on-demand", "reserve"])
@pytest.mark.parametrize("siblings", [1, 3])
def test_a_run_loses_what_its_decode_steps_do_one_by_one(admission: str, siblings: int) -> None:
    run = one_replica(admission, siblings)
    costs, trace = Costs.load(run), simulate(run)
    drawn = SimulatedWorkload(run).draw(0, run.algorithm.prompts_per_step)
    lengths = [length for draw in drawn for length in draw.lengths]
    lost = 0.0
    for made in range(1, max(lengths)):  # prefill made the first token of all
        running = sum(length > made for length in lengths)
        context = 40 + made
        own = context - 40 * (1 - 1 / siblings)
        full = len(costs.decode.base) - 1
        if admission == "on-demand":
            full = max(min(full, int(kv_capacity(resolve(run).replica) // own)), running)
        here = costs.decode.step_time(running, running * context)
        lost += here * (
            1 - (running / here) / (full / costs.decode.step_time(full, full * context))
        )
    shares = attribute(trace)
    found = shares.busy["underfilled"] * shares.gpu_seconds / run.rollout.tensor_parallel
    assert found == pytest.approx(lost, rel=0.01)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), system=st.sampled_from(sorted(SYSTEMS)))
def test_what_is_underfilled_is_a_part_of_decoding_and_shares_sum_to_1(
    seed: int, system: str
) -> None:
    trace = simulate(small_run({"seed": seed, "policies.system": system}))
    shares = attribute(trace)
    whole = measure(trace)
    assert sum(shares.busy.values()) + sum(shares.idle.values()) == pytest.approx(1.0)
    assert shares.busy["underfilled"] >= 0 and shares.busy["decode"] > 0
    assert whole.underfilled_from == "curve"
    trace.decode = ()
    plain = attribute(trace)
    both = shares.busy["underfilled"] + shares.busy["decode"]
    assert plain.busy["decode"] + plain.busy.get("underfilled", 0.0) == pytest.approx(both)
    assert plain.idle == shares.idle


def test_a_full_batch_loses_nothing() -> None:
    changes = {"rollout.max_running": 2, "algorithm.steps": 1, "rollout.replicas": 1}
    lengths = {"workload.lengths.scale": 1.0, "rollout.max_tokens": 50}  # all are cut at 50
    run = small_run({**changes, **lengths})
    world = SimWorld(run, Costs.load(run), SimulatedWorkload(run))
    metrics = measure(world.run())
    assert metrics.busy["decode"] > 0
    assert metrics.busy["underfilled"] == pytest.approx(0.0, abs=1e-9)


# The trace's file ---------------------------------------------------------------------------------


def test_a_trace_is_attributed_from_its_file_alone(tmp_path: Path) -> None:
    trace = simulate(small_run())
    path = tmp_path / "trace.jsonl"
    path.write_bytes(trace.encode())
    assert attribute(read_trace(path)) == attribute(trace)
    header, rest = trace.encode().split(b"\n", 1)
    table = json.loads(header)
    assert table["format"] == 2 and table["decode"]["most_running"] == 4
    del table["decode"]
    path.write_bytes(json.dumps(table).encode() + b"\n" + rest)
    assert read_trace(path).decode == []


def test_a_curve_keeps_all_small_batches_and_its_largest() -> None:
    times = [float(batch) for batch in range(1001)]
    kept = DecodeYield.of(times, times, 10.0)
    assert kept.batches[:32] == list(range(1, 33)) and kept.batches[-1] == kept.most_running == 1000
    assert len(kept.batches) < 100
    assert kept.base == kept.per_context_token == [float(batch) for batch in kept.batches]


def test_an_executed_run_knows_its_full_batch_from_the_profile_of_its_machine(
    tmp_path: Path,
) -> None:
    model, path = model_directory(tmp_path / "model"), tmp_path / "profile.toml"
    write_measured(make_profile(model), path)
    (known,) = measured_yield(measured_run(model, path, rollout__max_running=4))
    assert known.batches == [1, 2, 3, 4] and known.kv_capacity is None
    assert known.base == pytest.approx([base(batch) for batch in known.batches])
    assert known.per_context_token == pytest.approx([slope(batch) for batch in known.batches])
    write_measured(make_profile(model, pace=1.5), path)
    (slower,) = measured_yield(measured_run(model, path, rollout__max_running=4))
    assert slower.base == pytest.approx([1.5 * seconds for seconds in known.base])
    assert measured_yield(measured_run(model, path, model__dtype="bfloat16")) == []
    assert measured_yield(measured_run(model, tmp_path / "none.toml")) == []
    assert measured_yield(small_run()) == []


# What is shown ------------------------------------------------------------------------------------


def events_of(trace: Trace) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(chrome_trace(trace))["traceEvents"]
    return events


def test_a_chrome_trace_counts_the_gpus_that_full_batches_would_not_need() -> None:
    events = [e for e in events_of(hand_trace(FLAT).trace) if e["name"] == "underfilled GPUs"]
    assert [(e["ts"] / 1e6, e["args"]["value"]) for e in events] == [
        (0.0, 0.0),
        (10.0, 0.25),
        (20.0, 0.5),
        (30.0, 0.75),
        (40.0, 0.0),
    ]


def test_a_comparison_takes_decoding_as_a_whole_where_one_run_cannot_tell() -> None:
    told, untold = measure(hand_trace(FLAT, 3).trace), measure(hand_trace(None, 3).trace)
    busy = compare(told, untold)["busy"]
    assert isinstance(busy, dict) and "underfilled" not in busy
    assert busy["decode"]["error"] == pytest.approx(0.0)
    both = compare(told, told)["busy"]
    assert isinstance(both, dict) and both["underfilled"]["predicted"] > 0


def test_bubbles_are_told_beside_what_is_underfilled() -> None:
    full, half = (
        read_bubbles(name, hand_trace(curve).trace, (1, 1))
        for name, curve in (
            ("full", msgspec.structs.replace(FLAT, base=[0.25, 1.0])),
            ("half", FLAT),
        )
    )
    assert full.underfilled == pytest.approx(0.0) and half.underfilled == pytest.approx(15.0)
    assert "  underfilled grows from 0 to 15 GPU-seconds a step" in bubble_notes(full, half)
    console = Console(width=120, record=True, file=StringIO())
    console.print(bubble_table([full, half]))
    (row,) = (line for line in console.export_text().splitlines() if "underfilled" in line)
    assert row.split() == ["underfilled", "0", "15"]


def test_tiers_weigh_all_decoding() -> None:
    told, untold = measure(hand_trace(FLAT, 3).trace), measure(hand_trace(None, 3).trace)
    assert told.tiers == pytest.approx(untold.tiers)
    assert any(isinstance(event, Generated) for _, event, _ in hand_trace(FLAT).trace.entries)


def test_rounding_of_what_rollouts_hold_makes_no_full_batch_larger_or_smaller() -> None:
    most = 64
    rising = DecodeYield(
        batches=[1, most],
        base=[1.0, 2.0],
        per_context_token=[0.0, 0.0],
        most_running=most,
        kv_capacity=700.0,
    )
    own = np.nextafter(100.0, [0.0, 100.0, 200.0])  # seven of them fill the memory
    lost = share_lost(rising, np.full(3, 2.0), own, own)
    assert lost == pytest.approx(np.full(3, lost[1]), rel=1e-12)
