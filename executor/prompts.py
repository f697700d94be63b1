"""Tokenize the prompts of an executed run, and draw them in the order of its epochs."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import TemplateError

from streamrl.engine.messages import DrawnGroup, ExpectationsChanged, Generated
from streamrl.engine.presets import choose_system
from streamrl.executor.chat_template import render
from streamrl.executor.end_of_turn import TurnEnds
from streamrl.executor.prompt_probe import read_probe
from streamrl.executor.tokens import count_ids, decode_ids, encode_ids
from streamrl.runfile.config import Run
from streamrl.runfile.dispatch_choice import dispatch_named
from streamrl.runfile.policies_config import PoliciesConfig
from streamrl.runfile.roles_config import SecondaryTrainerConfig
from streamrl.runfile.workload_config import RankerConfig, WorkloadConfig
from streamrl.workload.online_ranker import Expectations
from streamrl.workload.prompt_families import check_families, prompt_family
from streamrl.workload.prompt_order import TailBatches, held_out_lines, make_order
from streamrl.workload.prompt_records import EXPECTED, PromptSource, Record, read_sources
from streamrl.workload.workload import Draw

logger = logging.getLogger(__name__)

MOST_SAID = 300
"""Maximum characters of an error of the tokenizer in a message."""


class PromptWorkload:
    """Draws groups from the records of a run's data sets; the group id and the run's seed select the record."""

    def __init__(self, run: Run, tokenizer: Any, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """Tokenize the prompts of a run; `tools` are schemas of its environment for the chat template.

        With an environment, a chat ends before the policy's turn begins: the environment may add messages.
        """
        self._rendering: dict[str, object] = {
            "add_generation_prompt": run.environment is None,
            **({"tools": list(tools)} if tools else {}),
            **run.workload.template_arguments,
        }
        sources = read_sources(run.workload)
        assert sources, "check_executable wants prompts"
        self.records = list(chain.from_iterable(source.records for source in sources))
        """Records of all data sets, concatenated. A line is an index into this list."""
        self.tokenizer = tokenizer
        self.prompts = [encode_ids(ids) for source in sources for ids in self.tokenized(source)]
        """Token ids of each record's prompt; see `streamrl.executor.tokens`."""
        self.has_chats = any(not isinstance(record["prompt"], str) for record in self.records)
        """Whether the model's chat template renders prompts."""
        arguments = run.workload.template_arguments
        ends = TurnEnds.of(str(run.model.path), tokenizer, arguments, has_chats=self.has_chats)
        self.end_tokens = ends.tokens
        """Token ids that end a rollout, of all files of the model."""
        self.notes = [*(note for source in sources for note in source.notes), *ends.notes]
        """What is unusual in the data sets and in the model's files, one line each."""
        self.group_size = run.algorithm.group_size
        self.max_tokens = run.rollout.max_tokens
        """Maximum output tokens of a rollout."""
        self._sources = sources
        share = None if run.evaluation is None else run.evaluation.share
        self.held_out = held_out_lines([len(each.records) for each in sources], share, run.seed)
        """Lines of prompts that are evaluated, and never trained on."""
        drawable = list(self._drawable(run.workload))
        self._lines_drawn = list(chain.from_iterable(drawable))
        """Lines that the order of prompts counts."""
        self._order = make_order(run.workload, run.seed, [len(lines) for lines in drawable])
        self._told = Expectations(
            run.workload.ranker,
            prompts_per_step=run.algorithm.prompts_per_step,
            max_tokens=run.rollout.max_tokens,
            seed=run.seed,
            learns_from_siblings=run.policies.learns_from_siblings,
        )
        self._tells_families = False
        self.join(run.followers)
        self._expected = self._priors(run.workload.ranker)
        """Expected output tokens of each line before the run learns from its rollouts."""
        self._tails: TailBatches | None = None
        if (policy := expecting_policy(run.policies, run.workload.ranker)) is not None:
            _check_expected(sources, policy)
        if run.policies.tail_batching == "defer":
            every = run.policies.tail_every
            self._tails = TailBatches(run.algorithm.prompts_per_step, every, self._expect)

    def tokenized(self, source: PromptSource) -> Iterator[list[int]]:
        """Yield the token ids of the prompts of a data set, also of held-out ones, rendered as those of the run."""
        return tokenize(source, self.tokenizer, self._rendering)

    def with_prompts(
        self, records: Sequence[Record], prompts: Sequence[bytes], max_tokens: int
    ) -> PromptWorkload:
        """Return a workload of other prompts for the same model, with at most `max_tokens` output tokens each.

        Nothing is drawn from it: its prompts are named by their index.
        """
        own = copy(self)
        own.records, own.prompts, own.max_tokens = list(records), list(prompts), max_tokens
        return own

    def join(self, followers: Sequence[SecondaryTrainerConfig]) -> None:
        """Report prompt families from now on, if a secondary trainer of the run filters by family.

        Raises:
            RunError: a trainer names a family that no prompt has.
        """
        if any(follower.families for follower in followers):
            known = {prompt_family(record) for record in self.records}
            check_families(followers, {family for family in known if family is not None})
            self._tells_families = True

    def draw(self, first_group: int, num_groups: int) -> list[Draw]:
        """Return groups by id, without lengths, which are known only after generation."""
        return [self._group(group) for group in range(first_group, first_group + num_groups)]

    def learn(self, event: Generated) -> ExpectationsChanged | None:
        """Return new expected lengths of other rollouts, if the run learns them."""
        news = self._told.learn(event)
        if news is not None and news.reason:
            logger.info(news.reason)
        return news

    def forget(self, group: int) -> None:
        """Forget a dropped group; the lengths of its prompt's rollouts stay known."""
        self._told.forget(group)

    @property
    def figures(self) -> dict[str, float]:
        """Figures of a step about the length ranker; empty without one."""
        return {} if self._told.recall is None else {"ranker_recall": self._told.recall}

    def remember(self, lengths: Sequence[tuple[int, int]]) -> None:
        """Record output lengths from before a restart, as (line, tokens)."""
        self._told.remember(lengths, [self._expected[line] for line, _ in lengths])

    def text(self, tokens: list[int]) -> str:
        """Return output tokens as text, without special tokens."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def line(self, group: int) -> int:
        """Return the index of a group's record."""
        source = group if self._tails is None else self._tails.source(group)
        return self._lines_drawn[self._order.prompt(source)]

    def place(self, line: int) -> str:
        """Return the file and the line of a record, as errors name it: from 1 in each file."""
        for source in self._sources:
            if line < len(source.records):
                return source.line(line)
            line -= len(source.records)
        raise IndexError("no data set has this record")

    def _group(self, group: int) -> Draw:
        size = self.group_size
        rollouts = tuple(range(group * size, group * size + size))
        line = self.line(group)
        num_tokens, expected = count_ids(self.prompts[line]), (self._expected[line],) * size
        family = prompt_family(self.records[line]) if self._tells_families else None
        drawn = DrawnGroup(group, rollouts, num_tokens, expected, line, family=family)
        return Draw(self._told.draw(drawn, line), ())

    def _priors(self, ranker: RankerConfig | None) -> list[int]:
        """Return the expected output tokens of each line: from the ranker's file, the record, or the maximum."""
        if ranker is None or ranker.path is None:
            return [int(record.get(EXPECTED, self.max_tokens)) for record in self.records]
        from streamrl.ranker.score_files import text_of
        from streamrl.ranker.text_ranker import read_ranker

        if read_probe(Path(ranker.path)) is not None:
            raise ValueError(
                f"workload.ranker.path: {ranker.path} needs a language model; score the prompts before the run "
                "with `streamrl ranker score`"
            )
        scored = read_ranker(Path(ranker.path)).score([text_of(r["prompt"]) for r in self.records])
        return [min(self.max_tokens, max(1, round(tokens))) for tokens in scored.tolist()]

    def _expect(self, first: int, num: int) -> list[int]:
        """Return expected lengths from lines alone; what the run learns must not change the order of groups."""
        order, lines = self._order, self._lines_drawn
        return [self._expected[lines[order.prompt(each)]] for each in range(first, first + num)]

    def check_vocabulary(self, size: int) -> None:
        """Raise `ValueError` if a prompt has a token id that is not below the vocabulary size."""
        for line, ids in zip(self._lines(), self.prompts, strict=True):
            if (token := int(decode_ids(ids).max())) >= size:
                raise ValueError(
                    f"{line}: the tokenizer of model.path makes token {token}, but the model has {size} (vocab_size)"
                )

    def _lines(self) -> Iterator[str]:
        """Yield the file and line of each record."""
        return (source.line(at) for source in self._sources for at in range(len(source.records)))

    def _drawable(self, workload: WorkloadConfig) -> Iterator[list[int]]:
        """Yield the lines of each data set whose prompts are drawn; report those that are too long.

        Raises:
            ValueError: a prompt is empty, or too long for a run that refuses such prompts, or all are too long.
        """
        most, first = workload.max_prompt_tokens, 0
        for source in self._sources:
            lengths = {}
            for at, record in enumerate(source.records):
                line, lengths[first + at] = source.line(at), count_ids(self.prompts[first + at])
                _check_tokens(line, lengths[first + at], record)
                if lengths[first + at] > most and workload.overlong_prompts == "refuse":
                    raise ValueError(
                        f"{line}: {lengths[first + at]} prompt tokens, but workload.max_prompt_tokens is {most}; "
                        "raise it, or leave such prompts out: --set workload.overlong_prompts=filter"
                    )
            first += len(source.records)
            kept = [line for line, length in lengths.items() if length <= most]
            num_out = len(lengths) - len(kept)
            held_out = frozenset(self.held_out)
            kept = [line for line in kept if line not in held_out]
            if num_out:
                left_out = (
                    f"{source.key}: {num_out} of {len(lengths)} prompts of {source.name} have more than "
                    f"workload.max_prompt_tokens={most} tokens (longest: {max(lengths.values())})"
                )
                if not kept:
                    raise ValueError(f"{left_out}; no prompt is left")
                self.notes.append(f"{left_out} and are left out")
            yield kept


def _check_tokens(line: str, num_tokens: int, record: Record) -> None:
    """Raise `ValueError` if a prompt has no token."""
    if not num_tokens and not record["prompt"]:
        raise ValueError(f"{line}: the prompt is empty")
    if not num_tokens:
        raise ValueError(
            f"{line}: the tokenizer of model.path makes no token of the prompt: are its files there?"
        )


def expecting_policy(policies: PoliciesConfig, ranker: RankerConfig | None) -> str | None:
    """Return the key and value of a policy that needs `EXPECTED` in records, or None if no policy does.

    If a ranker provides lengths, records need not have them. If all expected lengths are equal, such a policy has no
    effect, and the run differs from its plan.
    """
    system = choose_system(policies)
    if ranker is not None and ranker.path is not None:
        return None
    if policies.tail_batching == "defer":
        return "policies.tail_batching 'defer'"
    if ranker is not None and ranker.history:
        return None
    if dispatch_named(system.dispatch).needs_lengths:
        return f"policies.dispatch {system.dispatch!r}"
    if system.order == "longest-first" and not policies.learns_from_siblings:
        return "policies.order 'longest-first'"
    return None


def load_tokenizer(path: str) -> Any:
    """Read the tokenizer of a Hugging Face directory.

    Raises:
        ValueError: it cannot be read.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:  # a damaged file can raise any kind of error
        reason = " ".join(str(error).split())[:MOST_SAID] or type(error).__name__
        raise ValueError(f"model.path {path!r}: its tokenizer cannot be read: {reason}") from error


def _check_expected(sources: Sequence[PromptSource], policy: str) -> None:
    for source in sources:
        for at, record in enumerate(source.records):
            if EXPECTED not in record:
                raise ValueError(
                    f"{policy} needs to know long prompts from short ones, but "
                    f"{source.line(at)} has no {EXPECTED!r}"
                )


def tokenize(
    source: PromptSource, tokenizer: Any, arguments: Mapping[str, object]
) -> Iterator[list[int]]:
    """Yield the token ids of each prompt: a text with the model's special tokens, a chat by the chat template.

    If the model has no chat template, a chat that the run file builds becomes a text of its messages. A chat in the
    data set is refused.
    """
    is_text = source.is_templated and not getattr(tokenizer, "chat_template", None)
    added = AddedTokens.of(tokenizer)
    for at, record in enumerate(source.records):
        prompt = record["prompt"]
        if is_text:
            prompt = "\n\n".join(message["content"] for message in prompt)
        if isinstance(prompt, str):
            yield added.of_prompt(list(tokenizer.encode(prompt)))
            continue
        try:
            ids = render(tokenizer, prompt, **arguments)
        except (TemplateError, TypeError, LookupError, ValueError) as error:
            line = source.line(at)
            text = f"{line}: the model's chat template does not accept the prompt: {error}"
            raise ValueError(text) from None
        yield ids


class AddedTokens(NamedTuple):
    """Special tokens that a tokenizer puts before and after every text."""

    before: list[int]
    after: list[int]

    @classmethod
    def of(cls, tokenizer: Any) -> AddedTokens:
        """Find them by encoding a short text with and without them."""
        try:
            plain = list(tokenizer.encode("a", add_special_tokens=False))
        except TypeError:  # a tokenizer without special tokens
            return cls([], [])
        whole = list(tokenizer.encode("a"))
        for start in range(len(whole) - len(plain) + 1):
            if whole[start : start + len(plain)] == plain:
                return cls(whole[:start], whole[start + len(plain) :])
        return cls([], [])

    def of_prompt(self, ids: list[int]) -> list[int]:
        """Return the ids of a prompt with one beginning and without an end.

        A text that was rendered by a chat template has its beginning already. After an end token the model would begin
        something else.
        """
        num_before, num_after = len(self.before), len(self.after)
        if num_before and ids[num_before : 2 * num_before] == self.before:
            ids = ids[num_before:]
        if num_after and ids[-num_after:] == self.after:
            ids = ids[:-num_after]
        return ids
