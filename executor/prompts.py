"""The prompts of a real run: a JSONL file, tokenized, shuffled anew in every epoch.

What a prompt's rollouts took in one epoch is expected of it in the next ones.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError

from executor.tokens import count_ids, encode_ids
from streamrl.engine.messages import DrawnGroup, ExpectationsChanged, Generated
from streamrl.engine.siblings import PRIOR_SAMPLES, SiblingLengths
from streamrl.engine.systems import choose_system
from streamrl.runfile.config import Run
from streamrl.runfile.errors import shown
from streamrl.workload.tail_batching import TailBatches
from streamrl.workload.workload import Draw

Record = dict[str, Any]
"""One line of the prompts file."""

KEPT_EPOCHS = 4
"""Orders of prompts in memory: those of the epoch, of the next, and of prompts that tail batching puts off. Others are
made anew, so that memory does not grow with the run."""
MOST_EXPECTED = 10**9
EXPECTED = "expected_tokens"  # of a record: the output tokens that a ranker expects of its rollouts


class PromptWorkload:
    """Groups made from the lines of `workload.prompts`; group ids choose lines by the run's seed."""

    def __init__(self, run: Run, tokenizer: Any) -> None:
        assert run.workload.prompts is not None, "check_executable wants prompts"
        path = Path(run.workload.prompts)
        self.records = read_prompts(path)
        self.prompts = [
            encode_ids(_tokenize(record, tokenizer, f"{path}:{number}"))
            for number, record in enumerate(self.records, start=1)
        ]
        """Token ids of each record's prompt; see `executor.tokens`."""
        self._tokenizer = tokenizer
        self._group_size = run.algorithm.group_size
        self._max_tokens = run.rollout.max_tokens
        self._seed = run.seed
        self._order: dict[int, list[int]] = {}
        self._past: dict[int, tuple[int, int]] = {}
        """By line, how many of its rollouts finished, and with how many output tokens together."""
        self._siblings = SiblingLengths() if run.policies.learns_from_siblings else None
        self._tails: TailBatches | None = None
        if (policy := expecting_policy(run)) is not None:
            self._check_expected(path, policy)
        if run.policies.tail_batching == "defer":
            every = run.policies.tail_every
            self._tails = TailBatches(run.algorithm.prompts_per_step, every, self._expect)
        for number, num_tokens in enumerate(map(count_ids, self.prompts), start=1):
            if not 0 < num_tokens <= run.workload.max_prompt_tokens:
                raise ValueError(
                    f"{path}:{number}: {num_tokens} prompt tokens, but "
                    f"workload.max_prompt_tokens is {run.workload.max_prompt_tokens}"
                )

    def draw(self, first_group: int, num_groups: int) -> list[Draw]:
        """Return groups by id; their lengths are for generation to tell."""
        draws = [self._group(group) for group in range(first_group, first_group + num_groups)]
        if self._siblings is not None:
            self._siblings.add(draw.drawn for draw in draws)
        return draws

    def learn(self, event: Generated) -> ExpectationsChanged | None:
        """Remember what a prompt took; return what is now expected of the rollout's siblings, if that is asked for."""
        if event.finish != "aborted":
            line = self.line(event.rollout // self._group_size)
            count, tokens = self._past.get(line, (0, 0))
            self._past[line] = count + 1, tokens + event.tokens
        return None if self._siblings is None else self._siblings.learn(event)

    def forget(self, group: int) -> None:
        """Expect nothing more of a group that was dropped; what its prompt took stays known."""
        if self._siblings is not None:
            self._siblings.forget(group)

    def text(self, tokens: list[int]) -> str:
        """Return output tokens as text, special ones left out."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def line(self, group: int) -> int:
        """Return the index of the record that group `group` is made from."""
        source = group if self._tails is None else self._tails.source(group)
        return self._line(source)

    def _line(self, source: int) -> int:
        epoch, position = divmod(source, len(self.records))
        if epoch not in self._order:
            if len(self._order) == KEPT_EPOCHS:
                del self._order[min(self._order)]
            shuffled = np.random.default_rng([self._seed, epoch]).permutation(len(self.records))
            self._order[epoch] = shuffled.tolist()
        return self._order[epoch][position]

    def _group(self, group: int) -> Draw:
        size = self._group_size
        rollouts = tuple(range(group * size, group * size + size))
        line = self.line(group)
        num_tokens, expected = count_ids(self.prompts[line]), (self._blended(line),) * size
        return Draw(DrawnGroup(group, rollouts, num_tokens, expected, line), ())

    def _blended(self, line: int) -> int:
        """Return the mean of what a line took so far and of what it says, which counts as `PRIOR_SAMPLES`."""
        count, tokens = self._past.get(line, (0, 0))
        return round((PRIOR_SAMPLES * self._expected(line) + tokens) / (PRIOR_SAMPLES + count))

    def _expected(self, line: int) -> int:
        """Return the output tokens that a line says to expect; the most there may be where it does not."""
        return int(self.records[line].get(EXPECTED, self._max_tokens))

    def _expect(self, first: int, num: int) -> list[int]:
        """Return what lines say alone: whatever was learnt, the same groups come of the same lines."""
        return [self._expected(self._line(source)) for source in range(first, first + num)]

    def _check_expected(self, path: Path, policy: str) -> None:
        for number, record in enumerate(self.records, start=1):
            if EXPECTED not in record:
                raise ValueError(
                    f"{policy} needs to know long prompts from short ones, but "
                    f"{path}:{number} has no {EXPECTED!r}"
                )


def expecting_policy(run: Run) -> str | None:
    """Return the key and value of a policy that works by `EXPECTED` alone; None where there is none.

    Where all rollouts are expected to be alike such a policy does nothing, and the run is not what was planned.
    """
    policies, system = run.policies, choose_system(run.policies)
    if policies.tail_batching == "defer":
        return "policies.tail_batching 'defer'"
    if system.dispatch == "skewness-aware":
        return "policies.dispatch 'skewness-aware'"
    if system.order == "longest-first" and not policies.learns_from_siblings:
        return "policies.order 'longest-first'"
    return None


def read_prompts(path: Path) -> list[Record]:
    """Read a JSONL file of prompts; `ValueError` names the file and line that is wrong."""
    try:
        lines = path.read_text(encoding="utf-8-sig").rstrip().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"workload.prompts: {path} cannot be read: {error}") from None
    if lines == [""]:
        raise ValueError(f"workload.prompts: {path} has no lines")
    records = [_read_line(path, number, line) for number, line in enumerate(lines, start=1)]
    return records


def load_tokenizer(path: str) -> Any:
    """Read the tokenizer of a Hugging Face directory."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


def _read_line(path: Path, number: int, line: str) -> Record:
    try:
        record = json.loads(line)
        json.dumps(record, ensure_ascii=False).encode()  # which half of a surrogate pair cannot be
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}:{number}: not JSON: {error}") from None
    prompt = record.get("prompt") if isinstance(record, dict) else None
    if not isinstance(prompt, str) and not _is_chat(prompt):
        raise ValueError(f'{path}:{number}: needs a "prompt": a text, or a list of chat messages')
    expected = record.get(EXPECTED, 1)
    is_number = isinstance(expected, int | float) and not isinstance(expected, bool)
    if not is_number or not 1 <= expected <= MOST_EXPECTED:
        raise ValueError(
            f"{path}:{number}: {EXPECTED} must be from 1 to {MOST_EXPECTED:.0e}, got {shown(expected)}"
        )
    return dict(record)


def _is_chat(prompt: object) -> bool:
    """Whether a prompt is a list of chat messages."""
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(isinstance(each, dict) and isinstance(each.get("role"), str) for each in prompt)
    )


def _tokenize(record: Record, tokenizer: Any, line: str) -> list[int]:
    """Encode a text with the model's own special tokens, chat messages through its chat template."""
    prompt = record["prompt"]
    if isinstance(prompt, str):
        return list(tokenizer.encode(prompt))
    try:
        encoded = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, return_dict=True
        )
    except (TemplateError, TypeError, LookupError, ValueError) as error:
        raise ValueError(f"{line}: the model's chat template does not take it: {error}") from None
    return list(encoded["input_ids"])
