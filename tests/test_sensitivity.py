"""The what-ifs of a plan have the sign and the size that longer simulations have, and say which limits break."""

from __future__ import annotations

from concurrent.futures import Future
from functools import cache
from typing import Any

import pytest
from msgspec.structs import replace

from streamrl.record.steady_state import START, Speed, over_steps
from streamrl.report.plan_report import not_varied_text
from streamrl.runfile.policies_config import SystemName
from streamrl.runfile.units import Duration
from streamrl.sim.planner import sensitivity
from streamrl.sim.planner.objective import value_of
from streamrl.sim.planner.search import Search
from streamrl.sim.planner.sensitivity import CHANCE, SAME, Judgement, judge
from streamrl.sim.planner.shifts import Shift, shifts
from streamrl.sim.planner.trial import Trial, short_speed_of, shortened, whole
from tests.test_plan import SMALL, Here, few


class Some(Here):
    """Works on the first jobs only, and leaves the others waiting."""

    def __init__(self, left: int) -> None:
        self.left = left

    def submit(self, work: Any, /, *arguments: Any, **_: Any) -> Future[Any]:
        """Do it now, or never."""
        if not self.left:
            return Future()
        self.left -= 1
        return super().submit(work, *arguments)


LONG = {**SMALL, "algorithm.steps": 24, "simulate.max_steps": 24}


@cache
def judged(system: SystemName, **plan: float) -> tuple[Search, int, Judgement]:
    """Judge the best plan of a system by estimate, on the GPUs of two pools."""
    search = Search.open(few(LONG, systems=[system], rollout_pools=["h20"], **plan))
    search.settle(Here(), [])
    chosen = search.in_order()[0]
    search.simulate(Here(), [chosen], lambda: None)
    return search, chosen, judge(search, chosen, search.spend_of(search.speeds[chosen]), Here())


def shift_of(search: Search, what: str) -> Shift:
    return next(each for each in shifts(search.space.run) if each.what == what)


@pytest.mark.parametrize("system", ["stream-sync", "stream-async"])
def test_an_effect_is_within_three_points_of_a_longer_simulation(system: SystemName) -> None:
    search, chosen, found = judged(system)
    candidate, plan = search.space.candidate(chosen), search.space.run.plan
    before = short_speed_of(Trial(whole(search.space.run, 0), candidate))
    assert isinstance(before, Speed) and len(before.step_times) >= 24
    for verdict in found.verdicts:
        if verdict.what.startswith("price"):
            continue
        run = shift_of(search, verdict.what).run
        after = short_speed_of(Trial(whole(run, 0), candidate))
        assert isinstance(after, Speed)
        direct = value_of(plan, after) / value_of(plan, before)
        assert verdict.value == pytest.approx(direct, abs=0.03), verdict.what
        for key, ratio in (("step_time", verdict.seconds), ("cost_per_step", verdict.dollars)):
            exact = getattr(after, key) / getattr(before, key)
            assert ratio == pytest.approx(exact, abs=0.04), (verdict.what, key)
        assert abs(direct - 1) < 0.01 or (verdict.value - 1) * (direct - 1) > 0, verdict.what


def test_faster_training_never_makes_a_plan_dearer_by_chance() -> None:
    _, _, found = judged("stream-async")
    slower, faster = (
        next(
            each.value for each in found.verdicts if each.what == f"speed of training (MFU) {name}"
        )
        for name in ("-20%", "+20%")
    )
    assert faster <= 1 <= slower


def test_a_small_effect_in_the_wrong_direction_is_none_and_a_large_one_is_simulated_again() -> None:
    search, chosen, _ = judged("stream-async")
    shift = shift_of(search, "speed of training (MFU) +20%")
    look = sensitivity._look(shift, search, chosen)
    small, large = (SAME._replace(value=1 + factor * CHANCE) for factor in (0.5, 2.0))
    better = SAME._replace(value=0.9)
    for ratios, simulations in ((small, 0), (large, 2), (better, 0)):
        pool = Some(simulations)
        search._of_trials.clear()
        ((ours, _),) = sensitivity._checked([look], [(ratios, None)], search, pool, lambda: None)
        assert ours is not None and ours.value <= 1.0
        assert pool.left == 0 and (ours == better) == (ratios == better)


@pytest.mark.parametrize("is_sure", [True, False])
@pytest.mark.parametrize("system", ["stream-async", "one-step-async"])
def test_a_small_effect_of_lengths_is_that_of_more_steps_where_steps_overlap(
    system: SystemName, is_sure: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    search, chosen, _ = judged(system)
    look = sensitivity._look(shift_of(search, "lengths +20%"), search, chosen)
    small, large = (SAME._replace(value=value, seconds=1.2) for value in (1.02, 1.04))
    monkeypatch.setattr(sensitivity, "is_beyond_chance", lambda *_: is_sure)
    pool = Some(2)
    search._of_trials.clear()
    ((ours, _),) = sensitivity._checked([look], [(small, None)], search, pool, lambda: None)
    assert ours is not None and pool.left == 0
    assert ours.value not in (1.0, small.value) and ours.seconds > 1.05
    ((kept, _),) = sensitivity._checked([look], [(large, None)], search, Some(0), lambda: None)
    assert kept == large


def test_an_effect_that_is_doubtful_by_estimate_is_simulated_for_longer_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    long = {**SMALL, "algorithm.steps": 80, "simulate.max_steps": 80}
    search = Search.open(few(long, systems=["stream-async"], rollout_pools=["h20"]))
    chosen = search.in_order()[0]
    search.simulate(Here(), [chosen], lambda: None)
    shift = shift_of(search, "lengths +20%")
    look = sensitivity._look(shift, search, chosen)._replace(other=None)
    asked: list[bytes] = []

    def keep(pool: object, wanted: dict[object, Trial], *_: object) -> dict[object, Speed]:
        asked.extend(trial.run for trial in wanted.values())
        return {}

    monkeypatch.setattr(search, "speeds_of", keep)
    for ratio, steps in ((1.01, 2 * sensitivity.STREAMING), (1.1, sensitivity.STREAMING)):
        asked.clear()
        list(sensitivity._simulate([look._replace(ratio=ratio)], search, Here(), lambda: None))
        assert set(asked) == {shortened(r, r.seed, steps) for r in (search.space.run, shift.run)}


def test_what_ifs_of_a_plan_that_streams_ahead_leave_out_the_first_of_many_steps() -> None:
    search, chosen, _ = judged("stream-async")
    look = sensitivity._look(shift_of(search, "lengths +20%"), search, chosen)
    assert look.chosen is not None
    trial = sensitivity._trial(look, search, look.chosen)
    unchanged = shortened(search.space.run, search.space.run.seed, sensitivity.STREAMING)
    before, after = (short_speed_of(each) for each in (Trial(unchanged, look.chosen), trial))
    assert isinstance(before, Speed) and isinstance(after, Speed)
    found = sensitivity._ratios(look, search, before, after, look.chosen).seconds
    last = min(after.counted_steps[1], before.counted_steps[1])
    first = max(START + 1, last // 4 + 1)
    late, early = (
        over_steps(after, *steps).step_time / over_steps(before, *steps).step_time
        for steps in ((first, last), (START + 1, 8))
    )
    assert found == pytest.approx(late)
    assert found != pytest.approx(early)


def test_longer_outputs_take_longer_even_if_a_token_costs_the_same() -> None:
    search, _, found = judged("stream-async")
    shift = shift_of(search, "lengths +20%")
    longer = SAME._replace(value=1.001, seconds=1.2, dollars=1.21)
    assert sensitivity._without_effect_of(shift, longer) == longer._replace(value=1.0)
    training = shift_of(search, "speed of training (MFU) +20%")
    assert sensitivity._without_effect_of(training, longer) == SAME
    (lengths,) = (each for each in found.verdicts if each.what == "lengths +20%")
    assert lengths.seconds > 1.1 and lengths.dollars > 1.1


def test_a_price_changes_dollars_and_no_seconds() -> None:
    _, _, found = judged("stream-sync")
    (dearer,) = (each for each in found.verdicts if each.what == "price of h800 +20%")
    assert dearer.seconds == 1.0 and 1.0 < dearer.dollars < 1.2


def test_a_price_counts_once_for_a_plan_that_only_the_what_if_simulates() -> None:
    search, chosen, _ = judged("stream-sync")
    lower, higher = (
        sensitivity._look(shift_of(search, f"price of h20 {name}"), search, chosen)
        for name in ("-20%", "+20%")
    )
    other = next(i for i in search.in_order() if i not in search.speeds)
    looks = [look._replace(other=other) for look in (lower, higher)]
    found = list(sensitivity._simulate(looks, search, Here(), lambda: None))
    low, high = (theirs for _, (_, theirs) in found if theirs is not None)
    rents = search.space.prices[other] / search.space.prices[chosen]
    assert low.dollars < high.dollars and low.seconds == high.seconds
    assert (low.dollars + high.dollars) / 2 == pytest.approx(low.seconds * rents)


def test_a_change_after_which_the_plan_misses_its_deadline_says_so() -> None:
    search, chosen, _ = judged("stream-sync")
    seconds = search.spend_of(search.speeds[chosen]).seconds
    run = replace(search.space.run, plan=replace(search.space.run.plan, deadline=1.01 * seconds))
    limited = Search.open(run)
    limited.speeds, limited.portions = search.speeds, search.portions
    verdicts = {
        each.what: each
        for each in judge(
            limited, chosen, limited.spend_of(limited.speeds[chosen]), Here()
        ).verdicts
    }
    assert verdicts["lengths +20%"].breaks == ("plan.deadline",)
    assert verdicts["lengths -20%"].breaks == ()
    assert all(each.still_fits for each in verdicts.values())


def test_limits_after_a_change_are_compared_with_the_whole_run_and_not_with_the_first_steps() -> (
    None
):
    search, chosen, found = judged("stream-sync")
    early = search.spend_of(search.speeds[chosen])
    (longer,) = (each.seconds for each in found.verdicts if each.what == "lengths +20%")
    deadline = 1.05 * longer * early.seconds
    run = replace(search.space.run, plan=replace(search.space.run.plan, deadline=deadline))
    limited = Search.open(run)
    limited.speeds, limited.portions = search.speeds, search.portions
    for times, broken in ((1.0, ()), (1.1, ("plan.deadline",))):
        spend = early._replace(seconds=times * early.seconds)
        judgement = judge(limited, chosen, spend, Here())
        (after,) = (each for each in judgement.verdicts if each.what == "lengths +20%")
        assert after.breaks == broken


def test_a_plan_that_exceeds_a_limit_only_as_simulated_has_another_one_beside_it() -> None:
    dear = {**LONG, "cluster.pools.h20.price": 8.0}  # more replicas are faster and cost more
    choices = {"systems": ["stream-sync"], "rollout_pools": ["h20"], "rollout_gpus": [4, 8, 16]}
    search = Search.open(few(dear, **choices))
    search.settle(Here(), [])
    chosen = search.in_order()[0]
    search.simulate(Here(), [chosen], lambda: None)
    early = search.spend_of(search.speeds[chosen])
    what = "lengths +20%"
    (longer,) = (
        each.seconds for each in judge(search, chosen, early, Here()).verdicts if each.what == what
    )
    deadline = 1.05 * longer * early.seconds
    search = replace_deadline(search, deadline)
    later = early._replace(seconds=1.1 * early.seconds)  # which estimates do not know
    (after,) = (each for each in judge(search, chosen, later, Here()).verdicts if each.what == what)
    assert after.breaks == ("plan.deadline",)
    assert after.other is not None
    assert after.other_value > after.value  # dearer, but in time


def replace_deadline(search: Search, deadline: float) -> Search:
    """Return a search of the same plans with a deadline, and what it simulated."""
    run = search.space.run
    limited = Search.open(replace(run, plan=replace(run.plan, deadline=Duration(deadline))))
    limited.settle(Here(), [])
    limited.speeds, limited.portions = dict(search.speeds), dict(search.portions)
    return limited


def test_a_minimum_term_and_set_up_are_in_the_total_after_a_change() -> None:
    run = few(LONG, systems=["stream-sync"], rollout_pools=["h20"])
    pools = {k: replace(p, minimum_term=Duration(1e7)) for k, p in run.cluster.pools.items()}
    billing = replace(run.cluster.billing, setup_time=Duration(3600.0))
    cluster = replace(run.cluster, pools=pools, billing=billing)
    search = Search.open(replace(run, cluster=cluster))
    search.settle(Here(), [])
    chosen = search.in_order()[0]
    search.simulate(Here(), [chosen], lambda: None)
    verdicts = {
        each.what: each
        for each in judge(search, chosen, search.spend_of(search.speeds[chosen]), Here()).verdicts
    }
    longer = verdicts["lengths +20%"]
    assert longer.seconds > 1.1 and longer.dollars == pytest.approx(1.0)
    assert verdicts["price of h800 +20%"].dollars > 1.05

    before = search.spend_of(search.speeds[chosen]).seconds
    tight = replace(search.space.run, plan=replace(search.space.run.plan, deadline=1.1 * before))
    limited = Search.open(tight)
    limited.speeds, limited.portions = search.speeds, search.portions
    wall = 3600 + (before - 3600) * longer.seconds
    assert wall < 1.1 * before < before * longer.seconds
    kept = {
        each.what: each
        for each in judge(
            limited, chosen, limited.spend_of(limited.speeds[chosen]), Here()
        ).verdicts
    }
    assert kept["lengths +20%"].breaks == ()


def test_effects_that_no_time_was_left_to_simulate_are_estimates() -> None:
    search, chosen, in_time = judged("stream-sync")
    assert not any(each.is_estimate for each in in_time.verdicts)
    late = Search.open(search.space.run, deadline=0.0)
    late.speeds, late.portions = search.speeds, search.portions
    found = judge(late, chosen, late.spend_of(late.speeds[chosen]), Some(1))
    lengths, *others = (v for v in found.verdicts if not v.what.startswith("price"))
    assert not lengths.is_estimate  # the first simulation always runs
    assert all(each.is_estimate and each.other is None for each in others)
    assert not any(v.is_estimate for v in found.verdicts if v.what.startswith("price"))


def test_what_was_left_out_is_one_line_with_each_reason_once() -> None:
    text = not_varied_text({"price of a": "only pool", "b": "unused", "c": "unused"})
    assert text == "not varied: price of a (only pool); b, c (unused)"
    assert not not_varied_text({})
