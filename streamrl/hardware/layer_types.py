"""Read from a config.json which layers attend how: to everything, to a window, or by a state of one size."""

from __future__ import annotations

from collections.abc import Mapping

from streamrl.hardware.linear_attention import LinearAttention

FULL, WINDOW, LINEAR = "full_attention", "sliding_attention", "linear_attention"
PERIODS = {"gpt_oss": 2, "gemma3_text": 6, "qwen3_next": 4}
"""Of so many layers the last one looks back at everything, where no types are listed (their config classes)."""


def layers_of(table: Mapping[str, object], kind: str) -> int | None:
    """Return how many layers are of a kind; None where the model's type has layers of one kind alone.

    Raises:
        ValueError: a type of layer is unknown, or there are not as many as layers.
    """
    total, types = table.get("num_hidden_layers"), table.get("layer_types")
    if isinstance(types, list):
        unknown = [each for each in types if each not in (FULL, WINDOW, LINEAR)]
        if unknown or len(types) != total:
            raise ValueError(
                f"layer_types must name {FULL}, {WINDOW} or {LINEAR} for each of {total} layers, got {types!r}"
            )
        return types.count(kind)
    period = table.get("full_attention_interval") or PERIODS.get(str(table.get("model_type")))
    if type(period) is not int or period < 1 or type(total) is not int:
        return None
    others = LINEAR if table.get("model_type") == "qwen3_next" else WINDOW
    full = total // period
    return {FULL: full, others: total - full}.get(kind, 0)


def num_window_layers(table: Mapping[str, object]) -> int | None:
    """Return how many layers have a window, where some have none."""
    if table.get("model_type") not in PERIODS and not isinstance(table.get("layer_types"), list):
        return None
    return layers_of(table, WINDOW)


def read_linear(table: Mapping[str, object]) -> LinearAttention | None:
    """Return the gated delta net of a config.json; None where no layer has one."""
    num_layers = layers_of(table, LINEAR)
    if not num_layers:
        return None
    return LinearAttention(
        num_layers=num_layers,
        num_key_heads=_count(table, "linear_num_key_heads"),
        key_head_dim=_count(table, "linear_key_head_dim"),
        num_value_heads=_count(table, "linear_num_value_heads"),
        value_head_dim=_count(table, "linear_value_head_dim"),
        conv_kernel=_count(table, "linear_conv_kernel_dim"),
    )


def shared_experts(table: Mapping[str, object]) -> int:
    """Return how many experts a shared one is as wide as.

    Raises:
        ValueError: it is no whole number of them.
    """
    shared = _count(table, "shared_expert_intermediate_size")
    one = _count(table, "moe_intermediate_size")
    if shared % one:
        raise ValueError(
            f"shared_expert_intermediate_size must be a multiple of moe_intermediate_size {one}, got {shared}"
        )
    return shared // one


def _count(table: Mapping[str, object], key: str) -> int:
    if key not in table:
        raise ValueError(f"{key} is missing")
    value = table[key]
    if type(value) is not int or value < 1:  # `True` is an int
        raise ValueError(f"{key} must be a whole number of at least 1, got {value!r}")
    return value
