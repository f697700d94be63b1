"""Plans whose rewards need GPUs: a reward model in its own pool, or in the pool that generates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from streamrl.export.launch_file import find_arguments, launch_script
from streamrl.hardware.resolved import resolve
from streamrl.record.charges import PaidGpus
from streamrl.report.against_report import figures
from streamrl.report.plan_report import head_lines
from streamrl.runfile.checks import check_run
from streamrl.runfile.config import Run
from streamrl.runfile.errors import RunError
from streamrl.runfile.files import load_run, write_run
from streamrl.sim.planner.layouts import mixed_fleets
from streamrl.sim.planner.plan import Choice
from streamrl.sim.planner.planner import make_plan
from streamrl.sim.planner.reward_replicas import (
    RewardReplicas,
    find_reward_replicas,
    least_gpus,
)
from streamrl.sim.planner.search import Search
from streamrl.sim.planner.space import Space
from streamrl.sim.planner.trial import Trial, portion_of, portions_of, short_speed_of
from streamrl.sim.steady_state import measure_steady
from streamrl.sim.studies.comparison import compare_runs
from tests.measured_profile import model_directory
from tests.runs import small_run
from tests.test_plan import FEW, FEW_PLANS, Here
from tests.test_portions import HUGE
from tests.test_search_space import OFFER, offer

THIRD = {**OFFER["cluster"]["pools"], "l40s": {"gpu": "h20", "gpus_per_node": 4, "price": 0.9}}
"""The pools of the offer, and one for the reward model alone."""


def rewarded(
    time: str = "0.5 s",
    pool: str = "l40s",
    changes: dict[str, Any] | None = None,
    model: str = "hf://nobody/knows",
    **plan: Any,
) -> Run:
    """Return a small offer with a reward model that takes `time` for a rollout."""
    verifier = {
        "pool": pool,
        "gpus_per_worker": 1,
        "time": time,
        "reward": [{"scorer": "reward-model", "model": model}],
    }
    cluster = {**OFFER["cluster"], "pools": THIRD}
    small = {"policies": {"system": "stream-async"}, "algorithm.group_size": 2}
    changed = {**FEW, **small, "cluster": cluster, "verifier": verifier, **(changes or {})}
    return offer(changed, **{**FEW_PLANS, "unit": 4, **plan})


# Sizes --------------------------------------------------------------------------------------------


def found(run: Run) -> list[RewardReplicas]:
    rollouts = run.algorithm.rollouts_per_step
    reward = resolve(run).reward
    return find_reward_replicas(reward, run.verifier, run.cluster.pools, run.plan, rollouts)


def gpus_of(run: Run) -> list[tuple[str, int]]:
    return [(each.pool, each.num_gpus) for each in found(run)]


def test_a_few_sizes_of_the_pool_are_tried_and_the_runs_own() -> None:
    assert gpus_of(rewarded(unit=1)) == [("l40s", 1), ("l40s", 2), ("l40s", 4)]
    own = rewarded(unit=1, changes={"verifier.workers": 3})
    assert gpus_of(own) == [("l40s", 1), ("l40s", 2), ("l40s", 3), ("l40s", 4)]
    assert gpus_of(rewarded(pool="h20", unit=None)) == [("h20", 8)]
    few = {"verifier.max_rollouts_per_call": 8}
    assert gpus_of(rewarded(pool="h20", unit=None, changes=few)) == [("h20", 8), ("h20", 16)]


def test_a_large_pool_is_tried_in_doublings() -> None:
    pools = {**THIRD, "l40s": {"gpu": "h20", "nodes": 8, "price": 0.9}}
    many = {"cluster.pools": pools, "verifier.max_rollouts_per_call": 1}
    sizes = [num_gpus for _, num_gpus in gpus_of(rewarded(unit=1, changes=many))]
    assert sizes == [1, 2, 4, 8, 16, 32, 64]


def test_replicas_that_would_have_no_call_are_not_tried() -> None:
    calls = {"verifier.max_rollouts_per_call": 64, "algorithm.prompts_per_step": 64}
    assert gpus_of(rewarded(unit=1, changes=calls)) == [("l40s", 1), ("l40s", 2)]


def test_the_plan_section_names_pools_and_sizes() -> None:
    run = rewarded(reward_pools=["l40s", "h20"], reward_gpus=[2, 8])
    assert gpus_of(run) == [("l40s", 2), ("h20", 2), ("h20", 8)]
    whole = rewarded(reward_gpus=[2, 3], changes={"verifier.gpus_per_worker": 2})
    assert found(whole) == [RewardReplicas("l40s", 1, 2)]


def test_sizes_that_no_pool_has_are_refused() -> None:
    with pytest.raises(RunError, match=r"verifier\.gpus_per_worker=1.* in pool l40s"):
        found(rewarded(reward_gpus=[16]))


def test_keys_of_reward_gpus_need_a_pool() -> None:
    with pytest.raises(RunError, match=r"plan\.reward_gpus=\[4\] applies to rewards on GPUs"):
        rewarded(reward_gpus=[4], changes={"verifier": {}})


def test_a_reward_model_that_fits_no_gpu_is_refused(tmp_path: Path) -> None:
    directory = model_directory(tmp_path / "judge")
    config = json.loads((directory / "config.json").read_text())
    config |= {"hidden_size": 16384, "num_hidden_layers": 120, "intermediate_size": 65536}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(RunError, match="of the reward model with gpus_per_worker=1"):
        found(rewarded(model=str(directory)))


# Plans --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pool", ["l40s", "h20", "h800"])
def test_no_plan_needs_more_gpus_than_the_offer_and_all_are_paid(pool: str) -> None:
    space = Space.open(rewarded(pool=pool, systems=["stream-async", "colocated"]))
    assert {mode.rewards is not None for mode in space.modes} == {True}
    shared = 0
    for index in range(0, len(space), 1 + len(space) // 120):
        candidate = space.candidate(index)
        run = candidate.apply(space.run)
        check_run(run)
        for name, rented in run.cluster.pools.items():
            assert rented.nodes <= space.run.cluster.pools[name].nodes
        assert PaidGpus.of(run).dollars_per_second == pytest.approx(space.prices[index], rel=1e-12)
        shared += pool in candidate.replicas.pools
    assert shared or pool == "l40s"


def test_a_pool_that_the_reward_model_fills_generates_no_more() -> None:
    space = Space.open(rewarded(pool="h20", reward_gpus=[16]))
    assert {space.candidate(i).replicas.pool for i in range(len(space))} == {"h800"}


def test_a_second_kind_of_replicas_leaves_the_gpus_of_rewards_free() -> None:
    one, two = RewardReplicas("h20", 4, 1), RewardReplicas("h20", 1, 2)
    assert least_gpus([one, two]) == {"h20": 2}
    assert least_gpus([one, RewardReplicas("h800", 1, 1), None]) == {"h20": 0, "h800": 0}
    run = rewarded(pool="h20", unit=1, mixes_replicas=True)
    space = Space.open(run)
    first = next(
        space.candidate(i)
        for i in range(len(space))
        if space.candidate(i).replicas.pools == ("h800",)
    )
    replica, pools = resolve(run).replica, run.cluster.pools

    def sizes(others: dict[str, int]) -> set[int]:
        fleets = mixed_fleets(replica, pools, run.plan, [first.replicas], [first.trainer], others)
        return {kind.num_gpus for each in fleets for kind in each.kinds if kind.pool == "h20"}

    assert max(sizes({})) == 16 and max(sizes({"h20": 3})) == 13


def test_a_portion_has_its_share_of_the_workers() -> None:
    gpus = {"verifier.pool": "near", "verifier.gpus_per_worker": 1}
    pools = {"cluster.pools.near": {"gpu": "h800", "nodes": 64}}
    many = small_run({**HUGE, **pools, **gpus, "verifier.workers": 8})
    assert portions_of(many) == 4 and portion_of(many, 4).verifier.workers == 2
    assert portions_of(small_run({**HUGE, **pools, **gpus, "verifier.workers": 2})) == 2
    assert portions_of(small_run({**HUGE, "verifier.time": "1 s"})) == 1
    assert portions_of(small_run(HUGE)) == 4


# Seconds ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pool", ["l40s", "h20"])
@pytest.mark.parametrize("system", ["colocated", "stream-sync", "one-step-async", "stream-async"])
def test_estimates_with_rewards_are_near_the_simulation(pool: str, system: str) -> None:
    chosen = {"rollout_tensor_parallel": [1], "trainer_tensor_parallel": [4]}
    sides = {"rollout_gpus": [8], "trainer_gpus": [8], "reward_gpus": [1, 4]}
    long = {"algorithm.steps": 12, "simulate.max_steps": 12}
    run = rewarded(pool=pool, systems=[system], changes=long, unit=1, **chosen, **sides)
    search = Search.open(run)
    of_size = {search.space.candidate(i).mode.rewards: i for i in range(len(search.space))}
    assert len(of_size) == 2
    search.refine(Here(), lambda *_: [*of_size.values()])
    estimate, bound = search.estimates.estimate(), search.estimates.bound()
    steps = []
    for index in of_size.values():
        step = short_speed_of(Trial(search.base, search.space.candidate(index))).step_time
        steps.append(step)
        assert step == pytest.approx(estimate.step[index], rel=0.1)
        assert step > 0.93 * bound[index]
    assert steps[0] > 1.15 * steps[1]


def test_rewards_on_cpus_bind_too() -> None:
    one = {"rollout_tensor_parallel": [1], "rollout_gpus": [8], "trainer_gpus": [8]}
    slow = {"verifier": {"time": "0.5 s", "workers": 1}}
    search = Search.open(rewarded(systems=["stream-sync"], changes=slow, **one))
    search.refine(Here(), lambda *_: [0])
    step = short_speed_of(Trial(search.base, search.space.candidate(0))).step_time
    assert step == pytest.approx(search.estimates.estimate().step[0], rel=0.1)
    assert step > 64


def test_a_reward_model_of_a_known_shape_takes_longer_with_lengths_mixed(tmp_path: Path) -> None:
    shape = model_directory(tmp_path / "judge")
    search = Search.open(rewarded(time="0 s", model=str(shape), reward_gpus=[1]))
    modes = dict(
        zip((m.system for m in search.space.modes), search.estimates._rewards, strict=True)
    )
    times = modes["stream-async"]
    assert 0 < times.last < times.sorted < times.of_batches(2) < times.mixed


def test_rewards_that_take_long_get_more_gpus() -> None:
    open_keys: dict[str, Any] = {"rollout_gpus": [8], "trainer_gpus": [8], "reward_gpus": [1, 2, 4]}

    def chosen(time: str) -> int:
        run = rewarded(time, systems=["stream-async"], objective="cost-per-step", **open_keys)
        search = Search.open(run)
        rewards = search.space.candidate(search.run(Here(), lambda: None)[0]).mode.rewards
        assert rewards is not None
        return rewards.num_gpus

    assert chosen("3 ms") == 1
    assert chosen("2 s") == 4


# The result ---------------------------------------------------------------------------------------


def test_a_plan_names_the_gpus_of_its_reward_model_and_what_they_cost(tmp_path: Path) -> None:
    run = rewarded(
        "2 s",
        systems=["stream-sync"],
        rollout_pools=["h20"],
        rollout_gpus=[8],
        trainer_gpus=[8],
        reward_gpus=[1, 2],
    )
    planned = make_plan(run)
    chosen: Choice = planned.plan.allocation
    assert chosen.verifier is not None and chosen.verifier.num_gpus == 2
    assert ", 2 l40s (2 x TP1) compute rewards; stream-sync" in chosen.text
    assert chosen.settings["verifier.workers"] == 2
    assert chosen.verifier_dollars_per_hour == pytest.approx(1.8)
    assert "an hour, $1.80 of it for rewards" in "\n".join(head_lines(planned.plan))
    assert planned.plan.binding.stage == "rewards"
    assert planned.plan.binding.seconds["rewards"] == pytest.approx(128)
    assert planned.plan.binding.text.startswith(
        "rewards are the bottleneck: verifier.workers 2 on 2 l40s; "
    )
    write_run(planned.run, tmp_path / "plan.toml")
    read = load_run(tmp_path / "plan.toml")
    assert (read.verifier.pool, read.verifier.workers) == ("l40s", 2)
    assert measure_steady(read).step_time == chosen.step_time


FEW_STEPS = {"simulate.max_steps": 3}


def with_workers(workers: int, system: str = "stream-async") -> Run:
    """Return a small run whose rewards take half a second on each GPU."""
    pools = {"cluster.pools.third": {"gpu": "a100", "gpus_per_node": 4, "price": 1.0}}
    keys = {"pool": "third", "gpus_per_worker": 1, "workers": workers, "time": "0.5 s"}
    return small_run(
        {
            **FEW_STEPS,
            "policies": {"system": system},
            **pools,
            **{f"verifier.{key}": value for key, value in keys.items()},
        }
    )


def test_two_runs_are_compared_by_the_gpus_of_their_reward_models() -> None:
    two, one, none = with_workers(2), with_workers(1, "colocated"), small_run(FEW_STEPS)
    against = compare_runs(two, one)
    assert against.a.rewards is not None and against.b.rewards is not None
    assert (against.a.rewards.num_gpus, against.b.rewards.num_gpus) == (2, 1)
    assert 0 < against.b.rewards.idle < 1 and 0 < against.a.rewards.idle < 1
    other = compare_runs(two, none)
    rows = {name: cells for name, *cells in figures(other)}
    assert rows["GPUs that compute rewards"][:2] == ["2", ""]


def test_a_launch_script_says_which_gpus_compute_rewards() -> None:
    run = with_workers(2)
    told = "\n#   verifier.pool = third\n#   verifier.workers x gpus_per_worker = 2\n"
    assert told in launch_script(find_arguments(run, "verl"))
    assert "verifier" not in launch_script(find_arguments(small_run(), "verl"))
