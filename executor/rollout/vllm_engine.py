"""Generate with vLLM: its asynchronous engine, with one request for each rollout.

| guarantee of `InferenceEngine` | given by |
|---|---|
| a run ends in exactly one call of its `on_end` | the task of its request, which gets an error if vLLM's core dies |
| inside `paused()` no token is sampled, and every earlier `on_end` has been called | vLLM's pause that keeps requests, then `_settle` |
| after `stop()` or a crash, `submit` and `paused` raise | vLLM, which reports that its core is dead |
| versions of tokens | `ReplicaWorker`; a request ends in an error if vLLM reports other version spans |
| nothing outlives the replica's process | `ChildGuard` |

Rollouts that start under the same weights share the KV cache of their common prompt. The name of the weights salts
vLLM's prefix cache. So no rollout attends to keys and values that older weights computed for another rollout.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from streamrl.executor.directory_lock import OwnedDirectory
from streamrl.executor.expert_choices import Choices
from streamrl.executor.roles import CacheState, Manifest
from streamrl.executor.rollout.child_guard import ChildGuard
from streamrl.executor.rollout.inference_engine import (
    STOPPED,
    Copy,
    OnEnd,
    ReplicaSettings,
    RunningSequence,
    TimedPass,
)
from streamrl.executor.rollout.torch_model import (
    check_vocabulary,
    empty_model,
    end_tokens,
    read_pairs,
)
from streamrl.executor.rollout.vllm_settings import (
    Adapters,
    environment,
    make_arguments,
    make_sampling,
)
from streamrl.executor.sampling import IsOver
from streamrl.executor.transfer.shared_memory import read_buckets

LONGEST_SOCKET = 107
"""Most bytes in the path of a UNIX socket (unix(7))."""
LONGEST_NAME = 37
"""Most bytes of the names of vLLM's sockets, with the "/" before them."""


@contextmanager
def _temporary_files_in(directory: Path) -> Iterator[None]:
    """Let vLLM and its processes have their temporary files in a directory; they are not moved if their names are too long.

    Only this call starts vLLM. Other threads of a replica make no temporary files meanwhile.
    """
    if len(os.fsencode(directory)) + LONGEST_NAME > LONGEST_SOCKET:
        yield
        return
    changed = {"TMPDIR": str(directory), "VLLM_RPC_BASE_PATH": str(directory)}
    before, own = {name: os.environ.get(name) for name in changed}, tempfile.tempdir
    os.environ.update(changed)
    tempfile.tempdir = str(directory)
    try:
        yield
    finally:
        tempfile.tempdir = own
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class CacheWatch:
    """Statistics logger for vLLM (`StatLoggerBase`) that keeps only the newest values.

    vLLM calls a factory to make a logger. An instance is its own factory.
    """

    def __init__(self) -> None:
        self._use = 0.0
        self._num_preempted = 0

    def __call__(self, config: Any, engine_index: int = 0) -> CacheWatch:
        """Return this logger: vLLM calls its logger factory once for each core."""
        return self

    def state(self, config: Any) -> CacheState:
        """Return the size and use of the KV cache of a vLLM with this configuration."""
        cache = config.cache_config
        pages = cache.num_gpu_blocks
        tokens = None if pages is None else pages * cache.block_size
        return CacheState(tokens=tokens, use=self._use, num_preempted=self._num_preempted)

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        """Keep the statistics of a pass (vllm/v1/metrics/stats.py)."""
        if scheduler_stats is not None:
            self._use = scheduler_stats.kv_cache_usage
        if iteration_stats is not None:
            self._num_preempted += iteration_stats.num_preempted_reqs

    def log(self) -> None:
        """Do nothing."""

    def log_engine_initialized(self) -> None:
        """Do nothing."""

    def record_sleep_state(self, *_: Any, **__: Any) -> None:
        """Do nothing."""


QUIET_TURNS = 10
"""Turns of the event loop without a token after which all tokens have arrived.

A token needs three turns, from the socket on which vLLM confirmed the pause to the task of its request.
"""

WARM_UP = ([1], 2)
"""Prompt and number of tokens of a warm-up request, which compiles the sampler (27 s on a busy machine)."""
FAILED = "vLLM failed (see the log of its replica)"


@dataclass(eq=False)
class _Run:
    """One request."""

    on_end: OnEnd
    is_over: IsOver | None = None
    task: asyncio.Task[None] | None = None
    prefill_at: float | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    experts: Choices | None = None
    """Chosen experts of its context; vLLM tells them when it ends."""
    starts: list[tuple[str, int]] = field(default_factory=list)
    """Names of the weights that sampled tokens, each with the number of tokens before."""

    @property
    def so_far(self) -> RunningSequence:
        made = list(self.tokens), list(self.logprobs), self.prefill_at, list(self.token_times)
        return RunningSequence(*made, self.experts)

    def add(self, output: Any, came_at: float) -> bool:
        """Add the tokens of an output, and the start of its prefill if vLLM reports it.

        Return whether a token ends the run; later ones are left out.
        """
        (made,) = output.outputs
        is_over = False
        for token, logprobs in zip(made.token_ids, made.logprobs or (), strict=True):
            self.tokens.append(token)
            self.logprobs.append(logprobs[token].logprob)
            self.token_times.append(came_at)
            if self.is_over is not None and self.is_over(self.tokens):
                is_over = True
                break
        experts = getattr(made, "routed_experts", None)
        if experts is not None:
            self.experts = np.asarray(experts, np.int16)
        if self.prefill_at is None and self.tokens:
            self.prefill_at = getattr(output.metrics, "scheduled_ts", 0.0) or None
        return is_over

    def check_versions(self, spans: Any) -> None:
        """Raise `RuntimeError` if vLLM reports other weights for a token than this engine recorded."""
        if spans is None:  # this version of vLLM reports none
            return
        ours = [
            (name, start)
            for (name, start), (_, end) in zip(
                self.starts, [*self.starts[1:], ("", len(self.tokens))], strict=True
            )
            if end > start
        ]
        theirs = [(span.version, span.start) for span in spans]
        if theirs != ours:
            raise RuntimeError(f"tokens recorded for weights {ours} were sampled by {theirs}")


class VllmEngine:
    """vLLM's asynchronous engine and the requests that run in it."""

    def __init__(self, settings: ReplicaSettings) -> None:
        self._settings = settings
        self._runs: dict[str, _Run] = {}
        self._num_runs = 0
        self._num_pauses = 0
        """Number of pauses that are held or requested; the first one pauses vLLM, the last one resumes it."""
        self._is_paused = False
        self._pausing = asyncio.Lock()
        self._num_tokens = 0
        self._weights = "initial"
        """Name of the current weights in vLLM.

        Each load has a new name. After a restart, a trainer makes other weights of the same version, and the prefix cache
        of the old ones must not be used for them.
        """
        self._num_loads = 0
        self._is_stopped = False
        self._guard: ChildGuard | None = None
        self._watch = CacheWatch()
        self._llm: Any = None
        self._files: OwnedDirectory | None = None
        """Sockets and other temporary files of vLLM, which does not remove them."""
        self._model: Any = None
        """The Hugging Face model without weights."""
        self._adapters: Adapters | None = None
        """Set if the replica loads adapters instead of weights."""
        self._num_embeddings = 0

    async def start(self, manifest: Manifest | None) -> None:
        """Start vLLM's processes, load the model and allocate the cache."""
        self._model = await asyncio.to_thread(empty_model, self._settings.model)
        self._num_embeddings = self._model.get_input_embeddings().num_embeddings
        if self._settings.adapter_rank is not None:
            self._adapters = Adapters(self._model, self._settings)
        self._guard = ChildGuard()
        try:
            self._llm = await asyncio.to_thread(self._start)
        except Exception as error:
            reason = " ".join(str(error).split())  # some messages have several lines
            raise RuntimeError(f"{FAILED}: {reason}") from error
        self._guard.register_children()
        if self._adapters is not None:
            first = await asyncio.to_thread(self._adapters.first, self._settings.adapters)
            await self._adapters.load(self._llm, first)
            await self._adapters.check_used(self._llm)  # once: later adapters have the same names
        await self._name_weights()
        await self._warm_up()
        await self._llm.collective_rpc("refuse_connections")
        if manifest is not None:
            copy = await self.read_weights(manifest)
            await copy()

    @property
    def end_tokens(self) -> frozenset[int]:
        """Return the token ids that end a rollout."""
        return end_tokens(self._model, self._settings.end_tokens)

    @property
    def pads_context(self) -> bool:
        """Return False: decode steps do not pad."""
        return False

    @property
    def prefill_tokens(self) -> int:
        """Return the tokens that vLLM schedules in a pass, less those of decoding rollouts."""
        scheduled = int(self._llm.vllm_config.scheduler_config.max_num_batched_tokens)
        return max(1, scheduled - self._settings.max_running)

    @property
    def has_room(self) -> bool:
        """Return whether the batch has room for one more sequence."""
        return len(self._runs) < self._settings.max_running or self.is_over

    @property
    def is_over(self) -> bool:
        """Return whether vLLM was stopped, or its core is dead."""
        return self._is_stopped or self._llm is None or bool(self._llm.errored)

    @property
    def cache(self) -> CacheState | None:
        """Return the cache's state after vLLM's last pass."""
        return None if self.is_over else self._watch.state(self._llm.vllm_config)

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
        """Generate after `tokens` from the next pass that has room."""
        self._check_alive()
        check_vocabulary(
            tokens, self._num_embeddings
        )  # others kill vLLM's core and all running requests
        self._num_runs += 1
        name = str(self._num_runs)
        run = self._runs[name] = _Run(on_end, is_over, starts=[(self._weights, 0)])
        prompt = {"prompt_token_ids": tokens, "cache_salt": self._weights}
        distribution = self._settings.sampling(evaluates=evaluates)
        sampling = make_sampling(distribution, max_new_tokens, self.end_tokens, seed)
        adapters = None if self._adapters is None else self._adapters.request()
        outputs = self._llm.generate(
            prompt, sampling, name, priority=priority, lora_request=adapters
        )
        run.task = asyncio.create_task(self._follow(name, run, outputs))
        return name

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Stop generation between two passes; running requests keep their KV cache."""
        self._num_pauses += 1
        try:
            await self._hold()
            await self._settle()
            yield
        finally:
            self._num_pauses -= 1
            await self._release()

    def read(self, run: str) -> RunningSequence:
        """Return the output of `run` so far."""
        return self._runs[run].so_far

    def cancel(self, run: str) -> None:
        """Drop `run`; its cancelled task then aborts vLLM's request."""
        task = self._runs.pop(run).task
        assert task is not None
        task.cancel()

    async def read_weights(self, manifest: Manifest) -> Copy:
        """Check that weights fit this model; return a function that makes vLLM's workers load them."""
        load = await self._reader(manifest)

        async def copy() -> None:
            try:
                await load()
            except Exception as error:  # the model may have both old and new weights
                await self._end(RuntimeError(f"vLLM failed to load weights: {error}"))
                raise
            self._num_loads += 1
            self._weights = f"v{manifest.version}.{self._num_loads}"
            await self._name_weights()
            for run in self._runs.values():
                run.starts.append((self._weights, len(run.tokens)))

        return copy

    async def _reader(self, manifest: Manifest) -> Copy:
        """Check weights or adapters; return a function that makes vLLM's workers load them."""
        if self._adapters is None:
            await asyncio.to_thread(read_pairs, manifest, self._model)
            encoded = msgspec.msgpack.encode(manifest)
            return partial(self._llm.collective_rpc, "load_pushed_weights", args=(encoded,))
        beside, what = Path(manifest.buckets[0].path).parent, f"version {manifest.version}"
        write = partial(self._adapters.write, read_buckets(manifest), beside, what)
        return partial(self._adapters.load, self._llm, await asyncio.to_thread(write))

    async def sleep(self) -> None:
        """Make vLLM drop its cache and keep its weights in host memory; on CPUs nothing moves."""
        self._check_alive()
        await self._llm.sleep(level=1)

    async def wake(self) -> None:
        """Make vLLM allocate its memory again."""
        self._check_alive()
        await self._llm.wake_up()

    async def stop(self) -> None:
        """End vLLM's processes."""
        self._is_stopped = True
        await self._end(RuntimeError(STOPPED))

    async def time_passes(self) -> None:
        """Make vLLM's first worker start timing forward passes."""
        await self._llm.collective_rpc("time_passes", args=(self._settings.device,))

    async def passes(self) -> list[TimedPass]:
        """Return the completed passes since the last call."""
        first, *_ = await self._llm.collective_rpc("take_passes")
        return msgspec.msgpack.decode(first, type=list[TimedPass])

    def _start(self) -> Any:
        os.environ.update(environment(self._settings))
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = make_arguments(self._settings, self._model)
        self._files = OwnedDirectory("vllm")
        with _temporary_files_in(self._files.path):
            return AsyncLLM.from_engine_args(arguments, stat_loggers=[self._watch])

    async def _warm_up(self) -> None:
        prompt, num_tokens = WARM_UP
        made: asyncio.Future[RunningSequence] = asyncio.get_running_loop().create_future()

        def end(result: RunningSequence | Exception) -> None:
            if isinstance(result, Exception):
                made.set_exception(result)
            else:
                made.set_result(result)

        self.submit(prompt, num_tokens, end, None, 0)
        await made

    async def _follow(self, name: str, run: _Run, outputs: AsyncGenerator[Any]) -> None:
        """Collect a request's output from vLLM until it ends."""
        output: Any = None
        result: RunningSequence | Exception
        is_over = False
        try:
            async for output in outputs:
                is_over = run.add(output, time.perf_counter())
                self._num_tokens += 1
                if is_over:
                    break
            await outputs.aclose()  # vLLM aborts a request that has not ended
            if not is_over:  # vLLM reports versions with the end of a request
                run.check_versions(getattr(output.outputs[0], "weight_versions", None))
            result = run.so_far
        except Exception as error:
            result = RuntimeError(STOPPED if self._is_stopped else f"{FAILED}: {error!r}")
            result.__cause__ = error
        if self._runs.pop(name, None) is not None:
            run.on_end(result)

    async def _hold(self) -> None:
        async with self._pausing:
            self._check_alive()
            if self._is_paused:
                return
            self._is_paused = (
                True  # set first: after a cancellation here vLLM may be paused all the same
            )
            try:
                await self._llm.pause_generation(mode="keep", clear_cache=False)
            except Exception as error:
                raise RuntimeError(f"vLLM is not running: {error!r}") from error

    async def _release(self) -> None:
        async with self._pausing:
            if self._is_paused and not self._num_pauses and not self.is_over:
                self._is_paused = False
                await self._llm.resume_generation()

    async def _settle(self) -> None:
        """Wait until every token that was sampled before the pause has arrived."""
        quiet = 0
        while quiet < QUIET_TURNS:
            before = self._num_tokens
            await asyncio.sleep(0)
            quiet = quiet + 1 if self._num_tokens == before else 0

    async def _name_weights(self) -> None:
        """Tell vLLM the name of the current weights, if this version of vLLM records it for each token."""
        if hasattr(self._llm, "update_weight_version"):
            await self._llm.update_weight_version(self._weights)

    def _check_alive(self) -> None:
        if self.is_over:
            raise RuntimeError(STOPPED if self._is_stopped else "vLLM is not running")

    async def _end(self, error: RuntimeError) -> None:
        """End every run with an error, and end all processes."""
        runs = list(self._runs.values())
        self._runs.clear()
        for run in runs:
            assert run.task is not None
            run.task.cancel()
            run.on_end(error)
        if self._guard is not None:  # vLLM's own shutdown takes seven seconds
            guard, self._guard = self._guard, None
            await asyncio.to_thread(guard.kill_registered)
        if self._llm is not None:
            await asyncio.to_thread(self._llm.shutdown, 0)
        if self._files is not None:
            self._files.remove()
