"""What GPUs waited for during some steps: it adds up, and a table, notes and a figure say it."""

from __future__ import annotations

from io import StringIO
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from streamrl.engine.messages import Stepped
from streamrl.engine.presets import SYSTEMS
from streamrl.engine.trace import Trace
from streamrl.record.attribution import attribute
from streamrl.record.metrics import measure
from streamrl.record.timeline import Span, read_timeline
from streamrl.report.bubbles import Bubbles, bubble_notes, bubble_table, causes, read_bubbles
from streamrl.report.figures import bubble_figure
from streamrl.report.pictures.drawing import Rectangle
from streamrl.report.pictures.stacked_bars import RIGHT, WIDTH, bubbles_picture
from streamrl.sim.world import simulate
from tests.runs import small_run


def ends(trace: Trace) -> list[float]:
    return [0.0, *(entry.time for entry in trace.entries if isinstance(entry.event, Stepped))]


def within(spans: list[Span], start: float, end: float) -> float:
    return sum(max(0.0, min(span.end, end) - max(span.start, start)) for span in spans)


@pytest.mark.parametrize("system", sorted(SYSTEMS))
@pytest.mark.parametrize("step", [1, 2, 3])
def test_busy_and_idle_of_a_step_are_its_gpus_for_as_long_as_it_took(
    system: str, step: int
) -> None:
    trace = simulate(small_run({"policies.system": system}))
    run, ended_at = trace.run, ends(trace)
    bubbles = read_bubbles("one", trace, (step, step))
    assert bubbles.step_time == pytest.approx(ended_at[step] - ended_at[step - 1])
    assert bubbles.gpu_seconds == pytest.approx(run.num_gpus * bubbles.step_time)
    total = sum(bubbles.busy.values()) + sum(bubbles.idle.values())
    assert total == pytest.approx(bubbles.gpu_seconds)


@pytest.mark.parametrize("system", [name for name in sorted(SYSTEMS) if name != "colocated"])
def test_the_bubbles_of_a_step_are_what_its_timeline_leaves_empty(system: str) -> None:
    trace = simulate(small_run({"policies.system": system}))
    timeline, ended_at, run = read_timeline(trace), ends(trace), trace.run
    window = ended_at[1], ended_at[2]
    working = ("generate", "score", "train")
    replicas = [s for spans in timeline.replicas.values() for s in spans if s.activity in working]
    trainer = [span for span in timeline.trainers[0] if span.activity in working]
    busy = (
        run.rollout.tensor_parallel * within(replicas, *window)
        + run.trainer.num_gpus * within(trainer, *window)
    )  # fmt: skip
    bubbles = read_bubbles("one", trace, (2, 2))
    assert sum(bubbles.busy.values()) == pytest.approx(busy)
    assert sum(bubbles.idle.values()) == pytest.approx(bubbles.gpu_seconds - busy)


@pytest.mark.parametrize("system", sorted(SYSTEMS))
def test_windows_side_by_side_add_up_to_the_run(system: str) -> None:
    trace = simulate(small_run({"policies.system": system}))
    whole, edges = attribute(trace), [*ends(trace), trace.entries[-1].time]
    parts = [attribute(trace, window) for window in pairwise(edges)]
    assert sum(part.gpu_seconds for part in parts) == pytest.approx(whole.gpu_seconds)
    for kind in ("busy", "idle"):
        for name, share in getattr(whole, kind).items():
            seconds = sum(getattr(part, kind)[name] * part.gpu_seconds for part in parts)
            assert seconds == pytest.approx(share * whole.gpu_seconds, abs=1e-6)


def test_goodput_and_price_of_all_steps_that_count_are_the_runs() -> None:
    trace = simulate(small_run({"policies.system": "stream-sync"}))
    metrics, bubbles = measure(trace), read_bubbles("one", trace, (2, 3))
    assert bubbles.goodput == pytest.approx(metrics.goodput)
    assert bubbles.cost_per_million_tokens == pytest.approx(metrics.cost_per_million_tokens)


def test_it_refuses_steps_that_the_run_does_not_have() -> None:
    with pytest.raises(ValueError, match="steps must be from 1 to 3, got 2 to 4"):
        read_bubbles("one", simulate(small_run()), (2, 4))


# What is said of it -------------------------------------------------------------------------------

NOTHING = dict.fromkeys(measure(simulate(small_run())).idle, 0.0)
BATCH = Bubbles(
    name="batch",
    step_time=100.0,
    gpu_seconds=1000.0,
    busy={"decode": 300.0},
    idle={**NOTHING, "pipeline": 500.0, "skew": 200.0},
    goodput=10.0,
    cost_per_million_tokens=8.0,
)
STREAM = msgspec.structs.replace(
    BATCH,
    name="stream",
    step_time=50.0,
    gpu_seconds=500.0,
    idle={**NOTHING, "skew": 199.0, "sync": 1.0},
    cost_per_million_tokens=4.0,
)


def test_notes_say_what_the_change_did_and_what_is_left() -> None:
    assert bubble_notes(BATCH, STREAM) == [
        "stream: a step takes 50 s instead of 100 s with batch (-50 %).",
        "  pipeline shrinks from 500 to 0 GPU-seconds a step",
        "  a million tokens trained on cost $4.00, before $8.00",
        "Largest bubble left: skew, 39.8 % of all GPU-seconds.",
    ]


def test_notes_do_not_take_less_idle_for_a_shorter_step() -> None:
    filled = msgspec.structs.replace(
        BATCH, name="moves", busy={"decode": 999.0}, idle={**NOTHING, "skew": 1.0}
    )
    notes = bubble_notes(BATCH, filled)
    assert notes[0] == "moves: a step takes 100 s, as long as with batch (within 1 %)."
    assert notes[-2].startswith("Less idle, and yet hardly a shorter step")
    assert notes[-1] == "Hardly an idle GPU-second is left."
    assert not any("Less idle" in note for note in bubble_notes(BATCH, BATCH))


def test_the_table_has_a_column_a_run_and_a_row_a_cause() -> None:
    console = Console(width=120, record=True, file=StringIO())
    console.print(bubble_table([BATCH, STREAM]))
    lines = {line[:20].strip(): line[20:].split() for line in console.export_text().splitlines()}
    assert lines["idle: pipeline"] == ["500", "0"]
    assert lines["idle"] == ["700", "200"]
    assert "idle: verifier" not in lines
    assert lines["$ per million tokens"] == ["$8.00", "$4.00"]


def test_the_figure_stacks_every_bubble_that_can_be_seen(tmp_path: Path) -> None:
    shapes = bubbles_picture("bubbles", [BATCH, STREAM]).drawing.shapes
    bars = [
        shape.width for shape in shapes if isinstance(shape, Rectangle) and shape.css == "hatch"
    ]
    longest = WIDTH - RIGHT  # of 700 idle GPU-seconds
    assert sum(bars) == pytest.approx(longest * (700 + 199) / 700)
    assert causes([BATCH, STREAM]) == ["sync", "skew", "pipeline"]
    bubble_figure([BATCH, STREAM], tmp_path / "bubbles.png")
    assert (tmp_path / "bubbles.png").stat().st_size > 10_000
