"""A machine's pace: what all readings of a profile took over their medians, and that runs are predicted at it."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from sim.costs.costs import Costs
from streamrl.hardware.machine_profile import RelayRow, read_measured, write_measured
from streamrl.hardware.profile_pace import pace_of
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


def test_a_machine_that_is_slower_in_spells_takes_longer_than_its_medians(
    tmp_path: Path,
) -> None:
    """Readings of one point are too few for a mean; of all of them a quarter were three times as long."""
    readings: list[dict[object, list[float]]] = [
        {1: [1.0, 1.0, 1.0, 3.0]},
        {(1, 2): [2.0, 2.0, 2.0, 6.0], "none": []},
    ]
    assert pace_of(readings) == pytest.approx((6 + 12) / (4 + 8))
    assert pace_of([{1: [0.1, 0.1]}]) == pace_of([]) == 1.0
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
