"""What a calibration does to simulated seconds, and what it says of itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from streamrl.hardware import cost_model
from streamrl.hardware.calibration_file import (
    OUTDATED,
    load_calibration,
    named_calibration,
    profile_digest,
)
from streamrl.hardware.cost_model import cost_model_digest
from streamrl.hardware.measured_profile import write_measured
from streamrl.hardware.profiles import load_model
from streamrl.report.page.assumptions import assumptions_of
from streamrl.runfile.config import Run
from streamrl.sim.costs.costs import Costs
from streamrl.sim.planner.estimates import sync_times
from streamrl.sim.planner.space import Space
from tests.measured_profile import make_profile, measured_run, model_directory
from tests.runs import small_run

FACTORS = """
source = "steps.csv"
date = 2026-11-24
model = "qwen2.5-7b"
system = "stream-async"
[generation]
gpu = "h20"
factor = 0.5
interval = [0.4, 0.6]
[score]
gpu = "h800"
factor = 0.25
[train]
gpu = "h800"
factor = 0.125
[sync]
gpu = "h20"
factor = 0.1
[overhead]
seconds = 7.0
"""


def calibrated(tmp_path: Path, text: str = FACTORS, **changes: Any) -> Run:
    path = tmp_path / "calibration.toml"
    path.write_text(text)
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    table = {"algorithm.old_log_probs": "trainer", "costs.calibration": str(path), **keys}
    return small_run(table)


def test_each_stage_has_a_factor_of_its_own(tmp_path: Path) -> None:
    plain = Costs.load(small_run({"algorithm.old_log_probs": "trainer"}))
    slow = Costs.load(calibrated(tmp_path))
    assert slow.decode.step_time(3, 900) == pytest.approx(2 * plain.decode.step_time(3, 900))
    assert slow.prefill_time(400, 9e4, 0) == pytest.approx(2 * plain.prefill_time(400, 9e4, 0))
    lengths = [300, 500]
    assert slow.training.score_time(lengths) == pytest.approx(
        4 * plain.training.score_time(lengths)
    )
    assert slow.training.train_time(lengths) == pytest.approx(
        8 * plain.training.train_time(lengths)
    )
    assert slow.training.optimizer_time == pytest.approx(8 * plain.training.optimizer_time)
    assert slow.sync.push_time == pytest.approx(10 * plain.sync.push_time)
    assert slow.load_time == pytest.approx(10 * plain.load_time)


def test_the_factors_of_a_run_file_come_on_top(tmp_path: Path) -> None:
    plain = Costs.load(small_run())
    both = Costs.load(calibrated(tmp_path, costs__generation_factor=0.5))
    assert both.decode.step_time(3, 900) == pytest.approx(4 * plain.decode.step_time(3, 900))


def test_the_overhead_replaces_an_assumed_step_time_and_not_a_stated_one(tmp_path: Path) -> None:
    assert Costs.load(calibrated(tmp_path)).training.overhead_time == 0.0  # as the run file states
    assumed = calibrated(tmp_path, framework={})
    assert Costs.load(assumed).training.overhead_time == 7.0


def test_a_factor_holds_for_the_gpu_that_it_was_measured_on(tmp_path: Path) -> None:
    other = FACTORS.replace('gpu = "h20"', 'gpu = "h100"')
    costs = Costs.load(calibrated(tmp_path, other))
    plain = Costs.load(small_run())
    assert costs.decode.step_time(3, 900) == plain.decode.step_time(3, 900)
    assert costs.sync.push_time == plain.sync.push_time
    assert "h20 is as the profiles say" in costs.provenance["decode"].sources[-1]


def test_the_sources_say_what_a_calibration_made_of_each_operation(tmp_path: Path) -> None:
    costs = Costs.load(calibrated(tmp_path))
    told = {name: found.sources[-1] for name, found in costs.provenance.items()}
    assert "generation at 0.5 (0.4 to 0.6) of the profiles' speed, from steps.csv" in told["decode"]
    assert told["prefill"] == told["decode"]
    assert "score at 0.25" in told["score"] and "train at 0.125" in told["train"]
    assert "sync at 0.1" in told["sync"]


def test_the_planner_sees_the_same_sync(tmp_path: Path) -> None:
    space = Space.open(calibrated(tmp_path))
    index = next(i for i in range(len(space)) if space.candidate(i).mode.system != "colocated")
    found = sync_times(space)
    costs = Costs.load(space.candidate(index).apply(space.run)).sync
    assert (found.push[index], found.load[index]) == (costs.push_time, costs.load_time)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("factor = 0.5", "factor = 1e-320"), r"`float` >= 0\.0001 .*generation\.factor"),
        (("factor = 0.5", "factor = 1e308"), r"`float` <= 10000\.0 .*generation\.factor"),
        (("seconds = 7.0", "seconds = 1e300"), r"`float` <= 10000000\.0 .*overhead\.seconds"),
        (("seconds = 7.0", "seconds = -1.0"), r"`float` >= 0\.0 .*overhead\.seconds"),
        (("[0.4, 0.6]", "[nan, inf]"), r"generation\.interval"),
        (("[0.4, 0.6]", "[0.6, 0.4]"), r"must be \[least, most\], got \[0\.6, 0\.4\]"),
        (("[0.4, 0.6]", "[0.4, 0.6]\nerrors.held_out = -5"), r"errors\.held_out"),
        (("[train]", "[trains]"), "trains"),
        (('gpu = "h20"\nfactor = 0.5', "factor = 0.5"), "gpu"),
    ],
)
def test_a_wrong_calibration_is_named_with_what_is_wrong_in_it(
    tmp_path: Path, change: tuple[str, str], said: str
) -> None:
    run = calibrated(tmp_path, FACTORS.replace(*change, 1))
    with pytest.raises(ValueError, match=rf"costs\.calibration: .*calibration\.toml: .*{said}"):
        Costs.load(run)


def test_factors_of_another_model_are_refused_with_both_names(tmp_path: Path) -> None:
    other = FACTORS.replace('model = "qwen2.5-7b"', 'model = "Llama-3.1-8B"')
    with pytest.raises(
        ValueError, match=r"made for model 'Llama-3\.1-8B', but the model of model\.name is"
    ) as told:
        Costs.load(calibrated(tmp_path, other))
    assert "'Qwen2.5-7B'" in str(told.value) and "calibration.toml" in str(told.value)
    assert Costs.load(calibrated(tmp_path, FACTORS.replace('"qwen2.5-7b"', '"Qwen2.5-7B"')))


def test_a_missing_calibration_is_named(tmp_path: Path) -> None:
    run = small_run({"costs.calibration": str(tmp_path / "no.toml")})
    with pytest.raises(ValueError, match=r"costs\.calibration: .*no\.toml: No such file"):
        Costs.load(run)


def test_factors_of_another_profile_are_refused(tmp_path: Path) -> None:
    """Its seconds are others: a factor of old ones would make up for what is no longer off."""
    model, profile = model_directory(tmp_path / "model"), tmp_path / "profile.toml"
    write_measured(make_profile(model), profile)
    made, file = measured_run(model, profile), tmp_path / "calibration.toml"
    name = load_model(made.model).name
    own = f'source = "steps.csv"\ndate = 2026-11-24\nmodel = "{name}"\nsystem = "stream-async"\n'
    for fitted_beside, again in (
        (profile_digest(made.costs.profile), True),
        (None, True),
        ("none", False),
        ("1" * 16, False),
    ):
        line = "" if fitted_beside is None else f'profile = "{fitted_beside}"\n'
        file.write_text(own + line + "[overhead]\nseconds = 7.0\n")
        run = measured_run(model, profile, costs__calibration=str(file))
        if again:
            assert Costs.load(run)
        else:
            with pytest.raises(
                ValueError, match=r"another costs\.profile, but the run has .*profile\.toml"
            ):
                Costs.load(run)
    file.write_text(
        own + f'profile = "{profile_digest(made.costs.profile)}"\n[overhead]\nseconds = 7.0\n'
    )
    write_measured(make_profile(model, pace=1.25), profile)
    run = measured_run(model, profile, costs__calibration=str(file))
    with pytest.raises(ValueError, match=r"another costs\.profile, but the run has .*profile"):
        Costs.load(run)
    told = {each.what: each for each in assumptions_of(run, load_model(run.model), None, None)}
    assert "steps.csv" in told["calibration"].value  # a report of what was recorded with it
    profile.unlink()
    file.write_text(own + "[overhead]\nseconds = 7.0\n")
    found = named_calibration(run.costs.calibration, run.model)
    assert found == load_calibration(run.costs, run.model) is not None


def test_a_calibration_of_another_cost_model_is_used_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "calibration.toml"
    own = f'cost_model = "{cost_model_digest()}"\n' + FACTORS.lstrip()
    for text, expected in ((FACTORS, 0), (own, 0), ('cost_model = "0000"\n' + FACTORS.lstrip(), 1)):
        path.write_text(text)
        caplog.clear()
        calibration = named_calibration(str(path), small_run().model)
        assert calibration is not None and calibration.is_outdated == bool(expected)
        assert [OUTDATED in record.getMessage() for record in caplog.records] == expected * [True]
        assert (OUTDATED in calibration.describe("train", "h800", str(path))) == bool(expected)


def test_the_digest_of_the_cost_model_ignores_comments_and_sees_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, figures = tmp_path / "code", tmp_path / "profiles"
    code.mkdir()
    (figures / "gpus").mkdir(parents=True)
    monkeypatch.setattr(cost_model, "CODE", (code,))
    monkeypatch.setattr(cost_model, "PROFILES", figures)

    def digest(program: str, figure: str) -> str:
        (code / "a.py").write_text(program)
        (figures / "gpus" / "a.toml").write_text(figure)
        return cost_model.cost_model_digest.__wrapped__()

    first = digest('"""What it does."""\nTIME = 1.0\n', "flops = 1\n")
    assert digest("TIME = 1.0  # seconds\n", "flops = 1\n") == first
    assert digest("TIME = 2.0\n", "flops = 1\n") != first
    assert digest("TIME = 1.0\n", "flops = 2\n") != first
