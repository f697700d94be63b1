"""What a model says of the tokens that the policy sampled: their log-probabilities, and how sure it was.

| trainer.logits  | logits that exist at once                                                    |
|-----------------|------------------------------------------------------------------------------|
| eager           | those of all tokens of a pass                                                |
| chunked, fused  | those of a chunk, which the backward pass makes again                        |

Only positions before a token that the policy sampled reach the output layer, so that no logits exist for prompts, padding
and tools.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers.utils import ModelOutput

from streamrl.executor.trainer.losses import token_entropies, token_logprobs
from streamrl.executor.trainer.passes import fill_up, flat, inputs_of
from streamrl.executor.trainer.sequences import TokenSequence
from streamrl.runfile.sides_config import Packing

Taking = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Takes what a loss needs, [n, any], out of logits [n, vocabulary] and the tokens [n] that were sampled."""


def output_logprobs(
    model: Any,
    sequences: list[TokenSequence],
    temperature: float,
    packing: Packing,
    dtype: torch.dtype = torch.float32,
    *,
    chunk: int | None = None,
) -> torch.Tensor:
    """Return the log-probability of every token that the policy sampled, [n] flat in the order of `sequences`.

    `model` is a causal transformers model, computed in `dtype`; for packed passes `attend_apart` has prepared it. Logits
    of so many tokens as a `chunk` has exist at once, or of all.
    """

    def taken(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return token_logprobs(logits, tokens, temperature)

    return _taken(taken, model, sequences, packing, dtype, chunk)


def outputs_with_entropy(
    model: Any,
    sequences: list[TokenSequence],
    temperature: float,
    packing: Packing,
    dtype: torch.dtype = torch.float32,
    *,
    chunk: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `output_logprobs` does, and the entropy, [n], of what could have been sampled at each place."""

    def taken(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        logprobs = token_logprobs(logits, tokens, temperature)
        return torch.stack([logprobs, token_entropies(logits, temperature)], dim=-1)

    logprobs, entropies = _taken(taken, model, sequences, packing, dtype, chunk).unbind(-1)
    return logprobs, entropies


def output_logits(
    model: Any,
    head: torch.nn.Module,
    sequences: list[TokenSequence],
    packing: Packing,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return what the output layer `head` says before every token that the policy sampled, [n, its outputs]."""
    inputs, positions = inputs_of(sequences, packing, model.device, dtype)
    num = sum(sequence.num_trained for sequence in sequences)
    with _computed_in(dtype, model.device), _only_positions(head, positions):
        logits: torch.Tensor = model(**inputs, use_cache=False).logits
    return logits[0, :num]


def check_chunks(model: Any) -> None:
    """Raise `ValueError` for a model whose output layer cannot be called without what comes before it."""
    if model.base_model is model:
        raise ValueError("trainer.logits must be 'eager' for this model: it is not built of a base")


def _taken(
    take: Taking,
    model: Any,
    sequences: list[TokenSequence],
    packing: Packing,
    dtype: torch.dtype,
    chunk: int | None,
) -> torch.Tensor:
    """Return what is taken of the logits of the tokens that the policy sampled, [n, any]."""
    num = sum(sequence.num_trained for sequence in sequences)
    sampled = flat([sequence.tokens[sequence.is_policy] for sequence in sequences])
    if chunk is None:
        head = model.get_output_embeddings()
        logits = output_logits(model, head, sequences, packing, dtype)
        return take(logits, sampled.long().to(logits.device))
    inputs, positions = inputs_of(sequences, packing, model.device, dtype)
    tokens = fill_up(sampled, len(positions)).long().to(model.device)
    whole = getattr(model, "module", model)  # DeepSpeed's engine has the model in it
    with _computed_in(dtype, model.device):
        states, kind = _last_states(model, whole.base_model, inputs, positions)
        of_chunk = partial(_taken_of_chunk, take, whole, kind)
        parts = zip(torch.split(states, chunk), torch.split(tokens, chunk), strict=True)
        again = partial(checkpoint, of_chunk, use_reentrant=False, preserve_rng_state=False)
        return torch.cat([again(*each) for each in parts])[:num]


def _last_states(
    model: Any, base: torch.nn.Module, inputs: dict[str, Any], positions: torch.Tensor
) -> tuple[torch.Tensor, type[ModelOutput]]:
    """Return what the layers of a model make of these positions of the flattened batch, [n, size], and what they return."""
    found: list[torch.Tensor] = []
    kinds: list[type[ModelOutput]] = []

    def select(_: torch.nn.Module, __: Any, output: Any) -> Any:
        kinds.append(type(output))
        found.append(output.last_hidden_state.flatten(0, 1)[positions])
        output.last_hidden_state = found[0][
            None, :1
        ]  # the output layer, which comes next, has one to do
        return output

    hook = base.register_forward_hook(select)
    try:
        model(**inputs, use_cache=False)
    finally:
        hook.remove()
    return found[0], kinds[0]


def _taken_of_chunk(
    take: Taking, model: Any, kind: type[ModelOutput], states: torch.Tensor, tokens: torch.Tensor
) -> torch.Tensor:
    """Let a model do to states what it does after its layers: its output layer, scaling, soft caps."""
    base = model.base_model
    own = base.__dict__.get("forward")

    def say(*_: Any, **__: Any) -> ModelOutput:
        return kind(last_hidden_state=states[None])

    base.forward = say
    try:
        logits = model(input_ids=tokens[None], use_cache=False).logits[0]
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
    """Yield the output layer only these positions of the flattened batch, as a batch of one.

    A hook, because what a model does to its logits after this layer (scaling, soft caps) must stay.
    """

    def select(_: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return args[0].flatten(0, 1)[positions].unsqueeze(0)

    hook = head.register_forward_pre_hook(select)
    try:
        yield
    finally:
        hook.remove()
