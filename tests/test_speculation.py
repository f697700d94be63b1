"""Speculative decoding: how many tokens a step makes, what it costs, and where it gains."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from streamrl.hardware.memory import (
    draft_of,
    draft_parameters,
    kv_capacity,
    replica_memory,
    trainer_memory,
)
from streamrl.hardware.profiles import load_model
from streamrl.hardware.resolved import resolve
from streamrl.runfile.cluster_config import ModelConfig
from streamrl.runfile.config import Run
from streamrl.runfile.errors import RunError
from streamrl.runfile.roles_config import SpeculativeConfig
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.curves import accepted_tokens, compose_decode, compose_speculative
from streamrl.sim.costs.inference import Shard
from streamrl.sim.costs.kernels import Kernels
from streamrl.sim.costs.training.profile import load_training_profile
from streamrl.sim.costs.training.ranks import Ranks
from streamrl.sim.costs.training.training import TrainingCosts
from streamrl.sim.costs.weight_sync import Payload
from streamrl.targets.execute_limits import check_back_ends
from tests.runs import small_run

CONSTANTS = load_training_profile().constants
DENSE = load_model(ModelConfig(name="qwen3-32b"))
SHARD = Shard(DENSE, Kernels("h200", "bfloat16"), 2)
SIZE = (256, 8192.0, 1e6)


def drafting(acceptance: float, tokens: int = 3, model: str | None = None) -> SpeculativeConfig:
    return SpeculativeConfig(tokens=tokens, acceptance=acceptance, model=model)


@pytest.mark.parametrize(
    ("tokens", "acceptance", "made"),
    [(1, 0.0, 1.0), (1, 0.85, 1.85), (3, 0.5, 1.875), (4, 1.0, 5.0)],
)
def test_a_step_makes_one_token_and_those_that_are_accepted(
    tokens: int, acceptance: float, made: float
) -> None:
    found = accepted_tokens(drafting(acceptance, tokens))
    assert found == pytest.approx(made)
    if acceptance < 1:
        assert found == pytest.approx((1 - acceptance ** (tokens + 1)) / (1 - acceptance))


def test_as_many_tokens_come_as_drawn_one_after_the_other() -> None:
    accepted = np.random.default_rng(0).random((20000, 3)) < 0.7
    drawn = 1 + np.cumprod(accepted, axis=1).sum(axis=1).mean()
    assert accepted_tokens(drafting(0.7)) == pytest.approx(drawn, rel=0.01)


def test_a_step_is_a_check_of_all_tokens_and_so_many_steps_of_the_draft() -> None:
    config = drafting(0.6, tokens=2)
    found = compose_speculative(SHARD, config, *SIZE)
    check = compose_decode(replace(SHARD, queries=3), *SIZE)
    layer = draft_of(DENSE, config)
    assert layer.num_layers == 1
    batch = np.array([16.0])
    slowdown = SHARD.engine.constants.slowdown
    module = replace(SHARD, model=layer)
    least = slowdown * float((module.products(batch) + module.head(batch)).seconds[0])
    for running in (1, 16, 256):
        assert found.base[running] * accepted_tokens(config) > check.base[running]
    drafts = found.base[16] * accepted_tokens(config) - check.base[16]
    assert 2 * least <= drafts < 2.5 * least
    assert found.per_context_token[16] * 1.96 > check.per_context_token[16]


def test_the_tail_gains_most_and_a_batch_bound_by_arithmetic_loses() -> None:
    plain = compose_decode(SHARD, *SIZE)
    fast = compose_speculative(SHARD, drafting(0.8), *SIZE)
    slow = compose_speculative(SHARD, drafting(0.0), *SIZE)
    gains = [plain.step_time(b, b * 2000) / fast.step_time(b, b * 2000) for b in (1, 32, 256)]
    assert gains[0] > 2 and gains[0] > gains[1] > gains[2]
    assert slow.step_time(1, 2000) > plain.step_time(1, 2000)


def run_with(**speculative: Any) -> Any:
    return small_run(
        {
            "model.name": "qwen2.5-7b",
            "rollout.max_tokens": 4096,
            **({"rollout.speculative": speculative} if speculative else {}),
        }
    )


def test_a_draft_takes_memory_for_its_weights_and_its_cache() -> None:
    plain, module, small = (
        run_with(),
        run_with(tokens=1, acceptance=0.7),
        run_with(tokens=1, acceptance=0.7, model="qwen2.5-0.5b"),
    )
    model = load_model(ModelConfig(name="qwen2.5-0.5b"))
    weights = [replica_memory(resolve(run).replica)["weights"] for run in (plain, module, small)]
    assert weights[2] - weights[0] == pytest.approx(2 * model.num_parameters)
    assert 0 < weights[1] - weights[0] < weights[0] / 20
    assert (
        kv_capacity(resolve(plain).replica)
        > kv_capacity(resolve(module).replica)
        > kv_capacity(resolve(small).replica)
    )
    per_token = 28 * 4 * 128 * 2 * 2, 24 * 2 * 64 * 2 * 2
    room = kv_capacity(resolve(plain).replica) * per_token[0] - 2 * model.num_parameters
    assert kv_capacity(resolve(small).replica) == pytest.approx(room / sum(per_token), rel=1e-3)
    assert Costs.load(small).decode.base[1] < Costs.load(plain).decode.base[1]


@pytest.mark.parametrize(
    ("speculative", "key"),
    [
        ({"tokens": 0, "acceptance": 0.5}, "rollout.speculative.tokens"),
        ({"tokens": 1, "acceptance": 1.5}, "rollout.speculative.acceptance"),
        ({"tokens": 1}, "rollout.speculative.acceptance"),
    ],
)
def test_what_no_draft_can_be_is_refused(speculative: dict[str, Any], key: str) -> None:
    with pytest.raises(RunError) as told:
        run_with(**speculative)
    assert key in str(told.value)


def test_a_model_without_a_layer_that_drafts_needs_a_smaller_one() -> None:
    with pytest.raises(RunError, match=r"model is missing: Qwen2\.5-7B has no layers for") as told:
        Costs.load(run_with(tokens=1, acceptance=0.7))
    assert "profiles/models/qwen2.5-7b.toml" in str(told.value) and "\n" not in str(told.value)
    shapes = [load_model(ModelConfig(name=name)) for name in ("deepseek-v3", "qwen3-next-80b-a3b")]
    assert [shape.num_draft_layers for shape in shapes] == [1, 1]


def mimo(changes: dict[str, Any] | None = None, **speculative: Any) -> Run:
    """Return a run of a model with a draft layer, on one pipeline stage."""
    drafts = {"rollout.speculative": {"tokens": 1, "acceptance": 0.7, **speculative}}
    return small_run({"model.name": "mimo-7b", **drafts, **(changes or {})})


def test_a_draft_that_loses_acceptance_makes_the_tokens_of_its_mean_seconds() -> None:
    """With one drafted token a step makes 1 + a, and the mean of 1 / (1 + a) is a logarithm."""
    stays, falls = (
        SpeculativeConfig(tokens=1, acceptance=0.8, acceptance_to=last) for last in (0.8, 0.2)
    )
    assert accepted_tokens(stays) == 1.8
    mean = np.log(1.8 / 1.2) / 0.6
    assert accepted_tokens(falls) == pytest.approx(1 / mean, rel=1e-3)


def test_a_trained_draft_layer_costs_a_layer_and_a_head_in_the_last_stage() -> None:
    two = {"trainer.pipeline_parallel": 2, "trainer.tensor_parallel": 2}
    frozen, trained = (Costs.load(mimo(two, trained=each)).training for each in (False, True))
    assert isinstance(frozen, TrainingCosts) and isinstance(trained, TrainingCosts)
    before, after = frozen.stages, trained.stages
    assert after.scored == before.scored and after.forward[0] == before.forward[0]
    layers = 18 * 2
    own = load_model(ModelConfig(name="mimo-7b")).num_layers
    assert layers == own
    layer = before.forward[0].per_token / 18
    head = before.forward[1].per_token - 18 * layer
    added = after.forward[1].per_token - before.forward[1].per_token
    assert added == pytest.approx(layer + head)
    assert after.backward[1].per_token > before.backward[1].per_token
    share = draft_parameters(load_model(ModelConfig(name="mimo-7b"))) / 7_622_619_136
    own_time = frozen.optimizer_time - CONSTANTS.step_time
    assert trained.optimizer_time - frozen.optimizer_time == pytest.approx(share * own_time)


def test_a_trained_draft_layer_takes_trainer_memory_and_is_sent() -> None:
    frozen, trained = (mimo(trained=each) for each in (False, True))
    model = load_model(ModelConfig(name="mimo-7b"))
    own = draft_parameters(model)
    assert own == pytest.approx(model.num_parameters / 36, rel=0.2)
    before, after = (trainer_memory(resolve(run).trainer) for run in (frozen, trained))
    degree = trained.trainer.tensor_parallel
    assert after.pop("draft layer") == pytest.approx((2 + 4 + 12) * own / degree, rel=0.01)
    assert after == before
    sent = [Payload.of(resolve(run).replica, run.sync).num_bytes for run in (frozen, trained)]
    assert sent[1] - sent[0] == 2 * own
    deltas = [
        Payload.of(resolve(run).replica, run.sync).num_bytes
        for run in (mimo({"sync.mode": "delta"}, trained=each) for each in (False, True))
    ]
    assert deltas[1] / deltas[0] == pytest.approx(1 + own / model.num_parameters, rel=1e-6)


def test_a_critic_has_no_draft_layer() -> None:
    ppo = {"algorithm.name": "ppo", "algorithm.kl_coefficient": 0.0}
    alone, both = (Ranks.of(resolve(mimo(more, trained=True)).trainer) for more in ({}, ppo))
    assert (alone.drafted, both.drafted) == (1, 0.5)


@pytest.mark.parametrize(
    ("changes", "speculative", "told"),
    [
        (
            {},
            {"model": "qwen2.5-0.5b"},
            r"rollout\.speculative\.trained trains the model's own draft",
        ),
        ({}, {"acceptance_to": 0.5}, r"rollout\.speculative\.acceptance_to must be absent"),
        (
            {"sync.mode": "lora"},
            {},
            r"rollout\.speculative\.trained needs sync\.mode full or delta",
        ),
    ],
)
def test_a_draft_that_no_trainer_could_keep_is_refused(
    changes: dict[str, Any], speculative: dict[str, Any], told: str
) -> None:
    with pytest.raises(RunError, match=told):
        mimo(changes, trained=True, **speculative)


def test_an_unknown_draft_is_told_and_execute_drafts_nothing() -> None:
    with pytest.raises(RunError, match=r"rollout\.speculative\.model: no profile 'qwen9'"):
        Costs.load(run_with(tokens=1, acceptance=0.5, model="qwen9"))
    with pytest.raises(ValueError, match=r"rollout\.speculative must be left out to be executed"):
        check_back_ends(run_with(tokens=1, acceptance=0.5))
