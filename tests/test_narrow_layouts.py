"""Narrow formats on replicas and trainers of many ranks: stages, attention ranks, drafts and context ranks keep what `dtype` says."""

from __future__ import annotations

from typing import Any

import pytest

from streamrl.hardware.memory import (
    draft_bytes,
    fullest_stage,
    kv_capacity,
    replica_memory,
    stage_bytes,
)
from streamrl.hardware.profiles import load_model
from streamrl.hardware.resolved import resolve
from streamrl.hardware.side_memory import replica_side
from streamrl.runfile.cluster_config import ModelConfig
from streamrl.sim.costs.training.ranks import Ranks
from streamrl.sim.costs.training.training import TrainingCosts
from tests.test_context_parallel import LONG, train_run
from tests.test_replica_layouts import plan

STAGES = {"tensor_parallel": 4, "pipeline_parallel": 2}
WIDE = {"tensor_parallel": 1, "expert_parallel": 32, "data_parallel": 32}


def test_stages_in_fp8_hold_half_the_bytes_of_linear_layers_and_their_tables_whole() -> None:
    wide, narrow = (stage_bytes(resolve(run).replica) for run in _formats(**STAGES))
    table = 2 * load_model(ModelConfig(name="llama-3.1-70b")).num_embedding_parameters / 4
    for one, other in zip(wide, narrow, strict=True):
        assert other.weights - table == pytest.approx((one.weights - table) / 2, rel=1e-3)
        assert other.token == one.token
    run = plan(dtype="fp8", **STAGES)
    assert (
        replica_side(resolve(run).replica).parts["weights"]
        == fullest_stage(resolve(run).replica).weights
    )
    assert (
        replica_memory(resolve(run).replica)["weights"]
        == fullest_stage(resolve(run).replica).weights
    )


def test_attention_ranks_with_a_cache_in_fp8_hold_twice_the_tokens() -> None:
    model = {"name": "qwen3-235b-a22b", **WIDE}
    wide, narrow = (
        kv_capacity(resolve(plan(**model, **keys)).replica) for keys in ({}, {"kv_dtype": "fp8"})
    )
    assert narrow == pytest.approx(2 * wide, rel=1e-4)
    assert kv_capacity(resolve(plan(dtype="fp8", kv_dtype="fp8", **model)).replica) > narrow


def test_a_draft_is_kept_in_the_formats_of_its_replica() -> None:
    drafting = {"tensor_parallel": 8, "speculative": {"tokens": 2, "acceptance": 0.7}}
    (wide, cached), (narrow, less) = (
        draft_bytes(resolve(run).replica) for run in _formats(kv_dtype="fp8", **drafting)
    )
    assert narrow == pytest.approx(wide / 2, rel=1e-3)
    assert cached == less == draft_bytes(resolve(plan(**drafting)).replica)[1] / 2


def test_context_ranks_share_a_pass_in_fp8_whose_attention_and_exchange_stay_in_16_bits() -> None:
    alone, shared = (
        train_run(dtype="fp8", context_parallel=degree, data_parallel=2) for degree in (1, 4)
    )
    assert (
        Ranks.of(resolve(shared).trainer).dtype,
        Ranks.of(resolve(shared).trainer).computes_in,
    ) == ("bfloat16", "fp8")
    one, four = (TrainingCosts.load(resolve(run)).stages for run in (alone, shared))
    wide = TrainingCosts.load(resolve(train_run(context_parallel=4, data_parallel=2))).stages
    assert four.forward[0].per_token == pytest.approx(one.forward[0].per_token / 4)
    assert four.forward[0].per_token < wide.forward[0].per_token
    assert four.forward[0].per_pair == wide.forward[0].per_pair
    assert four.late_forward == wide.late_forward


def test_factors_of_scoring_and_training_scale_the_waits_of_context_ranks_too() -> None:
    found = TrainingCosts.load(
        resolve(train_run(context_parallel=4, data_parallel=2, context_exchange="all-gather"))
    ).stages
    scored, trained = found.scored_times([LONG]), found.forward_times([LONG])
    fast = found.at(2.0, 4.0)
    assert fast.scored_times([LONG]) == pytest.approx(scored / 2)
    assert fast.forward_times([LONG]) == pytest.approx(trained / 4)


def _formats(**rollout: Any) -> tuple[Any, Any]:
    return plan(**rollout), plan(dtype="fp8", **rollout)
