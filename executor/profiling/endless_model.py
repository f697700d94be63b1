"""A model directory whose outputs end where they are told to."""

from __future__ import annotations

import json
from pathlib import Path

END_KEYS = ("eos_token_id",)
CONFIG_FILES = ("config.json", "generation_config.json")


def without_end(model: Path, copy: Path) -> Path:
    """Link a model directory, its end-of-sequence tokens left out of the configs."""
    copy.mkdir()
    for file in model.iterdir():
        if file.name not in CONFIG_FILES:
            (copy / file.name).symlink_to(file.resolve())
    for name in CONFIG_FILES:
        if (model / name).is_file():
            table = json.loads((model / name).read_text(encoding="utf-8"))
            kept = {key: value for key, value in table.items() if key not in END_KEYS}
            (copy / name).write_text(json.dumps(kept), encoding="utf-8")
    return copy


def vocabulary_of(model: Path) -> int:
    """Return the number of token ids of a model directory."""
    return int(json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"])
