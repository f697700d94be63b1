"""A machine's pace: what all readings of a profile took over their medians, and that runs are predicted at it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec import to_builtins
from msgspec.structs import replace

from streamrl.hardware.measured_profile import (
    MixedRow,
    RelayRow,
    SharingRow,
    mean_over_median,
    read_measured,
    scaled_to_mean_speed,
    write_measured,
)
from streamrl.sim.costs.costs import Costs
from tests.measured_profile import (
    ALONE,
    TRAIN_FACTOR,
    around,
    base,
    make_profile,
    measured_run,
    model_directory,
    prefix_time,
    slope,
)

RELAY = (RelayRow(mode="delta", bytes=500, values=250, encode=around(1e-3), decode=around(2e-3)),)
MIXED = (MixedRow(running=2, context=40.0, longest=60.0, seconds=around(5e-3)),)
SHARING = (SharingRow(generating=1, training=1, generation=(0.7, 0.8, 0.9), train=(0.5, 0.6, 0.7)),)


def test_a_machine_that_is_slower_in_spells_takes_longer_than_its_medians(
    tmp_path: Path,
) -> None:
    """Readings of one point are too few for a mean; of all of them a quarter were three times as long."""
    readings: list[dict[object, list[float]]] = [
        {1: [1.0, 1.0, 1.0, 1.0, 3.0]},
        {(1, 2): [2.0, 2.0, 2.0, 2.0, 6.0], "none": [], "once": [9.0]},
    ]
    assert mean_over_median(readings) == pytest.approx((6 + 12) / (4 + 8))
    readings[0][1][0] = 50.0
    assert mean_over_median(readings) == pytest.approx(18 / 12), (
        "what a point's first reading loads"
    )
    assert mean_over_median([{1: [0.1, 0.1]}]) == mean_over_median([]) == 1.0
    model, path = model_directory(tmp_path / "model"), tmp_path / "profile.toml"
    profile = make_profile(model)
    write_measured(replace(profile, pace=1.5), path)
    assert read_measured(path).pace == 1.5
    run = measured_run(model, path)
    costs = Costs.load(run)
    assert costs.decode.step_time(4, 100) == pytest.approx(1.5 * (base(4) + slope(4) * 100))
    assert costs.prefill_time(16, 128, 4, 1) == pytest.approx(1.5 * prefix_time(1, 16))
    assert costs.step_time == pytest.approx(1.5 * (5e-4 + 3e-3))
    assert (costs.sync.push_time, costs.load_time) == pytest.approx((6e-3, 9e-3))
    train = 5e-4 + 64e-6 + TRAIN_FACTOR * (ALONE + prefix_time(1, 64))
    assert costs.training.train_time([64]) == pytest.approx(1.5 * train)
    write_measured(replace(profile, pace=1.5, dtype="bfloat16", relay=RELAY), path)
    delta = measured_run(model, path, sync__mode="delta", model__dtype="bfloat16")
    assert Costs.load(delta).sync.push_time == pytest.approx(1.5 * (4e-3 + 1e-3 + 2e-3))


def test_every_second_of_a_profile_is_at_its_pace_and_nothing_else_is(tmp_path: Path) -> None:
    whole = make_profile(model_directory(tmp_path / "model"), pace=1.5)
    once = whole.optimizer
    rows = {"mixed": MIXED, "sharing": SHARING, "relay": RELAY, "reward": tuple(whole.train)}
    whole = replace(whole, turnover=once, handling=once, handling_over_ray=once, **rows)
    whole = replace(whole, push_over_ray=once, lend=once, take_back=once)
    before, after = (to_builtins(one) for one in (whole, scaled_to_mean_speed(whole)))
    assert seconds_of(after) == pytest.approx([1.5 * one for one in seconds_of(before)])
    assert len(seconds_of(before)) > 100
    assert without_seconds(after) == without_seconds({**before, "pace": 1.0})


def seconds_of(found: Any) -> list[float]:
    """Return all quartiles of seconds, at whatever depth; shares of a speed are quartiles too, under other keys."""
    own = [one for key, values in parts(found) if is_seconds(key, values) for one in values]
    return own + [
        one
        for key, values in parts(found)
        if not is_seconds(key, values)
        for one in seconds_of(values)
    ]


def without_seconds(found: Any) -> Any:
    if not isinstance(found, dict | list | tuple):
        return found
    return [
        (key, without_seconds(values))
        for key, values in parts(found)
        if not is_seconds(key, values)
    ]


def parts(found: Any) -> list[tuple[object, Any]]:
    if isinstance(found, dict):
        return list(found.items())
    return list(enumerate(found)) if isinstance(found, list | tuple) else []


def is_seconds(key: object, values: Any) -> bool:
    return key in {"seconds", "step", "encode", "decode"} and isinstance(values[0], float)


def test_runs_say_at_which_pace_they_are_predicted_and_that_an_older_profile_has_none(
    tmp_path: Path,
) -> None:
    model, path = model_directory(tmp_path / "model"), tmp_path / "profile.toml"
    for pace, known, said in ((1.25, "pace 1.250", True), (None, "slower spells were not", False)):
        write_measured(make_profile(model, pace=pace), path)
        assert ("pace =" in path.read_text()) is said
        sources = " ".join(Costs.load(measured_run(model, path)).decode.provenance.sources)
        assert known in sources
        assert ("slower spells" in sources) is not said
