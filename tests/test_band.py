"""One band for every total: by pencil and paper, and the same on the terminal, in JSON and in the report."""

from __future__ import annotations

import json
from math import sqrt
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from streamrl.hardware.step_errors import PAPER, checked_steps, checked_text
from streamrl.hardware.tiers import SPREADS
from streamrl.record.band import (
    Band,
    ModelError,
    band_of,
    basis_of,
    hull,
    model_error_of,
    named_datasheets,
)
from streamrl.record.metrics import bands_of_speed, measure
from streamrl.record.steady_state import FEW_STEPS, LEAST_FREEDOM, student
from streamrl.record.whole_run import whole_time
from streamrl.report.page.page import make_page, read_report, render_html
from streamrl.report.plan_report import head_lines
from streamrl.report.run_tables import figure_text, headline, time_text
from streamrl.report.words import money
from streamrl.runfile.files import write_run
from streamrl.runfile.formatting import format_dollars, format_step_time, long_dollars, long_time
from streamrl.runfile.frameworks import load_framework
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.kernels import Kernels
from streamrl.sim.planner.plan import read_plan
from tests.command_line import streamrl
from tests.report_directories import write_planned
from tests.runs import small_run
from tests.test_agreement import printed
from tests.test_metrics import two_steps
from tests.test_report import PREDICTED, WHOLE
from tests.test_whole_run import SPEED

ERROR = ModelError(low=0.8, high=1.25, datasheet_share=0.0)


# Arithmetic ---------------------------------------------------------------------------------------


def test_a_band_is_the_interval_stretched_by_the_model_error() -> None:
    band = band_of(100.0, (90.0, 110.0), ERROR)
    assert (band.low, band.high) == pytest.approx((90 * 0.8, 110 * 1.25))
    assert band_of(100.0, None, None) == Band(low=100.0, high=100.0)


def test_what_does_not_grow_with_seconds_is_in_no_band() -> None:
    found = bands_of_speed(SPEED, ERROR)  # 10 s in (9, 11), $7 a step, of which $2 are egress
    assert found.step_time_band.low == pytest.approx(9 * 0.8)
    assert found.cost_per_step_band.low == pytest.approx(2 + 5 * 0.9 * 0.8)
    assert found.cost_per_step_band.high == pytest.approx(2 + 5 * 1.1 * 1.25)
    assert found.cost_per_million_tokens_band.high == pytest.approx((2 + 5 * 1.1 * 1.25) * 1000)


def test_too_few_steps_for_an_interval_have_a_band_of_their_scatter_and_at_least_the_usual_error() -> (
    None
):
    few = replace(SPEED, step_time_interval=None)
    for even in (few, replace(few, counted_steps=(4, 4))):
        assert even.sampled == pytest.approx((10 / (1 + FEW_STEPS), 10 * (1 + FEW_STEPS)))
    uneven = replace(few, step_times=[30.0, 12.0, 5.0, 10.0, 15.0])
    error = student(LEAST_FREEDOM) * 5 / sqrt(3) / 10
    assert uneven.sampled == pytest.approx((10 / (1 + error), 10 * (1 + error)))
    many = replace(few, step_times=[9.9, 10.1] * 50, counted_steps=(1, 100))
    assert many.spread[1] < 1.01, "such as a run with planned faults"
    found = bands_of_speed(uneven, ERROR).step_time_band
    assert (found.low, found.high) == pytest.approx((8 / (1 + error), 12.5 * (1 + error)))
    time = whole_time(small_run({"algorithm.steps": 100}), uneven)
    assert time.interval is None
    assert time.sampled == pytest.approx((42 + 98 * 10 / (1 + error), 42 + 98 * 10 * (1 + error)))


def test_the_note_of_a_band_says_what_it_holds_and_whether_it_is_a_guess() -> None:
    assert not ERROR.is_guess and ERROR.note == f"band: {checked_text('', False)}"
    assert replace(ERROR, has_environments=True).note == (
        "band: no published step with environments was compared"
    )
    assert ERROR.of_step == "-20 to +25 %"
    unchecked = replace(ERROR, unchecked=["train"])
    assert unchecked.is_guess
    assert unchecked.note == "band of a guess: errors of train were never checked"
    guess, little = (replace(ERROR, datasheet_share=share) for share in (0.7, 0.04))
    assert guess.note == "band of a guess: 70 % of the seconds are from datasheets"
    assert little.note == f"{ERROR.note}; 4 % of the seconds are from datasheets"


def test_the_note_of_a_band_says_for_which_system_it_was_checked() -> None:
    runs = {each.system: each for each in checked_steps() if each.group != PAPER}
    figure = {each.system: each for each in checked_steps() if each.group == PAPER}
    assert runs.keys() == {"colocated", "one-step-async"}
    assert figure.keys() == {"colocated", "stream-sync", "stream-async"}
    assert sum(each.steps for each in figure.values()) == 27
    alone, both, none = (
        replace(ERROR, system=system).note
        for system in ("one-step-async", "colocated", "stream-async")
    )
    of = runs["one-step-async"]
    assert alone == (
        f"band: {of.within} of {of.steps} published one-step-async steps are within it"
    )
    of = figure["colocated"]
    assert both.endswith(f"are within it; in {PAPER}, {of.within} of {of.steps} are")
    assert none.startswith("band: no published run of stream-async was compared; in StreamRL")
    assert replace(ERROR, system="fully-async").note == (
        "band: no published run of fully-async was compared"
    )


def test_bands_of_several_seeds_are_joined() -> None:
    bands = [Band(low=1.0, high=3.0), Band(low=2.0, high=4.0)]
    assert hull(bands) == Band(low=1.0, high=4.0)


def test_a_clock_leaves_no_band() -> None:
    real = two_steps()
    real.world = "real"
    metrics = measure(real)
    assert metrics.model_error is None and metrics.whole_run is not None
    band = metrics.whole_run.dollars_band
    assert band == Band(low=metrics.whole_run.dollars, high=metrics.whole_run.dollars)
    assert long_dollars(5.0, None, (5.0, 5.0)) == "$5.00"


# Text ---------------------------------------------------------------------------------------------


def test_ends_have_three_digits_in_the_unit_of_the_figure() -> None:
    assert long_dollars(849.1, None, (684.2, 1157.9)) == "$849 (684 to 1,158)"
    assert long_time(56_440.0, None, (45_000.0, 77_000.0)) == "15.7 h (12.5 to 21.4)"
    assert long_time(864_000.0, None, (700_000.0, 1.2e6)) == "10.0 d (8.10 to 13.9)"
    assert format_step_time(164.7, None, (132.1, 224.0)) == "164.7 s (132 to 224)"
    assert format_step_time(720.0, None, (577.0, 979.0)) == "12 min (9.62 to 16.3)"
    assert (
        format_step_time(7200.0, None, (5760.0, 9780.0)) == "2 h 0 min (1 h 36 min to 2 h 43 min)"
    )
    assert format_dollars(0.381, (0.306, 0.5182)) == "$0.381 (0.306 to 0.518)"


# Everywhere ---------------------------------------------------------------------------------------


def test_terminal_json_and_report_of_a_simulation_have_one_band(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    write_run(small_run({"simulate.max_steps": 12}), tmp_path / "run.toml")
    shown = streamrl("simulate", tmp_path / "run.toml", "-o", tmp_path / "run").stdout
    data = json.loads(streamrl("simulate", tmp_path / "run.toml", "--json").stdout)
    whole, low_high = data["whole_run"], data["whole_run"]["dollars_band"]
    assert low_high["low"] < whole["dollars"] < low_high["high"]
    dollars = long_dollars(whole["dollars"], None, (low_high["low"], low_high["high"]))
    step = data["step_time_band"]
    step_time = format_step_time(data["step_time"], None, (step["low"], step["high"]))
    html = render_html(make_page(read_report([tmp_path / "run"]))).replace("\xa0", " ")
    for text in (shown, html):
        assert dollars in text and step_time in text
    assert " ± " not in shown.partition("error of the step")[0]


def test_intervals_are_shown_to_who_asks() -> None:
    assert time_text(WHOLE, intervals=True) == "2.500 h ± 0.028"
    assert headline(WHOLE, ERROR, intervals=True).endswith(f"; ± is a 95 % interval; {ERROR.note}")
    assert "±" not in headline(WHOLE, ERROR)
    assert figure_text(PREDICTED, "step_time", intervals=True) == "90 s ± 1"


def test_terminal_json_and_report_of_a_plan_have_one_band_and_runners_up_their_own(
    tmp_path: Path,
) -> None:
    plan = read_plan(write_planned(tmp_path / "plan") / "plan.json")
    whole, chosen = plan.whole_run, plan.allocation
    assert (
        whole is not None and whole.dollars_band is not None and chosen.step_time_band is not None
    )
    dollars = long_dollars(whole.dollars, None, (whole.dollars_band.low, whole.dollars_band.high))
    band = chosen.step_time_band
    step_time = format_step_time(chosen.step_time, None, (band.low, band.high))
    head = "\n".join(head_lines(plan))
    html = render_html(make_page(read_report([tmp_path / "plan"]))).replace("\xa0", " ")
    for text in (head, printed(plan)):
        assert dollars in text and step_time in text
    ends = f" {money(whole.dollars_band.low)} to {money(whole.dollars_band.high)}"
    assert money(whole.dollars) in html and ends in html and step_time in html
    assert " ± " not in head
    sampled = replace(plan, allocation=replace(chosen, step_time_interval=(1.0, 2.0)))
    assert " ± " in "\n".join(head_lines(sampled, intervals=True))
    for choice in (runner.choice for runner in plan.runners_up):
        assert choice.cost_per_step_band is not None and choice.model_error is not None
        assert choice.cost_per_step_band.low < choice.cost_per_step < choice.cost_per_step_band.high


def test_a_guess_names_what_takes_the_seconds_from_datasheets() -> None:
    weights = {"decode": 60.0, "train": 30.0, "sync": 10.0}
    tiers = {
        "decode": {"composed": 0.5, "roofline": 0.5},
        "train": {"composed": 1.0},
        "sync": {"roofline": 1.0},
    }
    parts = {"decode": {"attention of decode on A100": 0.4, "all-reduce on A100": 0.02}}
    named = named_datasheets(weights, tiers, parts)
    assert named == pytest.approx(
        {
            "attention of decode on A100": 0.24,
            "weight sync": 0.10,
            "decode": 0.048,
            "all-reduce on A100": 0.012,
        }
    )
    guess = replace(ERROR, datasheet_share=0.4, datasheets=named)
    assert guess.note == (
        "band of a guess: 40 % of the seconds are from datasheets (24 % attention of decode on A100, "
        "10 % weight sync and 5 % decode)"
    )


def test_attention_beyond_its_table_is_named_with_its_layers_and_its_gpu() -> None:
    kernels = Kernels("a100", "bfloat16")
    contexts = np.array([1024.0, 4096.0, 1e6])
    found = kernels.time("decode_attention", contexts, heads=8.0, kv_heads=2.0, batch=8.0)
    ((name, seconds),) = found.parts.items()
    assert name == "attention of decode beyond its table on A100"
    assert seconds == pytest.approx(found.unmeasured) and seconds[-1] > 0
    whole = (found.within("layers with a window") * 3 + kernels.traffic(np.full(3, 1e9))).taking(
        np.full(3, 2.0)
    )
    shares = whole.provenance.datasheets
    assert set(shares) == {
        "attention of decode beyond its table on A100, layers with a window",
        "norms and activations on A100",
    }
    assert sum(shares.values()) == pytest.approx(whole.provenance.shares["roofline"])
    first = whole.where(np.array([True, False, False]), found)
    assert first.seconds == pytest.approx([2.0, *found.seconds[1:]])
    shares = first.provenance.datasheets
    assert sum(shares.values()) == pytest.approx(first.provenance.shares["roofline"])
    shares = whole.mean().provenance.datasheets
    assert sum(shares.values()) == pytest.approx(whole.provenance.shares["roofline"])


def test_a_factor_that_few_sources_have_widens_the_band_of_what_it_takes_part_in() -> None:
    base = {"algorithm.old_log_probs": "trainer"}

    def spread(name: str, **framework: str) -> float:
        keys = {f"framework.{key}": value for key, value in framework.items()}
        found = Costs.load(small_run({**base, "framework.name": name, **keys})).facts.get(
            SPREADS, {}
        )
        assert isinstance(found, dict)
        return float(found.get("train", 0.0))

    low, middle, high = load_framework("nemo-rl").layouts[0].slowdown
    passes = spread("nemo-rl", transfer_time="0 s")
    assert passes == max(1 - low / middle, high / middle - 1) and spread("verl") == 0.0
    assert spread("nemo-rl", version="0.6") > passes  # what its controller sends

    def half(factor: float) -> float:
        shares = {"train": 0.5, "generation": 0.5}
        facts = {"train": {"composed": 1.0}, "decode": {"composed": 1.0}}
        return model_error_of(basis_of({}, shares, {**facts, SPREADS: {"train": factor}})).high

    assert half(0.3) > half(0.1) > half(0.0)
    assert half(0.0) == pytest.approx(half(1e-9))


def test_a_slow_host_widens_the_band_of_mixtures_alone() -> None:
    table = {"cluster.pools.near.gpu": "gb200", "trainer.max_tokens_per_pass": 8192}
    mixture = {"model.name": "qwen3-30b-a3b"}
    for changes, is_wider in ((mixture, True), ({}, False)):
        facts = Costs.load(small_run({**table, **changes})).facts
        assert (SPREADS in facts) == is_wider
