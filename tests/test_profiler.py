"""`streamrl profile`: what it writes, and what it says of wrong input; no test here is timed."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from streamrl.cli.main import app
from streamrl.engine.world import RunInterruptedError
from streamrl.executor.profiling import profiler
from streamrl.executor.profiling.measurements import (
    Limits,
    Readings,
    Setup,
    full_plan,
    longest_prefix,
    quick_plan,
)
from streamrl.hardware.measured_profile import read_measured
from streamrl.record.metrics import measure
from streamrl.sim.world import simulate
from tests.command_line import streamrl
from tests.measured_profile import measured_run
from tests.tiny_model import WIDE_HEADS, save_tiny_reward_model, tiny_model

LIMITS = ["--max-running", "4", "--max-context", "64", "--max-tokens-per-pass", "128"]


def _limits() -> Limits:
    return Limits(max_running=4, max_context=64, max_tokens_per_pass=128)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model(64, eos_token_id=1).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def readings() -> list[Readings]:
    """Return a list to which the fixture `profile` adds what it measured."""
    return []


@pytest.fixture(scope="module")
def profile(
    model: Path, tmp_path_factory: pytest.TempPathFactory, readings: list[Readings]
) -> Path:
    path = tmp_path_factory.mktemp("profiles") / "tiny.toml"
    judge = save_tiny_reward_model(path.with_name("judge"), ["<pad>", "<eos>", *"0123456789"])
    more = ["--quick", "--reward-model", str(judge), *LIMITS, "-o", str(path)]

    def measured(setup: Setup, watch: Callable[[str], None]) -> Readings:
        readings.append(profiler.measure(setup, watch))
        return readings[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("streamrl.executor.profiling.profile_file.measure", measured)
        done = CliRunner().invoke(app, ["profile", str(model), *more])
    assert done.exit_code == 0, done.output
    assert str(path) in done.output
    assert f"{read_measured(path).pace:.3f} times as long as at their medians" in done.output
    return path


def test_a_profile_has_every_table_and_says_what_it_was_taken_on(profile: Path) -> None:
    found = read_measured(profile)
    assert {row.running for row in found.decode} == {1, 4}
    assert max(row.context for row in found.decode) <= 64
    assert {(row.rollouts, row.tokens) for row in found.train} == set(quick_plan(_limits()).passes)
    assert {(row.rollouts, row.tokens) for row in found.reward} == {(1, 15), (4, 15), (1, 63)}
    assert found.reward_model is not None and found.reward_model.name == "judge"
    assert found.push.bytes == found.load.bytes > 4 * found.model.num_parameters
    assert found.lend is not None and found.take_back is not None
    assert (found.gpu, found.dtype, found.backend) == ("cpu", "float32", "transformers")
    assert not found.shares_prefixes and found.pads_context
    assert found.pace != 1  # the readings of a point differ, and their mean is not their median
    assert found.host.threads == 1 and found.host.cores >= 1 and found.host.cpu
    assert all(row.context <= row.longest <= 64 for row in found.mixed)
    assert [row.running for row in found.mixed] == [3]
    (shared,) = found.sharing
    assert (shared.generating, shared.training) == (1, 1) and shared.train is not None
    assert {"python", "torch", "transformers"} <= set(found.versions)


@pytest.mark.usefixtures("profile")
def test_a_reading_of_the_trainer_is_of_one_call_alone(readings: list[Readings]) -> None:
    (found,), plan = readings, quick_plan(_limits())
    for table in (found.train, found.score):
        assert {point: len(seconds) for point, seconds in table.items()} == dict.fromkeys(
            plan.passes, plan.repeats
        )
    assert len(found.optimizer) == len(found.push) == plan.repeats


def test_what_profile_writes_simulate_reads(model: Path, profile: Path) -> None:
    run = measured_run(model, profile, rollout__max_running=4)
    metrics = measure(simulate(run))
    assert metrics.tiers == pytest.approx({"measured": 1.0})
    assert metrics.step_time > 0


def test_adapters_are_measured_and_simulated(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "adapters.toml"
    done = CliRunner().invoke(
        app, ["profile", str(model), "--lora-rank", "2", "--quick", *LIMITS, "-o", str(path)]
    )
    assert done.exit_code == 0, done.output
    found = read_measured(path)
    assert found.lora_rank == 2
    (row,) = found.relay
    assert row.mode == "lora" and row.bytes == found.push.bytes < found.load.bytes / 2
    assert found.load.bytes > 4 * found.model.num_parameters
    sync = {"sync__mode": "lora", "sync__lora_rank": 2}
    metrics = measure(simulate(measured_run(model, path, rollout__max_running=4, **sync)))
    assert metrics.tiers == pytest.approx({"measured": 1.0})


@pytest.mark.vllm
def test_what_vllm_takes_is_measured_and_simulated_with_adapters_beside_its_weights(
    tmp_path: Path,
) -> None:
    model, path = tmp_path / "model", tmp_path / "vllm.toml"
    tiny_model(64, eos_token_id=1, **WIDE_HEADS).save_pretrained(model)
    given = [str(model), "--backend", "vllm", "--lora-rank", "2", "--quick", *LIMITS]
    done = CliRunner().invoke(app, ["profile", *given, "-o", str(path)])
    assert done.exit_code == 0, done.output
    found = read_measured(path)
    assert found.backend == "vllm" and not found.pads_context
    assert found.prefill_tokens >= longest_prefix("vllm", "cpu") - 4
    assert {row.running for row in found.decode} == {1, 4}
    assert found.serves_adapters
    assert found.load.bytes == found.push.bytes < found.model.num_parameters
    own = {"sync__mode": "lora", "sync__lora_rank": 2, "rollout__backend": "vllm"}
    run = measured_run(model, path, rollout__max_running=4, **own)
    assert measure(simulate(run)).tiers == pytest.approx({"measured": 1.0})


def test_a_profile_that_is_ended_is_not_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(*_: object) -> None:
        raise RunInterruptedError("terminated: go on with: streamrl execute", signal.SIGTERM)

    monkeypatch.setattr("streamrl.executor.profiling.profile_file.measure", ended)
    path = tmp_path / "profile.toml"
    done = CliRunner().invoke(app, ["profile", str(model), *LIMITS, "-o", str(path)])
    assert done.exit_code == 128 + signal.SIGTERM
    assert (
        f"streamrl: SIGTERM: {path} is not written" in done.output and "--resume" not in done.output
    )
    assert not path.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], ["nowhere", "config.json"]),
        (["{model}", "--gpu", "h10"], ["h10", "h100"]),
        (["{model}", "--max-context", "8"], ["max_context", "8"]),
        (["{model}", "--max-tokens-per-pass", "100"], ["max_tokens_per_pass", "512", "100"]),
    ],
)
def test_wrong_input_is_named_and_nothing_is_written(
    model: Path, tmp_path: Path, arguments: list[str], words: list[str]
) -> None:
    given = [text.format(model=model) for text in arguments]
    done = CliRunner().invoke(app, ["profile", *given, "-o", str(tmp_path / "p.toml")])
    assert isinstance(done.exception, ValueError)
    for word in words:
        assert word in str(done.exception)
    assert not (tmp_path / "p.toml").exists()


def test_an_engine_that_is_not_simulated_is_not_measured(model: Path, tmp_path: Path) -> None:
    given = ["measure", str(model), "--backend", "static", "-o", str(tmp_path / "p.toml")]
    done = streamrl("profile", *given)
    assert done.returncode == 2 and "'static'" in done.stderr and "vllm" in done.stderr
    assert not (tmp_path / "p.toml").exists()


def test_a_full_plan_reaches_the_limits_and_stays_within_them() -> None:
    limits = Limits(max_running=24, max_context=300, max_tokens_per_pass=1000)
    plan = full_plan(limits)
    assert max(running for running, _ in plan.decode) == 24
    assert {running for running, _ in plan.decode} >= {1, 2, 4, 8, 16}
    assert all(context < 300 for _, context in plan.decode)
    assert all(rollouts * tokens <= 1000 for rollouts, tokens in plan.passes)
    assert all(0 < long < running for running, long in plan.mixed)
    assert all(running + joining <= 24 for running, joining, _ in plan.join)


def test_few_rollouts_are_measured_more_often() -> None:
    repeats = [
        full_plan(Limits(max_running=running, max_context=300, max_tokens_per_pass=1000)).repeats
        for running in (4, 8, 9, 64)
    ]
    assert repeats == [15, 15, 5, 5]
