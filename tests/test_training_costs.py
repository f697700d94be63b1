"""What training costs: closed forms of each term from its constants, and where these come from."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from streamrl.hardware.memory import stage_parameters
from streamrl.hardware.model_shape import lora_parameters
from streamrl.hardware.profiles import load_gpu, load_model
from streamrl.hardware.resolved import resolve
from streamrl.runfile.config import Run
from streamrl.runfile.errors import RunError
from streamrl.runfile.frameworks import load_framework
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.kernels import Kernels
from streamrl.sim.costs.training.layer import Layer, Pass, loss_passes
from streamrl.sim.costs.training.profile import PATH, load_training_profile
from streamrl.sim.costs.training.ranks import Ranks
from streamrl.sim.costs.training.stage_times import StageTimes
from streamrl.sim.costs.training.training import TrainingCosts
from tests.runs import small_run

PPO = {"algorithm.name": "ppo", "algorithm.kl_coefficient": 0.001}
MIXTURE = {"model.name": "qwen3-30b-a3b"}
H800 = load_gpu("h800")
FIT = load_training_profile()
CONSTANTS, GEMM, EXPERTS = FIT.constants, FIT.gemm["h800"], FIT.experts["h800"]
NOTHING = 1e-30
"""Stands for a constant whose term is to vanish."""
MICRO = (3000, 7e6, 3000)
"""Tokens of a micro-batch, its pairs, and its tokens times its sequences."""


def train_run(changes: dict[str, Any] | None = None, **trainer: Any) -> Run:
    """Return the small run on four nodes of H800, one GPU training alone unless told otherwise."""
    return small_run(
        {
            "cluster.pools.near": {"gpu": "h800", "nodes": 4},
            "algorithm.prompts_per_step": 64,
            "trainer": {"pool": "near", "micro_batch": 2, "kernels": "fused", **trainer},
            **(changes or {}),
        }
    )


def train_costs(changes: dict[str, Any] | None = None, **trainer: Any) -> TrainingCosts:
    return TrainingCosts.load(resolve(train_run(changes, **trainer)))


def a_layer(
    changes: dict[str, Any] | None = None,
    constants: dict[str, float] | None = None,
    **trainer: Any,
) -> Layer:
    """Return a layer whose constants are the shipped ones, apart from those that a test replaces."""
    return Layer(
        ranks=replace(
            Ranks.of(resolve(train_run(changes, **trainer)).trainer),
            collective=CONSTANTS.collective,
        ),
        gemm=GEMM,
        experts=EXPERTS,
        constants=replace(CONSTANTS, **(constants or {})),
    )


def seconds(one: Pass, tokens: float = MICRO[0], pairs: float = 0.0) -> float:
    return one.fixed + one.per_token * tokens + one.per_pair * pairs


def product(columns: float, rows: float, tokens: float = MICRO[0]) -> float:
    """Return the seconds of (tokens, rows) times (rows, columns), by what the rate says of itself."""
    slower = 1 + GEMM.tokens / tokens + GEMM.columns / columns + GEMM.rows / rows
    return 2 * tokens * columns * rows * slower / GEMM.flops


# A dense layer ------------------------------------------------------------------------------------


def products(degree: int) -> float:
    """Of a layer of the 7B model: queries, keys and values; their output; gate and up; down."""
    return (
        product((28 * 128 + 2 * max(1, 4 / degree) * 128 * degree) / degree, 3584)
        + product(3584, 3584 / degree)
        + product(2 * 18944 / degree, 3584)
        + product(3584, 18944 / degree)
    )


def activations(tokens: float = MICRO[0]) -> float:
    """Of a layer of the 7B model on one GPU: what a forward pass keeps, times the traffic that it takes."""
    kept = 2 * (4 * 3584 + 2 * (28 + 4) * 128 + 3 * 18944)
    return CONSTANTS.activation_traffic * kept * tokens / H800.memory_bandwidth


def test_a_layer_computes_its_products_and_moves_its_activations() -> None:
    layer = a_layer(constants={"attention": NOTHING})
    assert seconds(layer.forward()) == pytest.approx(products(1) + activations())
    backward = a_layer(constants={"attention": NOTHING}, recompute="none").backward()
    assert seconds(backward) == pytest.approx(2 * seconds(layer.forward()))


def test_attention_takes_the_prefill_kernels_seconds_of_a_causal_sequence() -> None:
    kernels = Kernels("h800", "bfloat16")
    with_attention, without = a_layer(), a_layer(constants={"attention": NOTHING})
    for length in (2048, 8192, 32768):
        batch = max(1.0, 16384 / length)
        found = kernels.time(
            "prefill_attention", np.array([length]), heads=28.0, kv_heads=4.0, batch=batch
        ).seconds
        kernel = CONSTANTS.attention * float(found[0]) / batch
        size = (length, length**2 / 2)
        term = seconds(with_attention.forward(), *size) - seconds(without.forward(), *size)
        assert term == pytest.approx(kernel, rel=0.15)
        both = (a_layer(recompute="none"), a_layer(None, {"attention": NOTHING}, recompute="none"))
        back = [seconds(one.backward(), *size) for one in both]
        assert back[0] - back[1] == pytest.approx(2.8 * term)


def test_packed_sequences_attend_each_to_itself() -> None:
    forward = a_layer().forward()
    one, two = seconds(forward, 8000, 8000**2 / 2), seconds(forward, 8000, 2 * 4000**2 / 2)
    assert one - two == pytest.approx(forward.per_pair * 4000**2)
    assert forward.per_pair > 0


def test_recomputation_adds_a_forward_pass_or_mlps_or_norms_and_activations_again() -> None:
    none, selective, mlp, full = (
        seconds(a_layer(recompute=mode).backward(), *MICRO[:2])
        for mode in ("none", "selective", "mlp", "full")
    )
    assert none < selective < mlp < full
    assert selective - none == pytest.approx(0.3 * activations())
    gate_up_down = product(2 * 18944, 3584) + product(3584, 18944)
    assert mlp - selective == pytest.approx(gate_up_down)
    assert full - none == pytest.approx(seconds(a_layer().forward(), *MICRO[:2]))


def test_unfused_kernels_move_activations_more_often() -> None:
    fused, uncompiled, eager = (
        seconds(a_layer(kernels=kind).forward()) for kind in ("fused", "uncompiled", "eager")
    )
    assert fused < uncompiled < eager
    assert uncompiled - fused == pytest.approx(activations() * (CONSTANTS.uncompiled_traffic - 1))
    assert eager - fused == pytest.approx(activations() * (CONSTANTS.eager_traffic - 1))


@pytest.mark.parametrize("degree", [2, 4])
def test_tensor_ranks_have_slices_of_products_and_gather_the_hidden_state(degree: int) -> None:
    layer = a_layer(constants={"attention": NOTHING}, tensor_parallel=degree, recompute="none")
    wire = MICRO[0] * 4 * (degree - 1) / degree * 3584 * 2 / H800.nvlink
    sliced = products(degree) + activations() / degree
    assert seconds(layer.forward()) == pytest.approx(sliced + CONSTANTS.reduce * wire)
    backward = 2 * sliced + 1.5 * CONSTANTS.reduce * wire
    assert seconds(layer.backward()) == pytest.approx(backward)


def test_tensor_ranks_beyond_the_heads_of_keys_have_one_each() -> None:
    four, eight = (
        a_layer(constants={"attention": NOTHING, "reduce": NOTHING}, tensor_parallel=degree)
        for degree in (4, 8)
    )
    assert seconds(eight.forward()) > seconds(four.forward()) / 2


# Stages -------------------------------------------------------------------------------------------


def head(degree: int = 1, kernels: float = 1.0) -> float:
    """Of the last stage: logits, and their softmax."""
    moved = kernels * CONSTANTS.logit_traffic * MICRO[0] * 152064 / degree
    return product(152064 / degree, 3584) + moved / H800.memory_bandwidth


def stages_of(**trainer: Any) -> StageTimes:
    layer = a_layer(**trainer)
    return StageTimes.compose(layer.ranks, layer)


def test_trainers_that_differ_only_in_their_ranks_share_no_more_than_layers() -> None:
    alone = train_costs().stages
    for split in (
        {"data_parallel": 4, "zero": 3},
        {"data_parallel": 2, "zero": 2, "micro_batch": 4},
        {"data_parallel": 4, "pipeline_parallel": 4, "offload": True, "logits": "chunked"},
        {"data_parallel": 2, "context_parallel": 2, "recompute": "none"},
        {"data_parallel": 8, "tensor_parallel": 2, "context_parallel": 2},
    ):
        stages = train_costs(**split).stages
        assert stages == stages_of(**split) != alone, split


@pytest.mark.parametrize(
    ("num_stages", "layers"),
    [(1, [28]), (4, [7] * 4), (8, [3, 4, 4, 4, 4, 3, 3, 3]), (16, [1, *[2] * 12, 1, 1, 1])],
)
def test_the_last_stage_has_the_head_and_those_in_the_middle_what_is_left_of_layers(
    num_stages: int, layers: list[int]
) -> None:
    stages, layer = stages_of(pipeline_parallel=num_stages), a_layer()
    forward = stages.forward_times([MICRO])[0]
    backward = stages.backward_times([MICRO])[0]
    ends = [0.0] * (num_stages - 1) + [head()]
    one, back = seconds(layer.forward(), *MICRO[:2]), seconds(layer.backward(), *MICRO[:2])
    expected = [count * one + more for count, more in zip(layers, ends, strict=True)]
    assert forward == pytest.approx(expected)
    expected = [count * back + 2 * more for count, more in zip(layers, ends, strict=True)]
    assert backward == pytest.approx(expected)
    assert stages.scored_times([MICRO])[0] == pytest.approx(forward)


def test_tensor_ranks_split_the_vocabulary_and_unfused_kernels_move_logits_more_often() -> None:
    assert seconds(a_layer(tensor_parallel=4).head()) == pytest.approx(head(4))
    eager = head(kernels=CONSTANTS.eager_traffic)
    assert seconds(a_layer(kernels="eager").head()) == pytest.approx(eager)
    assert seconds(a_layer(kernels="fused", logits="eager").head()) == pytest.approx(eager)
    assert seconds(a_layer(kernels="fused", logits="chunked").head()) == pytest.approx(head())
    assert seconds(a_layer(kernels="eager", logits="fused").head()) == pytest.approx(head())


def test_stages_of_one_node_send_over_nvlink_and_others_over_the_network() -> None:
    near, far = stages_of(pipeline_parallel=4), stages_of(pipeline_parallel=16)
    assert near.send == pytest.approx(2 * 3584 / H800.nvlink)
    assert far.send == pytest.approx(2 * 3584 / H800.network)
    split = stages_of(pipeline_parallel=4, tensor_parallel=8)
    assert split.send == pytest.approx(2 * 3584 / 8 / H800.network)
    assert stages_of(data_parallel=8).send == 0.0


def test_interleaved_slices_have_all_layers_between_them() -> None:
    whole, sliced = (
        stages_of(pipeline_parallel=4, virtual_stages=slices).forward_times([MICRO])
        for slices in (1, 7)
    )
    assert sliced.shape == (1, 28)
    assert sliced.sum() == pytest.approx(whole.sum())


# A mixture ----------------------------------------------------------------------------------------


def an_expert_layer(constants: dict[str, float] | None = None, **trainer: Any) -> Layer:
    """Return a layer of 128 experts, 8 of them for a token, whose attention takes nothing."""
    return a_layer(MIXTURE, {"attention": NOTHING, **(constants or {})}, **trainer)


def dense_part() -> float:
    """Of a layer of the mixture: projections, and activations that are not permuted."""
    kept = 2 * (4 * 2048 + 2 * (32 + 4) * 128 + 8 * 3 * 768)
    moved = CONSTANTS.activation_traffic * kept * MICRO[0] / H800.memory_bandwidth
    return product(40 * 128, 2048) + product(2048, 32 * 128) + moved


def expert_part(ranks: int, traffic: float) -> float:
    """Of a layer of the mixture: grouped products over what each expert is sent, and permutation."""
    tokens = MICRO[0] * 8 * ranks / 128
    flops = 2 * MICRO[0] * 8 * 3 * 2048 * 768
    computed = flops / EXPERTS.flops * (1 + EXPERTS.tokens / tokens + EXPERTS.width / 768)
    return computed + MICRO[0] * traffic * 2 * 8 * 2048 * 2 / H800.memory_bandwidth


def test_a_mixture_on_one_gpu_computes_all_experts_and_permutes_tokens() -> None:
    expected = dense_part() + expert_part(1, CONSTANTS.permutation_traffic)
    forward = an_expert_layer().forward()
    assert seconds(forward) == pytest.approx(expected + CONSTANTS.routing_time)


@pytest.mark.parametrize("routing", ["natural", "balanced"])
def test_expert_ranks_trade_copies_and_wait_for_the_fullest(routing: str) -> None:
    layer = an_expert_layer(data_parallel=8, expert_parallel=8, routing=routing)
    fullest = fullest_rank(8) if routing == "natural" else 1.0
    traffic = CONSTANTS.permutation_traffic + CONSTANTS.unfused_traffic
    traded = 2 * CONSTANTS.trade * MICRO[0] * 8 * 7 / 8 * 2048 * 2 / H800.nvlink
    expected = dense_part() + fullest * (expert_part(8, traffic) + traded)
    assert seconds(layer.forward()) == pytest.approx(expected + CONSTANTS.routing_time)


def test_a_slow_host_keeps_a_mixture_waiting_longer_and_a_dense_layer_not_at_all() -> None:
    grace = load_gpu("gb200").host_slowdown.middle
    assert grace > 2
    for model, waited in ((MIXTURE, CONSTANTS.routing_time), ({}, 0.0)):
        fast = a_layer(model)
        slow = replace(fast, ranks=replace(fast.ranks, host_slowdown=grace))
        more = seconds(slow.forward()) - seconds(fast.forward())
        assert more == pytest.approx((grace - 1) * waited)


def fullest_rank(ranks: int) -> float:
    """Return the tokens of the fullest of ranks with 128 experts between them, over those of a mean one."""
    return 1 + CONSTANTS.imbalance * math.sqrt(ranks / 128) * math.sqrt(2 * math.log(ranks))


def test_the_fullest_of_more_ranks_has_more() -> None:
    natural = [
        seconds(
            an_expert_layer({"trade": NOTHING}, data_parallel=16, expert_parallel=ranks).forward()
        )
        for ranks in (2, 4, 8, 16)
    ]
    assert natural == sorted(natural) and fullest_rank(2) < 1.25 < fullest_rank(8)


def test_a_mixture_without_expert_ranks_has_no_fullest_one() -> None:
    natural, balanced = (an_expert_layer(routing=kind) for kind in ("natural", "balanced"))
    assert natural.forward() == balanced.forward()


def traded(**trainer: Any) -> float:
    """Return the seconds of both all-to-alls of a layer."""
    with_trade, without = (
        an_expert_layer(constants, expert_parallel=16, data_parallel=16, **trainer)
        for constants in ({}, {"trade": NOTHING})
    )
    return seconds(with_trade.forward()) - seconds(without.forward())


def test_a_copy_for_each_expert_crosses_to_other_nodes_as_often_as_it_is_there() -> None:
    each = MICRO[0] * 2048 * 2
    wire = each * (8 / 2 / H800.network + 8 * (1 / 2 - 1 / 16) / H800.nvlink)
    assert traded(routing="balanced") == pytest.approx(2 * CONSTANTS.trade * wire)


def test_deduplicated_copies_cross_once_a_node_and_once_a_gpu() -> None:
    each = MICRO[0] * 2048 * 2
    nodes, gpus = 2 * (1 - 0.5**8), 15 * (1 - (15 / 16) ** 8)
    wire = each * (nodes / 2 / H800.network + gpus / H800.nvlink)
    found = traded(routing="balanced", dispatch="deduplicated")
    assert found == pytest.approx(2 * CONSTANTS.trade * wire)
    assert found < traded(routing="balanced")
    packed = [
        an_expert_layer({"trade": NOTHING}, data_parallel=8, expert_parallel=8, dispatch=kind)
        for kind in ("deduplicated", "all-to-all")
    ]
    less, more = (seconds(layer.forward()) for layer in packed)
    unfused = MICRO[0] * CONSTANTS.unfused_traffic * 2 * 8 * 2048 * 2 / H800.memory_bandwidth
    assert more - less == pytest.approx(fullest_rank(8) * unfused)


def test_dispatch_that_overlaps_hides_its_share() -> None:
    shown = 1 - CONSTANTS.trade_overlap
    assert traded(overlaps_dispatch=True) == pytest.approx(shown * traded())


def test_tensor_ranks_without_expert_ranks_slice_every_expert() -> None:
    one, two = (
        an_expert_layer({"reduce": NOTHING}, tensor_parallel=degree).forward() for degree in (1, 2)
    )
    assert one.per_token / 2 < two.per_token < one.per_token  # thin slices are slower


# What ranks send ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "wire"), [(8, H800.nvlink), (16, 8 * H800.network)])
def test_a_step_sums_gradients_over_nvlink_in_a_node_and_over_its_ports_beyond(
    ranks: int, wire: float
) -> None:
    run = train_run(data_parallel=ranks)
    model = load_model(run.model)
    ring = (ranks - 1) / ranks * (4 + 2) * model.num_parameters / wire  # gradients, then weights
    update = 28 * model.num_parameters / ranks / (0.8 * H800.memory_bandwidth)
    expected = CONSTANTS.collective * ring + update + CONSTANTS.step_time
    assert TrainingCosts.load(resolve(run)).optimizer_time == pytest.approx(expected)


def test_ranks_of_a_whole_node_each_have_one_port() -> None:
    ranks = Ranks.of(resolve(train_run(data_parallel=4, tensor_parallel=8)).trainer)
    assert ranks.ring_time(1e9, 4, 8) == pytest.approx(3 / 4 * 1e9 / H800.network)


def test_gradients_of_the_fullest_stage_are_what_a_step_waits_for() -> None:
    run = train_run(data_parallel=2, pipeline_parallel=4)
    model = load_model(run.model)
    table = 152064 * 3584
    fullest = (model.num_parameters - 2 * table) / 4 + table
    ring = CONSTANTS.collective / 2 * 6 * fullest / H800.nvlink
    update = 28 * model.num_parameters / 8 / (0.8 * H800.memory_bandwidth)
    found = TrainingCosts.load(resolve(run)).optimizer_time
    assert found == pytest.approx(ring + update + CONSTANTS.step_time)


def test_zero_3_gathers_weights_and_scatters_gradients_for_every_micro_batch() -> None:
    one, three = (stages_of(data_parallel=8, zero=stage) for stage in (1, 3))
    parameters = load_model(train_run().model).num_parameters
    gather = CONSTANTS.collective * 7 / 8 * 2 * parameters / H800.nvlink
    for micro in ((20, 200.0, 20), (16384, 1e7, 16384)):  # too little to hide behind, and plenty
        for times, wire in (
            ([s.forward_times([micro])[0, 0] for s in (one, three)], gather),
            ([s.backward_times([micro])[0, 0] for s in (one, three)], 3 * gather),
        ):
            computed, found = times
            shown = max((1 - CONSTANTS.gather_overlap) * wire, wire - computed)
            assert found == pytest.approx(computed + shown)
    reduced, plain = (train_costs(data_parallel=8, zero=stage) for stage in (3, 1))
    assert reduced.optimizer_time < plain.optimizer_time


def test_zero_2_scatters_gradients_after_every_micro_batch_and_gathers_weights_at_the_step() -> (
    None
):
    two, one = (stages_of(data_parallel=8, zero=stage) for stage in (2, 1))
    parameters = load_model(train_run().model).num_parameters
    wire = CONSTANTS.collective * 7 / 8 * parameters / H800.nvlink  # of a byte each
    micro = (20, 200.0, 20)
    assert two.forward_times([micro]) == one.forward_times([micro])
    computed, found = (s.backward_times([micro])[0, 0] for s in (one, two))
    shown = max((1 - CONSTANTS.gather_overlap) * 4 * wire, 4 * wire - computed)
    assert found == pytest.approx(computed + shown)
    none, first, second = (
        train_costs(data_parallel=8, zero=stage).optimizer_time for stage in (0, 1, 2)
    )
    assert first - second == pytest.approx(4 * wire)
    whole = 28 * parameters / (0.8 * H800.memory_bandwidth)  # of an optimizer on every rank
    assert none - first == pytest.approx(2 * wire + whole * 7 / 8)


def test_expert_ranks_sum_no_gradients_of_experts_that_no_other_has() -> None:
    alone, shared = (train_costs(MIXTURE, data_parallel=8, expert_parallel=e) for e in (1, 8))
    experts = 48 * 128 * 3 * 2048 * 768
    summed = CONSTANTS.collective * 7 / 8 * (4 + 2) * experts / H800.nvlink
    assert alone.optimizer_time - shared.optimizer_time == pytest.approx(summed)


# Adapters -----------------------------------------------------------------------------------------

LORA = {"sync.mode": "lora", "sync.lora_rank": 32}


ENDS = [(3584, 3584), (3584, 512), (3584, 512), (3584, 3584)]  # queries, keys, values, output
ENDS += [(3584, 18944), (3584, 18944), (18944, 3584)]


def of_adapters(inputs: float, outputs: float, products: float, rate: float = GEMM.flops) -> float:
    """Return the seconds of their products, and of so many times the inputs and outputs of layers through memory."""
    moved = 2 * sum(inputs * inner + outputs * outer for inner, outer in ENDS)
    flops = products * 2 * 32 * sum(inner + outer for inner, outer in ENDS)
    achieved = H800.memory_bandwidth * H800.roofline.bandwidth_efficiency
    return MICRO[0] * (moved / achieved + flops / rate)


@pytest.mark.parametrize(("kernels", "added", "back"), [("fused", 2, 3), ("uncompiled", 4, 5)])
def test_beside_adapters_no_gradient_of_weights_is_computed(
    kernels: str, added: float, back: float
) -> None:
    quiet = {"attention": NOTHING, "activation_traffic": NOTHING}
    layer = a_layer(LORA, quiet, recompute="none", kernels=kernels)
    forward = products(1) + of_adapters(1, added, 1)
    assert seconds(layer.forward()) == pytest.approx(forward)
    assert seconds(layer.backward()) == pytest.approx(products(1) + of_adapters(back, 2, 2))
    head = seconds(layer.head_backward()), seconds(layer.head())
    assert head[0] == pytest.approx(2 * head[1] - product(152064, 3584))


def test_a_mixture_beside_adapters_brings_gradients_to_experts_and_back_all_the_same() -> None:
    still, moved = (
        [
            seconds(a_layer({**MIXTURE, **mode}, traffic, recompute="none").backward())
            for mode in ({}, LORA)
        ]
        for traffic in ({"permutation_traffic": NOTHING}, {})
    )
    assert moved[0] - still[0] == pytest.approx(moved[1] - still[1])
    assert still[1] < still[0]


def test_a_critic_beside_an_actor_with_adapters_learns_all_of_its_weights() -> None:
    quiet, ppo = {"attention": NOTHING}, {"algorithm.name": "ppo"}
    both, actor, whole = (
        seconds(a_layer(changes, quiet, recompute="none").backward())
        for changes in ({**ppo, **LORA}, LORA, ppo)
    )
    assert both == pytest.approx((actor + whole) / 2)


def test_a_step_sums_and_updates_what_adapters_have() -> None:
    shape = load_model(train_run().model)
    share = lora_parameters(shape, 32) / shape.num_parameters
    assert share < 0.02
    for zero in (0, 1, 2):
        full, lora = (train_costs(each, data_parallel=8, zero=zero) for each in ({}, LORA))
        steps = [costs.optimizer_time - CONSTANTS.step_time for costs in (full, lora)]
        assert steps[1] == pytest.approx(share * steps[0])
    stages = [train_costs(each, data_parallel=8, zero=3).stages for each in ({}, LORA)]
    assert stages[0].gather_time == stages[1].gather_time
    scattered = [each.scatter_time - each.gather_time for each in stages]
    assert scattered[1] == pytest.approx(share * scattered[0])


def test_no_training_with_adapters_was_measured_and_every_rate_says_so() -> None:
    assert train_costs(LORA).provenance.tier == "roofline"
    assert "no training with them was measured" in str(train_costs(LORA).provenance.sources)
    assumed = [train_costs(each, efficiency=0.4) for each in ({}, LORA)]
    whole, frozen = (each.stages.backward[0] for each in assumed)
    theirs = 28 * of_adapters(3, 2, 2, 0.4 * H800.flops["bfloat16"]) / MICRO[0]
    assert frozen.per_token == pytest.approx(whole.per_token / 2 + theirs)
    assert frozen.per_pair == whole.per_pair


# Commands -----------------------------------------------------------------------------------------


def test_data_parallel_ranks_divide_the_time_of_equal_rollouts() -> None:
    lengths = [1000] * 16
    one, two = (train_costs(PPO, data_parallel=ranks) for ranks in (1, 2))
    assert two.train_time(lengths) == pytest.approx(one.train_time(lengths) / 2)
    assert two.score_time(lengths) == pytest.approx(one.score_time(lengths) / 2)


def test_a_rank_with_one_long_rollout_is_what_a_step_waits_for() -> None:
    costs = train_costs(data_parallel=4)
    alone = costs.train_time([9000])
    assert costs.train_time([9000, 1000, 1000, 1000]) == pytest.approx(alone)
    assert costs.train_time([9000] * 5) > 1.5 * alone


def test_a_critic_is_trained_and_a_reference_only_scores() -> None:
    actor, ppo = train_costs(), train_costs(PPO)
    forward = ppo.stages.forward_times([(1000, 1000**2 / 2, 1000)]).sum()
    assert ppo.train_time([1000]) == pytest.approx(2 * actor.train_time([1000]))
    assert ppo.score_time([1000]) == pytest.approx(2 * forward)
    assert actor.score_time([1000]) == 0


def test_the_trainers_own_log_probabilities_are_a_forward_pass() -> None:
    costs = train_costs({"algorithm.old_log_probs": "trainer"})
    forward = costs.stages.forward_times([(1000, 1000**2 / 2, 1000)]).sum()
    assert costs.score_time([1000]) == pytest.approx(forward)


def test_offloading_costs_its_bytes_over_the_link_to_the_host() -> None:
    resident, offloaded = (
        train_costs(PPO, tensor_parallel=4, data_parallel=2, offload=offload)
        for offload in (False, True)
    )
    model = load_model(train_run().model)
    shard = model.shard_parameters(4)
    weights, gradients, optimizer = 2 * shard, 4 * shard, 12 * shard / 2
    link, lengths = H800.host_link, [1000, 2000]
    score = offloaded.score_time(lengths) - resident.score_time(lengths)
    train = offloaded.train_time(lengths) - resident.train_time(lengths)
    step = offloaded.optimizer_time - resident.optimizer_time
    assert score == pytest.approx(2 * weights / link)
    assert train == pytest.approx(2 * (weights + 2 * gradients) / link)
    assert step == pytest.approx(2 * (weights + gradients + 2 * optimizer) / link)


def test_of_a_model_that_is_alone_the_optimizer_comes_for_the_step() -> None:
    resident, offloaded = (train_costs(tensor_parallel=4, offload=o) for o in (False, True))
    assert offloaded.train_time([1000]) == resident.train_time([1000])
    model = load_model(train_run().model)
    moved = 2 * 12 * max(stage_parameters(model, offloaded.trainer)) / H800.host_link
    assert offloaded.optimizer_time - resident.optimizer_time == pytest.approx(moved)


def test_weights_that_stay_after_the_forward_pass_are_gathered_once_less() -> None:
    freed, kept = (
        train_costs(zero=3, data_parallel=8, reshard_after_forward=each) for each in (True, False)
    )
    assert kept.stages.gather_time == freed.stages.gather_time > 0
    saved = freed.stages.scatter_time - kept.stages.scatter_time
    assert saved == pytest.approx(freed.stages.gather_time)


def test_sharding_groups_gather_within_them_and_sum_gradients_over_them() -> None:
    """Of 16 ranks, groups of 8 have a copy of the weights each: one node gathers, and two nodes sum shards."""
    ranks = {"trainer.data_parallel": 16, "trainer.zero": 3, "cluster.pools.near.nodes": 2}
    flat, grouped = (
        train_costs({**ranks, "trainer.shard_ranks": each}).stages for each in (None, 8)
    )
    num_bytes = load_model(train_run().model).num_parameters
    num_bytes *= CONSTANTS.collective
    gather = 2 * num_bytes * (7 / 8) / H800.nvlink
    scatter = 4 * num_bytes * (7 / 8) / H800.nvlink
    all_reduce = 2 * (1 / 2) * 4 * num_bytes / 8 / min(H800.nvlink, H800.network)
    assert grouped.gather_time == pytest.approx(gather)
    assert grouped.scatter_time == pytest.approx(gather + scatter + all_reduce)
    across = 2 * num_bytes * (15 / 16) / min(H800.nvlink, 8 * H800.network)
    assert flat.gather_time == pytest.approx(across)
    assert train_costs({**ranks, "trainer.shard_ranks": 16}).stages == flat


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"trainer.shard_ranks": 3}, "must divide data_parallel = 8, got 3"),
        ({"trainer.shard_ranks": 4, "trainer.zero": 1}, "needs trainer.zero = 3, got 1"),
        ({"trainer.shard_ranks": 4, "trainer.expert_parallel": 2}, "expert_parallel = 1, got 2"),
        ({"trainer.shard_ranks": 0}, "must be at least 1, got 0"),
    ],
)
def test_sharding_groups_that_do_not_fit_are_refused(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(RunError, match=re.escape(what)):
        train_run({"trainer.data_parallel": 8, "trainer.zero": 3, **changes})


def test_an_optimizer_on_nvme_takes_its_bytes_over_the_drives_of_a_node() -> None:
    on_host = {"trainer.data_parallel": 16, "trainer.zero": 3, "trainer.offload": True}
    on_nvme = {**on_host, "trainer.offload_to": "nvme", "cluster.pools.near.nvme_read": "20 GB/s"}
    resident, host, nvme, three = (
        train_costs({**changes, "cluster.pools.near.nodes": 2})
        for changes in ({**on_host, "trainer.offload": False}, on_host, on_nvme, {**on_nvme, **PPO})
    )
    num_bytes = 16 * load_model(train_run().model).num_parameters / 2  # on each of two nodes
    swaps = num_bytes / 20e9 + num_bytes / 5e9
    assert nvme.optimizer_time - resident.optimizer_time == pytest.approx(swaps)
    assert three.switches.step_time == pytest.approx(swaps), "for each of two models"
    assert nvme.train_time([1000]) == resident.train_time([1000])
    assert nvme.optimizer_time > host.optimizer_time


def test_rollouts_without_an_advantage_cost_a_gradient_only_where_a_kl_term_gives_them_one() -> (
    None
):
    lengths = [900, 80]
    everything = train_costs().train_time(lengths)
    half = train_costs({"workload.informative_share": 0.5}).train_time(lengths)
    assert half == pytest.approx(everything / 2)
    kl = {"algorithm.kl_coefficient": 0.001}
    with_kl = train_costs(kl).train_time(lengths)
    assert train_costs({**kl, "workload.informative_share": 0.5}).train_time(lengths) == with_kl


def test_mini_batches_drain_the_pipelines_and_update_the_weights_between_them() -> None:
    split = {"framework.optimizer_steps": 4}  # of 128 rollouts
    costs = train_costs(split, data_parallel=2, pipeline_parallel=4)
    each = train_costs(data_parallel=2, pipeline_parallel=4).train_time([700] * 32)
    expected = 4 * each + 3 * costs.optimizer_time
    assert costs.train_time([700] * 128) == pytest.approx(expected)
    assert costs.train_time([700] * 64) == pytest.approx(2 * each + costs.optimizer_time)


def test_further_epochs_begin_when_the_batch_is_whole() -> None:
    costs = train_costs({"framework.epochs": 3}, pipeline_parallel=4)
    once = train_costs(pipeline_parallel=4)
    whole = once.train_time([700] * 128)
    expected = 3 * whole + 2 * costs.optimizer_time
    assert costs.train_time([700] * 128) == pytest.approx(expected)
    line, now = costs.line(), 0.0
    for _ in range(16):
        now = line.train([700] * 8, now)
    assert line.finish(now) == pytest.approx(expected)
    after = line.finish(now)
    line.train([700] * 128, after)
    assert line.finish(after) - after == pytest.approx(expected)  # the next step begins afresh


def test_mini_batches_of_every_epoch_each_have_an_optimizer_step() -> None:
    changes = {"framework.epochs": 2, "framework.optimizer_steps": 2}
    costs = train_costs(changes)
    half = train_costs().train_time([700] * 64)
    assert costs.train_time([700] * 128) == pytest.approx(4 * half + 3 * costs.optimizer_time)


def test_a_batch_of_one_optimizer_step_has_one_however_large_it_is() -> None:
    costs = train_costs()
    assert costs.train_time([700] * 512) == pytest.approx(4 * costs.train_time([700] * 128))


def test_a_framework_adds_its_seconds_to_each_step_and_a_factor_changes_them_not() -> None:
    stated = {"framework.step_time": "3 s"}
    costs = Costs.load(train_run({**stated, "costs.training_factor": 0.5}, tensor_parallel=4))
    training = costs.training
    assert costs.step_time == pytest.approx(2 * training.optimizer_time + 3.0)
    usual = train_run(tensor_parallel=4)
    usual = replace(usual, framework=replace(usual.framework, step_time=None))
    assert TrainingCosts.load(resolve(usual)).overhead_time == 2.5


# Where the figures come from ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "tier"),
    [(gpu, "composed") for gpu in ("h100", "h800", "h200", "a100")]
    + [(gpu, "roofline") for gpu in ("h20", "h20-3e", "cpu")],
)
@pytest.mark.parametrize("model", ["qwen2.5-7b", "qwen3-30b-a3b"])
def test_only_gpus_like_those_that_were_measured_are_more_than_a_roofline(
    model: str, gpu: str, tier: str
) -> None:
    changes = {"cluster.pools.near": {"gpu": gpu, "nodes": 4}, "model.name": model}
    costs = TrainingCosts.load(resolve(train_run(changes, tensor_parallel=4)))
    source = costs.provenance.sources[0]
    assert costs.provenance.tier == tier
    assert (costs.provenance.error is None) == (tier == "roofline")
    assert ("published steps" in source) == (gpu != "cpu")
    assert ("unmeasured" in source) == (gpu == "cpu")
    assert ("no training was measured" in source) == (gpu in ("h20", "h20-3e"))


@pytest.mark.parametrize(("model", "kind"), [("qwen2.5-7b", "dense"), ("qwen3-30b-a3b", "mixture")])
def test_a_source_says_how_far_the_fit_missed_models_that_it_had_not_seen(
    model: str, kind: str
) -> None:
    costs = train_costs({"model.name": model})
    (source,) = costs.provenance.sources
    found = FIT.held_out[kind]
    assert f"{kind} models left out: {found.median:.1%} in median, {found.p90:.1%} at p90" in source
    assert costs.provenance.error == found.median
    assert f"{FIT.rows} published steps" in source and GEMM.source in source
    assert (EXPERTS.source in source) == (kind == "mixture")


def test_a_stated_efficiency_is_used_as_it_is_and_says_that_the_run_file_states_it() -> None:
    run = train_run(efficiency=0.3, tensor_parallel=4, recompute="full")
    costs, model = TrainingCosts.load(resolve(run)), load_model(run.model)
    flops = 3 * model.forward_flops(1000, 1000**2 / 2)
    assert costs.train_time([1000]) == pytest.approx(flops / (0.3 * 4 * 989.5e12))
    assert costs.provenance.tier == "roofline"
    assert costs.provenance.sources == ("run file: trainer.efficiency=0.3 of peak FLOP/s",)


def test_32_bit_training_was_not_measured() -> None:
    costs = train_costs({"model.dtype": "float32"}, tensor_parallel=4)
    assert costs.provenance.tier == "roofline"
    assert (
        "training_efficiency=0.4" in costs.provenance.sources[0]
        and "unmeasured" in costs.provenance.sources[0]
    )


@pytest.mark.parametrize("dtype", ["fp8", "int4"])
def test_a_dtype_that_nothing_trains_in_is_refused(dtype: str) -> None:
    with pytest.raises(ValueError, match=f"model.dtype must be one of .*, got '{dtype}'"):
        train_run({"model.dtype": dtype})


def test_a_run_takes_its_training_seconds_and_tiers_from_here() -> None:
    run = train_run(PPO, tensor_parallel=4)
    costs, training = Costs.load(run), TrainingCosts.load(resolve(run))
    line = costs.line()
    assert line.score([900, 80], 0.0) == pytest.approx(training.score_time([900, 80]))
    assert costs.step_time == training.optimizer_time
    assert costs.provenance["train"].tier == costs.provenance["score"].tier == "composed"


@pytest.mark.parametrize(
    ("changes", "trainer", "parts"),
    [
        ({}, {"tensor_parallel": 16}, ["trainer.tensor_parallel", "8 GPUs of a node", "16"]),
        ({}, {"tensor_parallel": 3}, ["trainer.tensor_parallel", "8 GPUs of a node", "3"]),
        ({}, {"pipeline_parallel": 32}, ["trainer.pipeline_parallel", "28 layers", "32"]),
        (
            {},
            {"pipeline_parallel": 4, "virtual_stages": 8},
            ["trainer.virtual_stages=8 x pipeline_parallel=4", "28 layers"],
        ),
        ({}, {"expert_parallel": 4}, ["trainer.expert_parallel", "= 1", "4"]),
        (
            {},
            {"expert_parallel": 4, "data_parallel": 4},
            ["trainer.expert_parallel", "no experts", "4"],
        ),
        ({}, {"efficiency": 1.5}, ["trainer.efficiency", "(0, 1]", "1.5"]),
        ({}, {"zero": 4}, ["trainer.zero", "0, 1, 2, 3", "4"]),
        ({}, {"recompute": "some"}, ["trainer.recompute", "none, selective, mlp, full", "'some'"]),
        ({}, {"kernels": "slow"}, ["trainer.kernels", "fused, uncompiled, eager", "'slow'"]),
    ],
)
def test_degrees_that_no_trainer_can_have_are_refused_by_key_and_value(
    changes: dict[str, Any], trainer: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises(ValueError) as caught:
        Costs.load(train_run(changes, **trainer))
    assert all(part in str(caught.value) for part in parts), str(caught.value)


@pytest.mark.parametrize("key", ["collective", "activation_traffic", "flops"])
def test_a_profile_with_a_wrong_figure_is_refused_by_file_and_key(tmp_path: Path, key: str) -> None:
    path = tmp_path / "training.toml"
    path.write_text(PATH.read_text().replace(f"\n{key} = ", f"\n{key} = -", 1))
    with pytest.raises(ValueError, match=rf"training\.toml: {key} must be positive"):
        load_training_profile(path)


def test_a_gpu_with_little_arithmetic_and_much_bandwidth_comes_closer_to_its_peak() -> None:
    def share_of_peak(gpu: str) -> float:
        run = train_run({"cluster.pools.near": {"gpu": gpu, "nodes": 4}}, tensor_parallel=4)
        flops = load_model(run.model).forward_flops(3 * 1000, 3 * 1000**2 / 2)
        peak = 4 * load_gpu(gpu).flops["bfloat16"]
        return flops / peak / TrainingCosts.load(resolve(run)).train_time([1000])

    shares = {gpu: share_of_peak(gpu) for gpu in ("h100", "a100", "h20")}
    assert sorted(shares, key=lambda gpu: shares[gpu]) == ["h100", "a100", "h20"]
    assert all(math.isfinite(share) and 0.05 < share < 0.8 for share in shares.values())


@pytest.mark.parametrize(("pcie", "nvlink"), [("a100-pcie", "a100"), ("h100-pcie", "h100")])
def test_a_card_on_pcie_does_not_train_a_mixture_faster_than_its_silicon_on_nvlink(
    pcie: str, nvlink: str
) -> None:
    slow, fast = (
        train_costs(
            {**MIXTURE, "cluster.pools.near": {"gpu": gpu, "nodes": 2}},
            data_parallel=16,
            zero=3,
        ).train_time([2000] * 64)
        for gpu in (pcie, nvlink)
    )
    assert slow > fast


def test_a_measured_efficiency_is_not_slowed_down_once_more() -> None:
    named = {"framework.name": "nemo-rl", "framework.transfer_time": "0 s"}
    own, others = (
        [
            train_costs(changes, zero=1, **more).line().train([2048], 0.0)
            for changes in (None, named)
        ]
        for more in ({"efficiency": 0.4}, {})
    )
    assert own[0] == own[1]
    assert others[1] > others[0]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_tensor_ranks_without_sequence_parallelism_each_compute_norms_and_residuals(
    recompute: str,
) -> None:
    split, plain = (
        a_layer(tensor_parallel=4, sequence_parallel=is_split, recompute=recompute)
        for is_split in (True, False)
    )
    moved = CONSTANTS.activation_traffic * 2 * 4 * 3584 * MICRO[0] / H800.memory_bandwidth
    assert seconds(plain.forward()) - seconds(split.forward()) == pytest.approx(moved * 3 / 4)
    wire = MICRO[0] * 4 * 3 / 4 * 3584 * 2 / H800.nvlink * CONSTANTS.reduce
    passes = 2 if recompute == "none" else 3
    more = seconds(plain.backward()) - seconds(split.backward())
    assert more == pytest.approx(passes * moved * 3 / 4 - 0.5 * wire)


# The loss of a framework --------------------------------------------------------------------------

NEMO = {"framework.name": "nemo-rl", "framework.transfer_time": "0 s"}


@pytest.mark.parametrize(
    ("changes", "counted"),
    [
        ({"framework.version": "0.3", "trainer.zero": 1}, (54, 54, 58, 16)),
        ({"framework.version": "0.5", "trainer.zero": 1}, (46, 46, 18, 16)),
        ({"trainer.zero": 1}, (46, 46, 18, 16)),
        ({"trainer.zero": 3}, (22, 22, 42, 16)),
        ({"trainer.zero": 1, "trainer.logits": "chunked"}, (0, 0, 0, 0)),
    ],
)
def test_log_probs_and_the_loss_of_a_framework_move_the_bytes_that_were_counted(
    changes: dict[str, Any], counted: tuple[float, ...]
) -> None:
    run = train_run({**NEMO, **changes}, tensor_parallel=4)
    scored, forward, backward = loss_passes(Ranks.of(resolve(run).trainer))
    second = 152064 / 4 / (0.8 * H800.memory_bandwidth)
    seconds_each = (scored.per_token, forward.per_token, backward.per_token, backward.per_repeat)
    assert tuple(each / second for each in seconds_each) == pytest.approx(counted)


def test_a_counted_loss_replaces_the_softmax_of_the_head_on_the_last_stage() -> None:
    loss = load_framework("nemo-rl").losses[1]
    layer = a_layer(kernels="fused", logits="eager")
    bare = replace(layer, ranks=replace(layer.ranks, loss=loss)).head()
    softmax = CONSTANTS.eager_traffic * CONSTANTS.logit_traffic * 152064 / H800.memory_bandwidth
    assert layer.head().per_token - bare.per_token == pytest.approx(softmax)
    stages = train_costs(NEMO, zero=1, pipeline_parallel=4).stages
    assert [one.per_repeat > 0 for one in stages.backward] == [False] * 3 + [True]


def test_a_loss_that_takes_one_sequence_at_a_time_fills_all_logits_for_each() -> None:
    short, long = (
        train_costs(NEMO, zero=1, max_tokens_per_pass=4096, micro_batch=64).stages.backward_times(
            [(4096, 0.0, 4096 * count)]
        )
        for count in (8, 1)
    )
    second = 152064 / (0.8 * H800.memory_bandwidth)
    assert float(short.sum() - long.sum()) == pytest.approx(7 * 4096 * 16 * second)


def test_a_measured_efficiency_has_the_loss_in_it() -> None:
    stages = train_costs(NEMO, zero=1, efficiency=0.4).stages
    assert stages.backward[-1].per_repeat == 0
