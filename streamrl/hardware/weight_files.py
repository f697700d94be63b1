"""Are a model's weights in its directory, whole as far as their headers say? No tensor is read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
"""Names the file of each tensor where weights are in several (huggingface.co/docs/safetensors)."""
LENGTH_BYTES = 8
"""Of a safetensors file: the length of its header, little-endian, which comes next; then tensors without gaps."""
MOST_HEADER = 100 * 10**6
"""Bytes, as safetensors has it."""


def weight_problems(directory: Path) -> Iterator[str]:
    """Yield what is missing or cut off of the weights of a Hugging Face directory."""
    named = _named(directory)
    missing = [name for name in named if not (directory / name).is_file()]
    if missing:
        yield f"lacks {', '.join(missing)}"
    files = [directory / name for name in named] or sorted(directory.glob("*.safetensors"))
    if not files:
        yield "lacks weights (*.safetensors)"
    for path in files:
        if path.is_file() and (problem := _problem(path)):
            yield f"has a damaged {path.name}: {problem}"


def _named(directory: Path) -> list[str]:
    """Return the files that an index names; none where there is no index."""
    try:
        index = json.loads((directory / INDEX).read_text(encoding="utf-8-sig"))
        return sorted({str(name) for name in index["weight_map"].values()})
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return []


def _problem(path: Path) -> str:
    """Return what is wrong with a file by its header and size; "" where nothing is."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if size < LENGTH_BYTES or not 0 < length <= min(MOST_HEADER, size - LENGTH_BYTES):
                return f"its {size} bytes begin with no header of safetensors"
            header: dict[str, Any] = json.loads(file.read(length))
        ends = [row["data_offsets"][1] for name, row in header.items() if name != "__metadata__"]
        wanted = LENGTH_BYTES + length + max(ends, default=0)
    except OSError as error:
        return str(error.strerror)
    except (ValueError, RecursionError, KeyError, IndexError, TypeError, AttributeError):
        return "its header is none of safetensors"
    return "" if size == wanted else f"it has {size} bytes, its header tells of {wanted}"
