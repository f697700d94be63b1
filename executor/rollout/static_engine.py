"""The simplest inference engine: waiting sequences form one batch, which runs to its end before the next begins.

It computes one padded forward pass for each token. The tests compare the log-probabilities of other engines with it.
A rollout that ends early is delivered at once, but its row is computed until the batch ends. Passes run in a thread,
one at a time. A pass or a pause holds `_turn`, so that it has exclusive access to the batch.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
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
from streamrl.executor.rollout.torch_model import (
    cache_name,
    end_tokens,
    load_model,
    move,
    next_logprobs,
    read_weights,
)
from streamrl.executor.sampling import IsOver

PADDING = 0
"""Any token id: padding is on the left, where the attention mask hides it."""


@dataclass(eq=False)
class _Row:
    """One sequence of a batch."""

    prefix: list[int]
    max_new_tokens: int
    on_end: OnEnd
    random: torch.Generator | None = None
    """Generator of this sequence alone; None: use the engine's."""
    ends: IsOver | None = None
    """Whether the sequence ends with its last token; None: only end tokens and its length end it."""
    evaluates: bool = False
    """Whether it has the sampling of evaluations."""
    prefill_at: float | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    is_over: bool = False
    """Whether the sequence has ended or was cancelled."""

    @property
    def so_far(self) -> RunningSequence:
        """Return the output so far."""
        made = list(self.tokens), list(self.logprobs), self.prefill_at, list(self.token_times)
        return RunningSequence(*made)


class StaticEngine:
    """One model and its current batch."""

    def __init__(self, settings: ReplicaSettings) -> None:
        self._settings = settings
        self._ids = map(str, itertools.count())
        self._rows: dict[str, _Row] = {}
        """Unfinished sequences of the current batch, or of the next batch if none is running."""
        self._batch: _Batch | None = None
        self._generating: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()
        self._end: RuntimeError | None = None
        """Error that ended generation, if any."""
        self._passes: PassLog | None = None
        self._random = torch.Generator(settings.device).manual_seed(settings.seed)
        self._model: Any = None

    async def start(self, manifest: Manifest | None) -> None:
        """Load the model; each batch allocates its own cache."""
        self._model = await load_model(self._settings, manifest)

    @property
    def end_tokens(self) -> frozenset[int]:
        """Return the token ids that end a rollout."""
        return end_tokens(self._model, self._settings.end_tokens)

    @property
    def pads_context(self) -> bool:
        """Return True: each decode step pads."""
        return True

    @property
    def prefill_tokens(self) -> int:
        """Return the maximum number of new prefix tokens of a pass: the first pass computes all prefixes."""
        return self._settings.max_running * self._settings.max_length

    @property
    def has_room(self) -> bool:
        """Return whether no batch is running and the next one has a free row."""
        is_open = self._batch is None and len(self._rows) < self._settings.max_running
        return is_open or self._end is not None

    @property
    def is_over(self) -> bool:
        """Return whether generation was stopped or has failed."""
        return self._end is not None

    @property
    def cache(self) -> None:
        """Return None: the cache has no fixed size."""
        return None

    def submit(
        self,
        tokens: list[int],
        max_new_tokens: int,
        on_end: OnEnd,
        seed: int | None,
        priority: int,
        is_over: IsOver | None = None,
        evaluates: bool = False,
    ) -> str:
        """Add a sequence to the next batch, which begins when control returns to the event loop."""
        self._check_alive()
        assert self._batch is None, "submit needs a free row: check has_room first"
        if not self._rows:
            asyncio.get_running_loop().call_soon(self._begin)
        run = next(self._ids)
        own = None if seed is None else torch.Generator(self._settings.device).manual_seed(seed)
        self._rows[run] = _Row(tokens, max_new_tokens, on_end, own, is_over, evaluates)
        return run

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Stop generation between two forward passes."""
        async with self._turn:
            self._check_alive()
            yield

    def read(self, run: str) -> RunningSequence:
        """Return the output of `run` so far."""
        return self._rows[run].so_far

    def cancel(self, run: str) -> None:
        """Drop `run`; its row is computed until the batch ends."""
        self._take([run])

    async def read_weights(self, manifest: Manifest) -> Copy:
        """Read new weights; return a function that copies them."""
        return await read_weights(manifest, self._model)

    async def sleep(self) -> None:
        """Move the weights to host memory; between batches there is no cache."""
        await move(self._model, "cpu")

    async def wake(self) -> None:
        """Move the weights back to the device."""
        await move(self._model, self._settings.device)

    async def stop(self) -> None:
        """Stop generation after the current pass."""
        async with self._turn:
            self._fail(RuntimeError(STOPPED))

    async def time_passes(self) -> None:
        """Start timing every forward pass."""
        self._passes = PassLog(self._settings.device)

    async def passes(self) -> list[TimedPass]:
        """Return the completed passes since the last call."""
        return [] if self._passes is None else self._passes.take()

    def _check_alive(self) -> None:
        if self._end is not None:
            raise RuntimeError(f"static batching is not running: {self._end}") from self._end

    def _begin(self) -> None:
        if not self._rows or self._batch is not None:
            return
        try:
            batch = _Batch(self._model, list(self._rows.values()), self._settings)
        except Exception as error:
            self._break(error)
            return
        self._batch = batch
        self._generating = asyncio.create_task(self._generate(batch))

    async def _generate(self, batch: _Batch) -> None:
        """Sample tokens until the batch has ended."""
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
        if len(row.tokens) >= row.max_new_tokens or row.tokens[-1] in self.end_tokens:
            return True
        return row.ends is not None and row.ends(row.tokens)

    def _break(self, error: Exception) -> None:
        """End generation permanently after an error in the batch."""
        failure = RuntimeError(f"static batching failed: {error}")
        failure.__cause__ = error
        self._fail(failure)

    def _fail(self, error: RuntimeError) -> None:
        self._end = self._end or error
        for row in self._take(list(self._rows)):
            row.on_end(error)

    def _take(self, runs: list[str]) -> list[_Row]:
        """Remove sequences and mark them as over; without any left, the next batch can begin."""
        rows = [self._rows.pop(run) for run in runs]
        for row in rows:
            row.is_over = True
        if not self._rows:
            self._batch = None
        return rows


class _Batch:
    """The rows of one batch, padded on the left to the longest prefix, and their KV cache."""

    def __init__(self, model: Any, rows: list[_Row], settings: ReplicaSettings) -> None:
        self._model = model
        self._rows = rows
        self._settings = settings
        self._cache = DynamicCache(config=model.config)
        self._cached = {cache_name(model): self._cache}
        width = max(len(row.prefix) for row in rows)
        gaps = [width - len(row.prefix) for row in rows]
        padded = [[PADDING] * gap + row.prefix for gap, row in zip(gaps, rows, strict=True)]
        columns = torch.arange(width, device=model.device)
        self._inputs = torch.tensor(padded, device=model.device)
        """Input tokens of the next pass, (rows, tokens)."""
        self._is_token = columns >= torch.tensor(gaps, device=model.device)[:, None]
        """Whether each column up to the last of `_inputs` has a token of its row, (rows, columns)."""

    def content(self) -> PassContent:
        """Return the tokens that the next pass computes."""
        live = [row for row in self._rows if not row.is_over]
        if self._cache.get_seq_length():
            return PassContent([len(row.prefix) + len(row.tokens) for row in live], [])
        return PassContent([], [len(row.prefix) for row in live])

    @torch.no_grad()
    def make_token(self, random: torch.Generator) -> None:
        """Compute one pass, and sample the next token of each row; rows that are over ignore theirs."""
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
        """Sample one token for each row, (rows, 1)."""
        if all(row.random is None for row in self._rows):
            return torch.multinomial(probabilities, 1, generator=random)
        each = zip(probabilities, self._rows, strict=True)
        return torch.stack([torch.multinomial(p, 1, generator=r.random or random) for p, r in each])

    def _next_logprobs(self) -> torch.Tensor:
        """Compute the log-probabilities of the next token, (rows, vocabulary), in float32."""
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
        evaluates = np.array([row.evaluates for row in self._rows])
        return next_logprobs(output.logits[:, -1], self._settings, evaluates)
