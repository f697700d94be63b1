"""Describe a model by layer kind: parameters, and the bytes that it keeps of each token and of each rollout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
from rich.table import Table
from rich.text import Text

from streamrl.hardware.checkpoint_format import checkpoint_bytes
from streamrl.hardware.hugging_face import ModelDirectory, read_model_directory
from streamrl.hardware.model_shape import BYTES, LinearAttention, ModelShape
from streamrl.hardware.profiles import load_model
from streamrl.runfile.cluster_config import ModelConfig


class LayerKind(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of layer, or another part of the model."""

    kind: str
    num_layers: int
    parameters: int
    """Parameters of all these layers, without norms of the hidden state."""
    bytes_per_token: int = 0
    """Bytes of the KV cache by which each token grows it, until `kept_tokens` are there."""
    kept_tokens: int | None = None
    """Most tokens that the cache keeps; None for all."""
    bytes_per_rollout: int = 0
    """Bytes of states that do not grow."""

    def bytes_at(self, context: int) -> int:
        """Return the bytes of one rollout with this many tokens."""
        kept = context if self.kept_tokens is None else min(context, self.kept_tokens)
        return kept * self.bytes_per_token + self.bytes_per_rollout


class ModelDescription(msgspec.Struct, frozen=True, kw_only=True):
    """A model as its profile or directory has it."""

    name: str
    source: str
    parameters: int
    """Parameters of the language model; a tied embedding counts once, draft layers do not count."""
    active_parameters: int
    """Parameters of a token, with the input embedding, as model cards count them."""
    multiplied_parameters: int
    """The same without the input embedding: what a token is multiplied with."""
    vision_parameters: int
    """Parameters of the vision tower, as far as its size is known."""
    draft_layers: int
    checkpoint: str | None
    """Number format of a quantised checkpoint; None for 16 bits, or for a profile."""
    weight_bytes: int
    """Bytes of the language model's weights in this format."""
    kv_dtype: str
    kv_bytes_per_token: int
    """Bytes by which each further token of a long rollout grows the KV cache."""
    kv_bytes_per_first_token: int
    """The same while no window is full."""
    state_bytes_per_rollout: int
    """Bytes that do not grow: full windows and states."""
    context: int
    """Tokens of the rollout of `bytes_per_rollout`."""
    bytes_per_rollout: int
    kinds: list[LayerKind]
    assumed: list[str]
    """What was assumed because the file does not say it."""
    not_simulated: list[str]
    """Parts of the model that no simulation computes with."""
    checked: str | None
    """What the index of weights says about the parameters."""


def describe_model(name: str, kv_dtype: str, context: int) -> ModelDescription:
    """Return the description of a directory or of a profile.

    Args:
        name: a directory with config.json, or a name in profiles/models.
        kv_dtype: format of the KV cache.
        context: tokens of a rollout.

    Raises:
        ValueError: there is no such profile, or config.json cannot be read.
    """
    if Path(name).is_dir():
        found = read_model_directory(Path(name))
    else:
        found = ModelDirectory(load_model(ModelConfig(name=name)), None, None, [], [], None)
    return _description(found, kv_dtype, context)


def _description(found: ModelDirectory, kv_dtype: str, context: int) -> ModelDescription:
    model = found.shape
    kinds = list(layer_kinds(model, kv_dtype))
    embedding = 0 if model.has_tied_embeddings else model.num_embedding_parameters
    return ModelDescription(
        name=model.name,
        source=model.source,
        parameters=model.num_parameters,
        active_parameters=model.num_active_parameters + embedding,
        multiplied_parameters=model.num_active_parameters,
        vision_parameters=model.num_vision_parameters,
        draft_layers=model.num_draft_layers,
        checkpoint=None if found.checkpoint is None else str(found.checkpoint),
        weight_bytes=round(checkpoint_bytes(model, found.checkpoint, "bfloat16")),
        kv_dtype=kv_dtype,
        kv_bytes_per_token=model.kv_bytes_per_token(kv_dtype),
        kv_bytes_per_first_token=sum(kind.bytes_per_token for kind in kinds),
        state_bytes_per_rollout=round(model.shard_state_bytes(kv_dtype, 1)),
        context=context,
        bytes_per_rollout=sum(kind.bytes_at(context) for kind in kinds),
        kinds=kinds,
        assumed=found.assumed,
        not_simulated=found.not_simulated,
        checked=found.checked_index,
    )


def layer_kinds(model: ModelShape, kv_dtype: str) -> Iterator[LayerKind]:
    """Yield the kinds of layers of a model: what mixes tokens, then MLPs and experts, then the rest."""
    mixing = _mixing if model.compressed is None else _compressed
    parts = [*mixing(model, kv_dtype), *_mlps(model), *_streams(model)]
    yield from parts
    tables = model.num_embedding_parameters * (1 if model.has_tied_embeddings else 2)
    text = "embedding, also the output head" if model.has_tied_embeddings else "embedding and head"
    yield LayerKind(kind=text, num_layers=0, parameters=tables)
    rest = model.num_parameters - tables - sum(part.parameters for part in parts)
    yield LayerKind(kind="norms", num_layers=0, parameters=rest)


def _mixing(model: ModelShape, kv_dtype: str) -> Iterator[LayerKind]:
    """Yield the kinds of layers that mix tokens."""
    if model.num_full_layers:
        cached = model.kv_bytes_per_token(kv_dtype)
        indexed = 0
        if model.indexer is not None:
            ranks = model.hidden_size, model.index_input_size
            count = model.indexer.num_layers or model.num_full_layers
            indexed = model.indexer.parameters(*ranks) * count
        yield LayerKind(
            kind=_attention_name(model),
            num_layers=model.num_full_layers,
            parameters=round(model.attention_parameters()) * model.num_full_layers
            + indexed
            - round(model.cached_projections()) * model.num_shared_full,
            bytes_per_token=cached,
        )
    if model.num_windowed_layers:
        windowed, window = model.windowed, model.sliding_window or 0
        states = round(_window_bytes(model, kv_dtype))
        yield LayerKind(
            kind=f"sliding window of {window:,}: {_heads(windowed)}",
            num_layers=model.num_windowed_layers,
            parameters=round(windowed.attention_parameters()) * model.num_windowed_layers
            - round(windowed.cached_projections()) * model.num_shared_windowed,
            bytes_per_token=states,
            kept_tokens=window if model.num_full_layers else None,
        )
    if model.linear is not None:
        linear = model.linear
        width = 2 if kv_dtype == "fp8" else {"float32": 4}.get(kv_dtype, 2)
        yield LayerKind(
            kind=_linear_name(linear),
            num_layers=linear.num_layers,
            parameters=round(linear.parameters(model.hidden_size)) * linear.num_layers,
            bytes_per_rollout=round(linear.state_bytes(width)) * linear.num_layers,
        )


def _linear_name(linear: LinearAttention) -> str:
    if linear.kind == "short-convolution":
        return f"convolution over {linear.conv_kernel} tokens: {linear.value_dim:,} channels"
    beside = ", beside attention" if linear.is_parallel else ""
    heads = f"{linear.num_value_heads} heads of {linear.key_head_dim} x {linear.value_head_dim}"
    return f"linear ({linear.kind}): {heads}{beside}"


def _compressed(model: ModelShape, kv_dtype: str) -> Iterator[LayerKind]:
    """Yield the layers of a model that attends to a window and to entries; the windows of the latter are a row apart."""
    own = model.compressed
    assert own is not None
    width, window, index = BYTES[kv_dtype], model.sliding_window or 0, own.indexer
    attention, vector = round(model.attention_parameters()), own.vector_bytes(model.head_dim, width)
    heads = f"{model.num_heads} heads, one vector of {model.head_dim}"
    if model.num_windowed_layers:
        yield LayerKind(
            kind=f"sliding window of {window:,}: {heads}",
            num_layers=model.num_windowed_layers,
            parameters=attention * model.num_windowed_layers,
            bytes_per_token=vector * model.num_windowed_layers,
            kept_tokens=window,
        )
    texts = (
        f"compressed sparse: {heads}, {index.top_k or 0:,} entries of {own.sparse_ratio} tokens by an index of "
        f"{index.num_heads} heads",
        f"compressed: {heads}, all entries of {own.dense_ratio} tokens",
    )
    columns = (
        own.compressor_parameters(model.hidden_size, model.head_dim),
        own.token_bytes(model.head_dim, width),
        own.state_bytes(model.head_dim),
    )
    counts = own.num_sparse_layers, own.num_dense_layers
    for text, count, parameters, grown, states in zip(texts, counts, *columns, strict=True):
        if count:
            yield LayerKind(
                kind=text,
                num_layers=count,
                parameters=(attention + parameters) * count,
                bytes_per_token=round(grown * count),
                bytes_per_rollout=states * count,
            )
    if own.num_layers:
        yield LayerKind(
            kind=f"the same layers' sliding window of {window:,}",
            num_layers=0,
            parameters=0,
            bytes_per_token=vector * own.num_layers,
            kept_tokens=window,
        )


def _streams(model: ModelShape) -> Iterator[LayerKind]:
    """Yield the hyper-connections of all blocks, and the inputs of each layer."""
    if model.layer_inputs is not None:
        yield LayerKind(
            kind=f"inputs of each layer: {model.layer_inputs.channels} channels, with their table",
            num_layers=0,
            parameters=model.layer_input_parameters,
        )
    if model.hyper_connections is not None:
        streams = model.hyper_connections.num_streams
        yield LayerKind(
            kind=f"hyper-connections of {streams} residual streams",
            num_layers=0,
            parameters=model.hyper_parameters,
        )


def _window_bytes(model: ModelShape, kv_dtype: str) -> float:
    """Return the bytes of one token in all layers with a window."""
    if not model.num_full_layers:
        return model.kv_bytes_per_token(kv_dtype)
    alone = msgspec.structs.replace(model, linear=None)
    return alone.shard_state_bytes(kv_dtype, 1) / (model.sliding_window or 1)


def _attention_name(model: ModelShape) -> str:
    latent = model.latent
    name = f"full attention: {_heads(model)}"
    if latent is not None:
        name = f"latent attention: {model.num_heads} heads, {latent.kv_lora_rank} + {latent.rope_head_dim} channels kept"
    if model.indexer is None:
        return name
    where = f" in {model.indexer.num_layers} layers" if model.indexer.num_layers else ""
    name = name.removeprefix("full ")
    return f"sparse {name}, {model.indexer.top_k or 0:,} tokens by an index of {model.indexer.num_heads} heads{where}"


def _heads(model: ModelShape) -> str:
    values = f" and {model.value_head_dim}" if model.value_head_dim != model.head_dim else ""
    return f"{model.num_heads} heads, {model.num_kv_heads} KV heads of {model.head_dim}{values}"


def _mlps(model: ModelShape) -> Iterator[LayerKind]:
    gate = "" if model.has_gated_mlp else ", no gate"
    if model.num_dense_layers:
        yield LayerKind(
            kind=f"MLP of {model.intermediate_size:,}{gate}",
            num_layers=model.num_dense_layers,
            parameters=model.mlp_parameters * model.num_dense_layers,
        )
    experts = model.experts
    if experts is None or not model.num_expert_layers:
        return
    shared = f" + {experts.num_shared_experts} shared" if experts.num_shared_experts else ""
    latent = f", on {experts.latent_size:,} channels" if experts.latent_size else ""
    yield LayerKind(
        kind=f"{experts.num_experts} experts of {experts.intermediate_size:,}{gate}{latent}: "
        f"{experts.experts_per_token} a token{shared}",
        num_layers=model.num_expert_layers,
        parameters=round(model.mixture_parameters()) * model.num_expert_layers,
    )


# The table ----------------------------------------------------------------------------------------


def model_table(model: ModelDescription) -> Table:
    """Lay out a model: a row for each kind of layer, and their sums."""
    title = Text(f"{model.name} ({model.source})")
    table = Table(box=None, pad_edge=False, title=title, title_justify="left", show_footer=True)
    sums = {
        "part": "sum",
        "layers": "",
        "parameters": _billions(model.parameters),
        "KV bytes\na token": f"{model.kv_bytes_per_first_token:,}",
        "of at most\ntokens": "",
        "state bytes\na rollout": f"{sum(kind.bytes_per_rollout for kind in model.kinds):,}",
        f"bytes at\n{model.context:,} tokens": f"{model.bytes_per_rollout:,}",
    }
    for name, footer in sums.items():
        table.add_column(
            name, footer, justify="left" if name == "part" else "right", no_wrap=name != "part"
        )
    for kind in model.kinds:
        kept = kind.bytes_at(model.context)
        table.add_row(
            kind.kind,
            f"{kind.num_layers}" if kind.num_layers else "",
            _billions(kind.parameters) if kind.parameters else "",
            f"{kind.bytes_per_token:,}" if kind.bytes_per_token else "",
            f"{kind.kept_tokens:,}" if kind.kept_tokens else "",
            f"{kind.bytes_per_rollout:,}" if kind.bytes_per_rollout else "",
            f"{kept:,}" if kept else "",
        )
    return table


def model_notes(model: ModelDescription) -> Iterator[str]:
    """Yield the lines below the table."""
    yield (
        f"Active: {_billions(model.active_parameters)} parameters a token with the input embedding, "
        f"{_billions(model.multiplied_parameters)} without it."
    )
    yield (
        f"A long rollout grows by {model.kv_bytes_per_token:,} bytes a token in {model.kv_dtype}, and keeps "
        f"{model.state_bytes_per_rollout:,} bytes that do not grow."
    )
    stored = model.checkpoint or "16 bits"
    yield f"Weights: {model.weight_bytes / 1e9:,.1f} GB in {stored}."
    if model.draft_layers:
        yield f"Draft layers (multi-token prediction): {model.draft_layers}, not counted above."
    yield from (f"Not simulated: {each}." for each in model.not_simulated)
    yield from (f"Assumed: {each}." for each in model.assumed)
    if model.checked:
        yield f"Checked: {model.checked}."
    if not model.assumed and not model.not_simulated:
        yield "Nothing was assumed, and every part is simulated."


def _billions(count: int) -> str:
    return f"{count / 1e9:,.3f}B" if count >= 1e6 else f"{count / 1e6:,.3f}M"
