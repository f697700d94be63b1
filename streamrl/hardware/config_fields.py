"""Read the fields of a config.json by any of their names, and name the fields that change a shape but were not read."""

from __future__ import annotations

import re
from collections.abc import Mapping

from streamrl.runfile.errors import shown

_NO_SHAPE = re.compile(
    r".*token_ids?|.*token_index|.*_tokens?(_per_\w+)?|.*max_position_embeddings?|original_max_position\w*|"
    r"n_positions|seq_length|model_max_length|initial_context_length|max_length|min_length|num_beams|"
    r"num_beam_groups|num_return_sequences|top_k|\w*no_repeat_ngram_size|pretraining_tp|ep_size|tp_size|"
    r"chunk_size\w*|mamba_chunk_size|n_group|topk_group|num_expert_group|num_logits_to_keep|\w*rope\w*|\w*rotary\w*|"
    r"mrope_section|floor_scale|attn_temperature_tuning|attn_scale|.*_multipliers?|time_step_\w*|query_pre_attn_scalar|"
    r"architectures|auto_map|id2label|label2id|pruned_heads|task_specific_params|torch_dtype|dtype|"
    r"\w+_id|norm_type|org_vocab_size|norm_expert_weight|\w*_scaling(_factor)?|"
    r"transformers_version|transformers\.js_config|quantization_config|compression_config|initializer_\w+|"
    r"residual_(multiplier|\w*dropout|pdrop)|\w*softcapping|\w*gradient_checkpointing|max_seq\w*|attn_temperature_len|"
    r"clip_qkv|ffn_act_fn|prefix_dense_sliding_window_pattern|\w*capacity|\w*capacity_factor|num_media_embeds|class_num|dense_list|n_ctx|"
    r"vocab_size_per_layer_input|max_window_layers|no_rope_layer_interval|logits_to_keep|expand|time_step_rank|"
    r"moe_router_\w+|router_\w+|rescale_\w+|unsloth_\w+|_\w+"
)
"""Fields that change neither parameters nor arithmetic."""
_EVERY_ONE = re.compile(r".*(_freq|_step|_period|_interval|_every_n(_layers?)?)")
"""Periods of a kind of layer. The value 1 changes nothing, because every layer is of that kind by default."""
_SHAPE_FLAG = re.compile(
    r".*(bias|norm|gate|gating|shared|latent|low_rank|lora|conv|parallel_attn|multi_query|double_wide|per_layer|"
    r"cross_attention|encoder|new_decoder|alibi|k_eq_v|head_wise|conditioned).*"
)
"""Boolean fields that may add or remove parameters if they are true."""
_PLAIN_FLAG = re.compile(
    r".*norm_topk_prob|moe_renormalize|.*use_cache|.*overlap|router_.*|.*norm_after.*|do_sample|return_dict\w*|"
    r"output_\w+|is_decoder|early_stopping|remove_invalid_values|torchscript|use_bfloat16|use_mrope|seq_aux|"
    r"residual_in_fp32|rescale_prenorm_residual|use_\w*kernels?|use_flash\w*|gradient_checkpointing|scale_\w+|"
    r"\w*dynamic\w*|language_model_only|\w*fp32\w*|tf_legacy_loss|use_parallel_residual|add_\w+_token|"
    r"use_mtp|mup_\w+|\w*_interleaved?|normalize_\w+|moe_apply_\w+|use_rmsnorm|norm_head|route_norm|"
    r"use_grouped_mm|\w*token_dropping|zero_centered|use_rotary_pos_emb|use_mixed_mlp_moe|use_moe"
)
"""Boolean fields that change no parameters."""
_SHAPE_TEXT = re.compile(
    r".*(pattern|layer_type|layers_block|block_type|norm_type|attn_type|mixer|attention_type).*"
)
"""Text fields that choose a kind of layer."""


MOST_COUNT = 10**9
"""Largest count of a field; no published model has one of more than a few millions."""


class Fields:
    """The fields of a config.json, and which of them were read."""

    def __init__(self, table: Mapping[str, object]) -> None:
        self.table = table
        self.read: set[str] = set()
        self.assumed: list[str] = []
        """What was assumed because the file does not say it."""

    def has(self, *names: str) -> bool:
        """Return whether any of these fields has a value."""
        return any(self.table.get(name) is not None for name in names)

    def value(self, *names: str) -> object:
        """Return the value of the first of these fields that has one; None without a value.

        Raises:
            ValueError: two of the fields have different values.
        """
        stated = {name: self.table[name] for name in names if self.table.get(name) is not None}
        self.read.update(names)
        values = list(stated.values())
        if any(value != values[0] for value in values[1:]):
            told = ", ".join(f"{name} = {value!r}" for name, value in stated.items())
            raise ValueError(f"{told} mean the same and must be equal")
        return values[0] if values else None

    def count(self, *names: str, least: int = 1) -> int:
        """Return a whole number.

        Raises:
            ValueError: the field is missing or has another value.
        """
        name = next((each for each in names if each in self.table), names[0])
        value = self.value(*names)
        if value is None and name not in self.table:
            raise ValueError(f"{name} is missing")
        if isinstance(value, list) and value:
            value = _of_all_layers(name, value)
        if type(value) is not int or value < least:  # `True` is an int
            raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
        if value > MOST_COUNT:
            raise ValueError(f"{name} must be at most {MOST_COUNT:,}, got {shown(value)}")
        return value

    def count_or(self, default: int, *names: str, least: int = 0) -> int:
        """Return a whole number; `default` without a value."""
        if not self.has(*names):
            self.read.update(names)
            return default
        return self.count(*names, least=least)

    def first_count(self, *names: str) -> int:
        """Return the whole number of the first of these fields that the file has; the others do not count.

        Raises:
            ValueError: no field is there, or it has another value.
        """
        self.read.update(names)
        return self.count(next((each for each in names if self.has(each)), names[0]))

    def flag(self, *names: str, default: bool = False) -> bool:
        """Return a boolean; `default` without a value.

        Raises:
            ValueError: the field has another value.
        """
        value = self.value(*names)
        if value is None:
            return default
        if not isinstance(value, bool):
            name = next(each for each in names if self.table.get(each) is not None)
            raise ValueError(f"{name} must be true or false, got {value!r}")
        return value

    def any_flag(self, *names: str) -> bool:
        """Return whether one of these booleans is true; they need not agree."""
        return True in [self.flag(name) for name in names]

    def words(self, name: str) -> list[object] | None:
        """Return a list of one value for each layer; None without a value."""
        value = self.value(name)
        if value is not None and not isinstance(value, list):
            raise ValueError(f"{name} must be a list, got {value!r}")
        return value

    def part(self, name: str) -> Mapping[str, object] | None:
        """Return an object of fields; None without a value."""
        value = self.value(name)
        if value is not None and not isinstance(value, dict):
            raise ValueError(f"{name} must be an object, got {value!r}")
        return value

    def assume(self, text: str) -> None:
        """Note what was assumed."""
        if text not in self.assumed:
            self.assumed.append(text)

    def not_understood(self, *, is_known: bool) -> list[str]:
        """Return the fields that may change the shape and were not read, in order of their names.

        Of a type without an entry of its own, any true flag may change it, unless it is known not to.
        """
        rest = {name: value for name, value in self.table.items() if name not in self.read}
        return sorted(name for name, value in rest.items() if _changes_shape(name, value, is_known))


def _of_all_layers(name: str, values: list[object]) -> object:
    """Return the value of a field that lists one for each layer.

    Raises:
        ValueError: the layers differ.
    """
    if any(value != values[0] for value in values):
        raise ValueError(
            f"{name} must be one number for all layers, got {shown(values)}; layers of different sizes are not simulated"
        )
    return values[0]


def _changes_shape(name: str, value: object, is_known: bool) -> bool:
    if _NO_SHAPE.fullmatch(name) or not value or isinstance(value, float):
        return False
    if value is True:
        is_suspect = not is_known or bool(_SHAPE_FLAG.fullmatch(name))
        return is_suspect and not _PLAIN_FLAG.fullmatch(name)
    if isinstance(value, str):
        return bool(_SHAPE_TEXT.fullmatch(name))
    return not (value == 1 and _EVERY_ONE.fullmatch(name))
