"""A run projects its end, is saved before a limit is exceeded, and says that it cannot learn."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from streamrl.engine.messages import Stepped
from streamrl.engine.trace import Trace
from streamrl.executor.run_guard import (
    FEW_STEPS,
    LearningWatch,
    PlannedStep,
    RunGuard,
    StageWatch,
    compare_stages,
    rewards_text,
)
from streamrl.record.attribution import attribute_sides
from streamrl.record.charges import PaidGpus
from streamrl.record.metrics import measure
from streamrl.record.step_stages import stage_seconds
from streamrl.runfile.config import ExecuteConfig
from streamrl.runfile.roles_config import RewardConfig, VerifierConfig
from streamrl.runfile.units import Duration
from tests.runs import checked_world, small_run
from tests.scripted import make_world
from tests.test_execute import real_run

JUDGE = (RewardConfig(scorer="judge", endpoint="http://localhost:8000/v1", at_once=4),)
"""A reward that an LLM behind an endpoint gives."""


def step(number: int, **figures: Any) -> dict[str, Any]:
    return {"step": number, "step_time": 10.0, "time": 30.0 + 10.0 * number, **figures}


def guard(dollars: float = 0.0, **limits: Any) -> RunGuard:
    return RunGuard(ExecuteConfig(grace=Duration(20.0), **limits), 100, dollars)


def test_a_run_ends_in_time_to_be_saved_before_its_deadline_and_is_told_once() -> None:
    own = guard(deadline=Duration(1000.0))
    assert own.reason(971.0) is None
    assert own.reason(973.0) == "execute.deadline (17 min) would be exceeded"
    assert own.reason(974.0) is None and own.ended


def test_a_budget_is_a_time_at_the_price_of_the_gpus_and_the_earlier_limit_counts() -> None:
    assert guard(2.0, budget=100.0).time_limit == (50.0, "execute.budget ($100.00)")
    both = guard(2.0, budget=100.0, deadline=Duration(40.0)).time_limit
    assert both is not None and both[0] == 40.0
    assert guard(2.0, budget=100.0).reason(26.0)  # half of a short limit is left for the end
    assert guard().reason(1e9) is None


def test_gpus_that_both_sides_share_are_paid_once() -> None:
    prices = {"cluster.pools.far.price": 3600.0, "cluster.pools.near.price": 7200.0}
    apart, shared = small_run(prices), small_run({**prices, "policies.system": "colocated"})
    for run, dollars in ((apart, 2 * 1.0 + 4 * 2.0), (shared, 4 * 1.0)):
        assert PaidGpus.of(run).dollars_per_second == dollars


def test_the_end_is_projected_after_a_few_steps(caplog: pytest.LogCaptureFixture) -> None:
    own = guard(2.0, deadline=Duration(500.0))
    with caplog.at_level(logging.INFO):
        for number in range(1, FEW_STEPS + 3):
            own.take(step(number, reward=0.5, uniform_groups=0.0, grad_norm=1.0))
        own.end()
    (line,) = caplog.messages
    assert line.startswith("after 5 steps: 10 s a step, 17 min in all, $2,060")
    assert line.endswith("execute.deadline (500 s) ends the run at about step 47 of 100")


def test_the_projection_compares_with_the_plan(caplog: pytest.LogCaptureFixture) -> None:
    own = RunGuard(ExecuteConfig(), 100, 0.0, planned=PlannedStep(8.0))
    with caplog.at_level(logging.INFO):
        for number in range(1, FEW_STEPS + 1):
            own.take(step(number, reward=0.5, uniform_groups=0.0, grad_norm=1.0))
    (line,) = caplog.messages
    assert line == "after 5 steps: 10 s a step (+25% against 8 s planned), 17 min in all"


def test_the_stage_that_deviates_most_is_named() -> None:
    planned = {"generation": 4.0, "train": 2.0}
    text = compare_stages({"generation": 7.0, "train": 1.8, "sync": 0.1}, planned)
    assert text == (
        "stages of a step, against the plan: generation 7 s (+75% against 4 s), train 1.8 s (-10% against 2 s), "
        "sync 100 ms (not planned); generation deviates most: 3 s longer in each step"
    )
    assert compare_stages({"generation": 4.4, "train": 2.0}, planned).endswith(
        "; no stage deviates by more than 10% of a step"
    )


@pytest.mark.parametrize("system", ["stream-sync", "stream-async", "colocated"])
def test_the_stages_of_a_run_are_those_of_its_own_simulation(
    system: str, caplog: pytest.LogCaptureFixture
) -> None:
    trace = checked_world(small_run({"policies.system": system, "algorithm.steps": 8})).run()
    at = [entry.time for entry in trace.entries if isinstance(entry.event, Stepped)]
    first, last = at[0], at[FEW_STEPS - 2]
    shares = attribute_sides(trace, (first, last))
    planned = stage_seconds(shares, (last - first) / (FEW_STEPS - 2))
    with caplog.at_level(logging.INFO):
        watch = StageWatch(Trace(trace.run, "real", {}), planned)
        for entry in trace.entries:
            watch.take(entry)
    (line,) = caplog.messages
    assert line.replace("-0%", "+0%").count("(+0% against ") == len(planned) >= 2
    assert line.endswith("no stage deviates by more than 10% of a step")
    assert set(measure(trace).stages) == set(planned)


@pytest.mark.parametrize(("seconds", "says_so"), [("1 s", True), ("1 ms", False)])
def test_a_run_that_rewards_hold_up_says_so_after_a_few_steps(
    seconds: str, says_so: bool, caplog: pytest.LogCaptureFixture
) -> None:
    trace = checked_world(small_run({"algorithm.steps": 8, "verifier.time": seconds})).run()
    watch = StageWatch(Trace(trace.run, "real", {}), {})
    for entry in trace.entries:
        watch.take(entry)
    assert len(caplog.messages) == says_so
    assert all("wait for rewards" in line for line in caplog.messages)


@pytest.mark.parametrize(
    ("changes", "way_out"),
    [
        ({}, ": set verifier.workers above 1, up to the 8 CPU cores of this machine"),
        (
            {"workers": 8},
            ", with verifier.workers 8 on 8 CPU cores: a faster scorer or more cores help",
        ),
        ({"pool": "near"}, ": set verifier.workers above 1, for more replicas of the reward model"),
        ({"reward": JUDGE}, ": set at_once of the judge above 4, for more requests at a time"),
    ],
)
def test_what_helps_against_waiting_for_rewards(changes: dict[str, Any], way_out: str) -> None:
    verifier = VerifierConfig(**changes)
    told = "replicas and trainer wait for rewards 23% of their time"
    assert rewards_text(0.23, verifier, 8) == f"{told}{way_out}"
    assert rewards_text(0.05, verifier, 8) == ""


@pytest.mark.parametrize(
    ("figures", "cause"),
    [
        ({"reward": 0.0, "uniform_groups": 1.0, "cut_off": 1.0}, "raise rollout.max_tokens"),
        ({"reward": 0.0, "uniform_groups": 1.0, "unscored": 8}, "8 completions have no score"),
        (
            {"reward": 0.0, "uniform_groups": 1.0, "late_actions": 9},
            "9 actions reached environment.",
        ),
        ({"reward": 0.0, "uniform_groups": 1.0}, "too hard, or the scorer refuses"),
        ({"reward": 1.0, "uniform_groups": 1.0}, "too easy"),
        ({"reward": 0.5, "uniform_groups": 0.5, "grad_norm": 0.0}, "algorithm.learning_rate"),
    ],
)
def test_a_run_that_cannot_learn_says_so_after_a_few_steps_and_at_the_end_with_the_cause(
    caplog: pytest.LogCaptureFixture, figures: dict[str, Any], cause: str
) -> None:
    watch = LearningWatch()
    for number in range(1, FEW_STEPS + 4):
        watch.take(step(number, **figures))
    (early,) = caplog.messages
    watch.end()
    assert "5 steps in a row taught the model nothing, up to step 5" in early and cause in early
    assert caplog.messages[1].startswith("8 of 8 steps taught the model nothing")


def test_a_run_that_learns_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    watch = LearningWatch()
    for number in range(1, 20):
        watch.take(step(number, reward=0.5, uniform_groups=float(number % 3 == 0), grad_norm=1.0))
    watch.end()
    assert not caplog.messages


def test_a_run_that_reaches_its_limit_is_saved_and_stopped(tmp_path: Path) -> None:
    run = real_run(tmp_path, algorithm__steps=100_000, execute__checkpoint_every=100_000)

    def limit(now: float) -> str | None:
        return "the limit" if now > 1.0 else None

    async def go() -> tuple[int, int]:
        world = make_world(run, {"slowest": 0.01}, limit=limit)
        with pytest.raises(RuntimeError, match="the limit"):
            await world.run()
        leader = world.engine.state.leader
        return leader.version, leader.checkpoint_version

    made, saved = asyncio.run(asyncio.wait_for(go(), 60))
    assert made == saved > 0
