"""Read a Hugging Face model directory: the model's shape and format, and whether its weight files are complete."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from streamrl.hardware.checkpoint_format import (
    INDEX,
    MODELOPT_FILE,
    CheckpointFormat,
    check_index,
    checkpoint_format,
)
from streamrl.hardware.model_config import read_shape
from streamrl.hardware.model_shape import ModelShape
from streamrl.hardware.model_types import EXECUTED_TYPES
from streamrl.hardware.vision_tower import vision_parameters
from streamrl.runfile.errors import RunError, shown, unique_keys
from streamrl.runfile.reading import read_json

TEXT_PARTS = ("text_config", "llm_config", "language_config")
"""Fields of a multimodal config.json that hold the language model."""
OTHER_PARTS = ("vision_config", "audio_config")
"""Fields of a multimodal config.json that hold other parts of the model."""
TOP_FIELDS = ("tie_word_embeddings", "quantization_config", "dtype", "torch_dtype")
"""Fields that a multimodal config.json may have outside that part."""


OTHER_HEADS = ("Classification", "Reward")
"""Words in the names of architectures without the output head of a language model."""
_NARROW_NAME = re.compile(r"(?:NV|MX)?FP[48]|INT[48]|AWQ|GPTQ|W4A16|W8A8", re.IGNORECASE)
"""Formats in the names of directories."""


class ModelDirectory(NamedTuple):
    """What a Hugging Face directory says about its model."""

    shape: ModelShape
    model_type: object
    checkpoint: CheckpointFormat | None
    """Format of a quantised checkpoint; None for one in 16 or 32 bits."""
    assumed: list[str]
    """What was assumed because config.json does not say it."""
    not_simulated: list[str]
    """Parts of the model that no simulation computes with."""
    checked_index: str | None
    """What the index of weights says; None without an index."""


def read_config_json(path: Path) -> ModelShape:
    """Read a model's shape from the config.json of a Hugging Face directory.

    Raises:
        RunError: the file cannot be read, a field is missing or has an invalid value, or a field that may change the
            shape is not understood. The text has the file, the field and the value.
    """
    return read_model_directory(path.parent).shape


def read_model_directory(directory: Path) -> ModelDirectory:
    """Read the shape of a directory's model, the format of its checkpoint, and what was assumed.

    Raises:
        RunError: as `read_config_json`, or the index of weights is that of another model.
    """
    path = directory / "config.json"
    try:
        table = read_json(path, unique_keys)
    except (OSError, ValueError, RecursionError) as error:
        raise _wrong(path, f"{path} cannot be read: {error}") from None
    if not isinstance(table, dict):
        raise _wrong(path, f"{path} must contain a JSON object, got {shown(table)}")
    try:
        return _read_directory(table, path)
    except ValueError as error:
        raise _wrong(path, f"{path}: {error}") from None


def _read_directory(table: dict[str, object], path: Path) -> ModelDirectory:
    text = _text_part(table)
    shape, assumed = read_shape(text, path.absolute().parent.name, str(path))
    vision, parts = 0, []
    for name, part in table.items():
        if name in text or not isinstance(part, dict) or not name.endswith("_config") or not part:
            continue
        if name in (*TEXT_PARTS, "quantization_config"):
            continue
        counted = vision_parameters(part, shape.hidden_size) if name == "vision_config" else None
        vision += counted or 0
        told = "of unknown size" if counted is None else f"about {counted / 1e9:.3g}B parameters"
        told += ", in memory and full syncs only" if counted else ""
        parts.append(f"{name}: {told}")
    if _text_name(table) and "vision_config" not in table:
        parts.append("the vision tower: config.json has no vision_config, so it is not counted")
    shape = replace(shape, num_vision_parameters=vision)
    checkpoint = checkpoint_format(text, path.parent)
    other = checkpoint_format({}, path.parent)
    if checkpoint is not None and other is not None and other.dtype != checkpoint.dtype:
        assumed.append(
            f"the checkpoint is in {checkpoint.dtype}, by config.json, although {MODELOPT_FILE} says {other.dtype}"
        )
    if checkpoint is None and (narrow := _NARROW_NAME.search(shape.name)):
        assumed.append(
            f"weights in 16 bits: the name says {narrow[0]}, but neither config.json nor {MODELOPT_FILE} does"
        )
    is_whole = not any("unknown" in part or "not counted" in part for part in parts)
    has_head = not any(word in str(table.get("architectures")) for word in OTHER_HEADS)
    index = None
    if is_whole:
        index = check_index(shape, checkpoint, path.parent, has_head=has_head)
    return ModelDirectory(shape, table.get("model_type"), checkpoint, assumed, parts, index)


def why_not_executed(directory: Path) -> str | None:
    """Return why a directory's model is planned and simulated but not executed; None if it can be executed.

    Raises:
        RunError: as `read_model_directory`.
    """
    model = read_model_directory(directory)
    if model.model_type not in EXECUTED_TYPES:
        return f"of a model_type in {', '.join(EXECUTED_TYPES)} to be executed, and {model.model_type!r} is not"
    if model.checkpoint is not None:
        return (
            f"a checkpoint in 16 or 32 bits to be executed, and this one is in {model.checkpoint}; "
            "save it in bfloat16 first"
        )
    return None


def _text_name(table: Mapping[str, object]) -> str | None:
    """Return the field that holds the language model; None if its fields are at the top."""
    if "hidden_size" in table:
        return None
    return next((each for each in TEXT_PARTS if isinstance(table.get(each), dict)), None)


def _text_part(table: dict[str, object]) -> Mapping[str, object]:
    """Return the fields of the language model, with those that are outside its part."""
    name = _text_name(table)
    if name is None:
        return {key: part for key, part in table.items() if key not in OTHER_PARTS}
    text = table[name]
    assert isinstance(text, dict)
    outer = {key: table[key] for key in TOP_FIELDS if table.get(key) is not None}
    return {"model_type": table.get("model_type"), **text, **outer}


def read_positions(directory: Path) -> int | None:
    """Return `max_position_embeddings` of a Hugging Face directory, in tokens; None if it is not stated."""
    try:
        table = read_json(directory / "config.json")
    except (OSError, ValueError, RecursionError):
        return None
    text = _text_part(table) if isinstance(table, dict) else {}
    positions = text.get("max_position_embeddings")
    return positions if isinstance(positions, int) else None


def _wrong(path: Path, text: str) -> RunError:
    return RunError("model.path", str(path.parent), text=f"model.path: {text}")


LENGTH_BYTES = 8
"""First bytes of a safetensors file: the length of its header, little-endian. The header follows, and then the tensors
without gaps."""
MOST_HEADER = 100 * 10**6
"""Maximum bytes of a header, the limit of safetensors."""


def weight_problems(directory: Path) -> Iterator[str]:
    """Yield a text for each missing, damaged or truncated weight file of a Hugging Face directory."""
    named = _indexed_files(directory)
    missing = [name for name in named if not (directory / name).is_file()]
    if missing:
        yield f"lacks {', '.join(missing)}"
    files = [directory / name for name in named] or sorted(directory.glob("*.safetensors"))
    if not files:
        yield "lacks weights (*.safetensors)"
    for path in files:
        if path.is_file() and (problem := _weight_problem(path)):
            yield f"has a damaged {path.name}: {problem}"


def _indexed_files(directory: Path) -> list[str]:
    """Return the file names in the index; none without an index."""
    try:
        index = read_json(directory / INDEX)
        return sorted({str(name) for name in index["weight_map"].values()})
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return []


def _weight_problem(path: Path) -> str:
    """Return what is wrong with the header or the size of a file; "" if nothing is."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if size < LENGTH_BYTES or not 0 < length <= min(MOST_HEADER, size - LENGTH_BYTES):
                return f"its {size} bytes do not begin with a safetensors header"
            header: dict[str, Any] = json.loads(file.read(length))
        ends = [row["data_offsets"][1] for name, row in header.items() if name != "__metadata__"]
        wanted = LENGTH_BYTES + length + max(ends, default=0)
    except OSError as error:
        return str(error.strerror)
    except (ValueError, RecursionError, KeyError, IndexError, TypeError, AttributeError):
        return "its header is not a safetensors header"
    return "" if size == wanted else f"it has {size} bytes, but its header says {wanted}"
