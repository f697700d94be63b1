"""The sequences that a model generates at a time, each in its own row of the KV cache.

Decoding sequences have the first rows, without gaps: when one ends, the last one moves into its row. A pass computes
the next token of each, and then prefixes of new sequences: at most `PREFILL_TOKENS` tokens, in order of arrival. So at
most one sequence has part of its prefix in the cache, in the row after the last decoding one.

With `shares_prefixes`, a sequence copies the keys and values of a decoding one that has the same prefix and computed
it with the current weights. Then it computes only the last token. If that prefix is being computed, it waits.

Figures of a row are numpy arrays on the host, and a pass changes those of all rows at once.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from streamrl.executor.expert_choices import Choices
from streamrl.executor.rollout.inference_engine import (
    PREFILL_TOKENS,
    ReplicaSettings,
    RunningSequence,
)
from streamrl.executor.rollout.row_attention import PASS, Prefix, RowCache, RowPass
from streamrl.executor.rollout.stopwatch import PassContent, PassLog
from streamrl.executor.rollout.torch_model import cache_name, draw, next_logprobs
from streamrl.executor.router_replay import Routers, routers_of
from streamrl.executor.sampling import IsOver


@dataclass(eq=False)
class RowSequence:
    """One sequence that is generated."""

    run: str
    prefix: tuple[int, ...]
    max_new_tokens: int
    is_over: IsOver | None = None
    """Whether its output ends with the last token; None: only end tokens and its length end it."""
    evaluates: bool = False
    """Whether it has the sampling of evaluations."""
    prefill_at: float | None = None
    num_computed: int = 0
    """Number of prefix tokens in the cache."""
    row: int = 0
    """Its row, from the first pass on."""
    weights: int = 0
    """Which weights have computed the start of its prefix; see `RowBatch.change_weights`."""
    experts: list[Choices] = field(default_factory=list)
    """Chosen experts of its cached tokens, pass by pass, if they are recorded."""


class RowBatch:
    """A model, its cache, and the sequences that it generates."""

    def __init__(self, model: Any, settings: ReplicaSettings, end_tokens: Iterable[int]) -> None:
        rows, tokens = settings.max_running, settings.max_tokens
        self._model = model
        self._settings = settings
        self._cache_name = cache_name(model)
        self._routers = None
        if settings.router_replay:
            self._routers = routers_of(model) or Routers(model)
        self._ends = np.fromiter(end_tokens, np.int64)
        self._random = torch.Generator(settings.device).manual_seed(settings.seed)
        self._cache = RowCache(rows, settings.max_length)
        self._decoding: list[RowSequence] = []
        """By row."""
        self._filling: deque[RowSequence] = deque()
        """Sequences whose prefix is not complete. The first one may have a part of it in the row after those that decode."""
        self._weights = 0
        """Number of times that the weights have changed."""
        self._owners: dict[tuple[int, ...], RowSequence] = {}
        """By prefix: the newest decoding sequence that has it in the cache, computed with the current weights."""
        self._lengths = np.zeros(rows, np.int64)
        """Number of cached tokens of each decoding row."""
        self._counts = np.zeros(rows, np.int64)
        """Number of output tokens of each decoding row."""
        self._limits = np.zeros(rows, np.int64)
        self._evaluates = np.zeros(rows, bool)
        self._tokens = np.zeros((rows, tokens), np.int64)
        self._logprobs = np.zeros((rows, tokens), np.float32)
        self._times: deque[float] = deque(maxlen=tokens)
        """When the tokens of the last passes were known; a decoding row has one from each pass."""

    def __len__(self) -> int:
        """Return the number of unfinished sequences."""
        return len(self._decoding) + len(self._filling)

    def add(self, sequence: RowSequence) -> None:
        """Compute the prefix of a sequence in one of the next passes."""
        self._filling.append(sequence)

    def allocate(self) -> None:
        """Allocate the cache, which takes a pass."""
        self.add(RowSequence("", (0,), 1))
        self.compute_pass()
        self._times.clear()

    def change_weights(self) -> None:
        """Share no prefix with later sequences that the weights before have computed."""
        self._weights += 1
        self._owners.clear()

    def read(self, run: str) -> RunningSequence:
        """Return the output of a run so far."""
        for row, sequence in enumerate(self._decoding):
            if sequence.run == run:
                return self._output(row)
        (begun_at,) = (each.prefill_at for each in self._filling if each.run == run)
        return RunningSequence([], [], begun_at, [])

    def cancel(self, run: str) -> None:
        """Drop a run, if it is here."""
        self._filling = deque(s for s in self._filling if s.run != run)
        self._drop([row for row, sequence in enumerate(self._decoding) if sequence.run == run])

    @torch.no_grad()
    def compute_pass(self, passes: PassLog | None = None) -> list[tuple[str, RunningSequence]]:
        """Compute one pass, and sample a token for each sequence whose prefix is complete; return those that ended."""
        began_at = time.perf_counter()
        count = len(self._decoding)
        filled = list(self._next_prefixes(began_at))
        prefixes = [part for _, part in filled]
        plan = RowPass.plan(self._cache, self._lengths[:count], prefixes, self._random.device)
        if passes is not None:
            content = PassContent(
                (self._lengths[:count] + 1).tolist(), [each.length for each in prefixes]
            )
            passes.begin(lambda: content)
        given = [self._tokens[np.arange(count), self._counts[:count] - 1]]
        given += [
            np.array(sequence.prefix[each.start : each.start + each.length])
            for sequence, each in filled
        ]
        logits = self._forward(plan, np.concatenate(given))
        if self._routers is not None:
            self._record(self._routers.take().to(torch.int16).cpu().numpy(), filled)
        self._lengths[:count] += 1
        self._begin_decoding(filled)
        if not self._decoding:
            return []
        self._sample(logits)
        self._times.append(time.perf_counter())
        return self._take_ended()

    def _next_prefixes(self, now: float) -> Iterator[tuple[RowSequence, Prefix]]:
        """Yield sequences with the parts of their prefixes that the next pass computes, in rows after the decoding ones."""
        left, row = PREFILL_TOKENS, len(self._decoding)
        begun = set[tuple[int, ...]]()
        for sequence in self._filling:
            if not left:
                return
            if self._settings.shares_prefixes:
                if sequence.prefix in begun:
                    continue
                begun.add(sequence.prefix)
            sequence.row, row = row, row + 1
            if sequence.prefill_at is None:
                sequence.prefill_at = now
                sequence.weights = self._weights
                owner = self._owners.get(sequence.prefix)
                if owner is not None:
                    begun.remove(sequence.prefix)
                    sequence.num_computed = len(sequence.prefix) - 1
                    if owner.experts:
                        known = np.concatenate(owner.experts)
                        sequence.experts = [known[: sequence.num_computed]]
                    self._cache.move_row(owner.row, sequence.row, sequence.num_computed)
            start = sequence.num_computed
            length = min(left, len(sequence.prefix) - start)
            left -= length
            yield sequence, Prefix(sequence.row, start, length)

    def _forward(self, plan: RowPass, tokens: Any) -> torch.Tensor:
        """Return the logits after each decoding row and each part of a prefix, (rows, vocabulary)."""
        device = self._random.device
        ends = np.cumsum([plan.num_decoding, *(each.length for each in plan.prefixes)]) - 1
        last = np.concatenate([np.arange(plan.num_decoding), ends[1:]])
        keep: Any = 0 if len(last) == len(tokens) else torch.from_numpy(last).to(device)
        self._cache.plan = plan
        try:
            output = self._model(
                input_ids=torch.from_numpy(tokens)[None].to(device),
                position_ids=plan.positions[None],
                use_cache=True,
                logits_to_keep=keep,
                **{self._cache_name: self._cache, PASS: plan},
            )
        finally:
            self._cache.plan = None
        logits: torch.Tensor = output.logits[0].float()
        return logits

    def _record(self, choices: Choices, filled: list[tuple[RowSequence, Prefix]]) -> None:
        """Keep the experts of a pass for each of its sequences."""
        parts = [(sequence, 1) for sequence in self._decoding]
        parts += [(sequence, part.length) for sequence, part in filled]
        ends = itertools.accumulate(length for _, length in parts)
        for (sequence, length), end in zip(parts, ends, strict=True):
            sequence.experts.append(choices[end - length : end])

    def _begin_decoding(self, filled: list[tuple[RowSequence, Prefix]]) -> None:
        """Let sequences decode whose prefix a pass has completed; the logits of an incomplete one are not used."""
        for sequence, part in filled:
            sequence.num_computed += part.length
        complete = [s for s, _ in filled if s.num_computed == len(s.prefix)]
        begun = {id(sequence) for sequence, _ in filled}
        partial = [s for s, _ in filled if s.num_computed < len(s.prefix)]
        self._filling = deque([*partial, *(s for s in self._filling if id(s) not in begun)])
        for sequence in complete:
            row = sequence.row
            self._decoding.append(sequence)
            self._lengths[row] = sequence.num_computed
            self._counts[row] = 0
            self._limits[row] = sequence.max_new_tokens
            self._evaluates[row] = sequence.evaluates
            if self._settings.shares_prefixes and sequence.weights == self._weights:
                self._owners[sequence.prefix] = sequence

    def _sample(self, logits: torch.Tensor) -> None:
        """Sample the next token of each decoding row from its logits."""
        count = len(self._decoding)
        logprobs = next_logprobs(logits[:count], self._settings, self._evaluates[:count])
        sampled = draw(logprobs, self._random)
        chosen = logprobs.gather(1, sampled)[:, 0].cpu().numpy()
        if not np.isfinite(chosen).all():
            raise FloatingPointError("the model's logits are not finite")
        rows = np.arange(count)
        self._tokens[rows, self._counts[:count]] = sampled[:, 0].cpu().numpy()
        self._logprobs[rows, self._counts[:count]] = chosen
        self._counts[:count] += 1

    def _take_ended(self) -> list[tuple[str, RunningSequence]]:
        """Remove the sequences that their last token ended, and return their outputs."""
        count = len(self._decoding)
        last = self._tokens[np.arange(count), self._counts[:count] - 1]
        has_ended = np.isin(last, self._ends) | (self._counts[:count] >= self._limits[:count])
        for row, sequence in enumerate(self._decoding):
            if sequence.is_over is not None and not has_ended[row]:
                has_ended[row] = sequence.is_over(self._tokens[row, : self._counts[row]].tolist())
        rows = np.flatnonzero(has_ended).tolist()
        ended = [(self._decoding[row].run, self._output(row)) for row in rows]
        self._drop(rows)
        return ended

    def _output(self, row: int) -> RunningSequence:
        count = int(self._counts[row])
        times = list(self._times)[len(self._times) - count :]
        sequence = self._decoding[row]
        return RunningSequence(
            self._tokens[row, :count].tolist(),
            self._logprobs[row, :count].tolist(),
            sequence.prefill_at,
            times,
            np.concatenate(sequence.experts) if sequence.experts else None,
        )

    def _drop(self, rows: list[int]) -> None:
        """Remove decoding rows, given in order, and close the gaps."""
        for row in rows:
            ended = self._decoding[row]
            if self._owners.get(ended.prefix) is ended:
                del self._owners[ended.prefix]
        for row in reversed(rows):
            last = len(self._decoding) - 1
            sequence = self._decoding.pop()
            if row < last:
                self._decoding[row] = sequence
                sequence.row = row
                self._cache.move_row(last, row, int(self._lengths[last]))
                for figures in (self._lengths, self._counts, self._limits, self._evaluates):
                    figures[row] = figures[last]
                made = self._counts[row]
                self._tokens[row, :made] = self._tokens[last, :made]
                self._logprobs[row, :made] = self._logprobs[last, :made]
        if self._filling and self._filling[0].num_computed and rows:
            partial = self._filling[0]
            self._cache.move_row(partial.row, len(self._decoding), partial.num_computed)
            partial.row = len(self._decoding)
