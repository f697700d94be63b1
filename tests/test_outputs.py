"""Logits a chunk at a time: the log-probabilities, entropies and gradients of all at once, in less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel

from streamrl.executor.trainer import model_loading as half_experts
from streamrl.executor.trainer.model_loading import follow_autocast
from streamrl.executor.trainer.passes import (
    attend_apart,
    check_chunks,
    output_logprobs,
    outputs_with_entropy,
)
from streamrl.hardware.model_types import EXECUTED_TYPES
from streamrl.runfile.roles_config import Packing
from tests.test_passes import (
    NOT_PACKED,
    TEMPERATURE,
    VOCABULARY,
    gradient,
    make_model,
    make_sequences,
)

CHUNK = 7
CAPPED = {"gemma3_text": {"final_logit_softcapping": 2.0}, "cohere": {"logit_scale": 0.3}}
"""What models do to their logits after the output layer."""


@pytest.mark.parametrize("kind", sorted({*EXECUTED_TYPES, *CAPPED} - {*NOT_PACKED}))
@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_chunks_have_the_log_probabilities_and_the_gradient_of_all_at_once(
    kind: str, packing: Packing
) -> None:
    model, sequences = make_model(kind, **CAPPED.get(kind, {})), make_sequences(1)
    if packing == "packed":
        attend_apart(model)
    found = []
    for chunk in (None, CHUNK):
        how = {"packing": packing, "chunk": chunk}
        alone = output_logprobs(model, sequences, TEMPERATURE, **how)
        logprobs, entropies = outputs_with_entropy(model, sequences, TEMPERATURE, **how)
        torch.testing.assert_close(alone, logprobs)
        (logprobs + 0.3 * entropies).sum().backward()
        found.append((logprobs.detach(), entropies.detach(), gradient(model)))
    for whole, chunked in zip(*found, strict=True):
        torch.testing.assert_close(chunked, whole, atol=2e-5, rtol=2e-5)


def test_no_more_logits_exist_than_those_of_a_chunk() -> None:
    model, sequences = make_model("qwen2"), make_sequences(1)
    made: dict[bool, list[int]] = {}
    for in_chunks in (False, True):
        rows = made.setdefault(in_chunks, [])
        hook = model.lm_head.register_forward_hook(
            lambda *call, rows=rows: rows.append(call[-1].flatten(0, -2).shape[0])
        )
        kept: list[torch.Size] = []

        def keep(tensor: torch.Tensor, kept: list[torch.Size] = kept) -> torch.Tensor:
            kept.append(tensor.shape)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            logprobs = output_logprobs(
                model, sequences, TEMPERATURE, "padded", chunk=CHUNK if in_chunks else None
            )
        of_head = model.lm_head.weight.T.shape
        of_logits = [shape for shape in kept if shape[-1:] == (VOCABULARY,) and shape != of_head]
        assert bool(of_logits) is not in_chunks
        logprobs.sum().backward()
        hook.remove()
    num = sum(sequence.num_trained for sequence in sequences)
    chunks = [CHUNK] * (num // CHUNK) + [num % CHUNK]
    assert made[False] == [num]
    assert made[True][:1] == [1]
    assert sorted(made[True][1:]) == sorted(chunks * 2)


def test_chunks_in_half_precision_are_those_of_all_at_once() -> None:
    model, sequences = make_model("qwen2"), make_sequences(1)
    attend_apart(model)
    whole, chunked = (
        output_logprobs(
            model,
            sequences,
            TEMPERATURE,
            "packed",
            torch.bfloat16,
            chunk=CHUNK if in_chunks else None,
        )
        for in_chunks in (False, True)
    )
    assert whole.shape == chunked.shape
    torch.testing.assert_close(chunked, whole, atol=2e-2, rtol=2e-2)


def test_a_model_without_a_base_is_refused() -> None:
    model: Any = BertModel(BertConfig(num_hidden_layers=1))
    with pytest.raises(ValueError, match=r"^trainer\.logits must be 'eager' for this model"):
        check_chunks(model)


def test_experts_compute_in_the_format_of_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sequences = make_model("qwen3_moe"), make_sequences(1)
    formats = set()
    grouped = half_experts.grouped_mm_experts_forward

    def seen(module: Any, hidden: torch.Tensor, *routed: Any) -> torch.Tensor:
        formats.add((module.gate_up_proj.dtype, module.down_proj.dtype, hidden.dtype))
        return grouped(module, hidden, *routed)

    monkeypatch.setattr(half_experts, "grouped_mm_experts_forward", seen)
    follow_autocast(model)
    whole = output_logprobs(model, sequences, TEMPERATURE, "padded")
    assert formats == {(torch.float32,) * 3}
    formats.clear()
    half = output_logprobs(model, sequences, TEMPERATURE, "padded", torch.bfloat16)
    assert formats == {(torch.bfloat16,) * 3}
    half.sum().backward()
    experts = model.model.layers[0].mlp.experts
    assert experts.gate_up_proj.grad.dtype == torch.float32
    assert float(experts.gate_up_proj.grad.abs().max()) > 0
    assert float((half - whole).norm()) <= 0.05 * float(whole.norm())
