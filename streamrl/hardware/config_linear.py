"""Read the linear attention of a config.json: gated delta nets, Kimi's, and Mamba-2."""

from __future__ import annotations

from streamrl.hardware.config_fields import Fields
from streamrl.hardware.model_shape import LinearAttention


def linear_attention(fields: Fields, num_layers: int) -> LinearAttention | None:
    """Return the linear attention of `num_layers` layers; None without such layers."""
    if not num_layers:
        return None
    config = fields.part("linear_attn_config")
    if config is not None:
        fields.read.update(("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"))
        return _kimi_delta(Fields(config), num_layers)
    if fields.has("linear_num_heads"):
        return _kimi_delta(fields, num_layers)
    if fields.has("ssm_state_size", "mamba_num_heads"):
        return _mamba(fields, num_layers)
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
    )


def _mamba(fields: Fields, num_layers: int) -> LinearAttention:
    """Return Mamba-2 layers: groups are key heads, and states have `ssm_state_size` channels of a key."""
    if not fields.flag("use_conv_bias", default=True):
        raise ValueError("use_conv_bias = false is not understood; a bias would be assumed")
    fields.read.update(("mamba_ssm_cache_dtype", "mamba_hidden_act"))
    if fields.table.get("mamba_ssm_cache_dtype") != "float32":
        fields.assume("states of Mamba-2 layers are in float32")
    return LinearAttention(
        kind="mamba-2",
        num_layers=num_layers,
        num_key_heads=fields.count("n_groups", "mamba_n_groups"),
        key_head_dim=fields.count("ssm_state_size"),
        num_value_heads=fields.count("mamba_num_heads"),
        value_head_dim=fields.count("mamba_head_dim"),
        conv_kernel=fields.count("conv_kernel"),
    )
