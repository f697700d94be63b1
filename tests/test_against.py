"""A run against another that does the same work: what is known of their difference, and what would make them even."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import asdict, replace
from rich.console import Console

from sim.steady_state import simulate_steady
from sim.studies.break_even import FREE_BANDWIDTH, LEAST_BANDWIDTH
from sim.studies.pair import compare_runs, simulate_pair
from streamrl.record.against import Against, BreakEvenBandwidth, Known, Outcome
from streamrl.record.attribution import attribute_sides
from streamrl.record.batch_means import half_width
from streamrl.record.leader_steps import read_steps
from streamrl.record.metrics import Metrics, measure
from streamrl.record.paired import relative
from streamrl.record.run_reader import read_run
from streamrl.record.set_against import decide, set_against
from streamrl.report.against_report import against_report, break_even_lines, verdict
from streamrl.runfile.config import Run
from streamrl.runfile.errors import RunError
from streamrl.runfile.simulate_config import SimulateConfig
from streamrl.runfile.units import Bandwidth
from streamrl.runfile.workload_config import LengthsConfig
from streamrl.runfile.writing import write_run
from tests.command_line import streamrl
from tests.runs import small_run

EXAMPLES = Path(__file__).parent.parent / "examples"
SOME: dict[str, Any] = {
    "algorithm.prompts_per_step": 8,
    "algorithm.steps": 50,
    "simulate.interval": 0.03,
    "rollout.max_running": 8,
}
COLOCATED = {"policies.system": "colocated", "rollout.pool": "near", "rollout.replicas": 4}
FAR = {"cluster.pools.far.price": 20.0}
"""A price at which generating there is dear, however good the link."""
TRAINING = ("training_steps", "training_time", "training_cost")


def some_run(changes: dict[str, Any] | None = None) -> Run:
    """Return a small run whose step time need not be known well."""
    return small_run({**SOME, **(changes or {})})


def disaggregated(changes: dict[str, Any] | None = None) -> Run:
    """Return a run on both pools."""
    return some_run({"policies.system": "stream-sync", **(changes or {})})


def colocated() -> Run:
    """Return a run that has the nearer pool alone."""
    return some_run(COLOCATED)


PAIR = (disaggregated(), colocated())


@pytest.fixture(scope="module")
def found() -> Against:
    """A disaggregated run against a colocated one."""
    return compare_runs(disaggregated(FAR), colocated())


def render(against: Against) -> str:
    """Return the report of two runs as text."""
    output = StringIO()
    Console(width=200, file=output).print(against_report(against, ("one", "other")))
    return output.getvalue()


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
    assert same.prices == [] and same.bandwidths[0].break_even == same.bandwidths[0].bandwidth


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
    for steps in (6, 30, 500):
        length = {"algorithm.steps": steps}
        against = compare_runs(disaggregated(length), some_run({**COLOCATED, **length}))
        fields = {name: getattr(against, name) for name in against.__struct_fields__}
        for name in "ab":
            fields[name] = {**asdict(fields[name]), "whole_run": None}
        answers.append({name: fields[name] for name in fields if name not in TRAINING})
        assert against.training_steps == steps
        answers[-1]["verdict"] = verdict(against)
    assert answers[0] == answers[1] == answers[2]


def test_what_lags_behind_is_charged_to_who_lags() -> None:
    ahead = {**FAR, "policies.system": "stream-async"}
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
    against = set_against(pair.traces, (pair.steps.first, pair.steps.last), pair.note)
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
    with pytest.raises(RuntimeError, match=r"A is not finished.*: it stopped after step 0 of 50"):
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
    against = set_against(pair.traces, (first, last), "")
    a, b = (measure(trace, (first, last)) for trace in pair.traces)
    assert a.step_tokens[first - 1 : last] != b.step_tokens[first - 1 : last]
    time, tokens = (
        relative(getattr(a, name)[first - 1 : last]) - relative(getattr(b, name)[first - 1 : last])
        for name in ("step_times", "step_tokens")
    )
    for ratio, spread in ((against.step_time_ratio, time), (against.cost_ratio, time - tokens)):
        assert ratio.interval is not None
        assert np.log(ratio.interval[1] / ratio.value) == pytest.approx(half_width(spread))


# Even ---------------------------------------------------------------------------------------------


def test_with_the_break_even_price_a_token_costs_the_same(found: Against) -> None:
    (price,) = found.prices
    assert (price.pool, price.num_gpus, price.price) == ("far", 2, 20.0)
    assert price.break_even is None and found.cost_ratio.value > 1
    dear = small_run({**SOME, **COLOCATED, "cluster.pools.near.price": 5.2725})
    cheap = disaggregated({"cluster.pools.near.price": 0.5})
    (price,) = compare_runs(cheap, dear).prices
    assert price.break_even is not None and price.break_even.interval is not None
    assert price.break_even.interval[0] < price.break_even.value < price.break_even.interval[1]
    changes = {"cluster.pools.near.price": 0.5, "cluster.pools.far.price": price.break_even.value}
    even = compare_runs(disaggregated(changes), dear)
    assert even.cost_ratio.value == pytest.approx(1, abs=1e-6)
    assert even.outcome == "may be chance"


def test_of_a_pool_that_both_rent_the_break_even_price_is_that_of_what_a_has_more() -> None:
    a, b = (disaggregated({"rollout.replicas": replicas}) for replicas in (4, 1))
    against = compare_runs(a, b)
    (price,) = against.prices
    assert price.break_even is not None and price.num_gpus == 3
    dollars = 1 * 1.85 + 3 * price.break_even.value + 4 * 5.2725
    tokens = against.a.cost_per_million_tokens / against.a.dollars_per_hour
    assert tokens * dollars == pytest.approx(against.b.cost_per_million_tokens, rel=1e-9)


def cheap_beside(bandwidth: str = "8 Gbps") -> Run:
    """Return a disaggregated run that is cheap, and waits for its link."""
    link = {"between": ["far", "near"], "bandwidth": bandwidth, "latency": "10 ms"}
    return disaggregated({"cluster.pools.near.price": 2.0, "cluster.links": [link]})


def _of_one_length(run: Run, directory: Path) -> Run:
    """Return a run whose rollouts are all of one length, so that few steps tell what a token costs."""
    path = directory / "one.csv"
    path.write_text("output_tokens\n100\n")
    lengths = LengthsConfig(kind="empirical", source=str(path))
    return replace(run, workload=replace(run.workload, lengths=lengths))


def with_bandwidth(run: Run, bandwidth: float) -> Run:
    """Return a run whose link has another bandwidth."""
    links = [replace(run.cluster.links[0], bandwidth=Bandwidth(bandwidth))]
    return replace(run, cluster=replace(run.cluster, links=links))


@pytest.mark.parametrize("bandwidth", ["0.2 Gbps", "400 Gbps"])
def test_with_the_break_even_bandwidth_a_token_costs_the_same(
    bandwidth: str, tmp_path: Path
) -> None:
    trials: list[int] = []
    one, other = (_of_one_length(run, tmp_path) for run in (cheap_beside(bandwidth), colocated()))

    def watch(what: str, done: int, most: int) -> None:
        trials.extend([done] * (what == "bandwidth"))

    against = compare_runs(one, other, watch)
    (found,) = against.bandwidths
    assert found.break_even is not None and 1 < len(trials) <= 12
    even = compare_runs(with_bandwidth(one, found.break_even), other)
    assert even.cost_ratio.value == pytest.approx(1, abs=0.2 * one.simulate.interval)
    assert abs(against.cost_ratio.value - 1) > 0.1


def test_a_link_that_does_not_help_even_free_is_tried_once(found: Against) -> None:
    (bandwidth,) = found.bandwidths
    assert bandwidth.break_even is None and not bandwidth.is_cheaper
    free = compare_runs(with_bandwidth(disaggregated(FAR), FREE_BANDWIDTH), colocated())
    assert free.cost_ratio.value > 1
    tried: list[str] = []
    compare_runs(disaggregated(FAR), colocated(), lambda what, done, most: tried.append(what))
    assert tried.count("bandwidth") == 1


def test_a_run_that_is_cheaper_over_any_link_says_so() -> None:
    cheap = {"cluster.pools.near.price": 1e-4, "cluster.pools.far.price": 1e-4}
    (bandwidth,) = compare_runs(disaggregated(cheap), colocated()).bandwidths
    assert bandwidth.break_even is None and bandwidth.is_cheaper
    assert bandwidth.least == LEAST_BANDWIDTH


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
        "A costs 1.0 % ± 2.0 % less a token, which may be chance, and takes as long, as far as can be told: "
        "dollars cannot decide."
    )
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


def test_the_report_has_both_runs_and_what_makes_them_even(found: Against) -> None:
    text = render(found)
    assert "A  one" in text and "B  other" in text and verdict(found) in text
    assert "even with the 2 far that A has more at $0 a token costs more with A" in text
    assert "A costs more even with a free link far - near (it has 80 Gbps)" in text
    link = {"between": ("far", "near"), "bandwidth": 1e9, "least": LEAST_BANDWIDTH}
    for more, said in (
        ({"break_even": 5e8, "is_cheaper": False}, "about 4 Gbps on the link far - near"),
        (
            {"break_even": None, "is_cheaper": True},
            "A costs less at any of the link far - near down",
        ),
    ):
        bandwidth = BreakEvenBandwidth(**link, **more)  # type: ignore[arg-type]  # as keywords
        lines = list(break_even_lines(replace(found, bandwidths=[bandwidth])))
        assert said in lines[-1]
    assert list(break_even_lines(replace(found, prices=[], bandwidths=[]))) == [
        "A rents no GPUs beyond those of B, so no price of them makes up for anything."
    ]


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


# The command --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Run files of a disaggregated and a colocated run."""
    base = tmp_path_factory.mktemp("runs")
    for name, run in (("a.toml", disaggregated(FAR)), ("b.toml", colocated())):
        write_run(run, base / name)
    return base / "a.toml", base / "b.toml"


def test_the_command_prints_the_table_and_the_verdict(
    files: tuple[Path, Path], found: Against
) -> None:
    a, b = files
    done = streamrl("simulate", a, "--against", b)
    assert done.returncode == 0 and done.stderr == ""
    text = " ".join(done.stdout.split())
    assert verdict(found) in text and "A a.toml: 2" in text and "B b.toml: 4" in text


def test_the_command_gives_the_same_as_json(files: tuple[Path, Path], found: Against) -> None:
    a, b = files
    done = streamrl("simulate", a, "--against", b, "--json")
    data = json.loads(done.stdout)
    assert data["verdict"] == verdict(found) and data["outcome"] == found.outcome
    assert data["cost_ratio"]["value"] == found.cost_ratio.value
    assert data["counted_steps"] == list(found.counted_steps)


def test_settings_are_of_both_or_of_the_one_they_are_written_for(files: tuple[Path, Path]) -> None:
    a, _ = files
    both = streamrl("simulate", a, "--against", a, "--json", "--set", "rollout.replicas=1")
    assert json.loads(both.stdout)["b"]["generation"]["num_gpus"] == 1
    settings = ("--set", "A:rollout.replicas=1", "--set", "B:rollout.replicas=3")
    one = json.loads(streamrl("simulate", a, "--against", a, "--json", *settings).stdout)
    assert [one[letter]["generation"]["num_gpus"] for letter in "ab"] == [1, 3]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--set", "B:algorithm.group_size=4"), "algorithm.group_size is 2 in A and 4 in B"),
        (("--set", "A:rollout.replicas=99"), "pool 'far' has 8 GPUs"),
        (("--sweep", "rollout.replicas=1,2"), "--sweep does not go with --against"),
        (("-o", "somewhere"), "--output does not go with --against"),
        (("--seeds", "2"), "--seeds does not go with --against"),
    ],
)
def test_bad_input_is_one_line(
    files: tuple[Path, Path], arguments: tuple[str, ...], said: str
) -> None:
    a, b = files
    done = streamrl("simulate", a, "--against", b, *arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and said in done.stderr


def test_a_missing_file_and_a_study_are_refused(files: tuple[Path, Path]) -> None:
    a, _ = files
    missing = streamrl("simulate", a, "--against", "nowhere.toml")
    assert missing.returncode == 2 and "nowhere.toml: no such run file" in missing.stderr
    study = EXAMPLES / "studies" / "bandwidth.toml"
    done = streamrl("simulate", a, "--against", study)
    assert done.returncode == 2 and "bandwidth.toml is a study" in done.stderr


def test_the_example_asks_what_readme_answers() -> None:
    quick = ("--set", "simulate.interval=0.1", "--set", "simulate.max_steps=22")
    few = ("--set", "algorithm.prompts_per_step=64")
    done = streamrl(
        "simulate", EXAMPLES / "against.toml", "--against", EXAMPLES / "against-colocated.toml",
        *quick, *few, "--json",
    )  # fmt: skip
    data = json.loads(done.stdout)
    assert data["a"]["generation"]["num_gpus"] == 32 and data["b"]["shares_gpus"]
    assert data["prices"][0]["pool"] == "h20" and len(data["bandwidths"]) == 1
