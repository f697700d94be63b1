"""The latency model that policies reckon with."""

from __future__ import annotations

import pytest

from streamrl.engine.estimates import Latency

LATENCY = Latency([(1, 0.01), (64, 0.02), (256, 0.05)])


def test_a_step_lies_on_the_line_between_its_neighbours_and_is_flat_beyond_them() -> None:
    assert LATENCY.step_time(1) == LATENCY.step_time(0.5) == 0.01
    assert LATENCY.step_time(160) == pytest.approx(0.035)
    assert LATENCY.step_time(256) == LATENCY.step_time(1000) == 0.05


def test_rollouts_past_the_batch_wait_for_another_round() -> None:
    assert LATENCY.replica_time(256, 100) == pytest.approx(0.05 * 100)
    assert LATENCY.replica_time(257, 100) == pytest.approx(2 * 0.05 * 100)
    assert LATENCY.replica_time(0, 100) == 0


def test_replicas_share_rollouts_evenly() -> None:
    assert LATENCY.time(128, 100, 2) == LATENCY.replica_time(64, 100)
    with pytest.raises(ValueError, match="3 rollouts need a replica, got 0"):
        LATENCY.time(3, 100, 0)
