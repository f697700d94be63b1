"""The worker process of a replica: generate rollouts in order of priority, and load new weights meanwhile.

An `InferenceEngine` generates. This module adds the parts that all engines share: a priority queue, aborts that keep
the partial tokens, drains, and a policy version for each token.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from streamrl.executor.expert_choices import encode_choices, end_of
from streamrl.executor.prompts import load_tokenizer
from streamrl.executor.roles import (
    BroadcastRank,
    CacheState,
    Completion,
    FinishReason,
    Loaded,
    Manifest,
    ReplicaRole,
    Request,
    RoleLostError,
)
from streamrl.executor.rollout.engines import make_engine
from streamrl.executor.rollout.inference_engine import (
    Copy,
    InferenceEngine,
    ReplicaSettings,
    RunningSequence,
)
from streamrl.executor.sampling import IsOver, StopStrings
from streamrl.executor.token_files import (
    Head,
    TokenRecord,
    add_record,
    completion_of,
    part_of,
    read_choices,
    write_attempt,
)
from streamrl.executor.tokens import (
    ID,
    LOGPROB,
    TokenSegment,
    count_ids,
    count_tokens,
    decode_ids,
    read_blocks,
)
from streamrl.executor.transfer.bucket_check import verify_buckets

if TYPE_CHECKING:
    from streamrl.executor.transfer.packed_weights import WeightReceiver


@dataclass(eq=False)
class _Attempt:
    """One call of `generate`."""

    request: Request
    prefix: list[int]
    ended: asyncio.Future[RunningSequence]
    is_over: IsOver | None = None
    """Whether its output ends with a stop string; None: the run has none."""
    run: str | None = None
    started_at: float = 0.0
    versions: list[tuple[int, int]] = field(default_factory=list)
    is_aborted: bool = False
    num_saved: int = 0
    """Number of tokens that are already saved on disk, in case the replica dies."""

    @property
    def is_saved(self) -> bool:
        """Return whether partial output is saved on disk.

        Not with a seed: a deterministic run must sample the same tokens again.
        """
        return self.request.output_path is not None and self.request.seed is None

    def save(self, run: RunningSequence) -> None:
        """Save the tokens since the last save, if they are enough for a record."""
        first, last = self.num_saved, len(run.tokens)
        if last - first < max(1, LEAST_NEW * last):
            return
        path = self.request.output_path
        assert path is not None
        ended_at, prefill_time = _times(run)
        head = Head(
            self.request.rollout,
            len(self.prefix) + first,
            last - first,
            (TokenSegment(last - first, is_policy=True),),
            _spans_from(self.versions, first),
            "aborted",
            ended_at - self.started_at,
            prefill_time,
        )
        ids, logprobs = np.array(run.tokens[first:], ID), np.array(run.logprobs[first:], LOGPROB)
        add_record(path, TokenRecord(head, ids, logprobs))
        self.num_saved = last


LEAST_NEW = 1 / 16
"""Minimum share of new tokens in a rollout before they are saved; so a long rollout has few records."""


class ReplicaWorker(ReplicaRole):
    """One inference engine and its queue; call all methods on one event loop."""

    def __init__(self, config: ReplicaSettings, engine: InferenceEngine | None = None) -> None:
        """Use the given engine, or the one that the config names; `start` loads it."""
        self.config = config
        self._engine = make_engine(config) if engine is None else engine
        self._attempts: dict[int, _Attempt] = {}
        self._running: set[_Attempt] = set()
        self._queue: list[tuple[int, int, int, _Attempt]] = []
        self._arrivals = itertools.count()
        self._tokenizer: Any = None
        self._stop: StopStrings | None = None
        self._idle_since = 0.0
        self._has_started = False
        self._is_stopped = False
        self._is_asleep = False
        self._num_loads = 0
        """Loads that were requested and have not finished; meanwhile no rollout is admitted."""
        self._idle = asyncio.Event()
        self._loading = asyncio.Lock()
        self._saving: asyncio.Task[None] | None = None
        self._receiver: WeightReceiver | None = None
        """Has the weights that the trainer sent; None until it sends any."""

    async def start(self, manifest: Manifest | None, version: int) -> str:
        """Load the model and the manifest's weights, if given, and serve them as `version`.

        Return the checksum that was computed from these weights; without a manifest an empty string.
        """
        checksum = ""
        if manifest is not None:
            manifest, checksum = await self._verified(manifest)
        if self.config.tokenizer is not None:
            self._tokenizer = await asyncio.to_thread(load_tokenizer, self.config.tokenizer)
        if self.config.stop:
            self._stop = StopStrings(self.config.stop, self._tokenizer)
        await self._engine.start(manifest)
        self._version = version
        self._has_started = True
        return checksum

    async def generate(self, request: Request) -> Completion:
        """Return when this rollout has finished or was aborted, independently of other rollouts.

        `run_time` runs from leaving the queue to the last token. `prefill_time` runs from the start of the first forward
        pass with part of the prefix to the first token. It counts whole passes, including the work for other rollouts,
        but not the wait for the first of them.

        Raises:
            ValueError: the cache has no room for the request.
            RuntimeError: generation fails or stops during the request.
            RoleLostError: generation had failed before the request; it does not restart.
        """
        self._check(request)
        prefix = read_blocks(request.prefix)[0].tolist()
        is_over = None if self._stop is None else partial(self._stop.ends, prefix)
        attempt = _Attempt(request, prefix, asyncio.get_running_loop().create_future(), is_over)
        if self._saving is None and attempt.is_saved:
            self._saving = asyncio.create_task(self._save_running())
        self._attempts[request.rollout] = attempt
        entry = (request.priority, request.rollout, next(self._arrivals), attempt)
        heapq.heappush(self._queue, entry)
        # Admit later, so that requests that arrive together are ordered by priority.
        asyncio.get_running_loop().call_soon(self._admit)
        try:
            done = self._completion(attempt, await attempt.ended)
            return msgspec.structs.replace(done, cache=self._engine.cache)
        except asyncio.CancelledError:
            await self._withdraw(attempt)
            raise
        finally:
            del self._attempts[request.rollout]

    async def abort(self, rollout: int) -> None:
        """End the rollout's `generate` now with the tokens so far; do nothing if the rollout is not here."""
        attempt = self._attempts.get(rollout)
        if attempt is not None:
            await self._withdraw(attempt)

    async def load(self, manifest: Manifest, drain: bool) -> Loaded:
        """Serve the manifest's weights from the next token on; return the seconds without generation, and the checksum.

        From this call on no rollout is admitted until the weights are loaded, so later rollouts start under the new
        weights. With `drain`, running rollouts end first. Without it, they wait only for the copy and then continue with
        their KV cache, which the old weights computed. Buckets are read and verified before any parameter changes. A bad
        manifest raises `ValueError` or `OSError`, and the old weights stay in use. After any other error the weights are
        unknown, so it raises `RoleLostError`.
        """
        self._num_loads += 1
        try:
            async with self._loading:
                return await self._load(manifest, drain)
        finally:
            self._num_loads -= 1
            self._admit()

    async def _load(self, manifest: Manifest, drain: bool) -> Loaded:
        began_at = time.perf_counter()
        with self._losing("cannot read weights", ValueError, OSError):
            manifest, checksum = await self._verified(manifest)
            copy = await self._engine.read_weights(manifest)
        if drain:
            await self._idle_now()
        is_in_flight = bool(self._running)
        still_at = time.perf_counter() if is_in_flight else max(began_at, self._idle_since)
        with self._losing("cannot load weights"):
            await self._swap(copy, manifest.version)
        return Loaded(time.perf_counter() - still_at, checksum)

    async def receive(self, manifest: Manifest, seat: BroadcastRank, kept: list[int]) -> None:
        """Receive packed buckets into files in shared memory, and verify them; generation goes on meanwhile.

        Raises:
            RuntimeError: a member of the group is gone.
            ValueError: a bucket differs from the one that was packed.
        """
        if self._receiver is None:
            from streamrl.executor.transfer.packed_weights import WeightReceiver  # imports torch

            self._receiver = WeightReceiver(self.config.device)
        await asyncio.to_thread(self._receiver.receive, manifest, seat, kept)

    async def _verified(self, manifest: Manifest) -> tuple[Manifest, str]:
        """Return a manifest of verified files on this machine, and their checksum."""
        if not manifest.is_packed:
            return manifest, await asyncio.to_thread(verify_buckets, manifest)
        if self._receiver is None:
            raise ValueError(f"version {manifest.version} was never received")
        files = self._receiver.files_of(manifest)  # they were verified when they arrived
        return files, files.checksum

    @contextmanager
    def _losing(self, what: str, *harmless: type[Exception]) -> Iterator[None]:
        """Raise `RoleLostError` for an error of the engine, unless it is harmless or the replica was stopped."""
        try:
            yield
        except Exception as error:
            if self._is_stopped or isinstance(error, (RoleLostError, *harmless)):
                raise
            raise RoleLostError(f"{what}: {error}") from error

    def check_alive(self) -> None:
        """Raise `RoleLostError` if the engine has ended by itself."""
        is_over = getattr(self._engine, "is_over", False)
        if is_over and self._has_started and not self._is_stopped:
            raise RoleLostError("generation has ended")

    async def cache(self) -> CacheState | None:
        """Return the size and use of the engine's KV cache."""
        return self._engine.cache

    async def sleep(self) -> None:
        """Free the device's memory until `wake`; raise `RuntimeError` if a rollout is running or queued."""
        if self._attempts:
            raise RuntimeError(f"{len(self._attempts)} rollouts are being generated")
        if not self._is_asleep:
            with self._losing("cannot sleep"):
                await self._engine.sleep()
            self._is_asleep = True

    async def wake(self) -> None:
        """Allocate the memory again, with the same weights as before `sleep`."""
        if self._is_asleep:
            with self._losing("cannot wake"):
                await self._engine.wake()
            self._is_asleep = False

    async def stop(self) -> None:
        """End generation; every pending `generate` raises `RuntimeError`."""
        self._is_stopped = True
        if self._saving is not None:
            self._saving.cancel()
        if self._receiver is not None:
            self._receiver.close()
        await self._engine.stop()
        self._admit()  # queued requests get the same error

    def _check(self, request: Request) -> None:
        limits = self.config
        if request.max_tokens < 1 or not request.prompt:
            raise ValueError(f"rollout {request.rollout}: prompt and max_tokens must not be empty")
        for key, count, most in (
            ("prompt", count_ids(request.prompt), limits.max_prompt_tokens),
            ("max_tokens", request.max_tokens, limits.max_tokens),
            ("prefix", count_tokens(request.prefix), request.max_tokens - 1),
        ):
            if count > most:
                raise ValueError(
                    f"rollout {request.rollout}: {key} may have at most {most} tokens, got {count}"
                )
        if request.rollout in self._attempts:
            raise ValueError(f"rollout {request.rollout} is already being generated")

    def _admit(self) -> None:
        if self._num_loads:
            return
        while self._queue and self._engine.has_room:
            attempt = heapq.heappop(self._queue)[-1]
            if not attempt.ended.done():
                self._run(attempt)

    def _run(self, attempt: _Attempt) -> None:
        request = attempt.request
        attempt.started_at = time.perf_counter()
        attempt.versions = [(self._version, 0)]
        has_own_sampling = request.evaluates and self.config.evaluation is not None
        evaluates: dict[str, Any] = {"evaluates": True} if has_own_sampling else {}
        try:
            attempt.run = self._engine.submit(
                [*decode_ids(request.prompt).tolist(), *attempt.prefix],
                request.max_tokens - len(attempt.prefix),
                lambda result: self._end(attempt, result),
                request.seed,
                request.priority,
                *(() if attempt.is_over is None else (attempt.is_over,)),
                **evaluates,
            )
            self._running.add(attempt)
        except RuntimeError as error:
            attempt.ended.set_exception(error if self._is_stopped else RoleLostError(str(error)))
        except Exception as error:  # concerns only this request
            attempt.ended.set_exception(error)

    def _end(
        self, attempt: _Attempt, result: RunningSequence | Exception, aborted: bool = False
    ) -> None:
        self._running.discard(attempt)
        if not self._running:
            self._idle_since = time.perf_counter()
            self._idle.set()
        if not attempt.ended.done():
            if isinstance(result, RunningSequence):
                attempt.is_aborted = aborted
                attempt.ended.set_result(result)
            else:
                attempt.ended.set_exception(result)
        self._admit()

    def _completion(self, attempt: _Attempt, run: RunningSequence) -> Completion:
        """Write the tokens of a finished attempt to the path of its request."""
        request, num_tokens = attempt.request, len(run.tokens)
        # The KV cache may hold NaNs too, and later rollouts would read them.
        if not np.isfinite(run.logprobs).all():
            raise RoleLostError(
                f"rollout {request.rollout}: some log-probabilities under version {self._version} are not finite; "
                "the replica restarts"
            )
        finish: FinishReason = "stop" if self._has_stopped(attempt, run.tokens) else "length"
        ended_at, prefill_time = _times(run)
        head = Head(
            request.rollout,
            len(attempt.prefix),
            num_tokens,
            (TokenSegment(num_tokens, is_policy=True),) if num_tokens else (),
            [span for span in attempt.versions if span[1] < num_tokens],
            "aborted" if attempt.is_aborted else finish,
            ended_at - attempt.started_at if attempt.run is not None else 0.0,
            prefill_time,
            self._experts(request, run),
        )
        output = write_attempt(head, run.tokens, run.logprobs, request.output_path)
        if attempt.num_saved and request.output_path is not None:
            Path(part_of(request.output_path)).unlink(missing_ok=True)
        text = None if attempt.is_aborted else self._text(attempt.prefix + run.tokens)
        return completion_of(head, output, text)

    def _experts(self, request: Request, run: RunningSequence) -> bytes:
        """Return the experts of tokens whose experts no earlier attempt has recorded."""
        if not self.config.router_replay or run.experts is None or request.output_path is None:
            return b""
        first = end_of(read_choices(request.prefix))
        return encode_choices(first, run.experts[first:])

    def _has_stopped(self, attempt: _Attempt, tokens: list[int]) -> bool:
        """Return whether an end token or a stop string ended a rollout."""
        if tokens and tokens[-1] in self._engine.end_tokens:
            return True
        return attempt.is_over is not None and attempt.is_over(tokens)

    async def _save_running(self) -> None:
        """Save running rollouts every few seconds; if this replica dies, another one continues them."""
        while True:
            await asyncio.sleep(self.config.save_time)
            if not any(attempt.is_saved for attempt in self._running):
                continue
            try:
                async with self._engine.paused():
                    runs = [(each, self._engine.read(str(each.run))) for each in self._running]
                for attempt, run in runs:
                    if attempt in self._running and attempt.is_saved:
                        attempt.save(run)
            except RuntimeError:
                return  # generation has ended
            except OSError as error:
                with suppress(OSError):  # the disk of the log may be full too
                    print(f"cannot save the tokens of running rollouts: {error}", file=sys.stderr)

    def _text(self, tokens: list[int]) -> str | None:
        if self._tokenizer is None:
            return None
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    async def _withdraw(self, attempt: _Attempt) -> None:
        """End an attempt with its tokens so far, whether it is queued or running."""
        if attempt.run is None:
            self._end(attempt, RunningSequence([], [], None, []), aborted=True)
            return
        if attempt not in self._running:
            return
        with self._losing("cannot abort a rollout"):
            async with self._engine.paused():
                if attempt in self._running:
                    run = self._engine.read(attempt.run)
                    self._engine.cancel(attempt.run)
                    self._end(attempt, run, aborted=True)

    async def _idle_now(self) -> None:
        while self._running:
            self._idle.clear()
            await self._idle.wait()

    async def _swap(self, copy: Copy, version: int) -> None:
        async with self._engine.paused():
            await copy()
            self._version = version
            for attempt in self._running:
                assert attempt.run is not None
                start = len(self._engine.read(attempt.run).tokens)
                spans = [span for span in attempt.versions if span[1] < start]
                attempt.versions = [*spans, (version, start)]


def _times(run: RunningSequence) -> tuple[float, float]:
    """Return when the last token was sampled, and the seconds from the start of prefill to the first token."""
    ended_at = run.token_times[-1] if run.token_times else time.perf_counter()
    first_at = run.token_times[0] if run.token_times else ended_at
    return ended_at, first_at - run.prefill_at if run.prefill_at is not None else 0.0


def _spans_from(versions: list[tuple[int, int]], first: int) -> list[tuple[int, int]]:
    """Return the version spans of the tokens from `first` on, with starts relative to `first`."""
    begun = max(number for number, (_, start) in enumerate(versions) if start <= first)
    return [(version, max(0, start - first)) for version, start in versions[begun:]]
