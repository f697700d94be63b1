"""Plans of runs with episodes: sandboxes are chosen and paid for, and estimates agree with simulations."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from itertools import islice
from typing import Any

import pytest
from msgspec.structs import replace

from streamrl.engine.messages import WakeAt
from streamrl.hardware.resolved import resolve
from streamrl.record.charges import PaidGpus
from streamrl.report.plan_report import worth_text
from streamrl.runfile.config import Run
from streamrl.runfile.errors import RunError
from streamrl.runfile.files import make_run
from streamrl.runfile.keys import place_of
from streamrl.sim.batch_generation import step_batches
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.policy_estimates import fill_policies
from streamrl.sim.planner.episode_times import times_of_episodes
from streamrl.sim.planner.episode_worth import episode_binding, find_worths, without_loss
from streamrl.sim.planner.modes import find_modes
from streamrl.sim.planner.plan import Worth
from streamrl.sim.planner.plan_settings import candidate_of, own_candidate, settings_of
from streamrl.sim.planner.planner import Planned, make_plan
from streamrl.sim.planner.search import Search
from streamrl.sim.planner.trial import Trial, Unfinished, short_speed_of, shortened
from streamrl.sim.steady_state import measure_steady, open_world, simulate_speed
from streamrl.sim.trace import SpeedTrace
from streamrl.sim.world import simulate
from streamrl.workload.workload import SimulatedWorkload

OFFER: dict[str, Any] = {
    "seed": 1,
    "model": {"name": "qwen3-8b"},
    "cluster": {"pools": {"h100": {"gpu": "h100", "nodes": 1, "gpus_per_node": 8}}},
    "rollout": {"pool": "h100", "replicas": 2, "tensor_parallel": 2, "max_tokens": 16384},
    "trainer": {"pool": "h100", "tensor_parallel": 4, "logits": "chunked"},
    "algorithm": {"name": "grpo", "steps": 20, "prompts_per_step": 8, "group_size": 4},
    "workload": {
        "max_prompt_tokens": 4096,
        "lengths": {"kind": "stated", "source": "mean 4000, p95 9000", "prompt_tokens": 2000},
    },
    "environment": {
        "max_turns": 20,
        "max_context": 32768,
        "turns": "mean 8, p95 16",
        "observation_tokens": "mean 800, p95 2500",
        "action_time": "median 3 s, p99 30 s",
        "start_time": "4 s",
        "sandboxes": 32,
        "sandbox_price": 0.25,
    },
    "policies": {"system": "stream-async"},
    "simulate": {"interval": 0.1, "max_steps": 6},
    "plan": {
        "systems": ["stream-async"],
        "sandboxes": [8, 32],
        "finalists": 2,
        "rollout_gpus": [4],
        "trainer_gpus": [4],
        "rollout_tensor_parallel": [2],
        "trainer_tensor_parallel": [2],
        "micro_batch": [1],
        "max_running": [64],
    },
}


def offer(changes: dict[str, Any] | None = None) -> Run:
    """Return a small offer of GPUs and sandboxes, with changes by key path."""
    table = deepcopy(OFFER)
    for key, value in (changes or {}).items():
        place, last = place_of(table, key)
        place[last] = value
    return make_run(table)


@pytest.fixture(scope="module")
def planned() -> Planned:
    return make_plan(offer())


def test_a_plan_chooses_sandboxes_and_pays_for_them(planned: Planned) -> None:
    run, plan = planned.run, planned.plan
    assert run.environment is not None
    sandboxes = run.environment.sandboxes
    assert sandboxes in (8, 32)
    assert plan.allocation.settings["environment.sandboxes"] == sandboxes
    total = plan.whole_run and plan.whole_run.sandboxes
    assert total and total.sandboxes == sandboxes
    assert total.dollars == pytest.approx(0.25 * total.hours)
    gpus = sum(pool.dollars for pool in plan.whole_run.pools.values())
    assert plan.whole_run.dollars == pytest.approx(gpus + total.dollars)


def test_a_plan_says_what_more_of_each_resource_is_worth(planned: Planned) -> None:
    plan = planned.plan
    assert {each.resource for each in plan.worths} >= {"replica", "tools", "training"}
    best = max(plan.worths, key=lambda each: each.gain)
    assert plan.binding.stage == ("training" if best.resource == "training" else "generation")
    for each in plan.worths:
        assert (each.break_even is None) == (each.resource in ("tools", "training"))


def test_more_sandboxes_are_worth_what_a_longer_queue_costs() -> None:
    search = Search.open(offer({"plan.sandboxes": [8]}))
    metrics = measure_steady(search.space.candidate(0).apply(search.space.run))
    with ThreadPoolExecutor(1) as pool:
        worths = find_worths(search, 0, metrics, pool)
    more = next(each for each in worths if each.resource == "sandboxes")
    assert more.units == 2 and more.step_time_ratio == pytest.approx(8 / 10, abs=0.06)
    assert max(worths, key=lambda each: each.gain) is more


@pytest.mark.parametrize("ratio", [1.004, 0.996])
def test_a_longer_step_with_faster_training_is_chance(ratio: float) -> None:
    worth = Worth(
        resource="training",
        what="training 1.25 times as fast",
        units=0,
        step_time_ratio=ratio,
        half_width=None,
        cost_ratio=ratio,
        gain=1 - ratio,
        break_even=None,
    )
    found = without_loss(worth)
    best = min(1.0, ratio)
    assert (found.step_time_ratio, found.cost_ratio) == (best, best)
    assert found.gain == 1 - best


def test_more_sandboxes_do_not_hurt_where_the_cache_loses_contexts() -> None:
    """The KV cache holds the contexts of 24 episodes, and not those of 30."""
    crowded = {
        "plan.sandboxes": [24],
        "environment.sandboxes": 64,
        "environment.scores_in_sandbox": True,
        "environment.observation_tokens": "mean 3000, p95 5000",
        "environment.max_context": 65536,
        "environment.action_time": "median 1 s, p99 5 s",
        "algorithm.prompts_per_step": 24,
        "verifier": {"time": "3 s", "workers": 32},
        "rollout.memory_utilization": 0.32,
    }
    search = Search.open(offer(crowded))
    metrics = measure_steady(search.space.candidate(0).apply(search.space.run))
    with ThreadPoolExecutor(1) as pool:
        worths = find_worths(search, 0, metrics, pool)
    more = next(each for each in worths if each.resource == "sandboxes")
    assert more.what == "6 more sandboxes" and more.step_time_ratio <= 1 and more.price == 0.25
    crowding = more.crowding
    assert crowding is not None and crowding.episodes == 30
    assert crowding.step_time_ratio is not None and crowding.step_time_ratio > 1.02
    assert crowding.recomputed > crowding.recomputed_before + 0.05
    text = worth_text(more)
    assert "; it costs $0.25" in text or "it costs $0.25 an hour" in text
    assert "; 30 episodes in flight would take " in text and "(13% now)" in text
    seconds = {"generation": 1.0, "training": 1.0}
    assert episode_binding(worths, metrics, seconds).resource == "GPU memory for KV cache"


def test_episodes_in_flight_are_chosen_apart_from_sandboxes() -> None:
    scored = {"environment.scores_in_sandbox": True, "environment.max_episodes": 10}
    run = offer({"plan.sandboxes": None, **scored})
    limits = {mode.episodes for mode in find_modes(run)}
    assert {(10, None), (12, 10), (32, None), (15, 12)} <= limits
    assert all(each is not None and (each.sandboxes or 0) <= 32 for each in limits)


def test_the_price_of_sandboxes_is_part_of_every_cost() -> None:
    free, paid = (offer({"environment.sandbox_price": price}) for price in (0.0, 0.25))
    before, after = (measure_steady(run) for run in (free, paid))
    hours = before.step_time / 3600
    assert after.cost_per_step - before.cost_per_step == pytest.approx(32 * 0.25 * hours)
    rents = PaidGpus.of(paid).rents
    assert sum(rents.values()) == pytest.approx(PaidGpus.of(paid).dollars_per_second)


def test_a_price_of_sandboxes_needs_their_number() -> None:
    with pytest.raises(
        RunError, match=r"environment.sandbox_price 0.25 needs .*environment.sandboxes"
    ):
        offer({"environment": {**OFFER["environment"], "sandboxes": None}})


def test_plans_that_cut_off_many_episodes_are_not_compared() -> None:
    run = offer({"environment.episode_time_limit": "40 s", "environment.sandboxes": 32})
    candidate = own_candidate(
        run.rollout, run.trainer, run.policies, run.sync, run.verifier, run.environment
    )
    found = short_speed_of(Trial(shortened(run, run.seed), candidate))
    assert isinstance(found, Unfinished)
    assert "environment.episode_time_limit, plan.cut_off_share allows 10%" in found.reason
    lenient = replace(run, plan=replace(run.plan, cut_off_share=1.0))
    assert not isinstance(short_speed_of(Trial(shortened(lenient, 1), candidate)), Unfinished)


def test_the_settings_of_a_plan_name_its_limits_of_episodes() -> None:
    run = offer({"environment.max_episodes": 24})
    sections = run.rollout, run.trainer, run.policies, run.sync, run.verifier
    candidate = own_candidate(*sections, run.environment)
    settings = settings_of(candidate)
    assert settings["environment.sandboxes"] == 32
    assert settings["environment.max_episodes"] == 24
    assert candidate_of(settings).mode.episodes == candidate.mode.episodes
    assert candidate.apply(run).environment == run.environment


def test_sandboxes_beyond_the_episodes_in_flight_are_not_tried() -> None:
    run = offer({"environment.sandboxes": 500, "plan": {"systems": ["stream-async"]}})
    sandboxes = {mode.episodes and mode.episodes.sandboxes for mode in find_modes(run)}
    assert sandboxes == {16, 24, 32, 48, 64}


ESTIMATED: list[tuple[dict[str, Any], float]] = [
    ({"environment.sandboxes": 8}, 0.1),
    ({"environment.sandboxes": 32}, 0.15),
    ({"rollout.replicas": 1}, 0.15),
    ({"environment.sandboxes": 16, "policies.system": "stream-sync"}, 0.15),
    ({"environment.action_time": "0 s"}, 0.15),
    ({"policies.turn_placement": "any"}, 0.2),
]
"""Layouts, and the largest relative error of their estimated generation."""


@pytest.mark.parametrize(("changes", "most"), ESTIMATED)
def test_estimates_of_episodes_agree_with_simulations(changes: dict[str, Any], most: float) -> None:
    own = {"costs.training_factor": 50, "simulate.max_steps": 8}  # generation binds
    run = offer({**own, **changes})
    costs = Costs.load(run)
    run, workload = fill_policies(run, costs), SimulatedWorkload(run, num_steps=8, keeps_draws=True)
    batches = list(islice(step_batches(run, workload), 8))
    found = times_of_episodes(resolve(run), costs, batches)
    is_ahead = run.policies.system == "stream-async"
    estimated = found.overlapping(2) if is_ahead else found.mean
    trace = simulate_speed(open_world(run, workload, trace_type=SpeedTrace))
    assert estimated == pytest.approx(trace.measure((4, 8)).step_time, rel=most)


def test_the_engine_wakes_at_most_once_for_each_episode() -> None:
    run = offer({"environment.episode_time_limit": "60 s", "algorithm.steps": 4})
    trace = simulate(run)
    commands = [command for entry in trace.entries for command in entry.commands]
    assert sum(isinstance(command, WakeAt) for command in commands) <= 4 * 32 + 64
