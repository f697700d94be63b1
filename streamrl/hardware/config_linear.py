"""Read the linear attention of a config.json: gated delta nets, Kimi's, and Mamba-2."""

from __future__ import annotations

from streamrl.hardware.config_fields import Fields
from streamrl.hardware.config_layers import Mixing
from streamrl.hardware.model_shape import LinearAttention

UNUSED = ("mamba_", "linear_", "conv_")
"""Beginnings of fields that say nothing about a model without linear attention."""
MAMBA_READ = (
    *("mamba_ssm_cache_dtype", "mamba_hidden_act", "mamba_expand", "mamba_norm_before_gate"),
    *("mamba_rms_norm", "mamba_use_mlp", "mamba_dt_rank", "mlp_expansion_factor"),
)
"""Fields of Mamba-2 layers without an effect on their shape beside the others. `mamba_rms_norm` decides about one norm."""


def linear_attention(fields: Fields, mixing: Mixing) -> LinearAttention | None:
    """Return the linear attention of a model's layers; None without such layers."""
    num_layers = mixing.linear
    if not num_layers:
        if "layer_types" in fields.table:  # whose layers are all of other kinds
            fields.read.update(name for name in fields.table if name.startswith(UNUSED))
        return None
    config = fields.part("linear_attn_config")
    if config is not None:
        fields.read.update(("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"))
        return _kimi_delta(Fields(config), num_layers)
    if fields.has("linear_num_heads"):
        return _kimi_delta(fields, num_layers)
    if fields.has("ssm_state_size", "mamba_num_heads", "mamba_n_heads"):
        return _mamba(fields, mixing)
    if fields.has("conv_L_cache"):
        return _short_convolution(fields, num_layers)
    if "conv" in (fields.words("layer_types") or []):
        raise ValueError("layers of conv need conv_L_cache, the tokens of the convolution")
    return LinearAttention(
        num_layers=num_layers,
        num_key_heads=fields.count("linear_num_key_heads"),
        key_head_dim=fields.count("linear_key_head_dim"),
        num_value_heads=fields.count("linear_num_value_heads"),
        value_head_dim=fields.count("linear_value_head_dim"),
        conv_kernel=fields.count("linear_conv_kernel_dim"),
    )


def _kimi_delta(config: Fields, num_layers: int) -> LinearAttention:
    """Return Kimi's layers, from `linear_attn_config` or from the `linear_*` fields that transformers 5 saves."""
    own = "num_heads" in config.table
    heads = config.count("num_heads" if own else "linear_num_heads")
    channels = config.count("head_dim" if own else "linear_head_dim")
    kernel = "short_conv_kernel_size" if own else "linear_conv_kernel_dim"
    return LinearAttention(
        kind="kimi-delta",
        num_layers=num_layers,
        num_key_heads=heads,
        key_head_dim=channels,
        num_value_heads=heads,
        value_head_dim=channels,
        conv_kernel=config.count(kernel),
        has_wide_gate=config.flag("use_full_rank_gate"),
    )


def _short_convolution(fields: Fields, num_layers: int) -> LinearAttention:
    """Return layers of LFM2: a gated convolution over the last tokens, as wide as the hidden state."""
    hidden = fields.count("hidden_size")
    if fields.flag("conv_bias"):
        raise ValueError("conv_bias = true is not understood; no bias would be assumed")
    return LinearAttention(
        kind="short-convolution",
        num_layers=num_layers,
        num_key_heads=1,
        key_head_dim=hidden,
        num_value_heads=1,
        value_head_dim=hidden,
        conv_kernel=fields.count("conv_L_cache"),
    )


def _mamba(fields: Fields, mixing: Mixing) -> LinearAttention:
    """Return Mamba-2 layers: groups are key heads, and states have `ssm_state_size` channels of a key."""
    if not fields.flag("use_conv_bias", "mamba_conv_bias", default=True):
        raise ValueError("use_conv_bias = false is not understood; a bias would be assumed")
    fields.read.update(MAMBA_READ)
    if fields.table.get("mamba_ssm_cache_dtype") != "float32":
        fields.assume("states of Mamba-2 layers are in float32")
    return LinearAttention(
        kind="mamba-2",
        num_layers=mixing.linear,
        num_key_heads=fields.count("n_groups", "mamba_n_groups"),
        key_head_dim=fields.count("ssm_state_size", "mamba_d_state"),
        num_value_heads=fields.count("mamba_num_heads", "mamba_n_heads"),
        value_head_dim=_mamba_head_dim(fields),
        conv_kernel=fields.count("conv_kernel", "mamba_d_conv"),
        is_parallel=mixing.is_parallel,
    )


def _mamba_head_dim(fields: Fields) -> int:
    """Return the channels of a head; "auto" divides the expanded hidden state over all heads.

    Raises:
        ValueError: `mamba_d_ssm` is another number of channels in all heads.
    """
    heads = fields.count("mamba_num_heads", "mamba_n_heads")
    if fields.table.get("mamba_d_head") == "auto":
        fields.read.add("mamba_d_head")
        return fields.count("hidden_size") * fields.count("mamba_expand") // heads
    channels = fields.count("mamba_head_dim", "mamba_d_head")
    whole = fields.count_or(heads * channels, "mamba_d_ssm")
    if whole != heads * channels:
        raise ValueError(
            f"mamba_d_ssm must be mamba_n_heads x mamba_d_head, {heads * channels}, got {whole}"
        )
    return channels
