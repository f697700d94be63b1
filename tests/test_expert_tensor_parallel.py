"""Ranks that share each expert of a mixture in training: what they hold, compute and send each other, and where they fit."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from streamrl.export.launch_file import find_arguments
from streamrl.export.option_table import ExportName
from streamrl.hardware.memory import model_state, trainer_memory
from streamrl.hardware.profiles import load_gpu, load_model
from streamrl.hardware.resolved import resolve
from streamrl.runfile.config import Run
from streamrl.runfile.roles_config import TrainerConfig
from streamrl.sim.costs.training.layer import Layer
from streamrl.sim.costs.training.profile import load_training_profile
from streamrl.sim.costs.training.ranks import Ranks
from streamrl.sim.costs.training.training import TrainingCosts
from streamrl.sim.planner.layouts import SLICES
from streamrl.sim.planner.space import Space
from tests.runs import small_run

FIT = load_training_profile()
H800 = load_gpu("h800")
NOTHING = 1e-30
"""Stands for a constant whose term is to vanish."""
WIDTH, HIDDEN, CHOSEN, NUM_EXPERTS = 768, 2048, 8, 128
"""Of Qwen3-30B-A3B."""
DEGREES = {"data_parallel": 4, "tensor_parallel": 4, "expert_parallel": 4}
TOKENS = 3000.0


def train_run(changes: dict[str, Any] | None = None, **trainer: Any) -> Run:
    """Return a run that trains a mixture on four nodes of H800."""
    trained = {"pool": "near", "kernels": "fused", **DEGREES, **trainer}
    return small_run(
        {
            "model.name": "qwen3-30b-a3b",
            "cluster.pools.near": {"gpu": "h800", "nodes": 4},
            "algorithm.prompts_per_step": 64,
            "trainer": trained,
            **(changes or {}),
        }
    )


def trainer(**keys: Any) -> TrainerConfig:
    return train_run(**keys).trainer


def time_of(constants: dict[str, float], **keys: Any) -> float:
    """Return the seconds of a layer's forward pass over a micro-batch, with some constants replaced."""
    layer = Layer(
        ranks=Ranks.of(resolve(train_run(**keys)).trainer),
        gemm=FIT.gemm["h800"],
        experts=FIT.experts["h800"],
        constants=msgspec.structs.replace(FIT.constants, **constants),
    )
    return float(layer.forward().time(TOKENS, 0.0))


# What ranks hold ----------------------------------------------------------------------------------


def test_all_gpus_together_hold_the_optimizer_of_every_parameter_once_however_experts_are_folded() -> (
    None
):
    model = load_model(train_run().model)
    whole = 12 * model.num_parameters
    for experts, slices in ((4, None), (4, 2), (2, 4), (1, 1), (1, 8), (8, 2)):
        own = trainer(expert_parallel=experts, expert_tensor_parallel=slices)
        held = model_state(model, own, "bfloat16").optimizer * own.num_gpus
        assert held == pytest.approx(whole, rel=0.01), (experts, slices)


def test_a_gpu_holds_the_weights_of_its_slice_of_its_experts() -> None:
    model = load_model(train_run().model)
    routed = model.num_layers * NUM_EXPERTS * 3 * HIDDEN * WIDTH
    weights = {
        (experts, slices): model_state(
            model,
            trainer(expert_parallel=experts, expert_tensor_parallel=slices),
            "bfloat16",
        ).weights
        for experts, slices in ((4, 1), (4, 2), (2, 4), (1, 1))
    }
    assert weights[4, 1] - weights[4, 2] == pytest.approx(2 * routed / 8)
    assert weights[2, 4] == pytest.approx(weights[4, 2])
    assert weights[1, 1] - weights[4, 1] == pytest.approx(2 * routed * 3 / 4)


def test_ranks_that_share_experts_hold_each_others_copies_of_tokens() -> None:
    kept = {
        slices: trainer_memory(
            resolve(train_run(expert_tensor_parallel=slices, recompute="none")).trainer
        )
        for slices in (1, 2)
    }
    run = train_run()
    tokens = min(
        run.trainer.micro_batch * (run.rollout.max_tokens + run.workload.max_prompt_tokens), 16384
    )
    more = kept[2]["activations"] - kept[1]["activations"]
    assert more == pytest.approx(48 * tokens * CHOSEN * HIDDEN * 2 / 4, rel=0.01)


# What it takes ------------------------------------------------------------------------------------


def test_absent_it_is_whole_experts_among_expert_ranks_and_the_slices_of_attention_else() -> None:
    for degrees, slices in ((DEGREES, 1), ({**DEGREES, "expert_parallel": 1}, 4)):
        told, absent = (
            train_run(**{**degrees, "expert_tensor_parallel": value}) for value in (slices, None)
        )
        assert trainer_memory(resolve(told).trainer) == trainer_memory(resolve(absent).trainer)
        costs = [TrainingCosts.load(resolve(run)) for run in (told, absent)]
        times = [one.stages.backward_times([(TOKENS, 7e6, TOKENS)])[0, 0] for one in costs]
        assert times[0] == times[1] and costs[0].optimizer_time == costs[1].optimizer_time


def test_narrower_experts_of_more_tokens_each_are_computed_at_the_rate_of_their_shape() -> None:
    """Of 4 tensor ranks each has a quarter of the tokens; two that share experts compute both quarters, half as wide."""
    silent = {"trade": NOTHING, "reduce": NOTHING, "permutation_traffic": NOTHING}
    silent |= {"unfused_traffic": NOTHING}
    rate, copies = FIT.experts["h800"], CHOSEN / 4
    times = {
        slices: time_of(silent, routing="balanced", expert_tensor_parallel=slices)
        for slices in (1, 2)
    }
    seconds = 2 * copies * 3 * HIDDEN * WIDTH / rate.flops
    fewer = rate.tokens / (copies * 4 / NUM_EXPERTS) - rate.tokens / (2 * copies * 4 / NUM_EXPERTS)
    narrower = TOKENS * rate.width * (2 / WIDTH - 1 / WIDTH)
    assert times[2] - times[1] == pytest.approx(seconds * (narrower - fewer))


@pytest.mark.parametrize("slices", [2, 4])
def test_copies_are_gathered_over_nvlink_by_the_ranks_that_share_an_expert(slices: int) -> None:
    keys = {"routing": "balanced", "expert_tensor_parallel": slices, "expert_parallel": 2}
    silent = {"trade": NOTHING}
    gathered = time_of(silent, **keys) - time_of({**silent, "reduce": NOTHING}, **keys)
    attention = 4 * 3 / 4 * HIDDEN
    copies = 2 * (slices - 1) * CHOSEN / 4 * HIDDEN
    expected = FIT.constants.reduce * TOKENS * 2 * (attention + copies) / H800.nvlink
    assert gathered == pytest.approx(expected)


def test_where_copies_are_saved_a_token_goes_at_once_to_every_gpu_that_shares_one_of_its_experts() -> (
    None
):
    keys = {"routing": "balanced", "dispatch": "deduplicated"}
    traded = {}
    for experts, slices in ((4, 1), (4, 2), (1, 8)):
        own = {**keys, "expert_parallel": experts, "expert_tensor_parallel": slices}
        traded[experts, slices] = time_of({}, **own) - time_of({"trade": NOTHING}, **own)
    reached = 1 - (1 - 1 / 4) ** CHOSEN
    one = 2 * FIT.constants.trade * TOKENS * HIDDEN * 2 / 4 / H800.nvlink
    assert traded[4, 1] == pytest.approx(one * 3 * reached)
    assert traded[4, 2] == pytest.approx(one * 7 * reached)
    assert traded[1, 8] == pytest.approx(one * 7)


def test_expert_ranks_reach_another_node_as_soon_as_their_slices_fill_one() -> None:
    keys = {"routing": "balanced", "expert_parallel": 4, "data_parallel": 8}
    for slices, outside in ((2, 0.0), (4, 1 / 2)):
        own = {**keys, "expert_tensor_parallel": slices}
        traded = time_of({}, **own) - time_of({"trade": NOTHING}, **own)
        inside = 1 / (2 if outside else 1) - 1 / 4
        wire = outside / H800.network + inside / H800.nvlink
        sent = 2 * FIT.constants.trade * TOKENS * CHOSEN * HIDDEN * 2 / 4
        assert traded == pytest.approx(sent * wire)


# What cannot be -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "keys", "parts"),
    [
        ({}, {"expert_tensor_parallel": 3}, ["8 GPUs that NVLink joins", "got 3"]),
        ({}, {"expert_tensor_parallel": 8}, ["expert_parallel = 32", "= 16", "got", "8"]),
        ({}, {"expert_tensor_parallel": 0}, ["at least 1", "0"]),
        (
            {"model.name": "qwen2.5-7b"},
            {"expert_tensor_parallel": 2, "expert_parallel": 1},
            ["Qwen2.5-7B has no experts", "2"],
        ),
        (
            {"cluster.pools.near": {"gpu": "h800", "nodes": 4, "gpus_per_node": 5}},
            {
                "expert_tensor_parallel": 5,
                "expert_parallel": 1,
                "tensor_parallel": 1,
                "data_parallel": 5,
            },
            ["768 channels of an expert", "5"],
        ),
    ],
)
def test_slices_that_no_trainer_can_have_are_refused_by_key_and_value(
    changes: dict[str, Any], keys: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises(ValueError, match=r"^trainer\.expert_tensor_parallel") as caught:
        TrainingCosts.load(resolve(train_run(changes, **keys)))
    assert all(part in str(caught.value) for part in parts), str(caught.value)


# Plans and exports --------------------------------------------------------------------------------


def planned(**plan: Any) -> Space:
    return Space.open(
        train_run(
            {
                "plan": {
                    "trainer_gpus": [8],
                    "micro_batch": [1],
                    "zero": [1],
                    "rollout_gpus": [2],
                    "systems": ["stream-async"],
                    **plan,
                }
            },
            data_parallel=1,
            tensor_parallel=8,
            expert_parallel=1,
        )
    )


def test_a_plan_shares_experts_out_in_slices_where_it_is_asked_to() -> None:
    assert {each.expert_tensor_parallel for each in planned().trainers} == {None}
    asked = planned(expert_tensor_parallel=[1, 2, 5])
    assert {each.expert_tensor_parallel for each in asked.trainers} == {1, 2}
    assert not asked.cut[SLICES]
    for each in asked.trainers:
        own = each.change(asked.run.trainer)
        assert own.copies * own.tensor_parallel % own.expert_ranks == 0


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("verl", "actor_rollout_ref.actor.megatron.expert_tensor_parallel_size"),
        ("nemo-rl", "policy.megatron_cfg.expert_tensor_parallel_size"),
        ("slime", "--expert-tensor-parallel-size"),
    ],
)
def test_an_export_says_how_experts_are_sliced_as_megatron_takes_the_tensor_ranks_where_nothing_is_said(
    name: ExportName, option: str
) -> None:
    for slices, expected in ((None, 1), (2, 2)):
        pools = {"cluster.pools.far": {"gpu": "h20", "nodes": 1}, "rollout.tensor_parallel": 4}
        whole_nodes = {**pools, "rollout.replicas": 2, "framework.name": name}
        run = train_run(whole_nodes, expert_tensor_parallel=slices)
        told = find_arguments(run, name).arguments
        assert {each.option.name: each.value for each in told}[option] == expected
