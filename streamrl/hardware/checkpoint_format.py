"""Recognise the number format of a quantised checkpoint, and check a model's parameters against its index.

| where                                          | names the format by                                   |
|------------------------------------------------|-------------------------------------------------------|
| `quantization_config` of config.json           | `quant_method`: fp8, mxfp4, compressed-tensors, awq,  |
|                                                | gptq, modelopt                                        |
| hf_quant_config.json (ModelOpt)                | `quantization.quant_algo`: FP8, FP8_PB_WO, NVFP4, ... |
| `expert_dtype` of config.json (DeepSeek-V4)    | fp4: experts in MXFP4                                 |
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from streamrl.hardware.model_shape import BYTES, ModelShape
from streamrl.runfile.errors import RepeatedKeyError, unique_keys
from streamrl.runfile.reading import read_json

MODELOPT_FILE = "hf_quant_config.json"
INDEX = "model.safetensors.index.json"
"""The index of sharded weights: the file name of each tensor (huggingface.co/docs/safetensors)."""
TOLERANCE = 0.02
"""Largest relative difference between the bytes of an index and those of the shape. Scales and buffers are not counted."""
MODELOPT = {
    **{"FP8": "fp8", "FP8_PB_WO": "fp8", "FP8_PB_REAL": "fp8", "FP8_PER_CHANNEL_PER_TOKEN": "fp8"},
    **{"MXFP8": "mxfp8", "NVFP4": "nvfp4", "NVFP4_AWQ": "nvfp4", "W4A8_NVFP4_FP8": "nvfp4"},
    "W4A16_NVFP4": "nvfp4",
    **{"W4A16_AWQ": "int4", "W4A8_AWQ": "int4", "INT8_SQ": "int8", "W8A8_SQ_PER_CHANNEL": "int8"},
}
"""Formats of ModelOpt's `quant_algo`."""
MIXED = "MIXED_PRECISION"
"""ModelOpt's `quant_algo` of a checkpoint whose `quantized_layers` have a format each."""
METHODS = {"fp8": "fp8", "fbgemm_fp8": "fp8", "mxfp4": "mxfp4"}
"""Formats of a `quant_method` that has only one."""
BITS = {"mxfp4": 4.25, "nvfp4": 4.5, "int4": 4.16, "fp8": 8.0, "mxfp8": 8.25, "int8": 8.0}
"""Bits of a value with its share of the scales. `int4` is that of AWQ with groups of 128."""
SCALE_BITS = 16
"""Bits of the scale of a group of `int4` values."""


class CheckpointFormat(NamedTuple):
    """The format of a quantised checkpoint."""

    dtype: str
    """fp8, mxfp8, int8, int4, nvfp4 or mxfp4."""
    experts_only: bool
    """Whether only routed experts are in this format."""
    stated_in: str
    """File and field that name it."""
    group: int | None = None
    """Values that share a scale, where the file says it."""
    others: tuple[str, ...] = ()
    """Formats of other quantised layers. Bytes count these layers in `dtype`, or in 16 bits next to narrow experts."""

    @property
    def bits(self) -> float:
        """Bits of a value with its share of the scales."""
        if self.dtype == "int4" and self.group:
            return 4 + SCALE_BITS / self.group
        return BITS[self.dtype]

    def __str__(self) -> str:
        """Return a short text: "mxfp4 (routed experts only), by quantization_config in config.json"."""
        which = "routed experts only" if self.experts_only else "linear layers"
        which += f"; other layers in {' and '.join(self.others)}" if self.others else ""
        return f"{self.dtype} ({which}), by {self.stated_in}"


def checkpoint_format(table: Mapping[str, object], directory: Path) -> CheckpointFormat | None:
    """Return the format of a quantised checkpoint; None for one in 16 or 32 bits.

    Args:
        table: config.json, or its part for text.
        directory: of the checkpoint.

    Raises:
        ValueError: the checkpoint is quantised in a format that is not known.
    """
    config = table.get("quantization_config") or table.get("compression_config")
    if isinstance(config, dict) and config:
        found = _of_config(config)
        if table.get("expert_dtype") == "fp4":
            found = CheckpointFormat("mxfp4", True, "expert_dtype in config.json")
        return found
    if config:
        raise ValueError(f"quantization_config must be an object, got {config!r}")
    return _of_modelopt(directory / MODELOPT_FILE)


def _of_config(config: Mapping[str, object]) -> CheckpointFormat:
    method, where = config.get("quant_method"), "quantization_config in config.json"
    algorithm = config.get("quant_algo")
    if algorithm == MIXED:
        return _of_layers(config, where)
    if isinstance(algorithm, str):
        return CheckpointFormat(_modelopt_dtype(algorithm), False, where)
    if isinstance(method, str) and method in METHODS:
        dtype = METHODS[method]
        return CheckpointFormat(dtype, dtype == "mxfp4", where)
    if isinstance(groups := config.get("config_groups"), dict):
        is_narrowed = _skips_attention(config)
        return CheckpointFormat(_grouped_dtype(groups), is_narrowed, where, _group_size(groups))
    bits = config.get("bits", config.get("w_bit", config.get("weight_bits")))
    if bits == 4 and method in ("awq", "gptq", "auto-round"):
        return CheckpointFormat("int4", False, where)
    raise ValueError(
        f"quantization_config with quant_method {method!r} is not known; known: fp8, mxfp4, compressed-tensors, "
        "modelopt, awq and gptq with 4 bits. Remove it to read the checkpoint as one in 16 bits"
    )


def _grouped_dtype(groups: Mapping[str, object]) -> str:
    """Return the format of compressed-tensors' weights, whose groups must agree."""
    found = {_weights_dtype(group) for group in groups.values()}
    if not found:
        raise ValueError(
            "quantization_config.config_groups has no group with the format of weights"
        )
    if len(found) != 1:
        raise ValueError(
            f"quantization_config.config_groups has more than one format: {sorted(found)}"
        )
    return found.pop()


def _group_size(groups: Mapping[str, object]) -> int | None:
    """Return the values that share a scale in the first group of weights."""
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, dict) else None
        size = weights.get("group_size") if isinstance(weights, dict) else None
        if type(size) is int and size > 0:
            return size
    return None


def _weights_dtype(group: object) -> str:
    weights = group.get("weights") if isinstance(group, dict) else None
    kind = (weights.get("type"), weights.get("num_bits")) if isinstance(weights, dict) else None
    dtype = {("int", 4): "int4", ("int", 8): "int8", ("float", 8): "fp8", ("float", 4): "nvfp4"}
    if kind not in dtype:
        raise ValueError(
            f"quantization_config.config_groups with weights {kind!r} (type, bits) is not known"
        )
    return dtype[kind]


def _skips_attention(config: Mapping[str, object]) -> bool:
    """Return whether attention is left out, so that only experts are quantised."""
    ignored = config.get("ignore")
    return isinstance(ignored, list) and any("self_attn" in str(each) for each in ignored)


def _modelopt_dtype(algorithm: str) -> str:
    if algorithm.upper() not in MODELOPT:
        raise ValueError(f"quant_algo {algorithm!r} is not known; known: {', '.join(MODELOPT)}")
    return MODELOPT[algorithm.upper()]


def _of_modelopt(path: Path) -> CheckpointFormat | None:
    """Return the format in ModelOpt's own file; None without the file."""
    table = _json(path)
    part = table.get("quantization") if isinstance(table, dict) else None
    algorithm = part.get("quant_algo") if isinstance(part, dict) else None
    if isinstance(part, dict) and algorithm == MIXED:
        return _of_layers(part, f"quantized_layers in {MODELOPT_FILE}")
    if not isinstance(algorithm, str):
        return None
    return CheckpointFormat(_modelopt_dtype(algorithm), False, f"quant_algo in {MODELOPT_FILE}")


def _of_layers(part: Mapping[str, object], where: str) -> CheckpointFormat:
    """Return the narrowest format of the layers in `quantized_layers`, and the others.

    Raises:
        ValueError: no layer is named, or one has a format that is not known.
    """
    layers = part.get("quantized_layers")
    names: dict[str, list[str]] = {}
    for name, layer in layers.items() if isinstance(layers, dict) else ():
        algorithm = layer.get("quant_algo") if isinstance(layer, dict) else None
        names.setdefault(_modelopt_dtype(str(algorithm)), []).append(name)
    if not names:
        raise ValueError(f"quant_algo is {MIXED}, but quantized_layers names no layer")
    dtype, *others = sorted(names, key=lambda each: BITS[each])
    are_experts = all(".experts" in name or name == "lm_head" for name in names[dtype])
    return CheckpointFormat(dtype, are_experts, where, others=tuple(others))


def _json(path: Path) -> object:
    try:
        return read_json(path, unique_keys)
    except RepeatedKeyError as error:
        raise ValueError(f"{path.name}: {error}") from None
    except (OSError, ValueError, RecursionError):
        return None


# The index ----------------------------------------------------------------------------------------


def check_index(
    model: ModelShape, form: CheckpointFormat | None, directory: Path, *, has_head: bool = True
) -> str | None:
    """Return what the index says about the shape; None without an index that has sizes.

    Args:
        model: the shape.
        form: format of a quantised checkpoint.
        directory: of the checkpoint.
        has_head: whether the checkpoint has the output head. Reward models have another one.

    Raises:
        ValueError: a checkpoint in 16 or 32 bits has the bytes of another number of parameters.
    """
    table = _json(directory / INDEX)
    facts = table.get("metadata") if isinstance(table, dict) else None
    size = facts.get("total_size") if isinstance(facts, dict) else None
    if type(size) is not int or size <= 0:
        return None
    head = 0 if has_head or model.has_tied_embeddings else model.num_embedding_parameters
    expected = list(_possible_bytes(model, form, head))
    if any(abs(size / each - 1) <= TOLERANCE for each in expected):
        return f"{INDEX}: {size / 1e9:.4g} GB, as the shape says"
    nearest = min(expected, key=lambda each: abs(size / each - 1))
    if form is not None:
        return (
            f"{INDEX}: {size / 1e9:.4g} GB, but {nearest / 1e9:.4g} GB if linear layers or experts are in {form.dtype}; "
            "other layers may be narrow"
        )
    raise ValueError(
        f"the shape has {model.num_parameters / 1e9:.4g}B parameters, {nearest / 1e9:.4g} GB, but {INDEX} says "
        f"{size / 1e9:.4g} GB; the file and its weights are of different models, or a part is not understood"
    )


def _possible_bytes(model: ModelShape, form: CheckpointFormat | None, head: int) -> list[float]:
    """Return the bytes that a checkpoint may have.

    It may have draft layers, a vision tower and a stored tied head, or not. `head` parameters are not stored. Linear
    layers are narrow, or experts alone.
    """
    drafts = model.num_draft_layers * _layer_parameters(model)
    tied = model.num_embedding_parameters * model.has_tied_embeddings
    parts = (model.num_vision_parameters, drafts, tied)
    sums = [0]
    for part in parts:
        sums += [each + part for each in sums] if part else []
    whole, widths = model.num_parameters - head, (BYTES["bfloat16"], BYTES["float32"])
    if form is None:
        return [float(whole + more) * width for more in sums for width in widths]
    extents = {_narrow_parameters(model, form), _routed_parameters(model)} - {0.0}
    extents |= {narrow + drafts for narrow in extents if drafts}
    wide = [whole + more - narrow for more in sums for narrow in extents]
    narrows = [narrow for _ in sums for narrow in extents]
    return [
        rest * BYTES["bfloat16"] + narrow * form.bits / 8
        for rest, narrow in zip(wide, narrows, strict=True)
    ]


def _layer_parameters(model: ModelShape) -> int:
    tables = model.num_embedding_parameters * (1 if model.has_tied_embeddings else 2)
    return (model.num_parameters - tables) // model.num_layers


def _narrow_parameters(model: ModelShape, form: CheckpointFormat | None) -> float:
    """Return the parameters of the language model that are in the narrow format."""
    if form is None:
        return 0.0
    if form.experts_only and model.experts is not None:
        return _routed_parameters(model)
    return model.linear_parameters()


def _routed_parameters(model: ModelShape) -> float:
    """Return the parameters of all routed experts."""
    if model.experts is None:
        return 0.0
    return float(model.num_expert_layers * model.experts.num_experts * model.expert_parameters)


def checkpoint_bytes(model: ModelShape, form: CheckpointFormat | None, dtype: str) -> float:
    """Return the bytes of the language model's weights in its checkpoint, with `dtype` for all that is not narrow."""
    narrow = _narrow_parameters(model, form)
    bits = 0.0 if form is None else form.bits
    return (model.num_parameters - narrow) * BYTES[dtype] + narrow * bits / 8
