"""Load the torch model of a replica and copy new weights into it; also build models without weights."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from inspect import signature
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from streamrl.executor.pretrained import load_pretrained
from streamrl.executor.roles import Manifest
from streamrl.executor.rollout.inference_engine import Copy, ReplicaSettings
from streamrl.executor.sampling import Sampling, truncated
from streamrl.executor.transfer.shared_memory import read_buckets

ATTENTION = "sdpa"
"""Attention implementation of a newly loaded model, as transformers names it."""
Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""Each tensor of the model with its new value in host memory."""


async def load_model(settings: ReplicaSettings, manifest: Manifest | None) -> Any:
    """Load the model and the manifest's weights, if given; also set this process's number of threads."""
    torch.set_num_threads(settings.num_threads)
    model = await asyncio.to_thread(_load, settings)
    if manifest is not None:
        copy = await read_weights(manifest, model)
        await copy()
    return model


async def read_weights(manifest: Manifest, model: Any) -> Copy:
    """Read a manifest's weights; return a function that copies them into the model.

    Raises `ValueError` if a tensor is unknown, missing or has another shape. A tied tensor may have any of its names.
    """
    pairs = await asyncio.to_thread(read_pairs, manifest, model)

    async def copy() -> None:
        await asyncio.to_thread(_copy, pairs)

    return copy


async def move(model: Any, device: str) -> None:
    """Move a model to a device, and free the memory that it used before."""
    await asyncio.to_thread(model.to, torch.device(device))
    torch.cuda.empty_cache()  # does nothing without a GPU


def empty_model(directory: str) -> Any:
    """Return the model of a Hugging Face directory without weights.

    Weights are checked against it before they are pushed to another process.
    """
    configs: Any = AutoConfig
    models: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = models.from_config(configs.from_pretrained(directory))
    with suppress(OSError):  # the file is optional
        model.generation_config = GenerationConfig.from_pretrained(directory)
    return model


def named_as_in_files(
    directory: str, weights: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield weights under the names of the checkpoint files of a Hugging Face directory; other engines need these.

    transformers stores all experts of a layer in one tensor. Files have one tensor for each expert, with other names.
    """
    model, others = _differs_from_files(directory)
    for name, tensor in weights:  # one at a time, because splitting experts copies them
        if name in others:
            yield from _revert(model, {name: tensor}).items()
        else:
            yield name, tensor


def has_names_of_files(directory: str) -> bool:
    """Return whether every tensor of a model has the name and the layout that its checkpoint files have."""
    return not _differs_from_files(directory)[1]


def check_vocabulary(tokens: list[int], size: int) -> None:
    """Raise `ValueError` if a token is not in a model's vocabulary of this size."""
    if max(tokens) >= size:
        raise ValueError(f"token {max(tokens)} is not in the model's vocabulary of {size} tokens")


def end_tokens(model: PreTrainedModel, others: Iterable[int] = ()) -> frozenset[int]:
    """Return the token ids that end a rollout: those of the generation config or else of the model config, and others."""
    for config in (model.generation_config, model.config):
        tokens = getattr(config, "eos_token_id", None)
        if tokens is not None:
            return frozenset([tokens] if isinstance(tokens, int) else tokens).union(others)
    return frozenset(others)


def cache_name(model: Any) -> str:
    """Return the name of a model's KV cache argument, which changed in transformers 5.24."""
    return "cache" if "cache" in signature(model.forward).parameters else "past_key_values"


def next_logprobs(
    logits: torch.Tensor, settings: ReplicaSettings, evaluates: npt.NDArray[np.bool_]
) -> torch.Tensor:
    """Compute the log-probabilities of the next token, (rows, vocabulary) float32, from logits.

    `evaluates`, (rows,), says which rows have the sampling of evaluations.
    """
    whole = logits.float()
    logprobs = _logprobs(whole, settings.sampling(evaluates=False))
    if settings.evaluation is not None and evaluates.any():
        own = torch.from_numpy(evaluates).to(logits.device)
        logprobs[own] = _logprobs(whole[own], settings.sampling(evaluates=True))
    return logprobs


def draw(logprobs: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """Sample one token for each row, (rows, 1), from its log-probabilities, (rows, vocabulary).

    Each row needs one random number. `torch.multinomial` draws one for each token of the vocabulary.
    """
    mass = logprobs.double().exp().cumsum(-1)
    drawn = torch.rand(len(mass), 1, dtype=mass.dtype, device=mass.device, generator=random)
    # A token without probability is never the first one whose mass exceeds the drawn one.
    found = torch.searchsorted(mass, drawn * mass[:, -1:], right=True)
    return found.clamp_(max=mass.shape[-1] - 1)  # beyond it only if the mass is not a number


def _logprobs(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    scaled = logits if sampling.temperature == 1.0 else logits / sampling.temperature
    return torch.log_softmax(truncated(scaled, sampling.truncation), dim=-1)


@cache
def _differs_from_files(directory: str) -> tuple[Any, frozenset[str]]:
    """Return a meta-device model and its tensors whose name or layout differs in the checkpoint files.

    Cached, because transformers searches every module for its conversion rules at each call.
    """
    model = empty_model(directory)
    own: dict[str, torch.Tensor] = model.state_dict()
    in_files = _revert(model, dict(own))
    return model, frozenset(
        name for name, tensor in own.items() if in_files.get(name) is not tensor
    )


def _revert(model: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    revert: Any = revert_weight_conversion
    return cast(dict[str, torch.Tensor], revert(model, weights))


def read_pairs(manifest: Manifest, model: Any) -> Pairs:
    """Return a manifest's weights, each with the tensor of the model that it replaces.

    Raises `ValueError` if a tensor is unknown, missing or has another shape.
    """
    targets = model.state_dict(keep_vars=True)
    pairs = []
    for name, tensor in read_buckets(manifest):
        if name not in targets:
            raise ValueError(
                f"version {manifest.version}: the model has no tensor {name!r}; "
                "trainer and replica must use the same model"
            )
        if tensor.shape != targets[name].shape:
            shapes = f"{list(tensor.shape)}, the model's is {list(targets[name].shape)}"
            raise ValueError(f"version {manifest.version}: the shape of {name!r} is {shapes}")
        pairs.append((targets[name], tensor))
    given = {id(target) for target, _ in pairs}
    for name, target in targets.items():
        if id(target) not in given:
            raise ValueError(f"version {manifest.version}: tensor {name!r} is missing")
    return pairs


def _load(settings: ReplicaSettings) -> Any:
    dtype = getattr(torch, settings.dtype)
    model = load_pretrained(
        settings.model,
        is_aligned=settings.deterministic,
        dtype=dtype,
        attn_implementation=ATTENTION,
    )
    return model.to(torch.device(settings.device)).eval().requires_grad_(False)


@torch.no_grad()
def _copy(pairs: Pairs) -> None:
    for target, tensor in pairs:
        target.copy_(tensor)
