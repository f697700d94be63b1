"""Stages of published RL steps, the page they stand on, and how far simulated seconds may be off."""

from __future__ import annotations

import csv
import tomllib
from pathlib import Path

import pytest
from msgspec.structs import replace

from benchmarks.bench_ablation import Line, page_of, without
from streamrl.cli.validate import ROWS
from streamrl.engine.messages import Stepped
from streamrl.hardware.memory import check_memory
from streamrl.hardware.profiles import PROFILES
from streamrl.hardware.resolved import resolve
from streamrl.record.band import StepBasis
from streamrl.record.metrics import measure
from streamrl.record.uncertainty import unmeasured_warning, unshared_error
from streamrl.runfile.files import make_run
from streamrl.sim.costs.overheads import decode_errors, load_engine
from streamrl.sim.fidelity import rl_steps
from streamrl.sim.fidelity.paper_figure import FigureCell, PaperFigure
from streamrl.sim.fidelity.published_rows import (
    AT_DEFAULTS,
    Row,
    band_text,
    first_predictions,
    in_band_text,
    middle,
    summarise,
    width_text,
)
from streamrl.sim.fidelity.ratios import DOUBLED, PAIRS
from streamrl.sim.fidelity.rl_steps import (
    PhaseSeconds,
    Published,
    at_defaults,
    choices_of,
    load_published,
    phase_seconds,
    simulate_step,
)
from streamrl.sim.fidelity.scorecard import (
    BEGIN,
    CHECKED_BEGIN,
    CHECKED_END,
    END,
    LIMITS,
    MANY_GPUS,
    MOE_STEPS,
    OF_MANY_GPUS,
    TOTALS,
    _bias,
    _origins,
    _told,
    checked_text,
    partition_of,
    scorecard,
    sections,
    short_scorecard,
    with_scorecard,
    write_history,
)
from streamrl.sim.world import simulate
from streamrl.workload.workload import SimulatedWorkload
from tests.runs import small_run

ROW = Row(
    name="a model",
    group="a framework",
    shape="a",
    unit="s",
    published=(10.0, 10.0),
    predicted=(9.0, 9.0),
    source="a page",
)
PUBLISHED = {step.name: step for step in load_published()}
SMALL = [name for name in PUBLISHED if "R1-Distill-Qwen-1.5B" in name]
MOST = 0.2
"""By which a stage of the two published steps of a 1.5B may be off."""


# Steps --------------------------------------------------------------------------------------------


def test_stages_of_a_colocated_step_follow_each_other_and_fill_it() -> None:
    changes = {
        "policies.system": "colocated",
        "rollout.pool": "near",
        "trainer.pool": "near",
        "algorithm.steps": 4,
        "algorithm.kl_coefficient": 0.1,
        "framework.step_time": "0 s",
    }
    found = phase_seconds(simulate(small_run(changes)))
    parts = found.generation + found.score + found.train + found.refit
    assert found.step == pytest.approx(parts, rel=0.02)
    assert min(found[:4]) > 0


def test_coming_steps_are_run_files_without_seconds() -> None:
    steps = load_published(PROFILES / "published" / "coming_steps.toml")
    assert steps and not any(step.stages for step in steps)
    assert not {step.name for step in steps} & PUBLISHED.keys()
    for step in steps:
        check_memory(resolve(make_run(step.table)))


def test_an_ablation_takes_away_what_the_framework_fills_in_and_nothing_that_the_source_states() -> (
    None
):
    step = PUBLISHED["NeMo-RL 0.5: Qwen3-32B on 64 H100, 1 step off"]
    table = step.table
    eager, slow = without(step, "trainer.kernels"), without(step, "framework.step_time")
    assert eager is not None and slow is not None
    assert eager.table == slow.table == table
    assert eager.opens == {**step.opens, "trainer.kernels": ["eager"]}
    assert slow.opens == {**step.opens, "framework.step_time": ["0 s"]}
    assert without(step, "rollout.memory_utilization") is None  # its recipe states it
    assert without(PUBLISHED[SMALL[0]], "trainer.kernels") is None  # it names no framework


def test_the_page_of_an_ablation_names_corrections_without_which_nothing_becomes_worse() -> None:
    stages = {"a": (0.10, 0.20), "b": (0.20, 0.10), "c": (0.10, 0.101)}
    lines = [Line(name, "train", 3, *medians, 0.0, 0.0) for name, medians in stages.items()]
    page = page_of([*lines, Line("b", "step", 3, 0.1, 0.12, 0.0, 0.0)], "today")
    assert "except without: `c`." in page
    assert "| `a` | train (+10.0) | - |" in page
    assert "| `b` | step (+2.0) | train (-10.0) |" in page
    assert "| `c` | - | - |" in page and "| `c` | train" not in page


@pytest.mark.parametrize("name", SMALL)
def test_the_two_steps_of_a_small_model_are_met_stage_by_stage(name: str) -> None:
    step = PUBLISHED[name]
    times = [one.seconds for choice in choices_of(step) if (one := simulate_step(step, choice))]
    assert len(times) == 8
    for stage, (low, high) in step.stages.items():
        ours = [one[stage] for one in times]
        assert min(ours) <= high * (1 + MOST), stage
        assert max(ours) >= low * (1 - MOST), stage


def test_steps_for_which_nothing_is_generated_beside_them_do_not_count() -> None:
    keys = {"policies.system": "one-step-async", "policies.max_staleness": 3, "algorithm.steps": 16}
    trace = simulate(small_run(keys))
    ended = [time for time, event, _ in trace.entries if isinstance(event, Stepped)]
    seconds = rl_steps.step_seconds(trace, 3)
    assert seconds == pytest.approx((ended[-4] - ended[9]) / 3)
    assert seconds > ended[-1] - ended[-2]  # the last steps only train


def test_a_row_with_a_wide_range_is_listed_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    step = PUBLISHED["NeMo-RL 0.5: Qwen3-32B on 64 H100, 1 step off"]
    found = [rl_steps.Simulated({"step": seconds}, ROW.basis) for seconds in (100.0, 112.0, 109.0)]  # type: ignore[arg-type]
    (narrow,), (wide,) = rl_steps._stage_rows(step, found[1:]), rl_steps._stage_rows(step, found)
    assert wide.group == f"{narrow.group}, unknown inputs" and narrow.predicted == (109.0, 112.0)


def test_lengths_are_scaled_to_the_published_mean_once_they_are_cut_off() -> None:
    first, second = (rl_steps._scale(PUBLISHED[name], {}) for name in SMALL)
    assert first < second  # 13,975 and 14,255 tokens in mean


def test_every_published_step_is_a_run_file_and_states_its_source() -> None:
    assert len(PUBLISHED) == len(load_published()) >= 52
    for step in PUBLISHED.values():
        run = make_run(step.table)
        assert step.source and step.note and step.stages
        assert step.stages.keys() <= {*PhaseSeconds._fields}
        assert {*step.fitted} <= {*PhaseSeconds._fields}
        gpus = run.trainer.num_gpus
        if step.most_ahead:
            gpus += run.rollout.num_gpus
        (pool,) = run.cluster.pools.values()
        assert gpus <= pool.num_gpus


@pytest.mark.parametrize(
    ("name", "partition"),
    [
        ("NeMo-RL 0.5: Qwen3-32B on 32 H100, on policy", "h100, dense, synchronous"),
        ("NeMo-RL 0.5: Qwen3-32B on 64 H100, 1 step off", "h100, dense, asynchronous"),
        ("NeMo-RL 0.6: DeepSeek-V3 on 128 GB200, on policy", "gb200, MoE, synchronous"),
    ],
)
def test_errors_are_summarised_by_gpu_kind_of_model_and_timing(name: str, partition: str) -> None:
    assert PUBLISHED[name].partition == partition


@pytest.mark.parametrize("name", ["NeMo-RL 0.5: Qwen3-30B-A3B on 32 H100, 1 step off"])
def test_lengths_have_the_published_mean_whatever_their_shape(name: str) -> None:
    step = PUBLISHED[name]
    choices = list(choices_of(step))
    assert len(choices) == 2
    for choice in choices:
        run = rl_steps._run(step.table, choice)
        draws = SimulatedWorkload(run).draw(0, 500)
        lengths = [min(each, run.rollout.max_tokens) for draw in draws for each in draw.lengths]
        assert sum(lengths) / len(lengths) == pytest.approx(step.mean_tokens, rel=0.03)


def test_a_step_that_our_memory_model_refuses_is_predicted_with_recomputation_and_says_so() -> None:
    step = PUBLISHED["NeMo-RL 0.5: Qwen3-30B-A3B on 32 H100, on policy"]
    assert rl_steps.REFUSED not in _note(step)
    assert rl_steps.REFUSED in _note(_with_passes(step, 14_000))
    with pytest.raises(ValueError, match="our memory model refuses it"):
        _note(_with_passes(step, 200_000))


def _with_passes(step: Published, tokens: int) -> Published:
    trainer = {**step.table["trainer"], "max_tokens_per_pass": tokens}
    return replace(step, table={**step.table, "trainer": trainer})


def _note(step: Published) -> str:
    """Return the note of a step's row."""
    found = [simulate_step(step, choice) for choice in choices_of(step)]
    (row,) = rl_steps._stage_rows(step, found)
    return row.note


# Errors -------------------------------------------------------------------------------------------


def test_a_row_with_unknown_inputs_is_off_by_what_its_middle_is() -> None:
    published, predicted = (10.0, 10.0), (5.0, 80.0)
    made = [
        replace(ROW, published=published, predicted=predicted),
        replace(ROW, published=predicted, predicted=published),
    ]
    assert [row.error for row in made] == pytest.approx([1.0, -0.5])
    assert [row.width for row in made] == pytest.approx([15.0, 0.0])


def test_a_step_whose_source_contradicts_itself_has_both_figures() -> None:
    both = [step for step in PUBLISHED.values() if len(set(step.stages.get("step", ()))) > 1]
    assert [(step.name.partition(":")[0], step.stages["step"]) for step in both] == [
        ("NeMo-RL 0.6", (199.0, 231.0))
    ]


def test_a_published_figure_is_in_the_band_of_its_prediction_or_it_is_not() -> None:
    bands: list[tuple[float, float] | None] = [(8.0, 9.9), (8.0, 10.0), None, (10.1, 11.0)]
    rows = [replace(ROW, band=band) for band in bands]
    assert [row.is_in_band for row in rows] == [False, True, None, False]
    assert summarise(rows).in_band == pytest.approx(1 / 3)
    assert summarise(rows[2:3]).in_band is None
    assert summarise(rows).above_band == pytest.approx(1 / 3)
    assert in_band_text(summarise(rows)) == "33% / 33% / 33%"
    assert band_text(summarise(rows[:1])) == "-11% to +10%"


def test_a_row_that_counts_as_a_range_is_in_no_band() -> None:
    ends = [(5.0, 20.0), (11.0, 20.0), (5.0, 10.0)]
    rows = [replace(ROW, predicted=each, counts_as_range=True) for each in ends]
    assert [row.is_within_range for row in rows] == [True, False, True]
    found = summarise([*rows, ROW])
    assert found.within_range == pytest.approx(2 / 3) and in_band_text(found) == ""
    assert width_text(found) == "91% (widest 300%), 67% within"
    assert summarise([ROW]).within_range is None


def test_a_fitted_row_is_judged_without_its_model() -> None:
    row = replace(ROW, left_out=12.0)
    assert row.error == pytest.approx(0.2)
    assert ROW.error == pytest.approx(-0.1)


def test_what_two_plans_share_says_nothing_of_which_is_better() -> None:
    stages = {"decode": 0.04, "train": 0.06}
    assert unshared_error(stages, {"decode"}) == 0.06
    assert unshared_error(stages, {"train"}) == 0.04
    assert unshared_error(stages, {"decode", "train"}) == 0.0
    assert unshared_error({"decode": 0.04}, {"decode"}) is None


def test_more_than_a_fifth_from_datasheets_is_called_a_guess() -> None:
    assert unmeasured_warning({"composed": 0.8, "roofline": 0.2}) == ""
    assert "21 %" in unmeasured_warning({"composed": 0.79, "roofline": 0.21})
    run = small_run({"model.dtype": "float32"})
    metrics = measure(simulate(run))
    assert metrics.tiers["roofline"] > 0.2 and "guess" in metrics.note


def test_an_engine_answers_for_gpus_that_it_was_measured_on_and_others_for_the_rest() -> None:
    vllm, sglang = load_engine("vllm-0.11").held_out, load_engine("sglang-0.4").held_out
    assert vllm is not None and sglang is not None
    assert decode_errors("vllm-0.11", "h100") == decode_errors("vllm-0.11", "h800") == vllm
    assert decode_errors("vllm-0.11", "h20") == sglang
    assert decode_errors("vllm-0.11", "cpu") is None


# The page -----------------------------------------------------------------------------------------


def test_the_page_has_each_group_with_its_errors_and_what_cannot_be_predicted() -> None:
    lines = list(sections({"training": [ROW]}))
    assert "| a framework | 1 | 10.0% | worst 10.0% | -10.0% |  |  |  |" in lines
    assert all(f"- {limit}" in lines for limit in LIMITS)


def test_the_scorecard_begins_with_rows_that_nothing_was_fitted_to() -> None:
    fitted = replace(ROW, is_fitted=True)
    sets = {
        "memory": [fitted],
        "training": [
            fitted,
            replace(fitted, left_out=8.0),
            ROW,
            replace(ROW, predicted=(5.0, 20.0)),
        ],
    }
    training, memory = list(scorecard(sets))[2:]
    cells = [cell.strip() for cell in training.strip("|").split("|")]
    assert cells[:5] == ["training steps", "2", "1", "", "5.0%"]
    assert cells[7] == "150% (widest 300%)"
    assert cells[11:] == ["20.0% / 20.0% of 1", "10.0% / 10.0% of 1"]
    assert memory.startswith(
        "| KV cache of replicas: reports that gave the constants | 0 |"
    ) and memory.endswith("10.0% of 1 |")


def test_first_predictions_and_steps_without_published_stages_are_marked() -> None:
    basis = StepBasis(
        replicas={"generation": 1.0}, trainer={}, partition=("mixture", "hopper", "a framework")
    )
    name, (low, high) = next(iter(first_predictions().items()))
    total = replace(ROW, name=name, stage="step", basis=basis, band=(8.0, 9.9), has_stages=False)
    (line,) = list(scorecard({"steps": [total]}))[2:]
    error = abs(middle((low, high)) / 10 - 1)
    assert f", {TOTALS} | 1 | 1 |  | 10.0% | worst 10.0% | -10.0% |  | {error:.1%} |" in line
    told = f"{error:.1%} off in median and {error:.0%} at p90. Today's are 10.0% and 10.0% off"
    assert told in _bias([total])
    assert any(f"{name} ({TOTALS})" in line for line in sections({"steps": [total]}))
    published = {f"{step.name}: step": step for step in PUBLISHED.values()}
    assert first_predictions().keys() <= published.keys()
    later = [name for name in published if " in fp8 " in name]
    assert len(first_predictions()) + len(later) == sum(
        step.stages.keys() == {"step"} for step in published.values()
    )


def test_a_step_on_racks_has_a_second_reading_whose_replicas_are_in_one_rack_each() -> None:
    on_racks = [step for step in PUBLISHED.values() if at_defaults(step) is not None]
    assert {step.partition.partition(",")[0] for step in on_racks} == {"gb200"}
    assert len(on_racks) == sum(" GB200, " in name for name in PUBLISHED)
    for step in on_racks:
        run = make_run(default.table) if (default := at_defaults(step)) else None
        assert run is not None and run.cluster.pools["gpus"].nvlink_domain == 72


def test_the_scorecard_shows_both_readings_of_racks_and_counts_configurations() -> None:
    basis = StepBasis(
        replicas={"generation": 1.0}, trainer={}, partition=("mixture", "blackwell", "a framework")
    )
    step = replace(ROW, stage="step", basis=basis, band=(8.0, 11.0), configuration="one")
    rows = [replace(step, name=name, readings={AT_DEFAULTS: 5.0}) for name in "ab"]
    (line,) = list(scorecard({"steps": rows}))[2:]
    assert "| 2 (1) | 1 | 50.0% | 10.0% |" in line
    (told,) = [each for each in _told({"steps": rows}, ()) if each.startswith("**2 whole steps")]
    assert "10.0% (all)" in told and "50.0% (all)" in told


def test_models_whose_errors_cancel_have_lines_of_their_own() -> None:
    basis = StepBasis(replicas={}, trainer={}, partition=("mixture", "hopper", "a framework"))
    step = replace(ROW, stage="step", basis=basis, band=(8.0, 11.0), source="a page")
    steps = [replace(step, shape="b", predicted=(11.0, 11.0)), step]
    every, longer, shorter = list(scorecard({"steps": steps}))[2:]
    assert ": b | 1 |" in longer and "| +10.0% |" in longer
    assert f": {ROW.shape} | 1 |" in shorter and "| -10.0% |" in shorter
    assert "| 2 | 1 |  | 10.0% |" in every and len(list(scorecard({"steps": [step, step]}))) == 3
    dense = replace(step, basis=replace(basis, partition=("dense", "hopper", "a framework")))
    assert len(list(scorecard({"steps": [dense, replace(dense, shape="b")]}))) == 3
    assert len(list(short_scorecard({"steps": steps}))) == 5
    alike = [replace(steps[0], shape=name) for name in "ab"]
    assert len(list(scorecard({"steps": alike}))) == 5
    assert len(list(short_scorecard({"steps": alike}))) == 3, "the README has those that cancel"


def test_large_steps_have_a_line_of_their_own_too() -> None:
    basis = StepBasis(replicas={}, trainer={}, partition=("dense", "hopper", "a framework"))
    step = replace(ROW, stage="step", basis=basis, band=(8.0, 9.9))
    sets = {"steps": [replace(step, num_gpus=number) for number in (MANY_GPUS - 1, MANY_GPUS)]}
    every, large = list(scorecard(sets))[2:]
    assert "| 2 | 1 |  | 10.0% | worst 10.0% |" in every and TOTALS not in every
    assert large.startswith(f"| {OF_MANY_GPUS} | 1 | 1 |  | 10.0% |") and "0% / 100% / 0%" in large


def test_below_the_scorecard_stand_what_bands_cover_elsewhere_and_what_a_fixed_choice_would_get() -> (
    None
):
    basis = StepBasis(
        replicas={"generation": 1.0}, trainer={}, partition=("dense", "hopper", "a framework")
    )
    step = replace(ROW, stage="step", basis=basis, band=(8.0, 11.0))
    steps = [step, step, replace(step, source="b page", band=(1.0, 2.0))]
    pair = replace(ROW, unit="x", group=PAIRS, published=(1.2, 1.2), predicted=(1.1, 1.1))
    pairs = [pair, replace(pair, published=(0.9, 0.9), predicted=(0.8, 0.8))]
    cells = [FigureCell(label="a", paper=1.1, ours=0.9), FigureCell(label="b", paper=1.1, ours=1.2)]
    assert [cell.is_reversed for cell in cells] == [True, False]
    figure = PaperFigure(
        name="Figure 8 ratios",
        title="",
        unit="",
        cells=cells,
        target="",
        is_met=False,
        found="",
        reversed=1,
    )
    doubled = replace(pair, group=DOUBLED, published=(0.8, 0.8), predicted=(1.2, 1.2))
    told = "\n".join(_told({"steps": steps, "ratios": [*pairs, doubled]}, [figure]))
    assert "The same run: 1 pairs, published 0.80 to 0.80" in told
    assert "and the sign is reversed in 1." in told
    assert "Of the 1 steps that are not of a page, 0 are within; 0 of these have fitted" in told
    assert "The 3 whole steps that no program fitted are of" in told and "fitted ones" not in told
    assert "By row, 3 of 3 are within 12 %, and 3 within 25 %. By partition, 1 of 1 are" in told
    assert "too short are 3 of 3 of" in told
    assert "Counted, they hold 3 of 3 (100%): 0 are above and 0 below." in told
    assert (
        "3 of 3 whole steps that no program fitted take longer" in told
        and "10.0% too short" in told
    )
    assert "In 0 of them the faster mode" in told and "wrong in 1." in told
    assert "In 1 of 2 ratios of StreamRL's Figure 8" in told and "1 of 1 targets" in told


def test_below_the_scorecard_stand_errors_of_fitted_steps_and_of_the_low_ends_of_ranges() -> None:
    step = replace(ROW, stage="step", source="a/one, page", published=(10.0, 10.0))
    fitted = replace(step, source="b/two page", is_fitted=True, predicted=(7.0, 7.0))
    told = " ".join(_origins([replace(step, predicted=(6.0, 15.0)), fitted]))
    assert "The 1 whole steps that no program fitted are of a/one." in told
    assert "1 fitted ones are of b/two: 30.0% off in median, 30.0% at worst." in told
    assert (
        "1 of the unfitted ones have unknown inputs: they are ranges, such as 6 to 15 s" in told
        and "At the lower end it is 40.0%" in told
    )


def test_stages_of_another_generation_of_gpus_have_a_line_of_their_own() -> None:
    basis = StepBasis(replicas={}, trainer={}, partition=("dense", "hopper", "a framework"))
    old = StepBasis(replicas={}, trainer={}, partition=rl_steps.OLD_GENERATION)
    rows = [replace(ROW, stage="generation", basis=each) for each in (basis, old)]
    names = [partition_of("steps", row) for row in rows]
    assert names == [f"stages of RL steps: generation on {name}" for name in ("Hopper", "Ampere")]


def test_every_set_of_rows_has_its_place_in_the_scorecard() -> None:
    for name in ROWS:
        assert any("10.0%" in line for line in scorecard({name: [ROW]}))
        assert list(sections({name: [ROW]}))


def test_a_range_does_not_count_as_exact_and_its_width_is_listed() -> None:
    (line,) = list(scorecard({"training": [replace(ROW, predicted=(5.0, 11.35))]}))[2:]
    assert "| 24.7% | worst 24.7% | -24.7% | 127% |" in line


def test_the_readme_has_the_figures_of_the_page_for_rows_that_no_program_fitted() -> None:
    root = Path(__file__).parents[1]
    readme, page = ((root / name).read_text() for name in ("README.md", "docs/fidelity.md"))
    part = readme.partition(f"{BEGIN}\n")[2].partition(f"\n{END}")[0]
    shown, every = ({c[0]: c for c in _cells(text)} for text in (part, page.partition("## ")[0]))
    for name, cells in shown.items():
        assert cells[1:] == [every[name][1], *every[name][3:11]], name
    free = [name for name, cells in every.items() if cells[1] != "0" and "ratios" not in name]
    moe = [name for name in free if name.startswith(MOE_STEPS)]
    by_model = {name for name in moe if ": " in name.removeprefix(MOE_STEPS)}
    assert by_model > by_model & shown.keys() and set(free) - by_model == shown.keys() - by_model
    assert len(shown) > 10 and list(shown)[1].startswith("whole RL steps")


def test_the_first_screen_says_which_steps_were_compared_and_that_no_prediction_was_scored() -> (
    None
):
    root = Path(__file__).parents[1]
    readme = (root / "README.md").read_text()
    told = readme.partition(CHECKED_BEGIN)[2].partition(CHECKED_END)[0]
    steps = [each for each in load_published() if "step" in each.stages]
    of_nemo = sum(each.name.startswith("NeMo-RL") for each in steps)
    assert told.startswith(f"Checked on {len(steps)} published steps, {of_nemo} of NeMo-RL, ")
    systems = {make_run(each.table).policies.system for each in steps}
    assert not any(system.startswith("stream") for system in systems)
    assert all(make_run(each.table).environment is None for each in steps)
    cells = [cells[-1] for cells in _cells((root / "docs" / "predictions.md").read_text())]
    assert set(cells) <= {"not read", "published"}, "a prediction was scored: README must say so"
    assert checked_text([]) == ""


def _cells(page: str) -> list[list[str]]:
    """Return the cells of the lines of a page's tables, without their heads."""
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_a_page_without_marks_for_the_scorecard_is_refused() -> None:
    page = f"{CHECKED_BEGIN}{CHECKED_END}{BEGIN}\n{END}"
    assert with_scorecard(page, {"training": [ROW]}).count("| training steps") == 1
    assert "10.0%" not in with_scorecard(page, {"training": [replace(ROW, is_fitted=True)]})
    with pytest.raises(ValueError, match="must have the marks <!-- checked -->"):
        with_scorecard("no marks", {})


def test_the_history_has_a_line_a_commit(tmp_path: Path) -> None:
    path = tmp_path / "history.csv"
    path.write_text("date,commit,version,serving_median\n2026-01-01,abc,0.1,0.5\n")
    for _ in range(2):
        write_history({"training": [ROW]}, {"figure-8": 0.1}, path)
    with path.open() as file:
        lines = list(csv.DictReader(file))
    assert [line["commit"] == "abc" for line in lines] == [True, False]
    assert lines[0]["serving_median"] == "0.5" and lines[1]["serving_median"] == ""
    assert lines[1]["training_median"] == "0.1000" and lines[1]["paper_figure-8"] == "0.1000"


# Steps to come ------------------------------------------------------------------------------------

CHANGED_SINCE = {
    "framework.version",
    "framework.optimizer_steps",
    "rollout.memory_utilization",
    "rollout.speculative.acceptance",
    "rollout.speculative.tokens",
    "trainer.expert_parallel",
    "trainer.max_tokens_per_scoring_pass",
}
"""Keys that recipes of NeMo-RL 0.7 have other than those of 0.6."""


def test_a_step_to_come_has_the_inputs_of_the_published_step_of_its_recipe() -> None:
    tables = [
        tomllib.loads((PROFILES / "published" / f"{name}.toml").read_text(encoding="utf-8"))
        for name in ("rl_steps", "coming_steps")
    ]
    published, coming = (
        {step["name"]: step.get("keys", {}) for group in table["groups"] for step in group["steps"]}
        for table in tables
    )
    twins = {
        name: name.replace("0.7", "0.6")
        for name in coming
        if name.replace("0.7", "0.6") in published
    }
    assert len(twins) >= 9
    for name, twin in twins.items():
        own, other = coming[name], published[twin]
        differ = {key for key in {*own, *other} if own.get(key) != other.get(key)}
        assert differ <= CHANGED_SINCE | {"algorithm.old_log_probs"}, name
