"""Context ranks: what they share of a pass, what they send each other and when it shows, and what the planner makes of them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from streamrl.doctor.memory import MEMORY_FIXES
from streamrl.hardware.memory import model_states, trainer_memory
from streamrl.hardware.parallelism import check_split
from streamrl.hardware.profiles import load_gpu, load_model
from streamrl.hardware.resolved import resolve
from streamrl.hardware.side_memory import trainer_side
from streamrl.runfile.config import Run
from streamrl.runfile.errors import RunError
from streamrl.runfile.findings import changed
from streamrl.sim.costs.training.layer import ATTENTION_BACKWARD, Layer
from streamrl.sim.costs.training.profile import load_training_profile
from streamrl.sim.costs.training.ranks import Ranks
from streamrl.sim.costs.training.stage_times import StageTimes
from streamrl.sim.costs.training.training import TrainingCosts
from streamrl.sim.fidelity.training_steps import training_rows
from streamrl.sim.planner.layouts import TrainerRange, fitting_trainers, in_pool
from streamrl.sim.planner.space import find_trainers
from tests.runs import small_run

FIT = load_training_profile()
H800 = load_gpu("h800")
LAYERS, HEADS, CACHES, CHANNELS = 28, 28, 4, 128
"""Of the 7B model: layers, query heads, key-value heads, channels of a head."""
LONG = (131072, 131072**2 / 2, 131072)
"""Tokens and pairs of one long rollout."""


def train_run(changes: dict[str, Any] | None = None, **trainer: Any) -> Run:
    """Return the small run on four nodes of H800."""
    return small_run(
        {
            "cluster.pools.near": {"gpu": "h800", "nodes": 4},
            "algorithm.prompts_per_step": 64,
            "trainer": {"pool": "near", "kernels": "fused", "zero": 1, **trainer},
            **(changes or {}),
        }
    )


def stages(**trainer: Any) -> StageTimes:
    return TrainingCosts.load(resolve(train_run(**trainer))).stages


def time(kind: str, size: tuple[float, float, float], **trainer: Any) -> float:
    found = getattr(stages(**trainer), f"{kind}_times")([size])
    return float(found[0, 0])


def attention(**trainer: Any) -> float:
    """Return the seconds of one layer's attention to a long rollout on one rank."""
    ranks = Ranks.of(resolve(train_run(**trainer)).trainer)
    layer = Layer(
        ranks=ranks, gemm=FIT.gemm["h800"], experts=FIT.experts["h800"], constants=FIT.constants
    )
    return float(layer.attention().time(np.array(LONG[0]), np.array(LONG[1])))


# Seconds ------------------------------------------------------------------------------------------


def test_ranks_of_a_ring_halve_what_a_long_pass_computes_and_hide_what_they_send() -> None:
    alone, shared = time("forward", LONG), time("forward", LONG, context_parallel=2)
    assert shared == pytest.approx(alone / 2, rel=0.01)
    assert shared > alone / 2  # products of fewer tokens are slower


def test_gathered_keys_and_values_show_and_their_gradients_go_back() -> None:
    ring, gathered = (
        {"context_parallel": 4, "context_exchange": way, "recompute": "none"}
        for way in ("ring", "all-gather")
    )
    num_bytes = 3 / 4 * LONG[0] * 2 * CACHES * CHANNELS * 2
    sent = LAYERS * FIT.constants.collective * num_bytes / H800.nvlink
    for kind, times in (("forward", 1), ("backward", 2)):
        more = time(kind, LONG, **gathered) - time(kind, LONG, **ring)
        assert more == pytest.approx(times * sent)


def test_a_ring_shows_what_attention_is_too_short_to_hide() -> None:
    alone, shared = stages(), stages(context_parallel=4)
    tokens = 4096.0  # of sequences so short that there is no attention to speak of
    layers = LAYERS * FIT.constants.collective / H800.nvlink
    wire = layers * 3 / 4 * tokens * 2 * CACHES * CHANNELS * 2
    one = float(shared.forward_times([(4096, 0.0, 4096)])[0, 0])
    computed = shared.forward[0].fixed + alone.forward[0].per_token * tokens / 4
    hidden = LAYERS * 3 / 4 * attention_of_tokens(tokens) / 4
    assert one - computed == pytest.approx(max(0.0, wire - hidden))
    assert wire > hidden


def attention_of_tokens(tokens: float) -> float:
    """Return the part of attention's seconds that grows with tokens, of one layer on one GPU."""
    ranks = Ranks.of(resolve(train_run()).trainer)
    layer = Layer(
        ranks=ranks, gemm=FIT.gemm["h800"], experts=FIT.experts["h800"], constants=FIT.constants
    )
    return layer.attention().per_token * tokens


def test_heads_that_are_dealt_out_send_their_tokens_queries_keys_values_and_output() -> None:
    ring, dealt = (
        {"context_parallel": 4, "context_exchange": way, "recompute": "none"}
        for way in ("ring", "all-to-all")
    )
    channels = (2 * HEADS + 2 * CACHES) * CHANNELS
    share = 3 / 4 * LONG[0] / 4
    sent = LAYERS * FIT.constants.collective * share * channels * 2 / H800.nvlink
    kernels = LAYERS * (attention(**dealt) - attention(**ring)) / 4
    for kind, times in (("forward", 1.0), ("backward", ATTENTION_BACKWARD)):
        more = time(kind, LONG, **dealt) - time(kind, LONG, **ring)
        assert more == pytest.approx(sent + times * kernels)


def test_between_nodes_a_ring_goes_through_one_port() -> None:
    narrow = {"cluster.pools.near": {"gpu": "h800", "nodes": 16, "gpus_per_node": 2}}
    runs = [train_run(changes, context_parallel=4) for changes in ({}, narrow)]
    assert [Ranks.of(resolve(run).trainer).context_ranks_of_a_node for run in runs] == [4, 2]
    inside, across = (
        float(TrainingCosts.load(resolve(run)).stages.forward_times([(4096, 0.0, 4096)])[0, 0])
        for run in runs
    )
    num_bytes = LAYERS * 3 / 4 * 4096 * 2 * CACHES * CHANNELS * 2
    slower = 1 / H800.network - 1 / H800.nvlink
    assert across - inside == pytest.approx(FIT.constants.collective * num_bytes * slower)


def test_context_ranks_sum_gradients_and_share_the_optimizer_as_data_parallel_ranks_do() -> None:
    by_data, by_context = (
        TrainingCosts.load(resolve(train_run(**{name: 4, "tensor_parallel": 2}))).optimizer_time
        for name in ("data_parallel", "context_parallel")
    )
    assert by_data == pytest.approx(by_context)
    model = load_model(train_run().model)
    states = [
        model_states(model, train_run(**{name: 4}).trainer, "bfloat16")
        for name in ("data_parallel", "context_parallel")
    ]
    assert states[0] == states[1]


def test_published_steps_with_context_ranks_are_predicted_within_a_tenth_though_none_was_fitted() -> (
    None
):
    found = [row for row in training_rows() if row.group.endswith("context ranks")]
    assert len(found) == 7 and not any(row.is_fitted for row in found)
    assert max(abs(row.error) for row in found) < 0.10


# Memory -------------------------------------------------------------------------------------------


def test_context_ranks_share_activations_and_logits_but_not_what_a_layer_attends_to() -> None:
    long = {"rollout.max_tokens": 65000, "workload.max_prompt_tokens": 536}
    one, four = (
        trainer_memory(resolve(train_run(long, context_parallel=ranks, micro_batch=1)).trainer)
        for ranks in (1, 4)
    )
    assert four["logits"] == one["logits"] / 4
    ring = 2 * 65536 * 2 * CACHES * CHANNELS * 2 / 4
    assert four["activations"] == pytest.approx(one["activations"] / 4 + ring)
    gathered = trainer_memory(
        resolve(
            train_run(long, context_parallel=4, micro_batch=1, context_exchange="all-gather")
        ).trainer
    )
    assert gathered["activations"] == pytest.approx(four["activations"] + ring)
    assert four["weights"] == one["weights"] and four["optimizer"] < one["optimizer"]


# What cannot be -----------------------------------------------------------------------------------


def test_a_trainer_takes_the_gpus_of_its_context_ranks() -> None:
    assert train_run(context_parallel=4, tensor_parallel=2, data_parallel=4).trainer.num_gpus == 32
    with pytest.raises(RunError, match="context_parallel=8 x tensor_parallel=2"):
        train_run(context_parallel=8, tensor_parallel=2, data_parallel=4)


def test_heads_that_do_not_divide_are_refused_where_they_are_dealt_out_alone() -> None:
    model = load_model(train_run().model)
    check_split(model, train_run(context_parallel=8).trainer)
    dealt = train_run(context_parallel=8, context_exchange="all-to-all").trainer
    with pytest.raises(
        RunError, match=r"trainer\.context_parallel must divide the 28 heads"
    ) as told:
        check_split(model, dealt)
    assert told.value.key == "trainer.context_parallel"


def test_experts_may_be_shared_out_over_context_ranks_too() -> None:
    mixture = {"model.name": "qwen3-30b-a3b"}
    train_run(mixture, data_parallel=2, context_parallel=4, tensor_parallel=4, expert_parallel=32)
    with pytest.raises(RunError, match="data_parallel x context_parallel x tensor_parallel = 8"):
        train_run(mixture, data_parallel=2, context_parallel=4, expert_parallel=16)


# Plans --------------------------------------------------------------------------------------------


def long_run(tokens: int) -> Run:
    return train_run({"rollout.max_tokens": tokens, "plan.trainer_gpus": [16]}, micro_batch=1)


def test_context_ranks_are_searched_where_rollouts_are_long() -> None:
    short, long = (find_trainers(long_run(tokens), Counter()) for tokens in (8192, 131072))
    assert {trainer.context_parallel for trainer in short} == {1}
    assert {trainer.context_parallel for trainer in long} >= {1, 2, 4, 8}


def test_a_long_rollout_that_fits_no_gpu_whole_fits_several_context_ranks() -> None:
    run = long_run(2**19)
    among = {
        "tensor_parallel": [1],
        "pipeline_parallel": [1],
        "micro_batch": [1],
        "zero": [3],
        "recompute": ["full"],
    }

    trainer = in_pool(resolve(run).trainer, "near", run.cluster.pools)

    def fits(degrees: tuple[int, ...]) -> set[int]:
        found = TrainerRange(**among, context_parallel=degrees)  # type: ignore[arg-type]
        return {each.context_parallel for each in fitting_trainers(trainer, 16, found, Counter())}

    assert fits((1,)) == set()
    assert fits((1, 16)) == {16}


def test_doctor_shares_the_tokens_of_a_pass_where_a_long_rollout_does_not_fit() -> None:
    run = train_run(
        {"rollout.max_tokens": 2**19, "rollout.tensor_parallel": 4, "rollout.replicas": 1},
        context_parallel=1,
        data_parallel=16,
        micro_batch=1,
        zero=3,
        logits="chunked",
    )
    found = next(iter(MEMORY_FIXES["trainer-memory"].candidates(run)))
    assert found["trainer.context_parallel"] >= 4
    assert trainer_side(resolve(changed(run, found)).trainer).num_gpus == 16
