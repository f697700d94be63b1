"""Activations and logits: closed forms of what is kept, by kind, stage and kernel."""

from __future__ import annotations

from typing import Any

import pytest

from streamrl.hardware.activations import (
    EAGER_AGAIN,
    LOGIT_CHUNK,
    activation_bytes,
    layer_activations,
    layer_bytes,
    logit_bytes,
    tokens_in_pass,
)
from streamrl.hardware.model_shape import ModelShape
from streamrl.hardware.profiles import load_model
from streamrl.runfile.cluster_config import ModelConfig
from streamrl.runfile.roles_config import TrainerConfig

SEVEN = load_model(ModelConfig(name="qwen2.5-7b"))
THIRTY = load_model(ModelConfig(name="qwen3-30b-a3b"))
DEEPSEEK = load_model(ModelConfig(name="deepseek-v3"))
WHOLE = 4 * 3584 + 2 * (28 + 4) * 128 + 3 * 18944
"""Channels of one layer of the 7B model."""


def trainer(**keys: Any) -> TrainerConfig:
    return TrainerConfig(pool="p", **{"kernels": "fused", **keys})


def kept(model: ModelShape, **keys: Any) -> list[float]:
    return activation_bytes(model, trainer(**keys), "bfloat16", 1000)


# A layer ------------------------------------------------------------------------------------------


def test_a_layer_of_four_hidden_sizes_keeps_32_bytes_a_channel_and_two_masks_fewer_than_published() -> (
    None
):
    shape = ModelShape(
        name="plain",
        source="test",
        hidden_size=3072,
        num_layers=2,
        num_heads=24,
        num_kv_heads=24,
        head_dim=128,
        intermediate_size=8192,  # gated: as many parameters as a plain one of 4 x 3072
        vocab_size=1000,
        has_qkv_bias=False,
        has_tied_embeddings=True,
    )
    everything = trainer(recompute="none")
    assert layer_bytes(shape, everything, "bfloat16") == ((34 - 2) * 3072, 0)
    assert layer_bytes(shape, everything, "float32") == (2 * (34 - 2) * 3072, 0)


def test_experts_of_a_token_count_and_the_others_do_not() -> None:
    found = layer_activations(THIRTY)
    assert found.dispatched == 8 * 2048
    assert found.projections + found.products == 8 * 3 * 768
    assert found.total == 4 * 2048 + 2 * (32 + 4) * 128 + 8 * (3 * 768 + 2048)


def test_layers_with_experts_and_without_are_averaged_and_shared_experts_count() -> None:
    found = layer_activations(DEEPSEEK)
    assert found.products == pytest.approx((3 * 18432 + 58 * (8 + 1) * 2048) / 61)
    assert found.dispatched == pytest.approx(58 * 8 * 7168 / 61)


def test_latent_attention_keeps_its_vectors_and_what_they_are_expanded_to() -> None:
    found = layer_activations(DEEPSEEK)
    assert found.expanded == 128 * (192 + 192 + 128)
    assert found.attention == 128 * 128 + 2 * 1536 + 2 * 512 + 64
    moonlight = layer_activations(load_model(ModelConfig(name="moonlight-16b-a3b")))
    assert moonlight.expanded == 16 * (192 + 128)  # its queries come from the hidden state
    assert moonlight.attention == 16 * (192 + 128) + 2 * 512 + 64


@pytest.mark.parametrize(
    ("recompute", "again"),
    [
        ("none", 0),
        ("selective", 2 * 3584 + 18944),
        ("mlp", 2 * 3584 + 3 * 18944),
        ("full", WHOLE - 3584),
    ],
)
def test_what_is_made_again_is_not_kept_and_there_for_one_layer_at_a_time(
    recompute: str, again: int
) -> None:
    assert kept(SEVEN, recompute=recompute) == [1000 * 2 * (28 * (WHOLE - again) + again)]


def test_experts_with_their_dispatch_and_expanded_vectors_are_made_again() -> None:
    for model in (THIRTY, DEEPSEEK):
        found = layer_activations(model)
        cheap = found.norms + found.expanded + found.products
        selective, mlp = (
            layer_bytes(model, trainer(recompute=kind), "bfloat16")[0]
            for kind in ("selective", "mlp")
        )
        assert selective == pytest.approx(2 * (found.total - cheap))
        assert mlp == pytest.approx(2 * (found.inputs + found.attention))


def test_eager_kernels_keep_outputs_of_experts_and_take_more_for_a_layer_made_again() -> None:
    fused, eager = (trainer(kernels=kind) for kind in ("fused", "eager"))
    one, more = (layer_bytes(SEVEN, each, "bfloat16") for each in (fused, eager))
    assert more == (one[0], one[1] * EAGER_AGAIN)
    fused, eager = (trainer(kernels=kind, recompute="none") for kind in ("fused", "eager"))
    one, more = (layer_bytes(THIRTY, each, "bfloat16") for each in (fused, eager))
    assert more[0] - one[0] == 2 * 8 * 2048


# Stages -------------------------------------------------------------------------------------------


def test_tensor_ranks_split_activations_and_the_first_of_several_stages_does_not() -> None:
    (alone,), (tensor,), pipeline = (
        kept(SEVEN, recompute="none", **degrees)
        for degrees in ({}, {"tensor_parallel": 4}, {"pipeline_parallel": 4})
    )
    assert tensor == pytest.approx(alone / 4)
    assert pipeline[0] == pytest.approx(alone)


@pytest.mark.parametrize(("recompute", "whole"), [("none", 4 * 3584), ("full", 3584)])
def test_tensor_ranks_without_sequence_parallelism_each_keep_norms_and_residuals(
    recompute: str, whole: int
) -> None:
    degrees = {"recompute": recompute, "tensor_parallel": 4}
    (split,), (plain,) = (
        kept(SEVEN, sequence_parallel=is_split, **degrees) for is_split in (True, False)
    )
    again = 0 if recompute == "none" else 3 * 3584  # other norms and residuals of one layer
    assert plain - split == pytest.approx(1000 * 2 * (1 - 1 / 4) * (28 * whole + again))


def test_a_stage_holds_one_micro_batch_for_itself_and_one_for_each_after_it() -> None:
    again = 2 * (WHOLE - 3584)
    expected = [1000 * (count * 7 * 2 * 3584 + again) for count in (4, 3, 2, 1)]
    assert kept(SEVEN, pipeline_parallel=4) == pytest.approx(expected)


def test_interleaved_slices_hold_more_than_a_plain_pipeline() -> None:
    expected = [1000 * (2 * (3 - stage) + 6 * 4 + 1) * 2 * WHOLE for stage in range(4)]
    found = kept(SEVEN, pipeline_parallel=4, virtual_stages=7, recompute="none")
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("micro_batch", "longest", "tokens"), [(2, 1000, 2000), (4, 1000, 3000), (4, 5000, 5000)]
)
def test_a_pass_holds_a_micro_batch_or_what_it_may_hold_or_one_long_rollout(
    micro_batch: int, longest: int, tokens: int
) -> None:
    keys = trainer(micro_batch=micro_batch, max_tokens_per_pass=3000)
    assert tokens_in_pass(keys, longest) == tokens


# Logits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"kernels": "eager"}, 5000 * 16),
        ({"kernels": "uncompiled"}, 5000 * 16),
        ({"kernels": "fused"}, 5000 * 4),
        ({"kernels": "eager", "logits": "fused"}, 5000 * 4),
        ({"kernels": "fused", "logits": "eager"}, 5000 * 16),
        ({"kernels": "eager", "logits": "chunked"}, LOGIT_CHUNK * 16),
    ],
)
def test_logits_take_what_the_kernels_make_of_them_unless_their_own_key_says_otherwise(
    keys: dict[str, Any], expected: int
) -> None:
    for degree in (1, 4):
        found = logit_bytes(SEVEN, trainer(tensor_parallel=degree, **keys), 5000)
        assert found == expected * 152064 / degree


def test_a_short_pass_has_no_more_logits_for_being_chunked() -> None:
    whole, chunked = (
        logit_bytes(SEVEN, trainer(logits=kind), 100) for kind in ("eager", "chunked")
    )
    assert whole == chunked
