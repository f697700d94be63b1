"""Run the trainer's forward passes: pack or pad rollouts, and compute log-probabilities and entropies of their tokens.

`trainer.packing` decides how rollouts form a pass:

| packing | tokens of a pass                          | attention                                             |
|---------|-------------------------------------------|-------------------------------------------------------|
| packed  | (1, tokens): one rollout after the other  | `attend_rollouts`: each attends only to itself        |
| padded  | (rollouts, longest): padded on the right  | the model's own causal attention                      |

All other layers work token by token, so both have the same gradient. Packed passes have no padding, except on a CPU
(`FILLED_TO`).

`trainer.logits` decides how many logits exist at once:

| trainer.logits  | logits that exist at once                                                    |
|-----------------|------------------------------------------------------------------------------|
| eager           | those of all tokens of a pass                                                |
| chunked, fused  | those of a chunk; the backward pass computes them again                      |

The output layer runs only at positions before a sampled token. So prompts, padding and tool output need no logits.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.utils import ModelOutput

from streamrl.executor.attention import attend_packed
from streamrl.executor.expert_choices import UNKNOWN
from streamrl.executor.router_replay import routers_of
from streamrl.executor.sampling import WHOLE, Truncation
from streamrl.executor.tokens import Ids
from streamrl.executor.trainer.context import ContextRanks, ContextShare, context_of
from streamrl.executor.trainer.losses import token_entropies, token_logprobs
from streamrl.executor.trainer.sequences import TokenSequence
from streamrl.runfile.roles_config import Packing

PADDING = 0
"""Any token id: padding is on the right, where causal attention never reads it."""
PACKED = "streamrl_packed"
"""Name of this attention in transformers' registry."""
FILLED_TO = 64
"""On a CPU in half precision, the tokens and the output positions of a packed pass are multiples of this.

oneDNN compiles and caches its kernels for each new number of tokens. Without filling this took a third of training.
"""
PACKED_ERROR = 1e-3
"""Largest allowed difference between packed and single logits, relative to the largest logit; kernels differ by 1e-5."""
PACKED_ROUNDINGS = 16
"""The same in roundings of the weights' format, for half precision.

Two kernels round each of the 2 L blocks of L layers differently. Independent roundings of size u add up to sqrt(2 L) u: 16 u
with 128 layers. In bfloat16 u is 2^-8, so the limit is 0.06. Models there differ by 0.006 to 0.018. Where other layers mix
tokens, logits change by a multiple of the limit.
"""


def passes(
    sequences: list[TokenSequence], max_tokens: int, packing: Packing
) -> Iterator[list[TokenSequence]]:
    """Yield sequences in order of decreasing length, in lists of at most `max_tokens` tokens, padding included."""
    some = list[TokenSequence]()
    filled = 0
    for sequence in sorted(sequences, key=lambda s: (-s.length, s.rollout)):
        taken = sequence.length if packing == "packed" else (some or [sequence])[0].length
        if some and filled + taken > max_tokens:
            yield some
            some, filled, taken = [], 0, sequence.length
        some.append(sequence)
        filled += taken
    if some:
        yield some


class PassInputs(NamedTuple):
    """What a model computes in one pass of this rank."""

    inputs: dict[str, Any]
    """Its keyword arguments."""
    positions: torch.Tensor
    """Flattened positions before each sampled token, in the order of the sequences. If they are filled up
    (`FILLED_TO`), zeros follow."""
    tokens: torch.Tensor
    """The sampled token after each position."""
    share: ContextShare | None
    """The part of the pass that this rank computes; None if it computes all."""
    places: torch.Tensor
    """For each sampled token of the sequences, [n], its index among the computed ones of all context ranks."""
    experts: torch.Tensor | None
    """Recorded experts of each token of the pass, [tokens, layers, experts per token]; None if there are none."""

    def of_all(self, values: torch.Tensor) -> torch.Tensor:
        """Return values of all sampled tokens of the sequences, [n, …], from those at `positions`."""
        if self.share is not None:
            return self.share.all_values(values, self.places)
        return values[: len(self.places)]


def inputs_of(
    sequences: list[TokenSequence],
    packing: Packing,
    device: torch.device,
    dtype: torch.dtype,
    ranks: ContextRanks | None = None,
) -> PassInputs:
    """Return a model's inputs for sequences; with context ranks, those of the part that this rank computes."""
    filled = FILLED_TO if device.type == "cpu" and dtype != torch.float32 else 1
    multiple = filled if ranks is None else math.lcm(filled, ranks.multiple)
    computed = [np.concatenate([s.prompt, s.tokens[:-1]]) for s in sequences]
    if packing == "packed":
        inputs, starts = _packed(computed, device, multiple)
    else:
        inputs, starts = _padded(computed, device)
    positions = flat(
        [
            start + len(sequence.prompt) - 1 + np.flatnonzero(sequence.is_policy)
            for start, sequence in zip(starts, sequences, strict=True)
        ]
    )
    sampled = flat([sequence.tokens[sequence.is_policy] for sequence in sequences]).long()
    places, share = torch.arange(len(positions)), None
    if ranks is not None:
        share = ContextShare(ranks, inputs["input_ids"].shape[1])
        inputs = share.inputs_of(inputs)
        own, places, mine = share.own_positions(positions)
        positions, sampled = own, sampled[mine]
    size = len(positions) + -len(positions) % filled
    return PassInputs(
        inputs,
        fill_up(positions, size).to(device),
        fill_up(sampled, size).to(device),
        share,
        places,
        _experts_of(sequences, starts, inputs["input_ids"].numel(), device),
    )


def _experts_of(
    sequences: list[TokenSequence], starts: list[int], num_tokens: int, device: torch.device
) -> torch.Tensor | None:
    """Return the recorded experts of the sequences, at their places in a flattened pass of `num_tokens`."""
    known = [
        (s.experts, at) for s, at in zip(sequences, starts, strict=True) if s.experts is not None
    ]
    if not known:
        return None
    laid_out = np.full((num_tokens, *known[0][0].shape[1:]), UNKNOWN, np.int16)
    for experts, start in known:
        laid_out[start : start + len(experts)] = experts
    return torch.from_numpy(laid_out).to(device)


def fill_up(numbers: torch.Tensor, size: int) -> torch.Tensor:
    """Append zeros to numbers, [n], until there are `size`."""
    return torch.nn.functional.pad(numbers, (0, size - len(numbers)))


def flat(parts: list[npt.NDArray[Any]]) -> torch.Tensor:
    """Concatenate arrays."""
    return torch.from_numpy(np.concatenate(parts))


def attend_apart(model: Any, *, is_blank: bool = False) -> None:
    """Make rollouts of a packed pass attend only to themselves.

    Raises `ValueError` if other layers of the model mix tokens too. A model without weights is not tested, because
    another process tests the real one.
    """
    rollouts = [np.arange(1, 1 + length) % model.config.vocab_size for length in (5, 3)]
    remedy = "trainer.packing must be 'padded' for this model"
    if model.config._attn_implementation != "sdpa":
        raise ValueError(f"{remedy}: its attention cannot be replaced by the packed implementation")
    if is_blank:
        _replace_attention(model)
        return
    alone = torch.cat([_logits(model, *_padded([tokens], model.device)) for tokens in rollouts])
    _replace_attention(model)
    difference = float((_logits(model, *_packed(rollouts, model.device)) - alone).abs().max())
    roundings = PACKED_ROUNDINGS * torch.finfo(model.dtype).eps / 2
    if not difference <= max(PACKED_ERROR, roundings) * float(alone.abs().max()):
        raise ValueError(f"{remedy}: packed rollouts change each other's logits by {difference:g}")


def _replace_attention(model: Any) -> None:
    AttentionInterface.register(PACKED, attend_rollouts)
    model.set_attn_implementation(PACKED)


def attend_rollouts(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention of each rollout to itself, as transformers calls an attention.

    `query` is (1, heads, tokens, size); the result is (1, tokens, heads, size).
    """
    lengths, bounds = kwargs["rollout_lengths"], kwargs["rollout_bounds"]
    share: ContextShare | None = kwargs.get("rollout_context")
    if share is not None:
        attended = share.attend(
            query, key, value, lengths=lengths, window=sliding_window, scaling=scaling
        )
        return attended, None
    attended = attend_packed(
        query,
        key,
        value,
        lengths=lengths,
        bounds=bounds,
        window=sliding_window,
        scaling=scaling,
    )
    return attended, None


def _packed(
    rollouts: list[Ids], device: torch.device, multiple: int = 1
) -> tuple[dict[str, Any], list[int]]:
    """Return a model's inputs for concatenated rollouts, and the start of each.

    A dummy rollout at the end fills them up to a multiple of `multiple` tokens.
    """
    starts = np.cumsum([0, *map(len, rollouts[:-1])]).tolist()
    filling = -sum(map(len, rollouts)) % multiple
    if filling:
        rollouts = [*rollouts, np.full(filling, PADDING, dtype=rollouts[0].dtype)]
    lengths = [len(tokens) for tokens in rollouts]
    bounds = np.cumsum([0, *lengths], dtype=np.int32)
    inputs = {
        "input_ids": flat(rollouts).long()[None].to(device),
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None].to(device),
        "rollout_lengths": lengths,
        "rollout_bounds": torch.from_numpy(bounds).to(device),
    }
    return inputs, starts


def _padded(rollouts: list[Ids], device: torch.device) -> tuple[dict[str, Any], list[int]]:
    """Return a model's inputs for rollouts in padded rows, and the start of each in the flattened batch."""
    width = max(map(len, rollouts))
    padded = np.full((len(rollouts), width), PADDING, dtype=np.int64)
    for row, tokens in zip(padded, rollouts, strict=True):
        row[: len(tokens)] = tokens
    inputs = {"input_ids": torch.from_numpy(padded).to(device)}
    return inputs, [row * width for row in range(len(rollouts))]


@torch.no_grad()
def _logits(model: Any, inputs: dict[str, Any], _: list[int]) -> torch.Tensor:
    """Return the logits of every token, (tokens, vocabulary)."""
    logits: torch.Tensor = model(**inputs, use_cache=False).logits
    return logits.flatten(0, 1).float()


Taking = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Computes the values that a loss needs, [n, any], from logits [n, vocabulary] and sampled tokens [n]."""


def output_logprobs(
    model: Any,
    sequences: list[TokenSequence],
    temperature: float,
    packing: Packing,
    dtype: torch.dtype = torch.float32,
    *,
    chunk: int | None = None,
    truncation: Truncation = WHOLE,
) -> torch.Tensor:
    """Compute the log-probability of each sampled token, [n], flat in the order of `sequences`.

    `model` is a causal transformers model, computed in `dtype`; packed passes need `attend_apart` first. With `chunk`,
    the logits of only so many tokens exist at once.
    """

    def taken(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return token_logprobs(logits, tokens, temperature, truncation)

    return _taken(taken, model, sequences, packing, dtype, chunk)


def outputs_with_entropy(
    model: Any,
    sequences: list[TokenSequence],
    temperature: float,
    packing: Packing,
    dtype: torch.dtype = torch.float32,
    *,
    chunk: int | None = None,
    truncation: Truncation = WHOLE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute log-probabilities as `output_logprobs` does, and the entropy of each sampling distribution, [n]."""

    def taken(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        logprobs = token_logprobs(logits, tokens, temperature, truncation)
        entropies = token_entropies(logits, temperature, truncation, tokens)
        return torch.stack([logprobs, entropies], dim=-1)

    logprobs, entropies = _taken(taken, model, sequences, packing, dtype, chunk).unbind(-1)
    return logprobs, entropies


def output_logits(
    model: Any,
    head: torch.nn.Module,
    sequences: list[TokenSequence],
    packing: Packing,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Compute the outputs of layer `head` before each sampled token, [n, number of outputs]."""
    part = inputs_of(sequences, packing, model.device, dtype, context_of(model))
    return part.of_all(_logits_of(model, head, part, dtype))


def _logits_of(
    model: Any, head: torch.nn.Module, part: PassInputs, dtype: torch.dtype
) -> torch.Tensor:
    """Compute the outputs of layer `head` at the positions of a pass."""
    _replay(model, part.experts)
    with _computed_in(dtype, model.device), _only_positions(head, part.positions):
        logits: torch.Tensor = model(**part.inputs, use_cache=False).logits
    return logits[0]


def _replay(model: Any, experts: torch.Tensor | None) -> None:
    """Set the experts of the next pass of a model whose routers were taken over."""
    if (routers := routers_of(model)) is not None:
        routers.replay(experts)


def check_chunks(model: Any) -> None:
    """Raise `ValueError` if the model's output layer cannot be called without its other layers."""
    if model.base_model is model:
        raise ValueError(
            "trainer.logits must be 'eager' for this model: its class has no base model"
        )


def _taken(
    take: Taking,
    model: Any,
    sequences: list[TokenSequence],
    packing: Packing,
    dtype: torch.dtype,
    chunk: int | None,
) -> torch.Tensor:
    """Compute the values of each sampled token, [n, any]."""
    part = inputs_of(sequences, packing, model.device, dtype, context_of(model))
    if chunk is None:
        logits = _logits_of(model, model.get_output_embeddings(), part, dtype)
        if part.share is None:
            num = len(part.places)
            return take(logits[:num], part.tokens[:num])
        return part.of_all(take(logits, part.tokens))
    whole = getattr(model, "module", model)  # DeepSpeed's engine wraps the model
    _replay(model, part.experts)
    with _computed_in(dtype, model.device):
        states, kind = _last_states(model, whole.base_model, part.inputs, part.positions)
        of_chunk = partial(_taken_of_chunk, take, whole, kind)
        parts = zip(torch.split(states, chunk), torch.split(part.tokens, chunk), strict=True)
        again = partial(checkpoint, of_chunk, use_reentrant=False, preserve_rng_state=False)
        return part.of_all(torch.cat([again(*each) for each in parts]))


def _last_states(
    model: Any, base: torch.nn.Module, inputs: dict[str, Any], positions: torch.Tensor
) -> tuple[torch.Tensor, type[ModelOutput]]:
    """Return the hidden states of these flattened positions, [n, size], and the class of the base model's output."""
    selected: list[torch.Tensor] = []
    kinds: list[type[ModelOutput]] = []

    def select(_: torch.nn.Module, __: Any, output: Any) -> Any:
        kinds.append(type(output))
        # The output layer, which comes next, then computes only one token.
        selected.append(output.last_hidden_state.flatten(0, 1)[positions])
        output.last_hidden_state = selected[0][None, :1]
        return output

    hook = base.register_forward_hook(select)
    try:
        model(**inputs, use_cache=False)
    finally:
        hook.remove()
    return selected[0], kinds[0]


def _taken_of_chunk(
    take: Taking, model: Any, kind: type[ModelOutput], states: torch.Tensor, tokens: torch.Tensor
) -> torch.Tensor:
    """Run the part of a model after its layers (output layer, scaling, soft caps) on hidden states."""
    base = model.base_model
    own = base.__dict__.get("forward")

    def states_only(*_: Any, **__: Any) -> ModelOutput:
        return kind(last_hidden_state=states[None])

    base.forward = states_only
    try:
        # `forward` alone: FSDP would gather the output layer again for each chunk.
        logits = model.forward(input_ids=tokens[None], use_cache=False).logits[0]
    finally:
        if own is None:
            del base.forward
        else:
            base.forward = own
    return take(logits, tokens)


def _computed_in(dtype: torch.dtype, device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)


@contextlib.contextmanager
def _only_positions(head: torch.nn.Module, positions: torch.Tensor) -> Iterator[None]:
    """Run the output layer only at these positions of the flattened batch, as a batch of one.

    A hook, because later operations on the logits (scaling, soft caps) must stay.
    """

    def select(_: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return args[0].flatten(0, 1)[positions].unsqueeze(0)

    # First: tensor parallelism then splits what is left.
    hook = head.register_forward_pre_hook(select, prepend=True)
    try:
        yield
    finally:
        hook.remove()
