"""The search of the planner: every system is tried, time is kept, of plans that are alike the simplest is run."""

from __future__ import annotations

import time
from functools import partial
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from streamrl.report.plan_report import head_lines, plan_report, terms_text
from streamrl.runfile.cluster_config import PoolConfig
from streamrl.runfile.plan_config import ObjectiveName
from streamrl.sim.batch_generation import generate_batch, step_batches
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.policy_estimates import fill_policies
from streamrl.sim.parallel import answers_in_time
from streamrl.sim.planner.layouts import FINE, sizes
from streamrl.sim.planner.plan import read_plan, write_plan
from streamrl.sim.planner.planner import make_plan
from streamrl.sim.planner.race import Race
from streamrl.sim.planner.search import MARGIN, Search
from streamrl.sim.planner.stage_times import summarize
from streamrl.sim.planner.trial import SEARCH_STEPS, Trial, open_trial, short_speed_of, shortened
from streamrl.sim.steady_state import measure_steady
from tests.test_agreement import printed
from tests.test_plan import SMALL, Here, few, planned, searched


def test_the_best_plan_of_every_system_on_every_pair_of_pools_is_simulated() -> None:
    search = searched()
    space = search.space

    def kinds(indices: object) -> set[tuple[str, str, str]]:
        found = [space.candidate(int(index)) for index in np.array(list(indices))]  # type: ignore[call-overload]
        return {(c.mode.system, c.replicas.pool, c.trainer.pool) for c in found}

    assert kinds(search.speeds) == kinds(range(len(space)))
    assert len(kinds(search.speeds)) > 5


def test_a_search_ends_where_no_lower_estimate_is_below_the_best_that_was_simulated() -> None:
    search = searched()
    best = search.value(search.ranking()[0])
    assert search.has_converged
    assert search.least_open() >= (1 - MARGIN) * best


def test_a_search_that_is_out_of_time_says_how_much_better_a_plan_may_be(tmp_path: Path) -> None:
    run = few(SMALL)
    search = Search.open(run, deadline=time.perf_counter())
    best = int(np.argmin(search.scores()))
    search.run(Here(), lambda: None)
    assert next(iter(search.speeds)) == best and not search.has_converged
    plan = make_plan(few(SMALL, time_limit="1 ms")).plan
    assert plan.open_gap is not None and 0 <= plan.open_gap < 1
    console = Console(file=(shown := StringIO()), width=200)
    console.print(plan_report(plan))
    assert not plan.sensitivity and "no what-ifs" in shown.getvalue()
    write_plan(plan, tmp_path)
    assert read_plan(tmp_path / "plan.json") == plan
    assert planned(few(SMALL)).plan.open_gap is None


def test_a_plan_fits_a_terminal_and_breaks_no_word() -> None:
    plan, width = planned(few(SMALL)).plan, 80
    Console(file=(output := StringIO()), width=width).print(plan_report(plan, details=True))
    shown = output.getvalue()
    assert all(cell_len(line) <= width for line in shown.splitlines())
    words = {*" ".join(head_lines(plan)).split(), *plan.options[0].text.split()}
    assert {*words} - {*shown.split()} == set()


def test_the_chosen_plan_is_simulated_for_as_many_steps_as_there_is_time_for() -> None:
    long = {**SMALL, "simulate.max_steps": 60, "simulate.interval": 1e-4}
    plan, run = (planned := make_plan(few(long, time_limit="1 ms"))).plan, planned.run
    assert plan.steps_in_time == SEARCH_STEPS == run.simulate.max_steps
    assert measure_steady(run).step_time == plan.allocation.step_time
    assert plan.allocation.step_time_interval is None  # of so few steps
    told = "\n".join(head_lines(plan))
    assert f"left time for {SEARCH_STEPS} steps of it" in told and plan.allocation.note in told
    unhurried = make_plan(few({**SMALL, "simulate.max_steps": 60, "simulate.interval": 0.5}))
    assert unhurried.plan.steps_in_time is None and unhurried.run.simulate.max_steps == 60


def test_a_system_is_not_tried_on_pools_where_all_its_plans_are_known_to_be_worse(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("streamrl.sim.planner.search.CLASSES", 4)
    search = Search.open(few({**SMALL, "cluster.pools.h20.price": 1000.0}))
    search.run(Here(), lambda: None)
    space, best = search.space, search.value(search.ranking()[0])
    assert {space.candidate(i).replicas.pool for i in search.speeds} == {"h800"}
    on_h20 = np.array([each.pool == "h20" for each in space.replicas])[space.of_replicas]
    assert on_h20.any() and search.bounds()[on_h20].min() > best
    tried = {space.candidate(i).mode.system for i in search.speeds}
    assert tried == {mode.system for mode in space.modes}


def test_a_plan_like_one_that_was_simulated_is_too_where_it_is_clearly_better_by_estimate() -> None:
    search = searched()
    space, (best, *_) = search.space, search.ranking()
    replicas, trainer, mode = space.candidate(best)
    other = next(
        index
        for index, each in enumerate(map(space.candidate, range(len(space))))
        if (each.replicas, each.mode, each.trainer.num_gpus) == (replicas, mode, trainer.num_gpus)
        and each.trainer.pool == trainer.pool
        and index not in search.speeds
    )
    scores = search.scores()
    for share, is_wanted in ((1 - 2 * MARGIN, True), (1 - MARGIN / 2, False)):
        scores[other] = share * scores[best]
        assert list(search.unlike([best, other], scores)) == [other] * is_wanted


def test_finalists_of_as_few_steps_as_the_search_had_are_not_simulated_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    search = searched()
    simulated: list[Trial] = []
    monkeypatch.setattr("streamrl.sim.planner.search.short_speed_of", simulated.append)
    race = Race(search)
    race.run(Here(), lambda: None)
    assert race.finals and not simulated
    assert all(race.finals[index] == [search.speeds[index]] for index in race.finals)


def test_what_has_not_begun_in_time_is_left_but_for_the_first() -> None:
    from concurrent.futures import ThreadPoolExecutor

    def slow(number: int) -> int:
        time.sleep(0.2)
        return number

    with ThreadPoolExecutor(1) as pool:
        told: list[None] = []
        found = answers_in_time(
            pool, slow, range(50), lambda: told.append(None), time.perf_counter() + 0.3
        )
        assert 1 <= len(found) < 10 and len(told) == len(found)
        assert found == {number: number for number in found} and 0 in found
        late = answers_in_time(pool, slow, range(5), lambda: None, time.perf_counter() - 1)
        assert 0 in late and len(late) <= 2


def test_of_plans_that_are_alike_the_simplest_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    search = searched()
    race = Race(search)
    race.run(Here(), lambda: None)
    by_cost = min(race.finals, key=race.value)
    search.complexity[by_cost] = 99
    monkeypatch.setattr("streamrl.sim.planner.race.is_beyond_chance", lambda *_: True)
    monkeypatch.setattr("streamrl.sim.planner.race.ALIKE", 1e9)
    simplest = race.run(Here(), lambda: None)
    least = min(search.complexity[index] for index in race.finals)
    assert search.complexity[simplest] == least < 99
    monkeypatch.setattr("streamrl.sim.planner.race.ALIKE", 0.0)
    monkeypatch.setattr(Race, "is_alike", lambda self, index, best: index == best)
    assert race.run(Here(), lambda: None) == by_cost


@pytest.mark.parametrize(
    ("objective", "key"),
    [("cost-per-step", "step_time"), ("step-time", "cost_per_step")],
)
def test_of_plans_that_are_alike_simplicity_comes_after_what_is_not_the_objective(
    objective: ObjectiveName, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = Search.open(few(SMALL, objective=objective))
    search.run(Here(), lambda: None)
    race = Race(search)
    race._compare(Here(), search.ranking()[:4], lambda: None)
    figures = {index: getattr(speeds[0], key) for index, speeds in race.finals.items()}
    best = min(figures, key=lambda index: figures[index])
    assert len(figures) > 2 and min(v for i, v in figures.items() if i != best) > figures[best]
    search.complexity[best] = 99
    monkeypatch.setattr("streamrl.sim.planner.race.ALIKE", 0.0)
    monkeypatch.setattr(Race, "is_alike", lambda *_: True)
    assert race._choose() == best


def test_what_there_is_to_set_up_is_counted() -> None:
    search = Search.open(few(SMALL), runnable=False)
    space, counts = search.space, search.complexity

    def counted(system: str, generates: tuple[str, int], trains: tuple[int, int]) -> int:
        """Return the count of a plan by its system, pool and degree that generate, and tensor and pipeline degree."""
        return next(
            int(counts[index])
            for index, (replicas, trainer, mode) in enumerate(
                map(space.candidate, range(len(space)))
            )
            if mode.system == system
            and (replicas.pool, replicas.tensor_parallel) == generates
            and (trainer.tensor_parallel, trainer.pipeline_parallel) == trains
            and trainer.zero == 1
        )

    plain = counted("colocated", ("h800", 1), (2, 1))
    assert plain == 1
    assert counted("colocated", ("h800", 4), (2, 1)) == plain + 1
    assert counted("colocated", ("h800", 1), (2, 2)) == plain + 1
    assert counted("stream-sync", ("h800", 1), (2, 1)) == plain + 1
    assert counted("one-step-async", ("h800", 1), (2, 1)) == plain + 1
    assert counted("one-step-async", ("h20", 1), (2, 1)) == plain + 2
    assert counted("stream-async", ("h800", 1), (2, 1)) == plain + 2


def test_sizes_of_a_large_pool_differ_by_a_sixteenth_and_those_of_a_small_one_by_a_node() -> None:
    small, large = (sizes(PoolConfig(gpu="h800", nodes=nodes), None) for nodes in (16, 256))
    assert small == [8 * nodes for nodes in range(1, 17)]
    assert large[-1] == 2048 and len(large) == 2 * FINE + 3 * FINE
    assert all(b / a - 1 <= 1 / FINE for a, b in zip(large[FINE:], large[FINE + 1 :], strict=False))
    assert len(sizes(PoolConfig(gpu="h800", nodes=256), 8)) == 256
    single = sizes(PoolConfig(gpu="h800", nodes=16, unit=1), None)
    assert single[:FINE] == [*range(1, FINE + 1)] and single[-1] == 128 and len(single) == 4 * FINE


@given(st.integers(1, 64), st.integers(1, 64), st.sampled_from([None, 1, 4]))
def test_a_larger_pool_has_all_sizes_of_a_smaller_one(
    nodes: int, more: int, unit: int | None
) -> None:
    smaller, larger = (
        sizes(PoolConfig(gpu="h800", nodes=each + 1, unit=unit), None)
        for each in (nodes, nodes + more)
    )
    assert set(smaller) <= set(larger)


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("memory", [0.9, 0.24])
def test_some_replicas_stand_for_many(memory: float, waits: bool) -> None:
    changes = {
        "rollout.memory_utilization": memory,
        "algorithm.name": "grpo",
        "algorithm.group_size": 8,
        "algorithm.prompts_per_step": 128,
    }
    run = few({**changes, "rollout.pool": "h20"}, rollout_tensor_parallel=[1])
    search = Search.open(run)
    candidate = next(
        c
        for c in map(search.space.candidate, range(len(search.space)))
        if c.replicas.pool == "h20" and c.replicas.replicas >= 16
    )
    base, workload = open_trial(shortened(run, run.seed))
    applied = candidate.apply(base)
    costs = Costs.load(applied)
    filled = fill_policies(applied, costs)
    batch = next(step_batches(base, workload))
    count = candidate.replicas.replicas
    whole, part = (
        summarize(
            [batch.generate(partial(generate_batch, filled, costs, most=most))],
            count,
            waits_for_groups=waits,
        )
        for most in (None, 8)
    )
    is_short = costs.kv_capacity < 20 * run.rollout.max_tokens
    assert is_short == (memory < 0.5)
    assert part.mean == pytest.approx(whole.mean, rel=1e-3 if is_short else 0.05)
    for one, all_of_them in ((part.shares, whole.shares), (part.turnovers, whole.turnovers)):
        assert one == pytest.approx(all_of_them, rel=0.05)
    busy = np.array([0.1, 0.5, 1.0, 2.0, 10.0]) * whole.mean
    assert part.stream_end(busy) == pytest.approx(whole.stream_end(busy), rel=0.03)


def test_short_simulations_of_a_system_that_runs_ahead_are_near_its_steady_state() -> None:
    run = few(
        {"algorithm.prompts_per_step": 128, "simulate.max_steps": 60}, systems=["stream-async"]
    )
    search = Search.open(run)
    index = int(np.argmin(search.scores()))
    short = short_speed_of(Trial(search.base, search.space.candidate(index)))
    long = short_speed_of(Trial(shortened(run, run.seed, 60), search.space.candidate(index)))
    assert short.counted_steps == (4, 8)
    assert short.step_time == pytest.approx(long.step_time, rel=0.08)


def test_terms_of_a_plan_are_explained_once() -> None:
    told = terms_text(["8 a (8 x TP2) generate, 8 b (DP4 TP2) train; stream-sync, delta sync"])
    assert told.startswith("N x = N replicas, ") and told.count("TP = tensor parallel: ") == 1
    assert "DP = data parallel" in told and "delta sync = only changed weights" in told
    assert "offload" not in told and "stream-sync = training starts while" in told
    assert "stream-sync" not in terms_text(["8 a train; stream-sync"], ["stream-sync"])


def test_terms_come_right_after_the_options_that_use_them() -> None:
    shown = printed(planned(few(SMALL)).plan)
    assert shown.index("recommended") < shown.index("terms: ") < shown.index("\nwhy")
