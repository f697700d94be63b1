"""A run against another that does the same work: what is known of their difference, and what decides."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import asdict, replace

from streamrl.record.attribution import attribute_sides
from streamrl.record.metrics import Metrics, measure, read_run
from streamrl.record.run_comparison import Against, Known, Outcome, compare_traces, decide, relative
from streamrl.record.steady_state import half_width, read_steps
from streamrl.report.against_report import verdict
from streamrl.runfile.errors import RunError
from streamrl.runfile.simulation_config import SimulateConfig
from streamrl.sim.steady_state import simulate_steady
from streamrl.sim.studies.comparison import compare_runs, simulate_pair
from tests.against_pair import COLOCATED, FAR, colocated, disaggregated, render, some_run
from tests.runs import small_run

EXAMPLES = Path(__file__).parent.parent / "examples"
TRAINING = ("training_steps", "training_time", "training_cost")

PAIR = (disaggregated(), colocated())


@pytest.fixture(scope="module")
def found() -> Against:
    """A disaggregated run against a colocated one."""
    return compare_runs(disaggregated(FAR), colocated())


# Differences --------------------------------------------------------------------------------------


def test_swapped_runs_have_the_inverse_ratio_and_the_opposite_difference(found: Against) -> None:
    swapped = compare_runs(colocated(), disaggregated(FAR))
    assert swapped.counted_steps == found.counted_steps
    for name in ("cost_ratio", "step_time_ratio"):
        ours, theirs = getattr(found, name), getattr(swapped, name)
        assert theirs.value == pytest.approx(1 / ours.value)
        assert theirs.interval == pytest.approx((1 / ours.interval[1], 1 / ours.interval[0]))
    for name in ("step_time", "cost_per_step", "idle_gpu_seconds", "idle_cost", "training_cost"):
        ours, theirs = getattr(found, name), getattr(swapped, name)
        assert theirs.value == pytest.approx(-ours.value)
        assert theirs.interval == pytest.approx((-ours.interval[1], -ours.interval[0]))
        assert ours.value != 0
    assert (swapped.a, swapped.b) == (found.b, found.a)


def test_a_run_against_itself_differs_in_nothing_and_that_is_said() -> None:
    same = compare_runs(disaggregated(), disaggregated())
    for name in ("step_time", "cost_per_step", "idle_gpu_seconds", "idle_cost", "training_cost"):
        assert getattr(same, name) == Known(value=0.0, interval=(0.0, 0.0)), name
    assert same.cost_ratio == same.step_time_ratio == Known(value=1.0, interval=(1.0, 1.0))
    assert same.outcome == "no difference" and same.unshared_error == 0
    assert "no difference" in verdict(same)
    assert same.prices == [] and same.bandwidths == []


def test_sides_that_share_gpus_may_differ_in_their_number() -> None:
    """The trainer has more GPUs than the replicas; their idle time counts too."""
    few = {
        "policies": {"system": "colocated"},
        "simulate.max_steps": 3,
        "cluster.pools.far.price": 1,
    }
    run = small_run(few)
    assert run.rollout.num_gpus < run.trainer.num_gpus
    found = compare_runs(run, run)
    assert found.a.generation.num_gpus == found.a.training.num_gpus == run.trainer.num_gpus
    assert 0 < found.a.idle_gpu_seconds < run.trainer.num_gpus * found.a.step_time


def test_differences_are_those_of_the_figures_of_both(found: Against) -> None:
    a, b = found.a, found.b
    assert found.step_time.value == pytest.approx(a.step_time - b.step_time)
    assert found.cost_per_step.value == pytest.approx(a.cost_per_step - b.cost_per_step)
    assert found.cost_ratio.value == a.cost_per_million_tokens / b.cost_per_million_tokens
    assert found.idle_cost.value == pytest.approx(a.idle_cost - b.idle_cost)
    whole, other = a.whole_run, b.whole_run
    assert found.training_cost.value == whole.dollars - other.dollars
    assert found.training_time.value == whole.seconds - other.seconds
    assert found.training_cost.value == pytest.approx(50 * found.cost_per_step.value, rel=0.2)
    assert (a.shares_gpus, b.shares_gpus) == (False, True)
    assert (a.generation.num_gpus, a.training.num_gpus, b.training.num_gpus) == (2, 4, 4)
    assert a.dollars_per_hour == pytest.approx(2 * 20.0 + 4 * 5.2725)


def test_both_are_simulated_until_their_ratio_is_known_and_no_longer() -> None:
    shares = (0.05, 0.015)
    wide, narrow = (
        simulate_pair(*(replace(run, simulate=SimulateConfig(interval=share)) for run in PAIR))
        for share in shares
    )
    for pair, share in zip((wide, narrow), shares, strict=True):
        assert pair.steps.half_width is not None and pair.note == ""
        assert pair.steps.half_width <= 1.1 * share  # which was met without the last step
        counted = (pair.steps.first, pair.steps.last)
        alone = [measure(trace, counted) for trace in pair.traces]
        assert [metrics.note for metrics in alone] == ["", ""]
    assert max(map(_share, alone)) > 1.1 * share  # so that more steps would have come alone
    assert wide.steps.last < narrow.steps.last < 400


def test_of_two_files_the_narrower_interval_and_the_larger_number_of_steps_count() -> None:
    strict = {"simulate.interval": 1e-6, "simulate.max_steps": 22}
    loose = {**COLOCATED, "simulate.interval": 0.5, "simulate.max_steps": 25}
    against = compare_runs(disaggregated(strict), some_run(loose))
    assert against.counted_steps[1] == 25 and "1e-06" in against.note


def _share(metrics: Metrics) -> float:
    """Return half the interval of a mean step time as a share of it."""
    assert metrics.step_time_interval is not None
    return metrics.step_time_interval[1] / metrics.step_time - 1


def test_where_too_many_steps_come_first_that_is_said() -> None:
    few = {"simulate.interval": 1e-6, "simulate.max_steps": 25}
    against = compare_runs(disaggregated(few), some_run({**COLOCATED, **few}))
    assert against.counted_steps[1] == 25
    assert "not to the 1e-06 that is wanted" in against.note and against.note in render(against)
    tiny = {"simulate.max_steps": 5}
    against = compare_runs(disaggregated(tiny), some_run({**COLOCATED, **tiny}))
    assert against.cost_ratio.interval is None and "too few for an interval" in against.note
    assert against.outcome == "may be chance" and "too few steps" in verdict(against)


def test_the_length_of_the_training_changes_nothing_but_the_whole() -> None:
    answers = []
    for steps in (6, 500):
        length = {"algorithm.steps": steps, "simulate.interval": 0.03}
        against = compare_runs(disaggregated(length), some_run({**COLOCATED, **length}))
        fields = {name: getattr(against, name) for name in against.__struct_fields__}
        for name in "ab":
            fields[name] = {**asdict(fields[name]), "whole_run": None}
        answers.append({name: fields[name] for name in fields if name not in TRAINING})
        assert against.training_steps == steps
        answers[-1]["verdict"] = verdict(against)
    assert answers[0] == answers[1]


def test_what_lags_behind_is_charged_to_who_lags() -> None:
    ahead = {**FAR, "policies.system": "stream-async", "simulate.max_steps": 30}
    found = compare_runs(disaggregated(ahead), colocated())
    charged = compare_runs(disaggregated({**ahead, "plan": {"staleness_cost": 40.0}}), colocated())
    ratio = (1 + 0.4 * charged.a.staleness) / (1 + 0.4 * charged.b.staleness)
    assert charged.a.staleness > 0.2 and charged.steps_ratio == pytest.approx(ratio)
    for name in ("cost_ratio", "step_time_ratio"):
        ours, theirs = getattr(charged, name), getattr(found, name)
        assert ours.value == pytest.approx(ratio * theirs.value)
    assert charged.a.whole_run.steps > charged.b.whole_run.steps == 50
    assert "plan.staleness_cost" in verdict(charged) and "staleness" not in verdict(found)


def test_runs_side_by_side_go_as_each_would_alone() -> None:
    a, b = disaggregated(), colocated()
    pair = simulate_pair(a, b)
    for run, trace in zip((a, b), pair.traces, strict=True):
        alone = simulate_steady(run)
        num = min(len(alone.entries), len(trace.entries))
        assert num > 500 and trace.entries[:num] == alone.entries[:num]
    assert len({len(read_steps(trace)) for trace in pair.traces}) == 1


FAILING = {"failures.per_gpu_day": 3000.0, "failures.trainers": True, "simulate.max_steps": 40}
ENDLESS = {"policies.max_restarts": 10_000, "policies.max_attempts": 10_000}


def test_a_run_that_stops_past_its_last_step_ends_the_other_too() -> None:
    failing = {**FAILING, "policies.max_restarts": 1, "algorithm.steps": 2}
    pair = simulate_pair(disaggregated(failing), disaggregated({"algorithm.steps": 2}))
    num_made = [len(read_steps(trace)) for trace in pair.traces]
    assert max(num_made) <= min(num_made) + 1 < 20 and "too few for an interval" in pair.note
    against = compare_traces(pair.traces, (pair.steps.first, pair.steps.last), pair.note)
    assert against.outcome == "may be chance"  # though the steps that both made are alike


def test_steps_that_failures_take_back_do_not_count_in_either() -> None:
    failing = disaggregated({**FAILING, **ENDLESS, "execute.checkpoint_every": 3})
    pair = simulate_pair(failing, disaggregated())
    one, other = (read_steps(trace) for trace in pair.traces)
    assert one.num_failures >= 10 and one.num_made > 40
    assert pair.steps.last <= min(len(one), len(other)) < one.num_made
    assert pair.note


def test_a_run_whose_steps_are_all_taken_back_fails() -> None:
    often = {"failures.per_gpu_day": 1e6, "policies.max_restarts": 0}
    with pytest.raises(RuntimeError, match=r"A does not finish.*: it stopped after step 0 of 50"):
        simulate_pair(disaggregated({**FAILING, **often}), disaggregated())


def test_lengths_that_drift_are_compared_over_the_whole_training() -> None:
    drifting = {"workload.lengths.scale_to": 0.02, "algorithm.steps": 24}
    against = compare_runs(disaggregated(drifting), some_run({**COLOCATED, **drifting}))
    assert against.counted_steps == (2, 24) and against.note == ""


def test_the_idle_seconds_of_steps_make_up_those_of_the_run() -> None:
    trace = simulate_steady(disaggregated())
    stepped_at = read_steps(trace).ended_at
    first, last = 5, 20
    shares = attribute_sides(trace, (stepped_at[first - 2], stepped_at[last - 1]))
    idle = read_run(trace).attribution.idle_of_steps(stepped_at)
    for side, of_side in shares.sides.items():
        expected = sum(of_side.idle.values()) * of_side.gpu_seconds
        assert np.sum(idle[side][first - 1 : last]) == pytest.approx(expected)
    assert sum(map(np.sum, idle.values())) > 0


def test_tokens_of_steps_make_up_the_goodput() -> None:
    metrics = measure(simulate_steady(disaggregated()))
    first, last = metrics.counted_steps
    tokens, seconds = (
        sum(values[first - 1 : last]) for values in (metrics.step_tokens, metrics.step_times)
    )
    assert tokens / seconds == pytest.approx(metrics.goodput)


def test_steps_of_other_tokens_are_compared_by_the_token() -> None:
    pair = simulate_pair(
        disaggregated({"policies.system": "fully-async", "policies.consumption": "greedy"}),
        disaggregated(),
    )
    first, last = pair.steps.first, pair.steps.last
    against = compare_traces(pair.traces, (first, last), "")
    a, b = (measure(trace, (first, last)) for trace in pair.traces)
    assert a.step_tokens[first - 1 : last] != b.step_tokens[first - 1 : last]
    time, tokens = (
        relative(getattr(a, name)[first - 1 : last]) - relative(getattr(b, name)[first - 1 : last])
        for name in ("step_times", "step_tokens")
    )
    for ratio, spread in ((against.step_time_ratio, time), (against.cost_ratio, time - tokens)):
        assert ratio.interval is not None
        assert np.log(ratio.interval[1] / ratio.value) == pytest.approx(half_width(spread))


# What decides -------------------------------------------------------------------------------------


def about(value: float, share: float = 0.02) -> Known:
    """Return a ratio that is known within a share."""
    return Known(value=value, interval=(value * (1 - share), value * (1 + share)))


@pytest.mark.parametrize(
    ("cost", "time", "error", "outcome"),
    [
        (1.0, 1.0, 0.1, "no difference"),
        (0.99, 0.5, 0.0, "may be chance"),
        (0.95, 0.5, 0.07, "within the error of costs"),
        (0.95, 0.5, None, "worth it"),
        (0.88, 0.7, 0.07, "worth it"),
        (0.88, 1.01, 0.07, "worth it"),
        (0.88, 1.05, 0.07, "worth it"),
        (0.88, 1.2, 0.07, "cheaper but slower"),
        (1.12, 0.7, 0.07, "faster but dearer"),
        (1.12, 0.95, 0.07, "not worth it"),
        (1.12, 1.2, 0.07, "not worth it"),
    ],
)
def test_the_cost_of_a_token_decides_and_then_the_time_of_a_step(
    cost: float, time: float, error: float | None, outcome: Outcome
) -> None:
    assert decide(about(cost), about(time), error) == outcome


def told(found: Against, cost: float, time: float, error: float | None = 0.0) -> str:
    """Return what is said of two runs with these ratios."""
    ratios = about(cost), about(time)
    dollars, seconds = 100 * (cost - 1), 360 * (time - 1)
    return verdict(
        replace(
            found,
            b=replace(found.b, cost_per_step=100.0),
            cost_ratio=ratios[0],
            step_time_ratio=ratios[1],
            cost_per_step=Known(value=dollars, interval=(dollars - 2, dollars + 2)),
            step_time=Known(value=seconds, interval=(seconds - 1, seconds + 1)),
            unshared_error=error,
            outcome=decide(*ratios, error),
        )
    )


def test_the_verdict_says_what_is_known_and_what_is_not(found: Against) -> None:
    assert told(found, 0.88, 0.7) == (
        "A costs 12.0 % ± 1.8 % less a token and is 1.43 ± 0.03 times as fast: worth it."
    )
    assert told(found, 1.12, 1.2).endswith("and takes 1.20 ± 0.02 times as long: not worth it.")
    assert told(found, 1.1, 0.5).endswith("worth it where an hour saved is worth more than $200.")
    assert told(found, 0.9, 1.5).endswith("worth it where an hour lost is worth less than $200.")
    assert told(found, 0.99, 1.0) == (
        "A costs 1.0 % ± 2.0 % less a token, which may be chance, and takes as long: "
        "dollars cannot decide."
    )
    wide = replace(found, step_time_ratio=Known(value=1.66, interval=(0.9, 3.1)))
    assert "and takes 1.66 ± 1.10 times as long, which may be chance: " in verdict(wide)
    few = replace(found, step_time_ratio=Known(value=0.5, interval=None))
    assert "and is 2.00 times as fast over few steps: " in verdict(few)
    assert told(found, 1.0, 0.5, 0.05).endswith("and an hour saved costs $140 at most.")
    assert "within the 7% that costs of what they do not do alike may be off" in told(
        found, 0.95, 0.5, 0.07
    )
    assert told(found, 0.88, 0.95, 0.07).endswith(
        "times as fast, within the 7% that costs may be off: worth it."
    )
    assert told(found, 0.88, 0.7, None).endswith("were never checked.")


def test_stages_that_both_do_alike_leave_no_error_in_the_difference() -> None:
    base = disaggregated()
    stages = measure(simulate_steady(base)).uncertainty
    assert stages is not None
    other_dispatch = compare_runs(disaggregated({"policies.order": "longest-first"}), base)
    assert other_dispatch.unshared_error == 0
    trained = compare_runs(disaggregated({"trainer.micro_batch": 4}), base)
    assert trained.unshared_error == stages.stages["train"] > 0
    generated = compare_runs(disaggregated({"rollout.replicas": 4}), base)
    assert generated.unshared_error == stages.stages["decode"] > 0
    other_engine = disaggregated({"costs.engine": "sglang-0.5"})
    theirs = measure(simulate_steady(other_engine)).uncertainty
    assert theirs is not None
    errors = [each.stages[name] for each in (stages, theirs) for name in ("train", "decode")]
    assert compare_runs(other_engine, base).unshared_error == max(errors)
    unchecked = compare_runs(disaggregated({"costs.training_factor": 0.9}), base)
    assert unchecked.unshared_error is None


# Input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", 1),
        ("model.name", "qwen2.5-14b"),
        ("rollout.max_tokens", 128),
        ("algorithm.prompts_per_step", 16),
        ("algorithm.group_size", 4),
        ("algorithm.name", "rloo"),
        ("algorithm.steps", 7),
        ("workload.lengths.scale", 0.02),
        ("workload.informative_share", 0.5),
        ("framework.epochs", 2),
        ("sync.mode", "lora"),
    ],
)
def test_runs_that_do_other_work_are_refused_with_the_key_named(key: str, value: object) -> None:
    with pytest.raises(RunError) as refused:
        compare_runs(disaggregated({key: value}), disaggregated())
    assert refused.value.key == key and str(refused.value).startswith(f"{key} is ")
    assert "\n" not in str(refused.value)


def test_trainers_that_follow_are_work_too() -> None:
    follower = {"name": "second", "pool": "near", "tensor_parallel": 4}
    with pytest.raises(RunError, match=r"trainer\.1\.algorithm\.name is 'grpo' in A and None in B"):
        compare_runs(disaggregated({"followers": [follower]}), disaggregated())


def test_what_a_ranker_knows_of_lengths_is_no_other_work() -> None:
    ranked = disaggregated({"workload.lengths.ranker": "oracle"})
    against = compare_runs(ranked, disaggregated())
    tokens = [run.goodput * run.step_time for run in (against.a, against.b)]
    assert tokens[0] == pytest.approx(tokens[1])


def test_a_run_that_costs_nothing_is_refused() -> None:
    free = {"cluster.pools.near.price": 0.0, "cluster.pools.far.price": 0.0}
    with pytest.raises(RunError, match=r"cluster\.pools\.far\.price is 0"):
        compare_runs(disaggregated(free), colocated())
