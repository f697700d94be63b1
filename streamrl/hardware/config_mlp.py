"""Read the MLPs and experts of a config.json."""

from __future__ import annotations

from streamrl.hardware.config_fields import Fields
from streamrl.hardware.config_layers import DENSE, MIXTURE, Mixing, of_marks, of_names
from streamrl.hardware.model_shape import Experts
from streamrl.hardware.model_types import UNKNOWN, ModelType
from streamrl.runfile.errors import shown

NUM_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
EXPERTS_PER_TOKEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "top_k_experts",
    "experts_per_token",
    "moe_topk",
    "moe_top_k",
    "moe_k",
)
SHARED_WIDTH = (
    "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "shared_intermediate_size",
    "share_expert_dim",
)
ROUTER_BIAS = (
    *("use_routing_bias", "use_moe_router_bias", "moe_router_enable_expert_bias"),
    *("use_expert_bias", "moe_use_aux_free"),
)
"""Flags of a correction of each expert's score."""
BESIDE_EXPERTS = ("enable_moe_block", "residual_moe")
"""Flags of a plain MLP that processes every token next to the experts (Gemma 4, Grok-2)."""
ACTIVATION = ("mlp_hidden_act", "hidden_act", "hidden_activation", "activation_function")
GATED = ("silu", "swish", "swiglu", "swigluoai", "situ")
"""Activations of MLPs with a gate. Others, such as relu2 and gelu, are used with and without one."""
FIRST_DENSE = ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers")


def has_gate(fields: Fields, known: ModelType) -> bool:
    """Return whether MLPs have a gate.

    Raises:
        ValueError: the type is unknown, and its activation is used with and without gates.
    """
    fields.read.update(ACTIVATION)
    stated = next((fields.table[key] for key in ACTIVATION if fields.has(key)), None)
    if known.has_gate is not None:
        return known.has_gate
    if stated is None:
        fields.assume("no hidden_act: MLPs have a gate")
        return True
    if stated not in GATED:
        raise ValueError(
            f"hidden_act = {stated!r} of an unknown model_type does not tell whether MLPs have a gate; "
            "a gate would be assumed"
        )
    return True


def mixture(
    fields: Fields, known: ModelType, num_layers: int, mixing: Mixing, *, has_gate: bool
) -> Experts | None:
    """Return the experts; None for a model without them."""
    if mixing.blocks is not None and not mixing.blocks[MIXTURE]:
        return None
    if not _has_experts(fields):
        return None
    width = _expert_width(fields, known)
    if mixing.blocks is not None:
        num_dense = mixing.blocks[DENSE]
    else:
        num_dense = _num_dense_layers(fields, num_layers)
    return Experts(
        num_experts=fields.count(*_named_first(fields, NUM_EXPERTS)),
        experts_per_token=fields.count(*_named_first(fields, EXPERTS_PER_TOKEN)),
        intermediate_size=width,
        num_shared_experts=_num_shared_experts(fields, known, width),
        num_dense_layers=num_dense,
        has_router_bias=_has_router_bias(fields, known),
        has_bias=known.has_expert_bias,
        has_shared_gate=known.has_shared_gate,
        has_gate=has_gate,
        latent_size=_latent_size(fields),
    )


def _has_experts(fields: Fields) -> bool:
    """Return whether the file names experts. Dense models of a family with mixtures have 0 experts, or 1."""
    number = next((fields.table[name] for name in NUM_EXPERTS if fields.has(name)), None)
    if number == 0 or (number == 1 and not fields.has(*EXPERTS_PER_TOKEN)):
        fields.read.update((*NUM_EXPERTS, *EXPERTS_PER_TOKEN, *SHARED_WIDTH))
        return False
    return number is not None or fields.has(*EXPERTS_PER_TOKEN)


def has_mlp_bias(fields: Fields, known: ModelType) -> bool:
    """Return whether the products of a plain MLP have biases."""
    if known.has_linear_bias is not None:
        return fields.flag("use_bias", "bias", "mlp_bias", default=known.has_linear_bias)
    return fields.flag("mlp_bias")


def _named_first(fields: Fields, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names with those first that the file has."""
    return tuple(sorted(names, key=lambda name: name not in fields.table))


def _latent_size(fields: Fields) -> int | None:
    names = ("moe_latent_size", "routed_expert_hidden_size")
    return fields.count(*_named_first(fields, names)) if fields.has(*names) else None


def _has_router_bias(fields: Fields, known: ModelType) -> bool:
    """Return whether each expert has a bias or a scale in the router."""
    stated = fields.any_flag(*ROUTER_BIAS, *BESIDE_EXPERTS)
    return known.has_router_bias or stated or fields.table.get("topk_method") == "noaux_tc"


def _expert_width(fields: Fields, known: ModelType) -> int:
    if known.expert_width == "intermediate_size":
        return fields.count("intermediate_size")
    if known is UNKNOWN and not fields.has("moe_intermediate_size"):
        fields.assume("no moe_intermediate_size: experts have intermediate_size channels")
        return fields.count("intermediate_size")
    return fields.count("moe_intermediate_size")


def dense_width(fields: Fields, known: ModelType, experts: Experts | None) -> int:
    """Return the channels of a plain MLP; those of an expert if there is none."""
    if fields.has("dense_intermediate_size"):
        fields.read.add("intermediate_size")
        return fields.count("dense_intermediate_size")
    if known.dense_width in fields.table or experts is None:
        fields.read.add("intermediate_size")
        return fields.count(known.dense_width)
    fields.read.add("intermediate_size")
    if experts.num_dense_layers:
        return fields.count("intermediate_size")
    return fields.count_or(experts.intermediate_size, "intermediate_size", least=1)


def _num_shared_experts(fields: Fields, known: ModelType, width: int) -> int:
    """Return the shared experts, in experts of the routed ones' width.

    Raises:
        ValueError: their width is no multiple of it.
    """
    number = fields.count_or(
        0, "n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert"
    )
    if fields.any_flag(*BESIDE_EXPERTS):
        return _multiple(fields, "intermediate_size", width)
    for name in SHARED_WIDTH:
        if fields.count_or(0, name):
            fields.read.update(SHARED_WIDTH)
            return _multiple(fields, name, width)
    return number or known.num_shared_experts


def _multiple(fields: Fields, name: str, width: int) -> int:
    shared = fields.count(name)
    if shared % width:
        raise ValueError(
            f"{name} must be a multiple of moe_intermediate_size {width}, got {shared}"
        )
    return shared // width


def _num_dense_layers(fields: Fields, total: int) -> int:
    """Return the number of layers with a plain MLP."""
    first = fields.count_or(0, *FIRST_DENSE)
    fields.read.update(("moe_layer_freq", "interleave_moe_layer_step"))
    if (numbers := _listed_mixtures(fields, total)) is not None:
        return total - len(numbers)
    if (kinds := fields.words("mlp_layer_types")) is not None:
        return len(of_names("mlp_layer_types", kinds, total, BLOCKS, "dense"))
    if isinstance(fields.table.get("moe_layer_freq"), list):
        marks = fields.words("moe_layer_freq") or []
        return of_marks("moe_layer_freq", marks, total, {0: DENSE, 1: MIXTURE})[DENSE]
    listed = fields.words("mlp_only_layers") or []
    if any(type(each) is not int or not 0 <= each < total for each in listed):
        raise ValueError(f"mlp_only_layers must name layers below {total}, got {listed!r}")
    if first > total:
        raise ValueError(f"{FIRST_DENSE[0]} must be at most {total}, got {first}")
    last = fields.count_or(total - 1, "moe_layer_end_index")
    every = fields.count_or(1, "moe_layer_freq", "moe_every_n_layer", least=1)
    names = ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval")
    step = fields.count_or(1, *names, least=1)
    mixtures = (
        first <= layer <= last
        and layer % every == 0
        and (layer + 1) % step == 0
        and layer not in listed
        for layer in range(total)
    )
    return total - sum(mixtures)


def _listed_mixtures(fields: Fields, total: int) -> set[int] | None:
    """Return the layers with experts that a file lists by number; None if it lists none.

    Step writes them as text, and may name draft layers too.
    """
    named = fields.words("moe_layers")
    text = fields.value("moe_layers_enum")
    if isinstance(text, str) and text:
        named = [int(each) if each.strip().isdecimal() else each for each in text.split(",")]
    elif isinstance(text, list) and text:
        named = text
    if not named:
        return None
    drafts = fields.count_or(0, "num_nextn_predict_layers")
    if any(type(each) is not int or not 0 <= each < total + drafts for each in named):
        raise ValueError(f"moe_layers must name layers below {total}, got {shown(named)}")
    return {int(str(each)) for each in named if int(str(each)) < total}


BLOCKS = ("dense", "sparse", "moe", "hash_moe")
"""Kinds in `mlp_layer_types`. A router with a table of tokens (`hash_moe`) has as many parameters as any other."""
