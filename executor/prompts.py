"""The prompts of a real run: a JSONL file, tokenized, shuffled anew in every epoch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from streamrl.config import Run
from streamrl.messages import DrawnGroup
from streamrl.workload import Draw

Record = dict[str, Any]
"""One line of the prompts file."""


class PromptWorkload:
    """Groups made from the lines of `workload.prompts`; group ids choose lines by the run's seed."""

    def __init__(self, run: Run, tokenizer: Any) -> None:
        assert run.workload.prompts is not None, "check_executable wants prompts"
        path = Path(run.workload.prompts)
        self._tokenizer = tokenizer
        self.records = read_prompts(path)
        self.tokens = [_tokenize(record, tokenizer) for record in self.records]
        self._group_size = run.algorithm.group_size
        self._max_tokens = run.rollout.max_tokens
        self._seed = run.seed
        self._order: dict[int, list[int]] = {}
        for number, tokens in enumerate(self.tokens, start=1):
            if not 0 < len(tokens) <= run.workload.max_prompt_tokens:
                raise ValueError(
                    f"{path}:{number}: {len(tokens)} prompt tokens, but "
                    f"workload.max_prompt_tokens is {run.workload.max_prompt_tokens}"
                )

    def draw(self, first_group: int, num_groups: int) -> list[Draw]:
        """Give groups by id; their lengths are for generation to tell."""
        return [self._group(group) for group in range(first_group, first_group + num_groups)]

    def line(self, group: int) -> int:
        """Give the index of the record that group `group` is made from."""
        epoch, position = divmod(group, len(self.records))
        if epoch not in self._order:
            shuffled = np.random.default_rng([self._seed, epoch]).permutation(len(self.records))
            self._order[epoch] = shuffled.tolist()
        return self._order[epoch][position]

    def decode(self, tokens: list[int]) -> str:
        """Give tokens as text, special tokens left out."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def _group(self, group: int) -> Draw:
        size = self._group_size
        rollouts = tuple(range(group * size, group * size + size))
        num_tokens = len(self.tokens[self.line(group)])
        return Draw(DrawnGroup(group, rollouts, num_tokens, (self._max_tokens,) * size), ())


def read_prompts(path: Path) -> list[Record]:
    """Read a JSONL file of prompts; `ValueError` names the file and line that is wrong."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"workload.prompts: {path} cannot be read: {error}") from None
    records = [_read_line(path, number, line) for number, line in enumerate(lines, start=1)]
    if not records:
        raise ValueError(f"workload.prompts: {path} has no lines")
    return records


def load_tokenizer(path: str) -> Any:
    """Read the tokenizer of a Hugging Face directory."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


def _read_line(path: Path, number: int, line: str) -> Record:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{number}: not JSON: {error}") from None
    if not isinstance(record, dict) or not isinstance(record.get("prompt"), str | list):
        raise ValueError(f'{path}:{number}: needs a "prompt": a text, or a list of chat messages')
    return record


def _tokenize(record: Record, tokenizer: Any) -> list[int]:
    """Encode a text with the model's own special tokens, chat messages through its chat template."""
    prompt = record["prompt"]
    if isinstance(prompt, str):
        return list(tokenizer.encode(prompt))
    encoded = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)
    return list(encoded["input_ids"])
