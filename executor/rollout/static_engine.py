"""The plainest inference engine: what waits becomes one batch, which is generated to its end before the next begins.

A padded forward pass a token, written out: what other engines' log-probabilities are tested against. Rollouts that
end early leave their results at once; their rows are computed on. Passes run in a thread, one at a time; whoever
holds `_turn`, a pass or a pause, is alone with the batch.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from transformers import DynamicCache

from streamrl.executor.roles import Manifest
from streamrl.executor.rollout.inference_engine import (
    STOPPED,
    Copy,
    OnEnd,
    ReplicaSettings,
    RunningSequence,
    TimedPass,
)
from streamrl.executor.rollout.stopwatch import PassContent, PassLog
from streamrl.executor.rollout.torch_model import end_tokens, load_model, move, read_weights

PADDING = 0
"""Any token id: it stands on the left, where the attention mask hides it."""


@dataclass(eq=False)
class _Row:
    """One sequence of a batch."""

    prefix: list[int]
    max_new_tokens: int
    on_end: OnEnd
    random: torch.Generator | None = None
    """That it alone is sampled with; None: that of the engine."""
    prefill_at: float | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    is_over: bool = False
    """Whether its sequence has ended or was dropped."""

    @property
    def so_far(self) -> RunningSequence:
        """What it has made."""
        made = list(self.tokens), list(self.logprobs), self.prefill_at, list(self.token_times)
        return RunningSequence(*made)


class StaticEngine:
    """One model and one batch."""

    def __init__(self, settings: ReplicaSettings) -> None:
        self._settings = settings
        self._ids = map(str, itertools.count())
        self._rows: dict[str, _Row] = {}
        """Sequences that are not over, of the batch under way or else of the one about to begin."""
        self._batch: _Batch | None = None
        self._generating: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()
        self._end: RuntimeError | None = None
        """Why there is no generation any more."""
        self._passes: PassLog | None = None
        self._random = torch.Generator(settings.device).manual_seed(settings.seed)
        self._model: Any = None

    async def start(self, manifest: Manifest | None) -> None:
        """Load the model; the cache grows with each batch."""
        self._model = await load_model(self._settings, manifest)

    @property
    def end_tokens(self) -> frozenset[int]:
        """Token ids that end a rollout."""
        return end_tokens(self._model)

    @property
    def pads_context(self) -> bool:
        """Whether a decode step pads: always."""
        return True

    @property
    def prefill_tokens(self) -> int:
        """Most new prefix tokens of a pass: a batch's first has all of them."""
        return self._settings.max_running * self._settings.max_length

    @property
    def has_room(self) -> bool:
        """Whether no batch is under way, and the next has a row left."""
        is_open = self._batch is None and len(self._rows) < self._settings.max_running
        return is_open or self._end is not None

    @property
    def cache(self) -> None:
        """None: it is as large as the batch under way wants it."""
        return None

    def submit(
        self,
        tokens: list[int],
        max_new_tokens: int,
        on_end: OnEnd,
        seed: int | None,
        priority: int,
    ) -> str:
        """Put a sequence into the batch that begins once the event loop is back at work."""
        self._check_alive()
        assert self._batch is None, "whoever submits asks for room first"
        if not self._rows:
            asyncio.get_running_loop().call_soon(self._begin)
        run = next(self._ids)
        own = None if seed is None else torch.Generator(self._settings.device).manual_seed(seed)
        self._rows[run] = _Row(tokens, max_new_tokens, on_end, own)
        return run

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Hold generation between two forward passes."""
        async with self._turn:
            self._check_alive()
            yield

    def read(self, run: str) -> RunningSequence:
        """Return what `run` has made so far."""
        return self._rows[run].so_far

    def cancel(self, run: str) -> None:
        """Drop `run`; its row is computed on as long as the batch is."""
        self._take([run])

    async def read_weights(self, manifest: Manifest) -> Copy:
        """Read new weights, and return what copies them."""
        return await read_weights(manifest, self._model)

    async def sleep(self) -> None:
        """Keep the weights in host memory; the cache went with the last batch."""
        await move(self._model, "cpu")

    async def wake(self) -> None:
        """Take the weights back to the device."""
        await move(self._model, self._settings.device)

    async def stop(self) -> None:
        """End generation after the pass under way."""
        async with self._turn:
            self._fail(RuntimeError(STOPPED))

    async def time_passes(self) -> None:
        """Time every forward pass from now on."""
        self._passes = PassLog(self._settings.device)

    async def passes(self) -> list[TimedPass]:
        """Return the passes since the last call."""
        return [] if self._passes is None else self._passes.take()

    def _check_alive(self) -> None:
        if self._end is not None:
            raise RuntimeError(f"static batching is not running: {self._end}") from self._end

    def _begin(self) -> None:
        if not self._rows or self._batch is not None:
            return
        try:
            batch = _Batch(self._model, list(self._rows.values()), self._settings.temperature)
        except Exception as error:
            self._break(error)
            return
        self._batch = batch
        self._generating = asyncio.create_task(self._generate(batch))

    async def _generate(self, batch: _Batch) -> None:
        """Make token after token until the batch is over."""
        while self._batch is batch:
            async with self._turn:
                if self._batch is batch:
                    await self._make_token(batch)

    async def _make_token(self, batch: _Batch) -> None:
        if self._passes is not None:
            content = batch.content()
            self._passes.begin(lambda: content)
        try:
            await asyncio.to_thread(batch.make_token, self._random)
        except Exception as error:
            self._break(error)
            return
        for row in self._take([run for run, row in self._rows.items() if self._has_ended(row)]):
            row.on_end(row.so_far)

    def _has_ended(self, row: _Row) -> bool:
        return len(row.tokens) >= row.max_new_tokens or row.tokens[-1] in self.end_tokens

    def _break(self, error: Exception) -> None:
        """End for good by what went wrong in the batch."""
        failure = RuntimeError(f"static batching failed: {error}")
        failure.__cause__ = error
        self._fail(failure)

    def _fail(self, error: RuntimeError) -> None:
        self._end = self._end or error
        for row in self._take(list(self._rows)):
            row.on_end(error)

    def _take(self, runs: list[str]) -> list[_Row]:
        """Take sequences out, which are over; after the last one there is room for the next batch."""
        rows = [self._rows.pop(run) for run in runs]
        for row in rows:
            row.is_over = True
        if not self._rows:
            self._batch = None
        return rows


def cache_name(model: Any) -> str:
    """Return what a model calls the keys and values that it is given: another name from transformers 5.24 on."""
    return "cache" if "cache" in signature(model.forward).parameters else "past_key_values"


class _Batch:
    """The rows of one batch, padded on the left to the longest prefix, and their keys and values."""

    def __init__(self, model: Any, rows: list[_Row], temperature: float) -> None:
        self._model = model
        self._rows = rows
        self._temperature = temperature
        self._cache = DynamicCache(config=model.config)
        self._cached = {cache_name(model): self._cache}
        width = max(len(row.prefix) for row in rows)
        gaps = [width - len(row.prefix) for row in rows]
        padded = [[PADDING] * gap + row.prefix for gap, row in zip(gaps, rows, strict=True)]
        places = torch.arange(width, device=model.device)
        self._inputs = torch.tensor(padded, device=model.device)
        """Tokens that the next pass reads, (rows, tokens)."""
        self._is_token = places >= torch.tensor(gaps, device=model.device)[:, None]
        """Of every place up to the last of `_inputs`, whether it holds a token of its row."""

    def content(self) -> PassContent:
        """Return what the next pass computes."""
        live = [row for row in self._rows if not row.is_over]
        if self._cache.get_seq_length():
            return PassContent([len(row.prefix) + len(row.tokens) for row in live], [])
        return PassContent([], [len(row.prefix) for row in live])

    @torch.no_grad()
    def make_token(self, random: torch.Generator) -> None:
        """Compute a pass and sample the next token of every row, kept of those that are not over."""
        began_at = time.perf_counter()
        logprobs = self._next_logprobs()
        sampled = self._sample(logprobs.exp(), random)
        chosen = logprobs.gather(1, sampled)[:, 0].tolist()
        tokens = sampled[:, 0].tolist()
        known_at = time.perf_counter()
        for row, token, logprob in zip(self._rows, tokens, chosen, strict=True):
            if not row.is_over:
                row.prefill_at = row.prefill_at or began_at
                row.tokens.append(token)
                row.logprobs.append(logprob)
                row.token_times.append(known_at)
        self._inputs = sampled

    def _sample(self, probabilities: torch.Tensor, random: torch.Generator) -> torch.Tensor:
        """Return a token of each row, (rows, 1)."""
        if all(row.random is None for row in self._rows):
            return torch.multinomial(probabilities, 1, generator=random)
        each = zip(probabilities, self._rows, strict=True)
        return torch.stack([torch.multinomial(p, 1, generator=r.random or random) for p, r in each])

    def _next_logprobs(self) -> torch.Tensor:
        """Return the log-probability of each next token, (rows, vocabulary), in float32."""
        positions = (self._is_token.cumsum(1) - 1).clamp(min=0)
        output = self._model(
            input_ids=self._inputs,
            attention_mask=self._is_token.long(),
            position_ids=positions[:, -self._inputs.shape[1] :],
            use_cache=True,
            logits_to_keep=1,
            **self._cached,
        )
        self._is_token = torch.cat([self._is_token, self._is_token.new_ones(len(self._rows), 1)], 1)
        return torch.log_softmax(output.logits[:, -1].float() / self._temperature, dim=-1)
