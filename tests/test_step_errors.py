"""The one error of a step: by pencil and paper, from residuals, and its coverage of sources that were left out."""

from __future__ import annotations

from math import exp, log
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from streamrl.hardware.step_errors import (
    PAPER,
    PATH,
    StageErrors,
    StepErrors,
    checked_steps,
)
from streamrl.hardware.tiers import Tier
from streamrl.record.band import ROOFLINE, StepBasis, model_error_of
from streamrl.record.metrics import measure, steady_basis
from streamrl.sim.fidelity.bands import (
    BEYOND,
    COVERAGE,
    RESIDUALS,
    Residual,
    derive,
    errors_text,
    left_out_bands,
    nested_bands,
    read_residuals,
    residuals_of,
    with_bands,
    write_residuals,
)
from streamrl.sim.fidelity.published_rows import Row
from streamrl.sim.world import simulate
from tests.runs import small_run

DOCS = Path(__file__).parents[1] / "docs"
ERRORS = StepErrors(
    name="made up",
    source="a test",
    coverage=0.8,
    rows=0,
    sources=0,
    within_source=0.5,
    priors=(8.0, 4.0),
    most_roofline=0.6,
    sides=(1.0, 1.0),
    stages={
        stage: StageErrors(rows=0, sources=0, own=None, spread={"all": 0.3, "dense": spread})
        for stage, spread in (("generation", 0.2), ("score", 0.1), ("train", 0.1), ("sync", 0.4))
    },
    correlation={"generation train": 0.5},
    factors={"all": 2.0, "dense": 1.5, "dense, hopper": 1.0},
)
HOPPER = ("dense", "hopper", "named framework")
ROW = Row(
    name="a step",
    group="steps",
    shape="a",
    unit="s",
    published=(10.0, 10.0),
    predicted=(9.0, 9.0),
    source="a page",
    stage="step",
    basis=StepBasis(replicas={"generation": 0.6, "train": 0.4}, trainer={}, partition=HOPPER),
)


# Combining stages ---------------------------------------------------------------------------------


def test_errors_of_stages_add_up_as_far_as_they_are_correlated() -> None:
    basis = StepBasis(replicas={"generation": 0.6, "train": 0.4}, trainer={}, partition=HOPPER)
    variance = (0.6 * 0.2) ** 2 + (0.4 * 0.1) ** 2 + 2 * 0.5 * 0.6 * 0.2 * 0.4 * 0.1
    found = model_error_of(basis, errors=ERRORS)
    assert log(found.high) == pytest.approx(variance**0.5) == -log(found.low)
    assert found.stages["generation"].share == 0.6
    assert found.stages["train"].high == pytest.approx(exp(0.1))


def test_the_expensive_side_of_a_band_has_a_factor_of_its_own() -> None:
    errors = replace(ERRORS, sides=(0.5, 2.0))
    basis = StepBasis(replicas={"generation": 1.0}, trainer={}, partition=HOPPER)
    found = model_error_of(basis, errors=errors)
    assert (log(found.low), log(found.high)) == pytest.approx((-0.5 * 0.2, 2.0 * 0.2))
    assert found.of_stages == "generation 100 % of the step, -10 to +49 %"
    measured = replace(basis, tiers={"generation": {"measured": 1.0}})
    timed = model_error_of(measured, errors=errors)
    assert timed.high == pytest.approx(1 / timed.low) == pytest.approx(1.21)


def test_a_partition_that_is_unknown_has_the_factor_of_the_nearest_larger_one() -> None:
    assert ERRORS.factor(HOPPER[:2]) == 1.0
    assert ERRORS.factor(("dense", "ada")) == 1.5
    assert ERRORS.factor(()) == ERRORS.factor(("mixture",)) == 2.0


def test_of_two_sides_at_the_same_time_the_longer_one_sets_the_step() -> None:
    spreads = dict.fromkeys(ERRORS.stages, 0.2)
    both = ERRORS.critical({"generation": 1.0}, {"train": 1.0}, spreads)
    assert both == pytest.approx({"generation": 0.5, "train": 0.5})
    longer = ERRORS.critical({"generation": 1.0}, {"train": 0.5}, spreads)
    assert longer["generation"] > 0.99 and sum(longer.values()) == pytest.approx(1.0)
    in_turns = ERRORS.critical({"generation": 0.6}, {"train": 0.3}, spreads)
    assert in_turns == {"generation": 0.6, "train": 0.3}
    partly = ERRORS.critical({"generation": 0.8}, {"train": 0.8}, spreads)
    assert partly == pytest.approx({"generation": 0.5, "train": 0.5})


def test_seconds_that_were_measured_on_the_machine_have_the_error_of_executed_runs() -> None:
    basis = StepBasis(
        replicas={"generation": 1.0},
        trainer={},
        tiers={"generation": {"measured": 1.0}},
        partition=HOPPER,
    )
    assert model_error_of(basis, errors=ERRORS).high == pytest.approx(1.21)
    assert model_error_of(basis).high == pytest.approx(1.21, rel=1e-3)
    unchecked = StepBasis(
        replicas=basis.replicas,
        trainer={},
        tiers={"generation": {"composed": 1.0}},
        partition=HOPPER,
    )
    known = model_error_of(unchecked, errors=ERRORS).high
    assert model_error_of(unchecked, unchecked=["decode"], errors=ERRORS).high > known


def test_a_stage_with_more_rooflines_than_any_published_one_has_a_further_spread() -> None:
    def spread(share: float) -> float:
        tiers: dict[Tier, float] = {"composed": 1 - share, "roofline": share}
        basis = StepBasis(replicas={}, trainer={}, tiers={"train": tiers}, partition=HOPPER)
        return basis.spreads(ERRORS)["train"]

    own = ERRORS.spread("train", HOPPER)
    assert spread(0.0) == spread(ERRORS.most_roofline) == own
    assert spread(1.0) == pytest.approx((own**2 + ROOFLINE**2) ** 0.5)
    assert own < spread(0.8) < spread(1.0)
    stages = [_made("a", 0.1, "train"), replace(_made("b", 0.1), generation_roofline=0.9)]
    found = derive([replace(stages[0], generation_roofline=0.4), stages[1]])
    assert found.most_roofline == 0.4, "a whole step checks no stage"


@pytest.mark.parametrize("system", ["colocated", "disaggregated", "stream-async"])
def test_stages_of_a_simulated_step_fill_it(system: str) -> None:
    shared = {"rollout.pool": "near", "trainer.pool": "near"} if system == "colocated" else {}
    run = small_run({"policies.system": system, "algorithm.steps": 8, **shared})
    trace = simulate(run)
    basis = steady_basis(trace)
    total = sum(basis.replicas.values()) + sum(basis.trainer.values())
    assert total == pytest.approx(1.0, abs=0.1)
    error = measure(trace).model_error
    expected = model_error_of(
        basis,
        error.datasheet_share if error else 0.0,
        error.unchecked if error else [],
        error.datasheets if error else {},
    )
    assert error == replace(expected, system=system)
    assert error is not None
    assert sum(part.share for part in error.stages.values()) == pytest.approx(1.0, abs=0.1)
    assert basis.partition == ("dense", "hopper", "default framework")


# From residuals -----------------------------------------------------------------------------------


def _made(source: str, error: float, stage: str = "step", number: int = 0) -> Residual:
    return Residual(
        stage=stage,
        name=f"{source} {number}: {stage}",
        source=source,
        kind="dense",
        silicon="hopper",
        framework="named framework",
        predicted=1.0,
        published=exp(error),
        width=0.0,
        generation=1.0,
    )


def test_a_source_of_many_equal_rows_counts_as_one_of_few() -> None:
    few = [_made(name, 0.1, "train", number=k) for name in "abcd" for k in range(2)]
    bad = [_made("bad", 0.9, "train", number=k) for k in range(20)]
    found = derive([*few, *bad, *(_made(name, 0.1) for name in "ab")])
    assert found.within_source == 1.0
    assert found.stages["train"].own == 0.1, "four of five sources are within 0.1"


def test_a_step_is_judged_by_other_sources() -> None:
    rows = [replace(ROW, source=name, predicted=(9.0, 9.0)) for name in "abc"]
    rows.append(replace(ROW, source="far", predicted=(2.0, 2.0)))
    found = with_bands(rows, [])
    assert [row.is_in_band for row in found] == [True, True, True, False]
    below, above = left_out_bands(residuals_of(rows), (8.0, 4.0))["far", "a step"]
    assert (below, above) == pytest.approx((log(10 / 9),) * 2, rel=0.01)


def test_rows_of_a_fit_and_ranges_count_by_their_middle() -> None:
    fitted = replace(ROW, stage="train", is_fitted=True)
    (only,) = residuals_of([fitted, replace(ROW, stage="train", predicted=(5.0, 20.0))])
    assert (only.predicted, only.width) == (10.0, 3.0)


# The files ----------------------------------------------------------------------------------------


def test_the_profile_is_what_the_residuals_give(tmp_path: Path) -> None:
    residuals = read_residuals(DOCS / RESIDUALS)
    write_residuals(residuals, tmp_path / RESIDUALS)
    assert (tmp_path / RESIDUALS).read_text() == (DOCS / RESIDUALS).read_text()
    assert errors_text(derive(residuals)) == PATH.read_text(), "run streamrl validate --output docs"


def test_a_source_that_is_left_out_changes_its_bands_by_nothing_of_its_own() -> None:
    residuals = read_residuals(DOCS / RESIDUALS)
    source = next(each.source for each in residuals if each.stage == "step")
    worse = [
        replace(each, predicted=each.predicted * 0.2) if each.source == source else each
        for each in residuals
    ]
    before, after = nested_bands(residuals), nested_bands(worse)
    assert {key: band for key, band in before.items() if key[0] == source} == {
        key: band for key, band in after.items() if key[0] == source
    }
    assert before != after


def test_bands_of_left_out_sources_hold_as_many_steps_as_the_notes_of_reports_say() -> None:
    residuals = read_residuals(DOCS / RESIDUALS)
    steps = [each for each in residuals if each.stage == "step"]
    bands = nested_bands(residuals)
    found = [bands[each.source, each.name] for each in steps]
    within = sum(
        -below <= each.error <= above for each, (below, above) in zip(steps, found, strict=True)
    )
    runs = [each for each in checked_steps() if each.group != PAPER]
    assert sum(each.steps for each in runs) == len(steps)
    assert within == pytest.approx(sum(each.within for each in runs), abs=1)
    halves = [(exp(above) - exp(-below)) / 2 for below, above in found]
    errors = [abs(each.predicted / each.published - 1) for each in steps]
    assert np.median(halves) <= WIDEST * np.quantile(errors, COVERAGE)


WIDEST = 1.4
"""Median of half the width of left-out bands, over the error that 80 % of the steps stay below."""


def test_steps_of_all_sources_are_in_the_bands_that_reports_show() -> None:
    steps = [each for each in read_residuals(DOCS / RESIDUALS) if each.stage == "step"]
    shown = [model_error_of(each.basis) for each in steps]
    errors = [exp(each.error) for each in steps]
    inside = [band.low <= error <= band.high for error, band in zip(errors, shown, strict=True)]
    above = [error > band.high for error, band in zip(errors, shown, strict=True)]
    below = [error < band.low for error, band in zip(errors, shown, strict=True)]
    assert max(np.mean(above), np.mean(below)) <= BEYOND
    assert COVERAGE <= np.mean(inside) <= 0.97
