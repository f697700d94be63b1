"""Make synthetic work to time: random tokens, and a model directory whose outputs do not end early."""

from __future__ import annotations

import json
import random
from pathlib import Path

from streamrl.executor.roles import Sample
from streamrl.executor.tokens import TokenSegment, encode_ids, write_block
from streamrl.runfile.reading import read_json


class SyntheticTokens:
    """Draws random tokens of a vocabulary, with a fixed seed."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._random = random.Random(0)

    def tokens(self, count: int) -> list[int]:
        """Return `count` token ids."""
        return [self._random.randrange(self._vocabulary) for _ in range(count)]

    def samples(self, rollouts: int, width: int, advantage: float) -> list[Sample]:
        """Return rollouts of `width` tokens each; the first quarter is the prompt."""
        prompt = max(1, width // 4)
        output = width - prompt
        return [
            Sample(
                rollout=index,
                prompt=encode_ids(self.tokens(prompt)),
                output=(write_block(self.tokens(output), [-1.0] * output, None),),
                segments=(TokenSegment(output, is_policy=True),),
                advantage=advantage,
            )
            for index in range(rollouts)
        ]


END_KEYS = ("eos_token_id",)
CONFIG_FILES = ("config.json", "generation_config.json")


def without_end(model: Path, copy: Path) -> Path:
    """Create a copy of a model directory that links its files, without end-of-sequence tokens in the configs."""
    copy.mkdir()
    for file in model.iterdir():
        if file.name not in CONFIG_FILES:
            (copy / file.name).symlink_to(file.resolve())
    for name in CONFIG_FILES:
        if (model / name).is_file():
            table = read_json(model / name)
            kept = {key: value for key, value in table.items() if key not in END_KEYS}
            (copy / name).write_text(json.dumps(kept), encoding="utf-8")
    return copy


def vocabulary_of(model: Path) -> int:
    """Return the vocabulary size in a model's config.json."""
    return int(read_json(model / "config.json")["vocab_size"])
