"""Generate with transformers' continuous batching; each sequence has its own row of the KV cache.

Attention by row. A page of the cache is as long as the longest rollout. So the cache of a layer is a tensor (rows,
tokens, heads, size). A pass writes its new keys and values there, and attention reads them in place. `_plan` decides
once for each pass which row each sequence has. Transformers' own method would gather all keys and values
token by token in each layer.

The engine. Continuous batching generates in its own thread.

| guarantee of `InferenceEngine` | given by |
|---|---|
| a run ends in exactly one call of its `on_end` | the batching thread, or `_watch` if that thread dies |
| inside `paused()` no token is sampled, and every earlier `on_end` has been called | `paused` |
| after `stop()` or a crash, `submit` and `paused` raise | the manager |
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AttentionInterface,
    ContinuousBatchingConfig,
    GenerationConfig,
    LogitsProcessor,
    PreTrainedModel,
)

from streamrl.executor.attention import attend
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
from streamrl.executor.rollout.stopwatch import PassContent, PassLog
from streamrl.executor.rollout.torch_model import (
    ATTENTION,
    end_tokens,
    load_model,
    move,
    read_weights,
)
from streamrl.executor.sampling import IsOver, Truncation, truncated

BY_ROW = "streamrl_by_row"
"""Name of this attention in transformers' registry."""
DENSE = 0.5
"""Minimum share of decoding rows, among all rows from the first to the last that decodes, to read them in place.

Then the other rows in between are computed as well. Below this share the decoding rows are copied together.
"""


@dataclass(frozen=True, eq=False)
class RowPrefix:
    """A sequence of which a pass computes all or part of the prefix."""

    queries: slice
    row: int
    length: int
    """Number of keys that the last query attends to."""


@dataclass(frozen=True, eq=False)
class RowPass:
    """Plan of one forward pass, which attention uses in every layer."""

    cache: Any
    """The cache of continuous batching."""
    written: torch.Tensor
    """(tokens,) where in the cache each token's keys and values are written."""
    stride: int
    """Number of pages from one row's page of a layer to the next row's."""
    queries: torch.Tensor
    """(decoding,) index of each decoding sequence's query."""
    rows: torch.Tensor
    """(decoding,) row of each decoding sequence."""
    span: slice
    """Rows that are read in place; empty if `rows` are copied together."""
    longest: int
    """Largest number of keys of a decoding sequence."""
    mask: torch.Tensor
    """(rows read, 1, 1, longest) whether a position holds a key of the row's sequence."""
    prefixes: list[RowPrefix]


class CacheWithoutUpdate:
    """A cache for models that write keys and values before attention (transformers 5.24 on).

    Row attention writes them itself, so `update` here writes nothing.
    """

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the new keys and values, without writing them."""
        return keys, values

    def get_seq_length(self, *_: Any) -> int:
        """Return 0: continuous batching passes positions, but some models would add the cached length to them."""
        return 0


def attend_by_row(model: Any) -> Any:
    """Make a model attend by rows, until you remove the returned hook; needs one page for each sequence."""
    AttentionInterface.register(BY_ROW, row_attention)
    model.set_attn_implementation(BY_ROW)
    return model.register_forward_pre_hook(_plan, with_kwargs=True)


def _plan(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Add the plan of its attention to a forward pass of continuous batching."""
    cache = kwargs["cache"]
    allocator = cache.layer_to_allocator[0]
    allocator.get_read_indices = _no_read_indices
    tokens_per_page = allocator.tokens_per_page
    stride = allocator.block_physical_stride // tokens_per_page
    written = kwargs["write_index"][allocator.index]
    ends = kwargs["cu_seq_lens_q"].long()
    last = written[ends[1:] - 1].long()
    rows, lengths = last // tokens_per_page // stride, last % tokens_per_page + 1
    is_decoding = ends.diff() == 1
    prefixes = [
        RowPrefix(slice(start, end), row, length)
        for start, end, row, length in torch.stack([ends[:-1], ends[1:], rows, lengths])[
            :, ~is_decoding
        ].T.tolist()
    ]
    decoding = _decoding(ends[:-1][is_decoding], rows[is_decoding], lengths[is_decoding])
    row_pass = RowPass(cache, written, stride, *decoding, prefixes)
    return args, {**kwargs, "cache": CacheWithoutUpdate(cache), "row_pass": row_pass}


def _no_read_indices(*_: object) -> list[int]:
    """Return no indices: attention by row gathers nothing, and making the list is slow."""
    return []


def _decoding(
    queries: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, slice, int, torch.Tensor]:
    """Compute the fields of `RowPass` from `queries` to `mask`."""
    if not len(rows):
        return queries, rows, slice(0, 0), 0, rows
    first, last, longest = int(rows.min()), int(rows.max()), int(lengths.max())
    span = slice(first, last + 1)
    if len(rows) < DENSE * (last + 1 - first):
        span = slice(0, 0)
    else:
        read = lengths.new_ones(
            last + 1 - first
        )  # other rows read one key, because softmax needs one
        read[rows - first] = lengths
        lengths = read
    positions = torch.arange(longest, device=rows.device)
    return queries, rows, span, longest, (positions < lengths[:, None])[:, None, None]


def row_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention of a packed batch, `query` (1, heads, queries, size), over the cached rows of its sequences.

    First write `key` and `value` of this pass into the cache. Return (1, queries, heads, size).
    """
    ours: RowPass = kwargs["row_pass"]
    allocator = ours.cache.layer_to_allocator[module.layer_idx]
    pages = allocator.get_cache_for_block_table(module.layer_idx)
    for cached, new in zip(pages, (key, value), strict=True):
        cached.flatten(0, 1).index_copy_(0, ours.written, new[0].transpose(0, 1))
    keys, values = (cached[:: ours.stride] for cached in pages)
    queries = query[0].transpose(0, 1)
    output = torch.empty_like(queries, memory_format=torch.contiguous_format)
    if len(ours.queries):
        output[ours.queries] = _attend_decoding(queries[ours.queries], keys, values, ours, scaling)
    for prefix in ours.prefixes:
        own_keys, own_values = (cached[prefix.row, : prefix.length] for cached in (keys, values))
        output[prefix.queries] = _attend_prefix(
            queries[prefix.queries], own_keys, own_values, scaling
        )
    return output[None], None


def _attend_decoding(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    ours: RowPass,
    scaling: float | None,
) -> torch.Tensor:
    """Attend with one query for each sequence, (sequences, heads, size), over the keys of its row."""
    num_groups = keys.shape[2]
    grouped = queries.view(len(queries), num_groups, -1, queries.shape[-1])
    in_place = ours.span.stop > 0
    read: slice | torch.Tensor = ours.span if in_place else ours.rows
    if in_place:
        used = ours.rows - ours.span.start
        spread = grouped.new_zeros(ours.span.stop - ours.span.start, *grouped.shape[1:])
        spread[used] = grouped
        grouped = spread
    attended = scaled_dot_product_attention(
        grouped,
        keys[read, : ours.longest].transpose(1, 2),
        values[read, : ours.longest].transpose(1, 2),
        attn_mask=ours.mask,
        scale=scaling,
    )
    if in_place:
        attended = attended[used]
    return attended.reshape(queries.shape)


def _attend_prefix(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """Attend with the last queries of one sequence, (queries, heads, size), each over the keys up to its own."""
    behind, mask = len(keys) - len(queries), None
    if behind:
        mask = torch.ones(len(queries), len(keys), dtype=torch.bool, device=keys.device).tril(
            behind
        )
    heads = (tensor.transpose(0, 1)[None] for tensor in (queries, keys, values))
    attended = attend(*heads, mask=mask, is_causal=not behind, scaling=scaling)
    return attended[0].transpose(0, 1)


PAGE_TOKENS = 256
"""Pages longer than this are a multiple of it, which flash attention needs; models with windows use this size."""


class TransformersEngine:
    """One model, and the thread that generates with it."""

    def __init__(self, settings: ReplicaSettings) -> None:
        self._settings = settings
        self._ids = map(str, itertools.count())
        self._on_end: dict[str, OnEnd] = {}
        self._cancelled: list[str] = []
        """Runs that a stop string ended; the thread may deliver more of their tokens until the next pause."""
        self._stopping = False
        self._passes = PassLog(settings.device)
        self._model: Any = None
        self._manager: Any = None
        self._is_dead = False
        """None before the start, while asleep, and after the end."""
        self._planning: Any = None
        """Hook that plans row attention, if the model uses it."""

    async def start(self, manifest: Manifest | None) -> None:
        """Load the model, allocate the cache and start the thread."""
        self._model = await load_model(self._settings, manifest)
        if self._settings.takes_turns:
            gc.freeze()  # each sleep collects garbage twice, and several 100,000 objects never become garbage
        await self._begin()

    @property
    def end_tokens(self) -> frozenset[int]:
        """Return the token ids that end a rollout."""
        return end_tokens(self._model, self._settings.end_tokens)

    @property
    def pads_context(self) -> bool:
        """Return whether a decode step pads: row attention does, flash kernels do not."""
        return bool(self._model.config._attn_implementation == BY_ROW)

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
        """Return whether generation was stopped, or its thread has died."""
        return self._stopping or self._is_dead

    @property
    def cache(self) -> CacheState | None:
        """Return the state of the cache, which has room for `max_running` longest rollouts: it never preempts."""
        batching = None if self._manager is None else self._manager.batch_processor
        if batching is None:
            return None
        settings = self._settings
        tokens = settings.max_running * settings.max_length
        use = 1.0 - float(batching.cache.compute_free_capacity())
        return CacheState(tokens=tokens, use=use, num_preempted=0)

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

        `seed` has no effect: all sequences of a pass share one random number generator.
        """
        if self._manager is None or self._stopping:
            raise RuntimeError(STOPPED)
        run = next(self._ids)  # not the rollout's id: a late cancel would hit its next attempt
        self._on_end[run] = on_end
        self._manager.register_result_handler(run, partial(self._deliver, is_over))
        accepted = self._manager.add_request(
            tokens,
            request_id=run,
            max_new_tokens=max_new_tokens,
            record_timestamps=True,
            streaming=is_over is not None,  # then each token is delivered with all before it
            **({EVALUATES: 1} if evaluates else {}),
        )
        if accepted is None:
            self._forget(run)
            why = "its thread ended" if self._cause is None else self._cause
            raise RuntimeError(f"continuous batching is not running: {why}") from self._cause
        return run

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Stop generation between two forward passes; running sequences keep their KV cache.

        On entry all earlier results have been delivered, because the event loop runs callbacks of other threads in
        order. Raises `RuntimeError` if generation is not running.
        """
        manager = self._manager
        if manager is None:
            raise RuntimeError(STOPPED)
        loop = asyncio.get_running_loop()
        entered: asyncio.Future[None] = loop.create_future()
        release = threading.Event()

        def resolve(error: Exception | None) -> None:
            if not entered.done():
                entered.set_exception(error) if error else entered.set_result(None)

        def hold() -> None:
            try:
                with manager.pause():
                    loop.call_soon_threadsafe(resolve, None)
                    release.wait()
            except RuntimeError as error:
                loop.call_soon_threadsafe(resolve, error)

        threading.Thread(target=hold, daemon=True).start()
        try:
            await entered
            while self._cancelled:
                self._forget(self._cancelled.pop())
            yield
        finally:
            release.set()

    def read(self, run: str) -> RunningSequence:
        """Return the output of `run` so far; call it only while paused and before its `on_end`."""
        scheduler = self._manager.batch_processor.scheduler
        state = scheduler.active_requests.get(run) or scheduler.waiting_requests.get(run)
        if state is None:  # submitted, but not yet read by the thread
            return RunningSequence(tokens=[], logprobs=[], prefill_at=None, token_times=[])
        return _run_from(state.to_generation_output())

    def cancel(self, run: str) -> None:
        """Drop `run` without calling its `on_end`; call it only while paused.

        Outside a pause the thread may read its cancellations before it has read the request itself. Then the run would
        never end.
        """
        self._forget(run)
        self._manager.cancel_request(run)

    async def read_weights(self, manifest: Manifest) -> Copy:
        """Read new weights; return a function that copies them."""
        return await read_weights(manifest, self._model)

    async def sleep(self) -> None:
        """End the thread, free the cache and move the weights to host memory."""
        await self._end()
        await move(self._model, "cpu")

    async def wake(self) -> None:
        """Move the weights back to the device, allocate the cache and start the thread."""
        await move(self._model, self._settings.device)
        await self._begin()

    async def stop(self) -> None:
        """End the thread now; every remaining run ends in a `RuntimeError`."""
        self._stopping = True
        await self._end()
        self._fail_all(RuntimeError(STOPPED))

    async def time_passes(self) -> None:
        """Start timing every forward pass."""
        self._model.register_forward_pre_hook(self._begin_pass, with_kwargs=True)

    async def passes(self) -> list[TimedPass]:
        """Return the completed passes since the last call."""
        return self._passes.take()

    async def _begin(self) -> None:
        """Allocate the cache and start the thread."""
        self._model.set_attn_implementation(ATTENTION)
        self._manager = manager = _init_batching(self._model, self._settings)
        if self._model.config._attn_implementation == ATTENTION and not _slides(self._model):
            self._planning = attend_by_row(self._model)
        await asyncio.to_thread(manager.warmup)
        manager.start()
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._watch, args=(loop, manager), daemon=True).start()

    async def _end(self) -> None:
        """End the thread and free the cache."""
        manager, self._manager = self._manager, None
        if manager is not None:
            await asyncio.to_thread(manager.stop, hard_stop=True)
            await asyncio.to_thread(manager.destroy)
        if self._planning is not None:
            self._planning.remove()

    def _begin_pass(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        keys = kwargs["cu_seq_lens_k"]  # a dictionary by kind of layer if there are several kinds
        longest = max(keys.values(), key=len) if isinstance(keys, dict) else keys
        ends = kwargs["cu_seq_lens_q"].clone(), longest.clone()  # transformers reuses the tensors
        self._passes.begin(lambda: _content(*ends))

    @property
    def _cause(self) -> Exception | None:
        error: Exception | None = self._manager.background_thread_status.fatal_error
        return error

    def _deliver(self, is_over: IsOver | None, output: Any) -> None:
        """Pass on the output of a run that has ended; end it if `is_over` says so."""
        run = output.request_id
        if run not in self._on_end:
            return  # cancelled, or ended by an earlier token
        if not output.error and not output.is_finished():
            if is_over is None or not is_over(output.generated_tokens):
                return
            self._manager.cancel_request(run)  # its first token is here, so the thread has read it
            self._cancelled.append(run)
        on_end = self._on_end.pop(run)
        on_end(self._failure(output.error) if output.error else _run_from(output))

    def _failure(self, why: str) -> Exception:
        if self._stopping:
            return RuntimeError(STOPPED)
        error = RuntimeError(f"continuous batching failed: {why}")
        error.__cause__ = self._cause
        return error

    def _forget(self, run: str) -> None:
        self._on_end.pop(run, None)
        self._manager.output_router.result_handlers.pop(run, None)

    def _watch(self, loop: asyncio.AbstractEventLoop, manager: Any) -> None:
        """Fail the runs that a dying thread had not yet read from its queue."""
        manager._generation_thread.join()
        if self._manager is manager:
            self._is_dead = True
            loop.call_soon_threadsafe(lambda: self._fail_all(self._failure("its thread ended")))

    def _fail_all(self, error: Exception) -> None:
        for run in list(self._on_end):
            self._on_end.pop(run)(error)


def _init_batching(model: Any, settings: ReplicaSettings) -> Any:
    """Return a manager whose cache has room for `max_running` rollouts of maximum length.

    So no sequence is ever evicted or recomputed. Sequences do not share blocks: the keys of a shared block may come
    from older weights, and a rollout that starts after a load would attend to them.
    """
    max_running, max_length = settings.max_running, settings.max_length
    page_size = max(4, max_length)
    if page_size > PAGE_TOKENS:
        num_pages = 1 if _slides(model) else math.ceil(max_length / PAGE_TOKENS)
        page_size = num_pages * PAGE_TOKENS
    manager = model.init_continuous_batching(
        _sampling(
            1.0 if settings.evaluation is not None else settings.temperature,
            end_tokens(model, settings.end_tokens),
        ),
        ContinuousBatchingConfig(
            page_size=page_size,
            num_blocks=max_running * math.ceil(max_length / page_size),
            max_batch_tokens=max_running + min(PREFILL_TOKENS, max_running * max_length),
            max_requests_per_batch=max_running,
            safety_margin=0.0,
            allow_block_sharing=False,
            use_async_batching=False,
            use_cuda_graph=False,
            return_logprobs=True,
            seed=settings.seed,
        ),
    )
    if settings.evaluation is not None:
        _sample_each(manager.logit_processor, settings)
    elif not settings.truncation.is_whole:
        processors = manager.logit_processor
        processors.logits_processor.append(Truncate(settings.truncation))
        processors.do_processing = True
    return manager


EVALUATES = "evaluates"
"""Argument of a request of continuous batching that has the sampling of evaluations."""


def _sample_each(processors: Any, settings: ReplicaSettings) -> None:
    """Let each request have the sampling of training or of evaluations, in a batch with both."""
    from transformers.generation.continuous_batching.cb_logits_processors import (
        ContinuousBatchingLogitsProcessor,
    )

    train, evaluate = (settings.sampling(evaluates=each) for each in (False, True))

    class SampleEach(ContinuousBatchingLogitsProcessor):  # type: ignore[misc]  # its types are not read
        supported_kwargs: ClassVar[dict[str, type]] = {EVALUATES: int}
        ignored_kwargs: ClassVar[tuple[str, ...]] = ()

        def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
            int32_tensor.zero_()

        def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> torch.Tensor:
            arguments = (each.state.logit_processor_kwargs for each in requests_with_new_token)
            return torch.tensor([each.get(EVALUATES, 0) for each in arguments], dtype=torch.int32)

        def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
            is_own = tensor_arg[: len(scores)].bool()
            scaled = truncated(scores / train.temperature, train.truncation)
            if bool(is_own.any()):
                own = scores[is_own] / evaluate.temperature
                scaled[is_own] = truncated(own, evaluate.truncation)
            return scaled

    processors.logits_processor.append(SampleEach())
    processors.tensors_required += 1
    processors.supported_keys[EVALUATES] = int
    processors.do_processing = True


class Truncate(LogitsProcessor):  # type: ignore[misc]  # its types are not read
    """Removes tokens as the trainer does; transformers' own processors apply the keys in another order."""

    supports_continuous_batching = True

    def __init__(self, truncation: Truncation) -> None:
        self._truncation = truncation

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return logits / temperature, [n, vocabulary], without the tokens that may not be sampled."""
        return truncated(scores, self._truncation)


def _sampling(temperature: float, ends: frozenset[int]) -> GenerationConfig:
    """Return a config for plain sampling; the model's own config may truncate or penalise."""
    settings: Any = GenerationConfig
    config: GenerationConfig = settings(
        do_sample=True,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        eos_token_id=sorted(ends) or -1,
    )
    return config


def _slides(model: PreTrainedModel) -> bool:
    """Return whether a layer attends only to a window of the last tokens."""
    layers = set(getattr(model.config, "layer_types", None) or [])
    return bool(layers - {"full_attention"} or getattr(model.config, "sliding_window", None))


def _content(query_ends: torch.Tensor, key_ends: torch.Tensor) -> PassContent:
    queries, keys = query_ends.diff().tolist(), key_ends.diff().tolist()
    decoding = [k for q, k in zip(queries, keys, strict=True) if q == 1]
    return PassContent(decoding, [q for q in queries if q > 1])


def _run_from(output: Any) -> RunningSequence:
    return RunningSequence(
        tokens=output.generated_tokens,
        logprobs=output.logprobs,
        prefill_at=output.lifespan[0] if output.lifespan[0] >= 0 else None,
        token_times=output.timestamps,
    )
