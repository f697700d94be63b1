"""Profiles of one machine as one: medians at one pace, of replicas over all kinds."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from benchmarks.pooled_profiles import Profiled, pooled
from streamrl.hardware.measured_profile import MeasuredProfile, scaled_to_mean_speed, write_measured
from tests.measured_profile import make_profile
from tests.tiny_model import tiny_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tiny_model(64).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def times(profile: MeasuredProfile, factor: float) -> MeasuredProfile:
    return scaled_to_mean_speed(replace(profile, pace=factor))


def test_replicas_have_the_middle_of_all_profiles_and_a_trainer_of_its_own(
    model: Path, tmp_path: Path
) -> None:
    plain = make_profile(model)

    def written(factor: float, work_time: float = 1.0, pace: float | None = None) -> Profiled:
        path = tmp_path / f"{factor}-{work_time}.toml"
        write_measured(replace(times(plain, factor), pace=pace), path)
        return Profiled(path, work_time)

    own = [written(1.0), written(1.1), written(1.2)]
    others = [written(3.0), written(4.0)]
    found = pooled(own, others, 2.0)
    assert found.decode[0].seconds[1] == pytest.approx(
        2 * 1.2 * plain.decode[0].seconds[1], rel=1e-4
    )
    assert found.train[0].seconds[1] == pytest.approx(2 * 1.1 * plain.train[0].seconds[1], rel=1e-4)
    assert found.sharing == plain.sharing
    slow = pooled([written(1.5, 3.0, pace=2.0)], [], 3.0)
    assert slow.push.seconds[1] == pytest.approx(3.0 * plain.push.seconds[1], rel=1e-4)
    assert slow.pace == 1.0
