"""The soak tells growth from warm-up, and finds growth that restarts hide."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.bench_soak import MOST_GROWTH, Lives, Process, execute, growth_of
from benchmarks.fault_results import KINDS
from tests.runs import small_run

RUN = 1000
"""Seconds of a run, with a sample every second."""
LEVEL = 300e6


def life(began: int, ended: int, size: Callable[[int], float], pid: int = 1) -> Lives:
    curve = [(float(time), LEVEL + size(time - began)) for time in range(began, ended)]
    return {Process("replica", pid, str(began)): curve}


def growth(lives: Lives) -> float:
    return max(share for _, share in growth_of(lives, RUN))


def test_the_faults_of_the_executed_runs_are_accepted(tmp_path: Path) -> None:
    execute(7, tmp_path, (), num_steps=30)
    table = tomllib.loads((tmp_path / "run.toml").read_text())
    kinds = [fault["kind"] for fault in table["faults"]]
    run = small_run({"faults": table["faults"]})
    assert [fault.kind for fault in run.faults] == kinds == [k for k in KINDS if k != "driver-dies"]


def test_imports_and_the_first_steps_are_no_growth() -> None:
    assert growth(life(0, RUN, lambda age: -200e6 if age < 60 else 0.0)) < 1e-9


def test_a_slow_leak_is_growth_over_the_rest_of_the_run() -> None:
    leak = growth(life(0, RUN, lambda age: 10e3 * age))
    assert leak == pytest.approx(10e3 * 0.9 * RUN / LEVEL, rel=0.05) and leak > MOST_GROWTH


def test_a_new_process_with_less_memory_hides_no_leak() -> None:
    lives: Lives = {}
    for number in range(5):
        lives |= life(200 * number, 200 * number + 200, lambda age: 10e3 * age, pid=number)
    assert growth(lives) == pytest.approx(10e3 * 0.9 * RUN / LEVEL, rel=0.05)


def test_processes_that_start_with_more_memory_each_time_are_growth() -> None:
    lives: Lives = {}
    for number in range(10):
        larger = 2e6 * number
        lives |= life(90 * number, 90 * number + 50, lambda age, own=larger: own, pid=number)
    assert dict(growth_of(lives, RUN)).keys() == {"replica, restarts"}
    assert growth(lives) > MOST_GROWTH
