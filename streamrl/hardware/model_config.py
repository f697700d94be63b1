"""Read the shape of a decoder from a config.json by rules, whatever its `model_type` is.

| part               | fields                                                                                        |
|--------------------|-----------------------------------------------------------------------------------------------|
| kinds of layers    | `layer_types`, `hybrid_override_pattern`, `layers_block_type`, `hybrid_layer_pattern`,        |
|                    | `sliding_window_pattern`, `full_attention_interval`, `linear_attn_config`, `attn_type_list`   |
| full attention     | `num_attention_heads`, `num_key_value_heads`, `head_dim`, `v_head_dim`, `global_head_dim`     |
| sliding window     | `sliding_window`, `use_sliding_window`, `attention_chunk_size`, `swa_*`                       |
| latent attention   | `kv_lora_rank`, `q_lora_rank`, `qk_rope_head_dim`, `qk_nope_head_dim`, `v_head_dim`           |
| sparse attention   | `index_n_heads`, `index_head_dim`, `index_topk`; blocks: `index_topk_blocks`                  |
| compressed tokens  | `compress_ratios`, `compress_rates`, `o_groups`, `o_lora_rank`, with `index_*`                |
| residual streams   | `hc_mult`                                                                                     |
| linear attention   | `linear_*` (gated delta), `linear_attn_config` (Kimi), `mamba_*`, `conv_L_cache` (LFM2)       |
| MLP                | `intermediate_size`, `intermediate_size_mlp`, `hidden_act`                                    |
| experts            | `num_experts`, `n_routed_experts`, `num_local_experts`, `moe_intermediate_size`, ...          |
| layers of experts  | `first_k_dense_replace`, `moe_layer_freq`, `decoder_sparse_step`, `mlp_only_layers`, ...      |
| draft layers       | `num_nextn_predict_layers`, `mtp_num_hidden_layers`, `num_mtp_modules`                        |

`streamrl.hardware.model_types` has what known types fix beyond these fields. A field that may change the shape and has
no rule is an error.
"""

from __future__ import annotations

from collections.abc import Mapping

from streamrl.hardware.config_attention import (
    attention_biases,
    attention_heads,
    compressed_attention,
    has_head_gates,
    heads_by_kind,
    hyper_connections,
    latent_attention,
    normed_over,
    token_indexer,
)
from streamrl.hardware.config_fields import Fields
from streamrl.hardware.config_layers import Mixing, compressed_layers, token_mixing
from streamrl.hardware.config_linear import linear_attention
from streamrl.hardware.config_mlp import dense_width, has_gate, has_mlp_bias, mixture
from streamrl.hardware.config_names import common_names
from streamrl.hardware.layer_inputs import LayerInputs
from streamrl.hardware.model_shape import ModelShape
from streamrl.hardware.model_types import MODEL_TYPES, UNKNOWN, ModelType

OUTPUT_GATE = ("attn_output_gate", "attention_output_gate", "mla_use_output_gate")
SMALL_HEAD = 0.005
"""Share of a model's parameters below which an output head may be assumed."""


def read_shape(table: Mapping[str, object], name: str, source: str) -> tuple[ModelShape, list[str]]:
    """Return the shape of a decoder without vision tower, and what was assumed.

    Raises:
        ValueError: a field is missing, has a value that no model has, or changes the shape in a way without a rule.
    """
    named, notes = common_names(table)
    fields = Fields(named)
    for note in notes:
        fields.assume(note)
    kind = fields.value("model_type")
    known = MODEL_TYPES.get(kind, UNKNOWN) if isinstance(kind, str) else UNKNOWN
    fields.read.update(known.unread)
    if known.refused is not None:
        raise ValueError(f"model_type {kind!r} is not read: {known.refused}")
    _fill_in(fields, known.defaults)
    _check_decoder(fields)
    for key in known.required:
        if not any(each in named for each in key.split("|")):
            raise ValueError(f"{key.partition('|')[0]} is missing")
    shape = _shape(fields, known, name, source)
    _check_head(fields, known, shape)
    _assume_small_parts(fields)
    if known is UNKNOWN:
        fields.assume(f"model_type {kind!r} has no entry of its own: read by its fields alone")
    if rest := fields.not_understood(is_known=known is not UNKNOWN):
        raise ValueError(
            f"{', '.join(rest)} may change the shape of the model and {'is' if len(rest) == 1 else 'are'} not "
            f"understood; without {'it' if len(rest) == 1 else 'them'} this would be {describe(shape)}. "
            "Remove the fields to assume this"
        )
    return shape, fields.assumed


def _fill_in(fields: Fields, defaults: Mapping[str, int]) -> None:
    """Add the defaults of the config class for fields that the file leaves out, and note them."""
    for name, value in defaults.items():
        if fields.table.get(name) is None:
            fields.table = {**fields.table, name: value}
            fields.assume(f"{name} = {value}, the default of its model_type")


def describe(shape: ModelShape) -> str:
    """Return a shape in a few words: parameters, and layers by kind."""
    counts = {
        "full attention": shape.num_full_layers,
        "a sliding window": shape.num_windowed_layers,
        "linear attention": shape.num_linear_layers,
        "experts": shape.num_expert_layers,
    }
    told = ", ".join(f"{count} with {what}" for what, count in counts.items() if count)
    return f"{shape.num_parameters / 1e9:.4g}B parameters in {shape.num_layers} layers, {told}"


def _check_decoder(fields: Fields) -> None:
    if fields.value("is_encoder_decoder") is True:
        raise ValueError("is_encoder_decoder = true: only decoders are supported")


def _shape(fields: Fields, known: ModelType, name: str, source: str) -> ModelShape:
    num_heads = fields.count("num_attention_heads")
    entries = compressed_layers(fields)
    latent = latent_attention(fields) if entries is None else None
    mixing = token_mixing(fields, known)
    num_layers = mixing.num_layers
    heads = attention_heads(fields, known, num_heads, latent)
    own, windowed = heads_by_kind(fields, heads, mixing)
    is_gated = has_gate(fields, known)
    experts = mixture(fields, known, num_layers, mixing, has_gate=is_gated)
    biases = attention_biases(fields, known)
    return ModelShape(
        name=name,
        source=source,
        hidden_size=fields.count("hidden_size"),
        num_layers=num_layers,
        num_heads=own.num_heads,
        num_kv_heads=own.num_kv_heads,
        head_dim=own.head_dim,
        values_dim=own.values_dim,
        has_value_projection=entries is None
        and not (fields.flag("attention_k_eq_v") and windowed is not None),
        window_heads=windowed,
        intermediate_size=dense_width(fields, known, experts),
        vocab_size=fields.count("vocab_size"),
        has_qkv_bias=biases[0] and latent is None,
        has_output_bias=biases[1],
        has_sinks=own.has_sinks or entries is not None,
        has_output_gate=known.has_output_gate or fields.any_flag(*OUTPUT_GATE),
        has_head_gates=has_head_gates(fields, known),
        norms_per_layer=_norms_per_layer(fields, known),
        has_gated_mlp=is_gated,
        has_mlp_bias=has_mlp_bias(fields, known),
        has_tied_embeddings=_is_tied(fields, known),
        has_qk_norm=normed_over(fields, known) != "none" and latent is None,
        qk_norm_spans_heads=normed_over(fields, known) == "heads",
        experts=experts,
        latent=latent,
        indexer=token_indexer(fields, num_layers) if entries is None else None,
        compressed=None if entries is None else compressed_attention(fields, entries),
        hyper_connections=hyper_connections(fields),
        linear=linear_attention(fields, mixing),
        layer_inputs=_layer_inputs(fields),
        num_shared_full=_num_shared(fields, "full_attention"),
        num_shared_windowed=_num_shared(fields, "sliding_attention"),
        sliding_window=mixing.window,
        num_window_layers=_num_window_layers(fields, mixing, num_layers),
        num_draft_layers=_num_draft_layers(fields, known),
        num_unmixed_layers=mixing.num_unmixed,
        num_bare_layers=num_layers - mixing.num_unmixed if mixing.blocks else mixing.bare,
    )


def _layer_inputs(fields: Fields) -> LayerInputs | None:
    """Return the inputs of each layer; None for a model without them."""
    if not fields.count_or(0, "hidden_size_per_layer_input"):
        return None
    return LayerInputs(
        vocab_size=fields.count_or(fields.count("vocab_size"), "vocab_size_per_layer_input"),
        channels=fields.count("hidden_size_per_layer_input"),
    )


def _num_shared(fields: Fields, kind: str) -> int:
    """Return the layers of a kind among the last ones, which share the keys and values of earlier layers.

    Raises:
        ValueError: the file does not name the kinds of its layers.
    """
    number = fields.count_or(0, "num_kv_shared_layers")
    types = fields.words("layer_types")
    if number and not types:
        raise ValueError("num_kv_shared_layers needs layer_types, which tell what these layers are")
    return (types or [])[-number:].count(kind) if number else 0


def _num_window_layers(fields: Fields, mixing: Mixing, num_layers: int) -> int | None:
    """Return the layers with the window; None for all, or without a window."""
    return None if mixing.window is None or mixing.sliding == num_layers else mixing.sliding


def _norms_per_layer(fields: Fields, known: ModelType) -> int:
    """Return the norms of a layer. Gemma 4 has three more around its experts, and a scale of the router's inputs."""
    return known.norms_per_layer + 4 * fields.flag("enable_moe_block")


def _is_tied(fields: Fields, known: ModelType) -> bool:
    """Return whether the output head is the embedding."""
    return fields.flag("tie_word_embeddings", default=bool(known.is_tied))


def _check_head(fields: Fields, known: ModelType, shape: ModelShape) -> None:
    """Note that a separate output head is assumed.

    Raises:
        ValueError: the head is more than `SMALL_HEAD` of the model.
    """
    if known.is_tied is not None or fields.has("tie_word_embeddings"):
        return
    if shape.num_embedding_parameters > SMALL_HEAD * shape.num_parameters:
        raise ValueError(
            "tie_word_embeddings is missing, and this model_type is unknown; a separate output head would be assumed"
        )
    fields.assume("no tie_word_embeddings: a separate output head")


def _assume_small_parts(fields: Fields) -> None:
    """Note parameters that are not counted, because they are too few to matter."""
    if fields.flag("lm_head_bias"):
        fields.assume("the bias of the output head is not counted")
    if fields.count_or(0, "attn_res_block_size"):
        fields.assume(
            "attention over the outputs of earlier layers (attn_res_block_size) is not counted"
        )


def _num_draft_layers(fields: Fields, known: ModelType) -> int:
    """Return the number of layers for multi-token prediction."""
    keys = (
        "num_nextn_predict_layers",
        "mtp_num_hidden_layers",
        "num_mtp_modules",
        "mtp_num_layers",
    )
    number = known.num_draft_layers
    if stated := [key for key in keys if fields.has(key)]:  # MiniMax-M3 states two numbers
        fields.read.update(keys)
        number = fields.count(stated[0], least=0)
    return number * fields.count_or(1, "mtp_transformer_layers", least=1)
