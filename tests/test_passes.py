"""Packed passes of the trainer: each rollout alone, as padded ones compute it, on every architecture that is known."""

from __future__ import annotations

import contextlib
import inspect
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from streamrl.executor import attention
from streamrl.executor.pretrained import load_pretrained, load_reward_model
from streamrl.executor.tokens import ID, LOGPROB
from streamrl.executor.trainer.context import ContextRanks, ContextShare
from streamrl.executor.trainer.passes import FILLED_TO, attend_apart, output_logprobs, passes
from streamrl.executor.trainer.sequences import TokenSequence
from streamrl.hardware.model_types import EXECUTED_TYPES
from tests.tiny_model import save_tiny_model, save_tiny_reward_model

VOCABULARY, TEMPERATURE, WINDOW = 40, 0.8, 8
HALF_ERROR = 5e-3
"""Of results in bfloat16 whose sums are taken in another order, as a share of their norm."""
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "head_dim": 8,
    "initializer_range": 0.2,
}
OWN: dict[str, dict[str, Any]] = {
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "mistral": {"sliding_window": WINDOW},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 12,
    },
}
"""What makes a model of each type other than the plainest: windows shorter than rollouts, experts, latent attention."""


def make_model(kind: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    table = {**SHAPE, **OWN.get(kind, {}), **changes}
    if kind == "deepseek_v3":
        del table["head_dim"]  # it derives it
    models: Any = AutoModelForCausalLM
    return models.from_config(
        AutoConfig.for_model(kind, **table), attn_implementation="sdpa"
    ).eval()


def make_sequences(seed: int, count: int = 12) -> list[TokenSequence]:
    """Rollouts of 1 to 30 tokens after prompts of 1 to 12, with a token of a tool's here and there."""
    rng = random.Random(seed)
    found = []
    for rollout in range(count):
        tokens = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 30))]
        found.append(
            TokenSequence(
                rollout=rollout,
                prompt=np.array([rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 12))], ID),
                tokens=np.array(tokens, ID),
                logprobs=np.zeros(len(tokens), LOGPROB),
                is_policy=np.array([True, *(rng.random() < 0.8 for _ in tokens[1:])]),
                advantage=rng.gauss(0, 1),
            )
        )
    return found


def gradient(model: Any) -> torch.Tensor:
    """Take the gradient of all parameters, which is then none."""
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return found


NOT_PACKED = {
    "gpt_oss": "does not support .*scaled_dot_product_attention",
    "qwen3_next": "trainer.packing must be 'padded' for this model",
}
"""What attends with sinks, and what mixes tokens by more than attention."""


@pytest.mark.parametrize("kind", NOT_PACKED)
def test_what_cannot_be_packed_is_refused_in_a_line(kind: str) -> None:
    with pytest.raises(ValueError, match=NOT_PACKED[kind]):
        attend_apart(make_model(kind))


@pytest.mark.parametrize("kind", [kind for kind in EXECUTED_TYPES if kind not in NOT_PACKED])
def test_packed_rollouts_have_the_log_probabilities_and_the_gradient_of_padded_ones(
    kind: str,
) -> None:
    model, sequences = make_model(kind), make_sequences(1)
    padded = output_logprobs(model, sequences, TEMPERATURE, "padded")
    padded.sum().backward()
    expected = gradient(model)
    attend_apart(model)
    packed = output_logprobs(model, sequences, TEMPERATURE, "packed")
    torch.testing.assert_close(packed, padded, atol=2e-5, rtol=2e-5)
    packed.sum().backward()
    torch.testing.assert_close(gradient(model), expected, atol=2e-4, rtol=2e-4)


def test_a_pass_in_half_precision_is_filled_up_and_what_fills_it_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, sequences = make_model("qwen2"), make_sequences(1)
    attend_apart(model)
    computed = list[tuple[int, ...]]()
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        layer.register_forward_hook(lambda *call: computed.append(tuple(call[-1].shape[:2])))
    found = []
    for multiple in (FILLED_TO, 1):
        monkeypatch.setattr("streamrl.executor.trainer.passes.FILLED_TO", multiple)
        logprobs = output_logprobs(model, sequences, TEMPERATURE, "packed", torch.bfloat16)
        logprobs.sum().backward()
        found.append((logprobs.detach(), gradient(model)))
    tokens = sum(s.length - 1 for s in sequences)  # the last one is not computed
    outputs = sum(s.num_trained for s in sequences)
    full = [(1, -(-count // FILLED_TO) * FILLED_TO) for count in (tokens, outputs)]
    assert computed == [*full, (1, tokens), (1, outputs)]
    for filled, bare in zip(*found, strict=True):
        assert filled.shape == bare.shape
        assert float((filled - bare).norm()) <= HALF_ERROR * float(bare.norm())


def test_packed_passes_are_full_of_tokens_and_padded_ones_of_rows() -> None:
    sequences = make_sequences(2, count=40)
    for room in (50, 120):
        for packing in ("packed", "padded"):
            found = list(passes(sequences, room, packing))
            flat = [sequence for some in found for sequence in some]
            assert sorted(s.rollout for s in flat) == list(range(40))
            assert [s.length for s in flat] == sorted((s.length for s in flat), reverse=True)
            taken = [
                [s.length if packing == "packed" else some[0].length for s in some]
                for some in found
            ]
            for those, after in zip(taken, found[1:], strict=False):
                next_one = after[0].length if packing == "packed" else those[0]
                assert sum(those) <= room < sum(those) + next_one
    assert [len(some) for some in passes(sequences[:3], 1, "packed")] == [1, 1, 1]


@pytest.mark.parametrize("window", [None, WINDOW])
def test_one_call_for_all_rollouts_attends_as_one_call_for_each(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    lengths, calls = [11, 3, 20], []
    bounds = torch.tensor([0, 11, 14, 34], dtype=torch.int32)
    query, key, value = (torch.randn(1, heads, 34, 8) for heads in (4, 2, 2))
    own: dict[str, Any] = {"lengths": lengths, "bounds": bounds, "window": window, "scaling": 0.3}
    apart = attention.attend_packed(query, key, value, **own)

    def varlen(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seq_q: torch.Tensor,
        cu_seq_k: torch.Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float,
        window_size: tuple[int, int],
        enable_gqa: bool,
    ) -> torch.Tensor:
        """Attention of many sequences as torch documents it: those up to `window_size[0]` before a token."""
        calls.append((max_q, max_k))
        starts = cu_seq_q.tolist()
        assert starts == cu_seq_k.tolist() and enable_gqa and window_size[1] == 0
        token = torch.arange(len(query))
        sequence = torch.bucketize(token, cu_seq_q[1:].long(), right=True)
        distance = token[:, None] - token[None, :]
        seen = (sequence[:, None] == sequence[None, :]) & (distance >= 0)
        if window_size[0] >= 0:
            seen &= distance <= window_size[0]
        by_head = (each.transpose(0, 1)[None] for each in (query, key, value))
        return torch.nn.functional.scaled_dot_product_attention(
            *by_head, attn_mask=seen, scale=scale, enable_gqa=True
        )[0].transpose(0, 1)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen)
    monkeypatch.setattr(attention, "varlen_kernel", lambda *_: attention._by_torch)
    together = attention.attend_packed(query, key, value, **own)
    assert calls == [(20, 20)]
    torch.testing.assert_close(together, apart)


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("has_kernel", [False, True])
def test_context_ranks_attend_together_as_one_rank_does(
    window: int | None, has_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    lengths, size = [11, 3, 22], 3
    bounds = torch.tensor([0, 11, 14, 36], dtype=torch.int32)
    query, key, value = (torch.randn(1, heads, 36, 8) for heads in (4, 2, 2))
    own: dict[str, Any] = {"lengths": lengths, "window": window, "scaling": 0.3}
    alone = attention.attend_packed(query, key, value, bounds=bounds, **own)
    if has_kernel:
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", _of_different_lengths)
        monkeypatch.setattr(attention, "varlen_kernel", lambda *_: attention._by_torch)
    monkeypatch.setattr(ContextShare, "whole", lambda _, tensor: tensor)  # no process group
    computed = []
    for rank in range(size):
        share = ContextShare(ContextRanks(None, rank, size), 36)
        tokens = share.indices()
        assert len(tokens) == 12
        computed.append((tokens, share.attend(query[:, :, tokens], key, value, **own)))
    together = torch.empty_like(alone)
    for tokens, attended in computed:
        together[:, tokens] = attended
    assert sorted(torch.cat([tokens for tokens, _ in computed]).tolist()) == list(range(36))
    torch.testing.assert_close(together, alone)


def _of_different_lengths(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    *_: int,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> torch.Tensor:
    """Attention of sequences with fewer queries than keys, as flash attention documents it: both end together."""
    parts = []
    for number in range(len(cu_seq_q) - 1):
        own = query[cu_seq_q[number] : cu_seq_q[number + 1]]
        keys, values = (each[cu_seq_k[number] : cu_seq_k[number + 1]] for each in (key, value))
        behind = torch.arange(len(own))[:, None] + len(keys) - len(own) - torch.arange(len(keys))
        seen = behind >= 0 if window_size[0] < 0 else (behind >= 0) & (behind <= window_size[0])
        by_head = (each.transpose(0, 1)[None] for each in (own, keys, values))
        attended = torch.nn.functional.scaled_dot_product_attention(
            *by_head, attn_mask=seen, scale=scale, enable_gqa=enable_gqa
        )
        parts.append(attended[0].transpose(0, 1))
    return torch.cat(parts)


def test_the_values_of_all_context_ranks_are_those_of_the_sampled_tokens_in_order() -> None:
    positions, size, num_tokens = torch.tensor([3, 4, 5, 17, 23]), 2, 24
    shares = [ContextShare(ContextRanks(None, rank, size), num_tokens) for rank in range(size)]
    gathered, of_rank = [], [share.own_positions(positions) for share in shares]
    for share, (own, _, mine) in zip(shares, of_rank, strict=True):
        tokens = share.indices()[own]
        assert len(own) == len(mine) == 4
        gathered.append(tokens)
        is_own = torch.isin(positions[mine], share.indices())
        assert (tokens == positions[mine])[is_own].all()
    for _, places, _ in of_rank:
        assert torch.equal(torch.cat(gathered)[places], positions)


def test_the_kernel_for_all_rollouts_takes_what_it_is_given() -> None:
    from torch.nn.attention.varlen import varlen_attn

    named = {"scale": None, "window_size": (-1, 0), "enable_gqa": True}
    if attention.has_varlen():
        inspect.signature(varlen_attn).bind(*range(7), **named)
    half = torch.empty(1, 4, 8, 64, dtype=torch.bfloat16)
    assert attention.varlen_kernel(half, half) is None, "none on a CPU"


def test_a_model_whose_tokens_mix_by_other_ways_than_attention_is_refused() -> None:
    model = make_model("llama")
    layer = model.model.layers[0].mlp
    layer.register_forward_hook(lambda _, args, output: output + args[0].cumsum(1))
    with pytest.raises(
        ValueError, match=r"^trainer\.packing must be 'padded' for this model: pack"
    ):
        attend_apart(model)


@pytest.mark.parametrize(("dtype", "is_refused"), [("float32", True), ("bfloat16", False)])
def test_a_difference_of_a_few_roundings_is_no_mixing(dtype: str, is_refused: bool) -> None:
    model = make_model("llama").to(getattr(torch, dtype))
    scale = iter((1.0, 1.0, 1.018))  # of each rollout alone, and of both together
    model.get_output_embeddings().register_forward_hook(lambda _, __, logits: logits * next(scale))
    context = (
        pytest.raises(ValueError, match="packed rollouts change")
        if is_refused
        else contextlib.nullcontext()
    )
    with context:
        attend_apart(model)


def test_a_model_whose_attention_is_its_own_is_refused() -> None:
    model = make_model("llama")
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match=r"^trainer\.packing must be 'padded' for this model: its"):
        attend_apart(model)


@pytest.mark.parametrize("load", [load_pretrained, load_reward_model])
def test_no_attention_is_planned_anew_for_every_length(load: Any, tmp_path: Path) -> None:
    judge = save_tiny_reward_model(tmp_path / "model", ["<pad>", "<eos>", *"0123456789"])
    save_tiny_model(tmp_path / "policy", ["<pad>", "<eos>", *"0123456789"])
    torch.backends.cuda.enable_cudnn_sdp(True)
    if load is load_pretrained:
        load(str(tmp_path / "policy"))
    else:
        load(str(judge), by_token=False)
    assert not torch.backends.cuda.cudnn_sdp_enabled()
