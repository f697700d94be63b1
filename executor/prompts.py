"""The prompts of a real run: a JSONL file, tokenized, shuffled anew in every epoch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from executor.notices import tell
from executor.prompt_probe import read_probe
from executor.tokens import count_ids, encode_ids
from streamrl.engine.messages import DrawnGroup, ExpectationsChanged, Generated
from streamrl.engine.systems import choose_system
from streamrl.runfile.config import Run
from streamrl.runfile.errors import shown
from streamrl.workload.epochs import EpochOrder
from streamrl.workload.expectations import Expectations
from streamrl.workload.tail_batching import TailBatches
from streamrl.workload.workload import Draw

Record = dict[str, Any]
"""One line of the prompts file."""

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
        self._order = EpochOrder(run.seed, len(self.records))
        self._told = Expectations(run)
        self._expected = self._priors(run)
        """Output tokens that are expected of each line before anything is learnt."""
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
        return [self._group(group) for group in range(first_group, first_group + num_groups)]

    def learn(self, event: Generated) -> ExpectationsChanged | None:
        """Return what is now expected of other rollouts, if that is asked for."""
        news = self._told.learn(event)
        if news is not None and news.reason:
            tell(news.reason)
        return news

    def forget(self, group: int) -> None:
        """Expect nothing more of a group that was dropped; what its prompt took stays known."""
        self._told.forget(group)

    @property
    def figures(self) -> dict[str, float]:
        """What there is to say of a step beside what was trained on in it."""
        return {} if self._told.recall is None else {"ranker_recall": self._told.recall}

    def remember(self, lengths: Sequence[tuple[int, int]]) -> None:
        """Enter what lines took in an earlier leg of the run, as (line, tokens)."""
        self._told.remember(lengths, [self._expected[line] for line, _ in lengths])

    def text(self, tokens: list[int]) -> str:
        """Return output tokens as text, special ones left out."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def line(self, group: int) -> int:
        """Return the index of the record that group `group` is made from."""
        source = group if self._tails is None else self._tails.source(group)
        return self._order.prompt(source)

    def _group(self, group: int) -> Draw:
        size = self._group_size
        rollouts = tuple(range(group * size, group * size + size))
        line = self.line(group)
        num_tokens, expected = count_ids(self.prompts[line]), (self._expected[line],) * size
        drawn = DrawnGroup(group, rollouts, num_tokens, expected, line)
        return Draw(self._told.draw(drawn, line), ())

    def _priors(self, run: Run) -> list[int]:
        """Return what a ranker's file says of each line, or the line itself; the most there may be where neither does."""
        ranker = run.workload.ranker
        if ranker is None or ranker.path is None:
            return [int(record.get(EXPECTED, self._max_tokens)) for record in self.records]
        from streamrl.ranker.known_lengths import text_of
        from streamrl.ranker.ranker_file import read_ranker

        if read_probe(Path(ranker.path)) is not None:
            raise ValueError(
                f"workload.ranker.path: {ranker.path} asks a language model: let it score the prompts ahead of the run "
                "with `streamrl ranker score`"
            )
        scored = read_ranker(Path(ranker.path)).score([text_of(r["prompt"]) for r in self.records])
        return [min(self._max_tokens, max(1, round(tokens))) for tokens in scored.tolist()]

    def _expect(self, first: int, num: int) -> list[int]:
        """Return what lines say alone: whatever was learnt, the same groups come of the same lines."""
        return [self._expected[self._order.prompt(source)] for source in range(first, first + num)]

    def _check_expected(self, path: Path, policy: str) -> None:
        for number, record in enumerate(self.records, start=1):
            if EXPECTED not in record:
                raise ValueError(
                    f"{policy} needs to know long prompts from short ones, but "
                    f"{path}:{number} has no {EXPECTED!r}"
                )


def expecting_policy(run: Run) -> str | None:
    """Return the key and value of a policy that works by `EXPECTED` alone; None where there is none, or a ranker knows.

    Where all rollouts are expected to be alike such a policy does nothing, and the run is not what was planned.
    """
    policies, system = run.policies, choose_system(run.policies)
    ranker = run.workload.ranker
    if ranker is not None and ranker.path is not None:
        return None
    if policies.tail_batching == "defer":
        return "policies.tail_batching 'defer'"
    if ranker is not None and ranker.history:
        return None
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
