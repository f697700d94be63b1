"""Runs that take turns: what is recorded of each has no time in which it was stopped."""

from __future__ import annotations

import pytest

from benchmarks.in_turns import gone_on


def test_time_does_not_go_on_where_a_run_was_stopped() -> None:
    stops = [(10.0, 12.0), (13.0, 17.0)]
    times = [12.0, 12.5, 13.0, 15.0, 17.0, 20.0]
    assert gone_on(times, stops) == pytest.approx([10.0, 10.5, 11.0, 11.0, 11.0, 14.0])
    assert gone_on([14.0], [(10.0, 12.0)]) == pytest.approx([12.0])
