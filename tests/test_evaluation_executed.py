"""Evaluations of executed runs, with scripted roles: their files, lost replicas, a resume and their scores."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from itertools import chain
from math import comb
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from streamrl.engine.messages import (
    DrawEvaluation,
    EndEvaluation,
    Evaluate,
    Evaluated,
    EvaluationDrawn,
    Event,
    Failed,
    Stepped,
)
from streamrl.engine.state import State
from streamrl.engine.trace import read_trace, replay
from streamrl.executor.evaluation import HeldOut
from streamrl.executor.sampling import GREEDY, Sampling, Truncation, sampling_of
from streamrl.executor.verifier.verifier import bounds_of
from streamrl.record.evaluation import (
    EVALUATED,
    EvaluationResult,
    difference,
    half_width,
    mean_of,
    pass_at,
    passes_hint,
    quantile,
    read_evaluations,
    scores_by_source,
    scores_of,
    values_of,
    wilson,
)
from streamrl.record.recorded_inputs import recorded_inputs
from streamrl.runfile.errors import RunError
from streamrl.runfile.evaluation_config import EvaluationConfig
from streamrl.runfile.roles_config import RewardConfig, VerifierConfig
from streamrl.workload.prompt_order import held_out_lines
from tests.command_line import streamrl
from tests.scripted import LengthsCost, make_world
from tests.test_execute import execute, real_run
from tests.traces import check_every_command_ends_once, check_every_rollout_is_accounted_for

HELD_OUT = {"share": 0.4, "every": 2, "samples": 3}


def evaluated_versions(directory: Path) -> list[int]:
    """Return the versions that a run has evaluated."""
    return [result.step for result in read_evaluations(directory)]


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("system", ["stream-sync", "fully-async", "colocated"])
def test_an_executed_run_evaluates_each_due_version_and_replays(
    tmp_path: Path, system: str, beside: bool
) -> None:
    run = real_run(tmp_path, policies__system=system, evaluation={**HELD_OUT, "beside": beside})
    trace = execute(run)
    recorded = recorded_inputs(trace, tmp_path / "run" / "trace.jsonl").manifest.run.evaluation
    assert recorded is not None and recorded.num_prompts == 3
    assert evaluated_versions(tmp_path / "run") == [0, 2, 4]
    rollouts = [json.loads(line) for line in (tmp_path / "run" / EVALUATED).open()]
    assert len(rollouts) == 3 * 3 * 3  # versions, prompts, samples
    assert {each["place"] for each in rollouts}.isdisjoint(_trained(tmp_path / "run"))
    check_every_command_ends_once(trace)
    check_every_rollout_is_accounted_for(trace)
    assert replay(trace, checks_invariants=True) is None


def _trained(directory: Path) -> set[str]:
    return {json.loads(line)["place"] for line in (directory / "rollouts.jsonl").open()}


def test_a_result_has_the_rewards_of_its_rollouts(tmp_path: Path) -> None:
    trace = execute(real_run(tmp_path, evaluation=HELD_OUT))
    (first, *_) = read_evaluations(tmp_path / "run")
    rewards = {
        event.rollout: event.reward
        for _, event, _ in trace.entries
        if isinstance(event, Evaluated) and event.version == 0
    }
    assert [each for of in first.rewards.values() for each in of] == [
        rewards[number] for number in sorted(rewards)
    ]
    assert first.num_failed == 0 and first.num_prompts == 3
    assert list(first.scores) == ["avg@3", "pass@1", "pass@3"]


def test_the_length_counts_in_training_and_not_in_evaluations(tmp_path: Path) -> None:
    run = real_run(tmp_path, evaluation=HELD_OUT)

    async def go() -> None:
        world = make_world(run, {}, verifier_class=LengthsCost)
        with contextlib.closing(world._directory):
            await world.run()

    asyncio.run(asyncio.wait_for(go(), timeout=60))
    results = read_evaluations(tmp_path / "run")
    found = {each for result in results for of in result.rewards.values() for each in of}
    assert found == {0.0, 1.0}
    trained = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").open()]
    assert {each["reward"] for each in trained} == {-9.0, -8.0}


def test_an_evaluation_of_several_data_sources_has_the_scores_of_each(tmp_path: Path) -> None:
    run = real_run(
        tmp_path,
        evaluation={**HELD_OUT, "prompts": str(tmp_path / "held-out.jsonl"), "share": None},
    )
    sources = ["math", "code", "math", None]
    rows = [{"prompt": f"h{n}", "answer": "odd"} for n in range(4)]
    lines = [
        json.dumps(row if source is None else {**row, "data_source": source})
        for row, source in zip(rows, sources, strict=True)
    ]
    (tmp_path / "held-out.jsonl").write_text("\n".join(lines))
    execute(run)
    for result in read_evaluations(tmp_path / "run"):
        assert list(result.sources) == ["math", "code"]
        assert result.sources["math"].num_prompts == 2
        of_math, of_code = ([result.rewards[n] for n in prompts] for prompts in ((0, 2), (1,)))
        found = {name: each.scores["avg@3"].value for name, each in result.sources.items()}
        assert found["math"] == pytest.approx(fmean(chain(*of_math)))
        assert found["code"] == pytest.approx(fmean(chain(*of_code)))
        assert result.figures["eval/math/pass@3"] == result.sources["math"].scores["pass@3"].value


def test_one_data_source_has_the_scores_of_all_prompts() -> None:
    config = EvaluationConfig(samples=2)
    rewards = {0: [1.0, 0.0], 1: [1.0, 1.0]}
    assert scores_by_source(rewards, ["math", "math"], config) == {}
    failed = scores_by_source(rewards, ["math", "math", "code"], config)["code"]
    assert failed.num_prompts == 1 and failed.scores == {}


def test_a_replica_killed_in_an_evaluation_loses_none_of_its_rollouts(tmp_path: Path) -> None:
    run = real_run(tmp_path, evaluation=HELD_OUT, policies__system="stream-sync")
    killed: list[int] = []

    async def go() -> None:
        def watch(event: Event, state: State, now: float) -> None:
            if isinstance(event, Evaluated) and event.version == 2 and not killed:
                killed.append(1)
                assert state.evaluations is not None and state.evaluations.sent
                replica = next(iter(state.evaluations.sent.values()))
                world._replicas[replica].kill("pulled the plug")

        world = make_world(run, {}, watch=watch)
        with contextlib.closing(world._directory):
            await world.run()

    asyncio.run(asyncio.wait_for(go(), timeout=60))
    assert killed
    results = read_evaluations(tmp_path / "run")
    assert [(each.step, each.num_failed) for each in results] == [(0, 0), (2, 0), (4, 0)]
    assert replay(read_trace(tmp_path / "run" / "trace.jsonl"), checks_invariants=True) is None


@pytest.mark.parametrize(
    ("is_alone", "what"), [(True, "evaluation: "), (False, "evaluation of step 0: ")]
)
def test_a_log_line_names_a_step_only_where_the_run_trains(
    is_alone: bool, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    own: Any = EvaluationConfig(share=0.5, samples=1)
    nothing: Any = lambda *_: None  # noqa: E731
    held_out = HeldOut(own, 8, [], nothing, None, nothing, nothing, is_alone=is_alone)
    held_out.draw(DrawEvaluation(0), 0.0)
    running = held_out._running
    assert running is not None
    running.rewards.append((0, 1.0))
    running.tokens.append(3)
    with caplog.at_level(logging.INFO):
        held_out.end(EndEvaluation(0), 1.0)
    assert caplog.messages[0].startswith(what)


def test_a_resumed_run_does_not_evaluate_its_checkpoint_again(tmp_path: Path) -> None:
    changes = {"execute__checkpoint_every": 2, "policies__system": "stream-sync"}
    execute(real_run(tmp_path, evaluation=HELD_OUT, **changes))
    execute(real_run(tmp_path, evaluation=HELD_OUT, algorithm__steps=6, **changes), resume=True)
    assert evaluated_versions(tmp_path / "run") == [0, 2, 4, 6]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"evaluation": {**HELD_OUT, "samples": 2}}, "evaluation.samples"),
        ({"evaluation": {**HELD_OUT, "scorer": "math-verify"}}, "evaluation.scorer"),
        ({"evaluation": HELD_OUT, "rollout__temperature": 0.5}, "evaluation.temperature"),
        ({}, "evaluation.share"),
    ],
)
def test_a_resume_scores_as_the_run_did(tmp_path: Path, changes: dict[str, Any], key: str) -> None:
    kept: dict[str, Any] = {"execute__checkpoint_every": 2, "policies__system": "stream-sync"}
    execute(real_run(tmp_path, evaluation=HELD_OUT, **kept))
    longer = {**kept, **changes, "algorithm__steps": 6}
    with pytest.raises(RunError, match=f"{key} is .* --resume needs the same"):
        execute(real_run(tmp_path, **longer), resume=True)
    same = {**longer, "evaluation": {**HELD_OUT, "temperature": 1.0}}
    if key == "evaluation.temperature":  # the same as before, by its own key
        execute(real_run(tmp_path, **same), resume=True)
        assert evaluated_versions(tmp_path / "run") == [0, 2, 4, 6]


def test_an_interrupted_evaluation_has_no_result(tmp_path: Path) -> None:
    run = real_run(tmp_path, evaluation=HELD_OUT, policies__system="stream-sync")

    async def go() -> None:
        def watch(event: Event, state: State, now: float) -> None:
            if isinstance(event, EvaluationDrawn) and event.version == 2:
                world.interrupt("Ctrl-C")

        world = make_world(run, {}, watch=watch)
        with contextlib.closing(world._directory):
            await world.run()

    with pytest.raises(RuntimeError, match="Ctrl-C"):
        asyncio.run(asyncio.wait_for(go(), timeout=60))
    assert evaluated_versions(tmp_path / "run") == [0]
    trace = read_trace(tmp_path / "run" / "trace.jsonl")
    ends = [c for entry in trace.entries for c in entry.commands if isinstance(c, EndEvaluation)]
    assert [(each.version, bool(each.reason)) for each in ends] == [(0, False), (2, True)]
    assert sum(isinstance(entry.event, Stepped) for entry in trace.entries) == 2
    failed = [entry.event for entry in trace.entries if isinstance(entry.event, Failed)]
    assert any(isinstance(each.command, Evaluate) for each in failed)


# Scores -------------------------------------------------------------------------------------------


def test_pass_at_k_is_the_share_of_subsets_with_a_solved_rollout() -> None:
    from itertools import combinations

    rollouts = [1, 0, 0, 1, 0]
    for k in range(1, 6):
        subsets = list(combinations(rollouts, k))
        assert len(subsets) == comb(5, k)
        assert pass_at(k, 2, 5) == pytest.approx(sum(any(s) for s in subsets) / len(subsets))


def test_intervals_are_those_of_the_tables() -> None:
    # Student's t: two-sided 95 % quantiles of 1, 2, 5 and 30 degrees of freedom
    for freedom, expected in ((1, 12.706), (2, 4.303), (5, 2.571), (30, 2.042)):
        assert quantile(0.95, freedom) == pytest.approx(expected, rel=2e-3)
    # Wilson 1927: 10 of 20
    assert wilson(0.5, 20, 0.95) == pytest.approx((0.2993, 0.7007), abs=1e-4)
    low, high = wilson(1.0, 20, 0.95)
    assert low == pytest.approx(0.8389, abs=1e-4) and high == 1.0
    solved = mean_of([1.0] * 20, 0.95)
    assert (solved.low, solved.high) == (low, high)
    score = mean_of([0.0, 0.5, 1.0, 0.5], 0.95)
    assert score.value == 0.5
    assert score.high - 0.5 == pytest.approx(3.182 * 0.40825 / 2, rel=0.01)


def test_the_difference_of_two_evaluations_is_paired_by_prompt() -> None:
    config = EvaluationConfig(prompts="x", samples=2)

    def result(rewards: dict[int, list[float]]) -> EvaluationResult:
        facts: dict[str, Any] = {"time": 0.0, "seconds": 1.0, "num_prompts": 4, "samples": 2}
        facts |= {"confidence": 0.95, "mean_tokens": 1.0, "truncated_share": 0.0}
        return EvaluationResult(step=0, scores=scores_of(rewards, config), rewards=rewards, **facts)

    before = result({0: [0, 0], 1: [1, 1], 2: [0, 1], 3: [0, 0]})
    after = result({0: [0, 1], 1: [1, 1], 2: [1, 1], 3: [0, 1]})
    found = difference(after, before, config)["avg@2"]
    assert found.num_prompts == 4 and found.score.value == pytest.approx(0.375)
    values = [list(values_of(each.rewards, config)["avg@2"].values()) for each in (before, after)]
    widths = [2 * half_width(each, config.confidence) for each in values]
    assert found.score.high - found.score.low < min(widths)
    assert not difference(after, after, config)["avg@2"].is_clear


@pytest.mark.parametrize("best", [1.0, 2.0])
def test_an_interval_of_a_share_ends_at_0_and_1(best: float) -> None:
    config = EvaluationConfig(samples=4)
    rewards = {0: [best] * 4, 1: [best] * 4, 2: [best, best, best, 0.0]}
    none: dict[int, list[float]] = {prompt: [0.0] * 4 for prompt in rewards}
    facts: dict[str, Any] = {"time": 0.0, "seconds": 1.0, "num_prompts": 3, "samples": 4}
    facts |= {"confidence": 0.95, "mean_tokens": 1.0, "truncated_share": 0.0, "scores": {}}
    one, other = (EvaluationResult(step=0, rewards=each, **facts) for each in (rewards, none))
    for found in (
        scores_of(rewards, config),
        {name: each.score for name, each in difference(one, other, config).items()},
    ):
        assert found["pass@1"].value == pytest.approx(11 / 12) and found["pass@1"].high == 1.0
        assert found["avg@4"].high == 1.0 if best == 1.0 else found["avg@4"].high > 2.0
    assert difference(other, one, config)["pass@1"].score.low == -1.0


def test_an_interval_of_rewards_ends_at_what_their_scorers_can_give() -> None:
    config = EvaluationConfig(samples=1)
    good, bad = {0: [0.9], 1: [1.0], 2: [0.2]}, {0: [-0.4], 1: [-0.5], 2: [0.9]}
    own = scores_of(good, config, (-0.5, 1.0))["avg@1"]
    assert scores_of(good, config)["avg@1"].high > 1.0 == own.high
    assert (
        scores_of(bad, config)["avg@1"].low
        < -0.5
        == scores_of(bad, config, (-0.5, 1.0))["avg@1"].low
    )
    facts: dict[str, Any] = {"time": 0.0, "seconds": 1.0, "num_prompts": 3, "samples": 1}
    facts |= {"confidence": 0.95, "mean_tokens": 1.0, "truncated_share": 0.0, "scores": {}}
    one, other = (
        EvaluationResult(step=0, rewards=each, bounds=(-0.5, 1.0), **facts) for each in (good, bad)
    )
    found = difference(one, other, config)["avg@1"].score
    assert (found.low, found.high) == (-1.5, 1.5)


@pytest.mark.parametrize(
    ("rewards", "bounds", "told"),
    [
        ([0.4, 0.5], None, "the highest reward was 0.5; lower it if"),
        ([0.4, 0.5], (0.0, 0.7), "the highest possible reward is 0.7; lower it"),
        ([1.2, 1.5], None, "the lowest reward was 1.2; raise it if"),
        ([0.4, 0.5], (0.0, 1.0), ""),
        ([0.4, 1.1], None, ""),
        ([0.0, 0.0], None, ""),
    ],
)
def test_a_bound_of_pass_at_k_that_rewards_cannot_tell_apart_has_a_hint(
    rewards: list[float], bounds: tuple[float, float] | None, told: str
) -> None:
    config = EvaluationConfig(samples=2)
    found = EvaluationResult(
        step=1,
        time=0.0,
        seconds=1.0,
        num_prompts=1,
        samples=2,
        confidence=0.95,
        scores={},
        mean_tokens=1.0,
        truncated_share=0.0,
        bounds=bounds,
        rewards={0: rewards},
    )
    hint = passes_hint(found, config)
    assert told in hint and bool(hint) == bool(told)


def test_the_bounds_of_a_reward_are_those_of_its_weighted_scorers() -> None:
    own = RewardConfig(scorer="exact")
    longer = RewardConfig(scorer="length-penalty", weight=0.5, beyond=8, until=16)
    of_some = RewardConfig(scorer="json:check", weight=2.0, bounds=(1.0, 3.0), families=("a",))
    unwanted = RewardConfig(scorer="json:check", weight=-1.0, bounds=(0.0, 2.0))
    for rewards, expected in (
        ((own,), (0.0, 1.0)),
        ((own, longer), (0.0, 1.0)),  # an evaluation leaves the length out
        ((own, of_some), (0.0, 7.0)),
        ((own, unwanted), (-2.0, 1.0)),
    ):
        assert bounds_of(VerifierConfig(reward=rewards)) == pytest.approx(expected)
    model = RewardConfig(scorer="reward-model")
    assert bounds_of(VerifierConfig(reward=(own, model))) is None


def test_evaluations_sample_as_training_does_where_nothing_else_is_said(tmp_path: Path) -> None:
    rollout = real_run(tmp_path, rollout__temperature=0.7, rollout__top_p=0.9).rollout
    same = Sampling(temperature=0.7, truncation=Truncation(top_p=0.9))
    assert sampling_of(EvaluationConfig(), rollout) == same
    assert sampling_of(EvaluationConfig(temperature=0.0), rollout) == GREEDY
    own = sampling_of(EvaluationConfig(top_k=5, top_p=1.0), rollout)
    assert own == Sampling(temperature=0.7, truncation=Truncation(top_k=5))


def test_a_share_of_each_data_set_is_held_out() -> None:
    lines = held_out_lines([10, 5], 0.2, seed=3)
    assert len(lines) == 3 and sum(line < 10 for line in lines) == 2
    assert lines == held_out_lines([10, 5], 0.2, seed=3) != held_out_lines([10, 5], 0.2, seed=4)
    assert held_out_lines([10], None, seed=3) == []


def test_a_model_is_not_compared_with_itself(tmp_path: Path) -> None:
    done = streamrl("evaluate", tmp_path, "--against", f"{tmp_path}/")
    assert done.returncode == 2 and "is the model itself" in done.stderr
