"""Tables, figures and Chrome traces say what the metrics and the trace say."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread
from rich.console import Console
from rich.table import Table

from streamrl.engine.messages import Generated, Stepped
from streamrl.engine.trace import Trace
from streamrl.record.chrome_trace import chrome_trace
from streamrl.record.ledger import Ledger, TrainerTotals
from streamrl.record.metrics import Metrics, SideMetrics, TrainerMetrics, measure
from streamrl.record.whole_run import PoolTotal, WholeRun
from streamrl.report.figures import idle_figure, timeline_figure
from streamrl.report.pictures.drawing import COLOURS, Rectangle, Text
from streamrl.report.pictures.step_timeline import timeline_picture
from streamrl.report.run_tables import compare, comparison_table, metrics_table
from streamrl.report.words import planned_sides_of, rent_text, sides_text
from streamrl.runfile.files import load_run
from streamrl.runfile.formatting import format_count, format_dollars, format_duration
from streamrl.sim.world import simulate
from tests.hand_traces import LEARNERS, HandTrace

EXAMPLE = Path(__file__).parent.parent / "examples" / "h20-h800.toml"

WHOLE = WholeRun(
    steps=100,
    seconds=9000.0,
    seconds_interval=(8900.0, 9100.0),
    dollars=450.0,
    dollars_interval=(445.0, 455.0),
    gpu_hours=120.0,
    pools={
        "h20": PoolTotal(
            gpu="h20", num_gpus=32, is_owned=True, gpu_hours=80.0, dollars=148.0, kwh=None
        ),
        "h100": PoolTotal(
            gpu="h100", num_gpus=16, is_owned=False, gpu_hours=40.0, dollars=302.0, kwh=20.0
        ),
    },
    egress=0.0,
    start_time=60.0,
    checkpoint_time=0.0,
    tokens=3.6e8,
    rollouts=102_400,
    kwh=None,
    unknown_power=["h20"],
)
PREDICTED = Metrics(
    world="simulated",
    num_steps=12,
    total_time=7200.0,
    whole_run=WHOLE,
    step_time=90.0,
    step_time_interval=(89.0, 91.0),
    median_step_time=90.0,
    counted_steps=(2, 12),
    note="",
    step_times=[90.0] * 12,
    throughput=44_000.0,
    goodput=40_000.0,
    samples_per_second=11.0,
    cost_per_step=4.5,
    cost_per_million_tokens=0.9,
    mean_staleness=0.0,
    num_gpus={"rollout": 32, "trainer": 16},
    busy={"prefill": 0.1, "decode": 0.5, "score": 0.0, "train": 0.1},
    idle={"skew": 0.2, "pipeline": 0.1, "sync": 0.0},
    staleness={0: 1000, 1: 3000},
    rewards=[0.1 * step for step in range(12)],
    dropped={"failed 3 times": 8},
    sides={
        "rollout": SideMetrics(busy={"prefill": 0.15, "decode": 0.6}, idle={"skew": 0.25}),
        "trainer": SideMetrics(busy={"train": 0.3}, idle={"skew": 0.4, "pipeline": 0.3}),
    },
    trainers=[
        TrainerMetrics(
            name="trainer",
            num_steps=12,
            mean_step_time=90.0,
            trained=4000,
            goodput=40_000.0,
            staleness={0: 1000, 1: 3000},
            lost={"failed 3 times": 8},
        )
    ],
    tiers={"measured": 0.75, "roofline": 0.25},
    ledger=Ledger(
        is_balanced=True,
        drawn=4008,
        trainers=[
            TrainerTotals(name="trainer", trained=4000, dropped={"failed 3 times": 8}, open=0)
        ],
        staleness=1,
        max_staleness=1,
        checksummed=None,
    ),
)
MEASURED = msgspec.structs.replace(
    PREDICTED,
    world="real",
    step_time=100.0,
    step_time_interval=(95.0, 105.0),
    throughput=40_000.0,
    busy={"prefill": 0.1, "decode": 0.4, "score": 0.0, "train": 0.1},
    idle={"skew": 0.2, "pipeline": 0.2, "sync": 0.0},
    tiers={"measured": 1.0},
)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return simulate_small("algorithm.steps=4")


def test_the_table_of_a_run_has_its_figures_with_units() -> None:
    text = render(metrics_table(PREDICTED))
    for shown in (
        "90 s",
        "44 k tokens/s",
        "11/s",
        "$4.50",
        "$0.9",
        "48  32 rollout, 16 trainer",
        "0: 1,000 (25 %), 1: 3,000 (75 %)",
        "8  failed 3 times",
        " over the same steps, simulated, 2 h 0 min in all",
    ):
        assert shown in text


def test_a_roofline_share_is_called_unmeasured() -> None:
    assert "75 % measured, 25 % roofline (unmeasured)" in render(metrics_table(PREDICTED))
    assert "unmeasured" not in render(metrics_table(MEASURED))


def test_causes_without_a_share_are_left_out() -> None:
    text = render(metrics_table(PREDICTED))
    assert "skew" in text and "50.0 %" in text
    assert "sync" not in text and "score" not in text


def test_rewards_are_shown_from_both_ends_where_there_are_any() -> None:
    executed = msgspec.structs.replace(PREDICTED, world="real")
    shown = render(metrics_table(executed))
    assert "0.200 over the first 5" in shown and "0.900 over the last 5" in shown
    assert "(+0.700)" in shown
    without = msgspec.structs.replace(executed, rewards=[0.0] * 12)
    assert "reward" not in render(metrics_table(without))


def test_a_comparison_gives_relative_errors_and_points() -> None:
    figures: dict[str, Any] = compare(PREDICTED, MEASURED)
    assert figures["step_time"] == {
        "predicted": 90.0,
        "measured": 100.0,
        "error": pytest.approx(-0.1),
    }
    assert figures["throughput"]["error"] == pytest.approx(0.1)
    assert figures["busy"]["decode"]["error"] == pytest.approx(10.0)
    assert figures["idle"]["pipeline"]["error"] == pytest.approx(-10.0)
    assert json.loads(msgspec.json.encode(figures))["goodput"]["error"] == 0
    text = render(comparison_table(PREDICTED, MEASURED))
    for shown in ("-10.0 %", "+10.0 %", "+10.0 pp", "-10.0 pp", "unmeasured"):
        assert shown in text
    assert "sync" not in text


def test_a_comparison_with_nothing_measured_has_no_error() -> None:
    nothing = msgspec.structs.replace(MEASURED, goodput=0.0)
    figures: dict[str, Any] = compare(PREDICTED, nothing)
    assert figures["goodput"]["error"] is None
    comparison_table(PREDICTED, nothing)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (2e-5, "20 us"),
        (0.0135, "13.5 ms"),
        (111.23, "111.2 s"),
        (1500, "25 min"),
        (11520, "3 h 12 min"),
    ],
)
def test_durations_have_the_unit_that_people_would_use(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_numbers_are_short() -> None:
    assert [format_count(x) for x in (9.134, 44_228, 1.84e6)] == ["9.13", "44.2 k", "1.84 M"]
    assert [format_dollars(x) for x in (0.0123, 4.5, 1234.5)] == ["$0.0123", "$4.50", "$1,234.50"]


def test_the_timeline_figure_shows_generation_training_and_idleness(
    trace: Trace, tmp_path: Path
) -> None:
    timeline_figure(trace, tmp_path / "timeline.png")
    pixels = imread(tmp_path / "timeline.png")[..., :3] * 255
    assert pixels.shape[1] == 1430
    for name, least in (("c-generate", 1000), ("c-train", 1000), ("lane", 10_000)):
        colour = 255 * np.array(to_rgb(COLOURS[name].light))
        assert (np.abs(pixels - colour).max(axis=-1) < 3).sum() > least


def test_an_emptying_replica_is_drawn_fainter() -> None:
    hand = HandTrace(algorithm__prompts_per_step=4)
    hand.begin()
    hand.draw(0.0, 1, 4)
    hand.generate(0.0, 0, 1, 2, 3)
    for rollout in range(3):
        hand.generated(10.0, rollout, run_time=10.0)
    hand.generated(20.0, 3, run_time=20.0)
    hand.train(20.0, 40.0, 1, 0, 1, 2, 3)
    full, last = [box for box in timeline_boxes(hand.trace, (1, 1)) if "c-generate" in box.css]
    assert full.css == "c-generate level-5" and last.css == "c-generate level-2"
    assert full.width == pytest.approx(last.width) and last.x == pytest.approx(full.x + full.width)
    lane = next(box for box in timeline_boxes(hand.trace, (1, 1)) if box.css == "lane")
    assert full.width / lane.width == pytest.approx(10 / 40, abs=0.01)


def test_a_window_of_several_steps_marks_and_names_each() -> None:
    trace = simulate_small("algorithm.steps=4", "policies.system=stream-sync")
    picture = timeline_picture("timeline", "mine", trace, measure(trace), (2, 4))
    ends = [shape for shape in picture.drawing.shapes if shape.css == "axis"]
    assert len(ends) == 3
    texts = [shape.text for shape in picture.drawing.shapes if isinstance(shape, Text)]
    assert [text for text in texts if text.startswith("step ")] == ["step 2", "step 3", "step 4"]
    assert picture.drawing.title.startswith("mine: steps 2 to 4 of 4, ")


def test_figures_are_svg_where_the_path_says_so(trace: Trace, tmp_path: Path) -> None:
    timeline_figure(trace, tmp_path / "timeline.svg", steps=(1, 2))
    idle_figure({"one": measure(trace)}, tmp_path / "idle.svg")
    for name in ("timeline.svg", "idle.svg"):
        assert "<svg" in (tmp_path / name).read_text()[:1000]


def test_a_window_outside_the_run_is_refused(trace: Trace, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="steps must be from 1 to 4, got 3 to 5"):
        timeline_figure(trace, tmp_path / "timeline.png", steps=(3, 5))


def test_more_replicas_than_fit_are_counted() -> None:
    many = simulate_small("algorithm.steps=1", "rollout.replicas=48", "cluster.pools.h20.nodes=6")
    picture = timeline_picture("timeline", "many", many, measure(many), (1, 1))
    assert "16 of 48 replicas are not drawn." in picture.caption
    assert sum(box.css == "lane" for box in timeline_boxes(many, (1, 1))) == 32 + 2


def test_a_chrome_trace_has_a_slice_for_each_attempt(trace: Trace) -> None:
    events = chrome_events(trace)
    num_generated = sum(isinstance(entry.event, Generated) for entry in trace.entries)
    for kind in "be":
        ids = [e["id"] for e in events if e["ph"] == kind and e["cat"] == "rollout"]
        assert len(set(ids)) == len(ids) == num_generated
    begun = [e for e in events if e["ph"] == "b"]
    tokens = sum(e["args"]["tokens"] for e in begun)
    assert tokens == sum(e.event.tokens for e in trace.entries if isinstance(e.event, Generated))
    staleness = Counter(str(e["args"]["staleness"]) for e in begun)
    assert staleness == {str(k): v for k, v in measure(trace, (1, 4)).staleness.items()}


def test_a_chrome_trace_is_in_order_with_each_kind_well_formed(trace: Trace) -> None:
    events = chrome_events(trace)
    assert {e["ph"] for e in events} == {"X", "b", "e", "C", "i", "M"}
    times = [e["ts"] for e in events]
    assert times == sorted(times) and times[0] >= 0
    assert times[-1] == pytest.approx(trace.entries[-1].time * 1e6)
    assert all(e["dur"] >= 0 for e in events if e["ph"] == "X")
    assert all("name" in e and "pid" in e for e in events)
    running = [e["args"]["value"] for e in events if e["name"] == "running rollouts"]
    assert min(running) == running[-1] == 0 and max(running) > 1


def test_every_chrome_event_says_its_thread_and_a_slice_when_and_how_long(trace: Trace) -> None:
    events = chrome_events(trace)
    assert all(type(e[key]) is int for e in events for key in ("pid", "tid"))
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert [named[1, replica] for replica in range(4)] == [f"replica {n}" for n in range(4)]
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"} == set(named)
    assert all("ts" in e and "dur" in e for e in events if e["ph"] == "X")
    assert all(e["name"] == f"rollouts of replica {e['tid']}" for e in events if e["ph"] in "be")


def test_slices_of_one_thread_of_a_chrome_trace_do_not_overlap(trace: Trace) -> None:
    ends: dict[tuple[int, int], float] = {}
    for event in chrome_events(trace):
        if event["ph"] == "X":
            thread = (event["pid"], event["tid"])
            assert event["ts"] >= ends.get(thread, 0.0) - 1e-2
            ends[thread] = event["ts"] + event["dur"]
    assert len(ends) == 4 + 2  # replicas, trainer, link


def test_a_chrome_trace_marks_each_step(trace: Trace) -> None:
    marks = [e["name"] for e in chrome_events(trace) if e["ph"] == "i"]
    steps = [e.event for e in trace.entries if isinstance(e.event, Stepped)]
    assert marks == [f"step {step.version}" for step in steps]


def learners() -> Trace:
    """Return a trace of a step of two trainers, of 2 and 5 seconds, and of a reward of 3."""
    hand = HandTrace(**LEARNERS)
    hand.begin()
    hand.draw(0.0, 1, 2)
    hand.generate(0.0, 0, 1)
    hand.generated(4.0, 0, run_time=4.0)
    hand.generated(5.0, 1, run_time=5.0, verified_at=8.0)
    hand.train(4.0, 9.0, 1, 0, 1, trainer=1)
    hand.train(8.0, 10.0, 1, 0)
    hand.sort()
    return hand.trace


def test_every_trainer_and_the_verifiers_have_a_thread_of_a_chrome_trace() -> None:
    events = chrome_events(learners())
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(named.values()) == ["push", "replica 0", "second", "trainer", "verifier"]
    slices = [e for e in events if e["name"] in ("train", "verify") and e["dur"]]
    seconds = {named[e["pid"], e["tid"]]: e["dur"] / 1e6 for e in slices}
    assert seconds == {"trainer": 2, "second": 5, "verifier": 3}
    assert [e["name"] for e in events if e["ph"] == "i"] == ["step 1"]  # the leader's


def test_every_trainer_and_the_verifiers_have_a_row_of_the_picture_and_a_sentence() -> None:
    trace = learners()
    picture = timeline_picture("timeline", "mine", trace, measure(trace), (1, 1))
    texts = [shape.text for shape in picture.drawing.shapes if isinstance(shape, Text)]
    assert {"trainer", "second", "link", "verifier"} < set(texts)
    words = picture.drawing.description.replace("\N{NO-BREAK SPACE}", " ")
    assert "The trainer's time: train 20 %, idle 80 %." in words
    assert "The time of second: train 50 %, idle 50 %." in words
    assert "Rewards are being computed for 30 % of the time." in words
    titles = [box.title for box in timeline_boxes(trace, (1, 1))]
    assert any("verify" in title for title in titles)


def test_the_table_of_a_run_names_every_trainer_and_every_side() -> None:
    text = render(metrics_table(measure(learners())))
    for words in ("trainers", "second", "1 steps", "verify", "sides"):
        assert words in text
    assert "trainers" not in render(metrics_table(PREDICTED))


def test_what_a_run_rents_names_every_side() -> None:
    run = learners().run
    team = planned_sides_of(
        run.cluster.pools, run.rollout, run.trainer, run.followers, run.verifier
    )
    assert plain(rent_text(team, "stream-sync")) == (
        "1 H20 in far to generate, 1 H800 in near to train, 2 H800 in near to train second and "
        "2 H800 in near to compute rewards"
    )
    assert plain(sides_text(team, "stream-sync")) == (
        "1 H20 in far (1 x TP1) generate, 1 H800 in near train, 2 H800 in near (TP2) train second, "
        "2 H800 in near compute rewards; stream-sync"
    )


def plain(text: str) -> str:
    return text.replace("\N{NO-BREAK SPACE}", " ")


def test_a_hundred_thousand_chrome_events_take_seconds() -> None:
    hand = HandTrace(algorithm__prompts_per_step=40_000)
    hand.begin()
    hand.draw(0.0, 1, 40_000)
    hand.generate(0.0, *range(40_000))
    for rollout in range(40_000):
        hand.generated(10.0 + rollout, rollout, run_time=5.0)
    began = time.perf_counter()
    encoded = chrome_trace(hand.trace)
    assert time.perf_counter() - began < 10
    assert len(json.loads(encoded)["traceEvents"]) > 100_000


def timeline_boxes(trace: Trace, steps: tuple[int, int]) -> list[Rectangle]:
    """Return the boxes of a timeline's picture, in order."""
    picture = timeline_picture("timeline", "run", trace, measure(trace), steps)
    return [shape for shape in picture.drawing.shapes if isinstance(shape, Rectangle)]


def chrome_events(trace: Trace) -> list[dict[str, Any]]:
    """Return the events of a Chrome trace as a reader of the file sees them."""
    events: list[dict[str, Any]] = json.loads(chrome_trace(trace))["traceEvents"]
    return events


def render(table: Table) -> str:
    """Return a table as a wide terminal without colours shows it."""
    console = Console(width=160, no_color=True)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def simulate_small(*changes: str) -> Trace:
    """Simulate the example on a few GPUs."""
    sizes = ("algorithm.prompts_per_step=64", "rollout.replicas=4", "cluster.pools.h20.nodes=1")
    return simulate(load_run(EXAMPLE, [*sizes, *changes]))
