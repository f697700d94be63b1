"""Generate with a transformers model by continuous batching: sequences join and leave the batch at each forward pass.

Passes run in a thread of their own, which owns `RowBatch` while it is in a pass. Between passes it adds submitted
sequences, and waits while there is nothing to generate or while generation is paused.

| guarantee of `InferenceEngine` | given by |
|---|---|
| a run ends in exactly one call of its `on_end` | `_deliver` and `_fail` take it out of `_on_end` |
| inside `paused()` no token is sampled, and every earlier `on_end` has been called | `_in_pass`: a pass hands its results to the event loop before it ends |
| after `stop()` or a crash, `submit` and `paused` raise | `_check_alive` |
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import torch

from streamrl.executor.roles import CacheState, Manifest
from streamrl.executor.rollout.inference_engine import (
    PREFILL_TOKENS,
    STOPPED,
    Copy,
    OnEnd,
    ReplicaSettings,
    RunningSequence,
    TimedPass,
)
from streamrl.executor.rollout.row_attention import attend_by_row
from streamrl.executor.rollout.row_batch import RowBatch, RowSequence
from streamrl.executor.rollout.stopwatch import PassLog
from streamrl.executor.rollout.torch_model import end_tokens, load_model, move, read_weights
from streamrl.executor.sampling import IsOver


class TransformersEngine:
    """One model, and the thread that generates with it."""

    def __init__(self, settings: ReplicaSettings) -> None:
        self._settings = settings
        self._ids = map(str, itertools.count())
        self._on_end: dict[str, OnEnd] = {}
        """Of every unfinished run; used on the event loop."""
        self._submitted: deque[RowSequence] = deque()
        """Sequences that the thread has not added yet."""
        self._state = threading.Condition()
        """Guards the flags below, and is notified when one changes."""
        self._num_pauses = 0
        self._in_pass = False
        self._stopping = False
        self._end: RuntimeError | None = None
        """Error that ended generation, if any."""
        self._wakes = False
        """Whether the thread will be woken up in this turn of the event loop."""
        self._passes: PassLog | None = None
        self._batch: RowBatch | None = None
        self._thread: threading.Thread | None = None
        self._model: Any = None

    async def start(self, manifest: Manifest | None) -> None:
        """Load the model, allocate the cache and start the thread."""
        self._model = await load_model(self._settings, manifest)
        if self._settings.takes_turns:
            gc.freeze()  # each sleep collects garbage, and several 100,000 objects never become garbage
        attend_by_row(self._model)
        self._loop = asyncio.get_running_loop()
        self._batch = await asyncio.to_thread(self._new_batch)
        self._thread = threading.Thread(target=self._generate, daemon=True, name="generation")
        self._thread.start()

    @property
    def end_tokens(self) -> frozenset[int]:
        """Return the token ids that end a rollout."""
        return end_tokens(self._model, self._settings.end_tokens)

    @property
    def pads_context(self) -> bool:
        """Return True: a decode step reads as many keys of each row as the longest one has."""
        return True

    @property
    def prefill_tokens(self) -> int:
        """Return the maximum number of new prefix tokens of a pass, without decoding rollouts."""
        return PREFILL_TOKENS

    @property
    def has_room(self) -> bool:
        """Return whether the batch has room for one more sequence; sequences may join at each pass."""
        return len(self._on_end) < self._settings.max_running

    @property
    def is_over(self) -> bool:
        """Return whether generation was stopped or has failed."""
        return self._end is not None

    @property
    def cache(self) -> CacheState | None:
        """Return the state of the cache, which has room for `max_running` longest rollouts: it never preempts."""
        if self._batch is None:
            return None
        settings = self._settings
        tokens = settings.max_running * settings.max_length
        return CacheState(
            tokens=tokens, use=len(self._on_end) / settings.max_running, num_preempted=0
        )

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
        """Generate after `tokens` from the next forward pass on; `on_end` gets the output or an error.

        `seed` has no effect: all sequences share one random number generator.
        """
        self._check_alive()
        run = next(self._ids)  # not the rollout's id: a late cancel would hit its next attempt
        self._on_end[run] = on_end
        self._submitted.append(RowSequence(run, tuple(tokens), max_new_tokens, is_over, evaluates))
        if not self._wakes:  # once, after all that this turn of the event loop submits
            self._wakes = True
            self._loop.call_soon(self._wake)
        return run

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Stop generation between two forward passes; running sequences keep their KV cache.

        On entry all earlier results have been delivered, because the event loop runs callbacks of other threads in
        order. Raises `RuntimeError` if generation is not running.
        """
        self._check_alive()
        with self._state:
            self._num_pauses += 1
        try:
            await asyncio.to_thread(self._wait_for_pass)
            self._check_alive()
            self._add_submitted()
            yield
        finally:
            with self._state:
                self._num_pauses -= 1
                self._state.notify_all()

    def read(self, run: str) -> RunningSequence:
        """Return the output of `run` so far; call it only while paused and before its `on_end`."""
        assert self._batch is not None
        return self._batch.read(run)

    def cancel(self, run: str) -> None:
        """Drop `run` without calling its `on_end`; call it only while paused."""
        assert self._batch is not None
        self._on_end.pop(run, None)
        self._batch.cancel(run)

    async def read_weights(self, manifest: Manifest) -> Copy:
        """Read new weights; return a function that copies them."""
        copy = await read_weights(manifest, self._model)

        async def load() -> None:
            await copy()
            if self._batch is not None:
                self._batch.change_weights()

        return load

    async def sleep(self) -> None:
        """Free the cache and move the weights to host memory."""
        async with self.paused():
            self._batch = None
            await move(self._model, "cpu")

    async def wake(self) -> None:
        """Move the weights back to the device, and allocate the cache."""
        await move(self._model, self._settings.device)
        self._batch = await asyncio.to_thread(self._new_batch)

    async def stop(self) -> None:
        """Stop generation after the current pass; every remaining run ends in a `RuntimeError`."""
        with self._state:
            self._stopping = True
            self._state.notify_all()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        self._fail(RuntimeError(STOPPED))
        self._batch = None

    async def time_passes(self) -> None:
        """Start timing every forward pass."""
        self._passes = PassLog(self._settings.device)

    async def passes(self) -> list[TimedPass]:
        """Return the completed passes since the last call."""
        return [] if self._passes is None else self._passes.take()

    def _new_batch(self) -> RowBatch:
        """Return a batch with an allocated cache.

        Raises `MemoryError` if the cache does not fit.
        """
        batch = RowBatch(self._model, self._settings, self.end_tokens)
        try:
            batch.allocate()
        except RuntimeError as error:  # torch has no class of its own for this on a CPU
            if isinstance(error, torch.OutOfMemoryError) or "memory" in str(error):
                raise MemoryError(f"the KV cache does not fit: {error}") from error
            raise
        return batch

    def _wake(self) -> None:
        self._wakes = False
        with self._state:
            self._state.notify_all()

    def _wait_for_pass(self) -> None:
        """Wait until no pass runs, or no pause is wanted any more because its task was cancelled."""
        with self._state:
            while self._in_pass and self._num_pauses:
                self._state.wait()

    def _generate(self) -> None:
        """Compute passes until the engine stops or fails, in the engine's thread."""
        try:
            while self._begin_pass():
                assert self._batch is not None
                self._add_submitted()
                ended = self._batch.compute_pass(self._passes)
                if ended:
                    self._loop.call_soon_threadsafe(self._deliver, ended)
                self._end_pass()
        except BaseException as error:
            self._loop.call_soon_threadsafe(self._break, error)
            self._end_pass()

    def _begin_pass(self) -> bool:
        """Wait until there is something to generate; return whether the engine goes on."""
        with self._state:
            while not self._stopping and (self._num_pauses or not self._has_work()):
                self._state.wait()
            self._in_pass = not self._stopping
            return self._in_pass

    def _has_work(self) -> bool:
        return bool(self._submitted or self._batch)

    def _end_pass(self) -> None:
        with self._state:
            self._in_pass = False
            self._state.notify_all()

    def _add_submitted(self) -> None:
        """Add submitted sequences to the batch; call it in the thread, or while paused."""
        assert self._batch is not None
        while self._submitted:
            self._batch.add(self._submitted.popleft())

    def _deliver(self, ended: list[tuple[str, RunningSequence]]) -> None:
        """Pass on the outputs of runs that have ended."""
        for run, output in ended:
            on_end = self._on_end.pop(run, None)
            if on_end is not None:  # else cancelled or failed
                on_end(output)

    def _check_alive(self) -> None:
        if self._end is not None:
            raise RuntimeError(f"continuous batching is not running: {self._end}") from self._end

    def _break(self, error: BaseException) -> None:
        """End generation permanently after an error in a pass."""
        failure = RuntimeError(f"continuous batching failed: {error}")
        failure.__cause__ = error
        self._fail(failure)

    def _fail(self, error: RuntimeError) -> None:
        self._end = self._end or error
        for run in list(self._on_end):
            self._on_end.pop(run)(error)
