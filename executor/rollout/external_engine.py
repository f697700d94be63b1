"""Generate on a server that someone else runs, such as `vllm serve`, over its HTTP API.

The process of the replica is only a client. So a server that dies or hangs is a lost replica, as an engine of its own
would be, and the replacement waits for the server to come back.

| guarantee of `InferenceEngine` | given by |
|---|---|
| a run ends in exactly one call of its `on_end` | the task of its request; `_fail` ends all runs of a lost server |
| inside `paused()` no token is recorded | `_open`: tokens that arrive meanwhile are added later |
| one version for each token | a load first ends every request, then loads, then sends a request for the rest of each run |
| after `stop()` or a loss, `submit` and `paused` raise | `_end` |
| log-probabilities of the tokens that may be sampled | `_check_logprobs`, once at the start |

A load computes the KV cache of running rollouts again, under the new weights. Tokens of an ended request that had not
arrived are lost; they are never recorded, so no token can have the wrong version.
"""

from __future__ import annotations

import asyncio
import math
import os
import reprlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx
import torch
from safetensors import safe_open

from streamrl.executor.roles import Manifest, RoleLostError
from streamrl.executor.rollout.inference_engine import (
    GPU_PASS_TOKENS,
    STOPPED,
    Copy,
    OnEnd,
    ReplicaSettings,
    RunningSequence,
    TimedPass,
)
from streamrl.executor.rollout.server_api import (
    AnswerError,
    GroupToJoin,
    Part,
    Post,
    RejectedError,
    ServerSettings,
    TensorsToReceive,
    Wanted,
    make_api,
    read_part,
)
from streamrl.executor.rollout.server_client import ServerClient, ServerError
from streamrl.executor.rollout.server_group import ServerGroup
from streamrl.executor.rollout.torch_model import (
    check_vocabulary,
    empty_model,
    end_tokens,
    named_as_in_files,
    read_pairs,
)
from streamrl.executor.rollout.weight_directory import weight_directory
from streamrl.executor.sampling import WHOLE, IsOver, Sampling, Truncation
from streamrl.executor.transfer.shared_memory import BUCKET_BYTES, read_buckets

T = TypeVar("T")
BUSY = (429, 408, 500, 502, 503, 504)
"""Statuses with which a request may succeed later; as the status of a whole answer, all but the first mean a lost server."""
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0
"""Seconds before a request is repeated; they double up to the second value."""
LOOK_TIME = 1.0
"""Seconds between two looks at the health of the server."""
MOST_REFUSED = 2
"""Refused connections in a row, above which nobody listens any more."""
LOAD_TIME = 600.0
"""Most seconds of one request that loads weights; a large model comes from a slow disk."""
PROBE = [1]
"""Prompt of the requests that check log-probabilities."""
PROBE_TEMPERATURE = 2.0
"""Temperature that differs from 1, within the limits of every server."""


@dataclass(eq=False)
class _Run:
    """One rollout, which may take several requests."""

    prompt: list[int]
    sampling: Sampling
    max_tokens: int
    on_end: OnEnd
    seed: int | None
    priority: int
    ends: frozenset[int]
    is_over: IsOver | None = None
    task: asyncio.Task[None] | None = None
    sent_at: float | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)

    @property
    def so_far(self) -> RunningSequence:
        made = list(self.tokens), list(self.logprobs), self.sent_at, list(self.token_times)
        return RunningSequence(*made)

    def add(self, part: Part, came_at: float) -> bool:
        """Add the tokens of a part; return whether one ends the run. Later ones are left out."""
        for token, logprob in zip(part.tokens, part.logprobs, strict=True):
            self.tokens.append(token)
            self.logprobs.append(logprob)
            self.token_times.append(came_at)
            if token in self.ends or len(self.tokens) == self.max_tokens:
                return True
            if self.is_over is not None and self.is_over(self.tokens):
                return True
        return False


class ExternalEngine:
    """One server, and the runs that it generates for."""

    def __init__(self, settings: ReplicaSettings, server: ServerSettings | None = None) -> None:
        """Use a server, by default the one in the settings."""
        self._settings = settings
        found = settings.server if server is None else server
        assert found is not None, "the configuration of an external replica has a server"
        self._server = found
        self._api = make_api(found.api)
        self._runs: dict[str, _Run] = {}
        self._num_runs = 0
        self._num_loads = 0
        self._weights = ""
        """Name of the server's weights; each load has a new one."""
        self._error: RuntimeError | None = None
        """Why the engine has ended, if it has."""
        self._open = asyncio.Event()
        """Cleared while tokens must not be recorded."""
        self._open.set()
        self._num_pauses = 0
        self._alive_at = 0.0
        """Last sign of life of the server, by `time.monotonic`."""
        self._looking: asyncio.Task[None] | None = None
        self._model: Any = None
        """The Hugging Face model without weights."""
        self._num_embeddings = 0
        self._group: ServerGroup | None = None
        """The group over which the server takes weights, if it takes them without files."""

    async def start(self, manifest: Manifest | None) -> None:
        """Wait for the server, check that it fits the run, and load the weights."""
        self._client = ServerClient(self._server)
        self._model = await asyncio.to_thread(empty_model, self._settings.model)
        self._num_embeddings = self._model.get_input_embeddings().num_embeddings
        await self._wait()
        await self._check_model()
        if self._server.weights == "distributed":
            await self._join()
        if manifest is None:  # an earlier run may have left other weights
            await self._load_initial()
        else:
            copy = await self.read_weights(manifest)
            await copy()
        await self._check_logprobs()
        self._looking = asyncio.create_task(self._look())

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
        """Return the default of vLLM's server; the real value is not reported."""
        return GPU_PASS_TOKENS

    @property
    def has_room(self) -> bool:
        """Return whether fewer than `max_running` rollouts are at the server."""
        return len(self._runs) < self._settings.max_running or self.is_over

    @property
    def is_over(self) -> bool:
        """Return whether the engine was stopped, or its server is lost."""
        return self._error is not None

    @property
    def cache(self) -> None:
        """Return None: servers do not report their KV cache in one form."""
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
        """Send a request for the tokens after `tokens`."""
        self._check_alive()
        check_vocabulary(tokens, self._num_embeddings)
        self._num_runs += 1
        name = str(self._num_runs)
        sampling, ends = self._settings.sampling(evaluates=evaluates), self.end_tokens
        run = _Run(tokens, sampling, max_new_tokens, on_end, seed, priority, ends, is_over)
        self._runs[name] = run
        run.task = asyncio.create_task(self._follow(name, run))
        return name

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Record no token meanwhile. The server goes on, under the same weights."""
        self._check_alive()
        self._num_pauses += 1
        self._open.clear()
        try:
            yield
        finally:
            self._num_pauses -= 1
            if not self._num_pauses:
                self._open.set()

    def read(self, run: str) -> RunningSequence:
        """Return the output of `run` so far."""
        return self._runs[run].so_far

    def cancel(self, run: str) -> None:
        """Drop `run`; its connection closes, and the server then aborts its request."""
        _cancel(self._runs.pop(run))

    async def read_weights(self, manifest: Manifest) -> Copy:
        """Check weights against the model, and write them where the server reads them; return the load."""
        await asyncio.to_thread(read_pairs, manifest, self._model)
        if self._group is not None:

            async def send() -> None:
                pushed = named_as_in_files(self._settings.model, read_buckets(manifest))
                await self._change(manifest.version, partial(self._send, pushed))

            return send
        beside = self._server.directory or str(Path(manifest.buckets[0].path).parent)

        async def copy() -> None:
            with weight_directory(self._settings.model, manifest, Path(beside)) as write:
                directory = await asyncio.to_thread(write)
                await self._change(manifest.version, partial(self._load, str(directory)))

        return copy

    async def sleep(self) -> None:
        """Do nothing: the server keeps its memory."""
        self._check_alive()

    async def wake(self) -> None:
        """Do nothing; see `sleep`."""
        self._check_alive()

    async def stop(self) -> None:
        """End all runs; the server goes on."""
        if self._group is not None:
            with suppress(RuntimeError, httpx.HTTPError):
                await self._client.post(self._api.leave(self._group.name), LOOK_TIME)
        await self._end(RuntimeError(STOPPED))

    async def time_passes(self) -> None:
        """Raise an error: a server does not report its forward passes."""
        raise NotImplementedError("an external server reports no forward passes")

    async def passes(self) -> list[TimedPass]:
        """Return no passes; see `time_passes`."""
        return []

    # The server -----------------------------------------------------------------------------------

    async def _wait(self) -> None:
        """Wait until the server is healthy, at most `timeout` seconds."""
        began_at, timeout = time.monotonic(), self._server.timeout
        while (reason := await self._health()) is not None:
            if time.monotonic() - began_at > timeout:
                raise RuntimeError(
                    f"the server {self._client.url} did not answer within {timeout:g} s: {reason}"
                )
            await asyncio.sleep(min(LOOK_TIME, timeout / 4))
        self._alive_at = time.monotonic()

    async def _health(self) -> str | None:
        """Return why the server cannot generate; None if it can."""
        try:
            await self._client.get(self._api.health, self._server.timeout)
        except httpx.HTTPError as error:
            return _named(error)
        except ServerError as error:
            if error.status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
                raise RuntimeError(f"{error}; set rollout.external.key") from None
            return str(error)
        except AnswerError as error:
            return str(error)
        return None

    async def _check_model(self) -> None:
        """Raise an error if the key is wrong, or the server takes no sequences of the run's length."""
        most = self._understood(
            self._api.models, await self._asked(self._api.models), self._api.see_models
        )
        if most is not None and most < self._settings.max_length:
            raise RuntimeError(
                f"the server {self._client.url} takes sequences of {most} tokens, but workload.max_prompt_tokens + "
                f"rollout.max_tokens is {self._settings.max_length}; start it with a larger limit (--max-model-len)"
            )

    async def _asked(self, path: str) -> Any:
        try:
            return await self._client.get(path, self._server.timeout)
        except ServerError as error:
            if error.status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
                raise RuntimeError(f"{error}; set rollout.external.key") from None
            raise
        except httpx.HTTPError as error:
            raise RuntimeError(f"{self._client.url}{path}: {_named(error)}") from error

    async def _load_initial(self) -> None:
        """Give the server the weights of the model directory."""
        if self._group is None:
            await self._change(0, partial(self._load, self._settings.model))
        else:
            await self._change(0, partial(self._send, weights_of(Path(self._settings.model))))

    async def _change(self, version: int, update: Callable[[], Awaitable[None]]) -> None:
        """End every request, let `update` change the server's weights, and send requests for the rest of each run."""
        running = list(self._runs.items())
        for _, run in running:
            _cancel(run)
        await asyncio.gather(*(_ended(run) for _, run in running))
        self._num_loads += 1
        self._weights = f"v{version}.{self._num_loads}"
        try:
            await update()
        except (ServerError, AnswerError, httpx.HTTPError, ConnectionError) as error:
            missing = isinstance(error, ServerError) and error.status == httpx.codes.NOT_FOUND
            advice = f"; {self._api.how_to_start}" if missing else ""
            reason = f"the server cannot load version {version}: {_named(error)}{advice}"
            await self._end(RoleLostError(reason))  # it may have both old and new weights
            raise RuntimeError(reason) from error
        self._alive_at = time.monotonic()
        for name, run in running:
            run.task = asyncio.create_task(self._follow(name, run))

    async def _load(self, directory: str) -> None:
        """Make the server load a directory."""
        for post in self._api.update(directory, self._weights):
            await self._update(post)

    async def _update(self, post: Post) -> None:
        self._api.check_update(await self._client.post(post, LOAD_TIME))

    async def _join(self) -> None:
        """Make a group with the server, over which it takes weights.

        Raises:
            RuntimeError: the server cannot join.
        """
        name = f"streamrl-{os.getpid()}-{id(self):x}"  # a server keeps the groups of earlier runs
        group = ServerGroup(name, self._server.num_ranks, self._server.timeout)
        post = self._api.join(GroupToJoin(group.host, group.port, group.size, name))
        try:
            await self._together(self._update(post), group, group.join)
        except (ServerError, AnswerError, httpx.HTTPError, ConnectionError) as error:
            raise RuntimeError(
                f"the server {self._client.url} cannot join a group at {group.host}:{group.port}: {_named(error)}; it "
                "must reach this address (GLOO_SOCKET_IFNAME names the network), and rollout.tensor_parallel must be "
                "its number of GPUs"
            ) from error
        self._group = group

    async def _send(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Send weights over the group while the server generates nothing."""
        assert self._group is not None, "the server has joined it"
        group, (before, after) = self._group, self._api.around_update()
        await self._update(before)
        parts = iter(buckets_of(tensors, BUCKET_BYTES))
        part = await asyncio.to_thread(next, parts, None)
        while part is not None:
            following = await asyncio.to_thread(next, parts, None)
            wanted = TensorsToReceive(
                [name for name, _ in part],
                [str(tensor.dtype).removeprefix("torch.") for _, tensor in part],
                [list(tensor.shape) for _, tensor in part],
                following is None,
            )
            sent = [tensor for _, tensor in part]
            post = self._api.receive(wanted, group.name, self._weights)
            await self._together(self._update(post), group, partial(group.send, sent))
            part = following
        await self._update(after)

    async def _together(
        self, asked: Coroutine[Any, Any, None], group: ServerGroup, work: Callable[[], None]
    ) -> None:
        """Ask the server for something, and do this process's part of it; if one fails, end the other.

        Raises:
            ConnectionError: this process's part failed.
        """
        request = asyncio.ensure_future(asked)
        own = asyncio.ensure_future(asyncio.to_thread(work))
        try:
            done, _ = await asyncio.wait((request, own), return_when=asyncio.FIRST_EXCEPTION)
            if request in done:
                request.result()  # the server's reason, if both failed
            await own
            await request
        except RuntimeError as error:
            group.close()
            request.cancel()
            if isinstance(error, ServerError | AnswerError):
                raise
            raise ConnectionError(str(error).splitlines()[0]) from None
        except BaseException:
            group.close()
            request.cancel()
            raise

    async def _check_logprobs(self) -> None:
        """Raise an error if log-probabilities are not those of the distribution that is sampled from.

        Dividing logits by a temperature divides each difference of log-probabilities by it. With two tokens to sample
        from, their probabilities add up to 1.
        """
        truncation = self._settings.truncation
        first, second = await self._probed(1.0, WHOLE)
        if self._settings.temperature != 1.0:
            warm = await self._probed(PROBE_TEMPERATURE, WHOLE)
            plain, found = first - second, warm[0] - warm[1]
            if abs(found - plain) < abs(found - plain / PROBE_TEMPERATURE):
                raise RuntimeError(self._unlike(f"temperature {self._settings.temperature:g}"))
        if not truncation.is_whole:
            two = await self._probed(1.0, Truncation(top_k=2))
            mass = math.exp(two[0]) + math.exp(two[1])
            if abs(mass - math.exp(first) - math.exp(second)) < abs(mass - 1):
                raise RuntimeError(self._unlike("top_k, top_p and min_p"))

    async def _probed(self, temperature: float, truncation: Truncation) -> tuple[float, float]:
        sampling = Sampling(temperature=temperature, truncation=truncation)
        post = self._api.probe(Wanted(PROBE, sampling, 1))
        answer = await self._client.post(post, LOAD_TIME)
        return self._understood(post.path, answer, self._api.read_probe)

    def _understood(self, path: str, answer: Any, read: Callable[[Any], T]) -> T:
        """Return what an answer says; raise `RuntimeError` with the URL if it has an unexpected form."""
        try:
            return read(answer)
        except (LookupError, TypeError, ValueError, AttributeError):
            shown = reprlib.repr(answer)
            raise RuntimeError(
                f"{self._client.url}{path} answers in an unexpected form: {shown}"
            ) from None

    def _unlike(self, what: str) -> str:
        return (
            f"the server {self._client.url} returns log-probabilities before {what} instead of those of the tokens that "
            f"may be sampled; {self._api.how_to_start}"
        )

    async def _look(self) -> None:
        """Look at the server's health until it is lost."""
        num_refused = 0
        while not self.is_over:
            await asyncio.sleep(min(LOOK_TIME, self._server.timeout / 4))
            try:
                reason = await self._health()
            except Exception as error:
                await self._fail(_named(error))
                return
            silence = time.monotonic() - self._alive_at
            is_refused = reason is not None and reason.startswith(httpx.ConnectError.__name__)
            num_refused = num_refused + 1 if is_refused else 0
            if reason is None:
                self._alive_at = time.monotonic()
            elif silence > self._server.timeout or num_refused > MOST_REFUSED:
                await self._fail(f"gave no sign of life for {silence:.1f} s: {reason}")

    # Runs -----------------------------------------------------------------------------------------

    async def _follow(self, name: str, run: _Run) -> None:
        """Collect a run's tokens until it ends; the server may end a request earlier than the run."""
        run.sent_at = run.sent_at or time.perf_counter()
        try:
            while not await self._request_patiently(run):
                pass
        except RejectedError as error:
            self._finish(name, RuntimeError(f"the server rejects a request: {error}"))
        except ServerError as error:
            if error.status >= httpx.codes.INTERNAL_SERVER_ERROR:
                await self._fail(str(error))
            else:
                self._finish(name, RuntimeError(str(error)))
        except Exception as error:  # a task must not end without a result
            await self._fail(_named(error))
        else:
            self._finish(name, run.so_far)

    async def _request_patiently(self, run: _Run) -> bool:
        """Make one request like `_request`; repeat it while the server is busy, until its timeout.

        A server is busy if it answers with status 429, or ends a stream with an error that may pass.
        """
        ends_at, pause = time.monotonic() + self._server.timeout, FIRST_PAUSE
        while True:
            before = len(run.tokens)
            try:
                return await self._request(run)
            except (RejectedError, ServerError) as error:
                busy = BUSY if isinstance(error, RejectedError) else BUSY[:1]
                if error.status not in busy:
                    raise
                if len(run.tokens) > before:
                    ends_at, pause = time.monotonic() + self._server.timeout, FIRST_PAUSE
                if time.monotonic() + pause > ends_at:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _request(self, run: _Run) -> bool:
        """Add the tokens of one request to a run; return whether the run has ended."""
        before = len(run.tokens)
        wanted = Wanted(
            [*run.prompt, *run.tokens],
            run.sampling,
            run.max_tokens - before,
            tuple(sorted(run.ends)),
            None if run.seed is None else run.seed + before,
        )
        post = self._api.generate(wanted, self._weights, run.priority)
        events = self._client.stream(post)
        num_read = 0
        try:
            async for event in events:
                came_at = time.perf_counter()
                self._alive_at = time.monotonic()
                part = read_part(self._api, event, num_read, self._num_embeddings)
                num_read += len(part.tokens)
                await self._open.wait()
                self._check_version(part)
                if run.add(part, came_at):
                    return True
                if part.is_last:
                    break
        finally:
            with suppress(httpx.HTTPError, RuntimeError):
                await events.aclose()  # type: ignore[attr-defined]  # an async generator
        if not num_read:
            raise RuntimeError("the server ended a request without a token")
        return False

    def _check_version(self, part: Part) -> None:
        if part.weights is not None and part.weights != self._weights:
            raise RuntimeError(
                f"the server has weights {part.weights!r} instead of {self._weights!r}: someone else loads weights into it"
            )

    def _finish(self, name: str, result: RunningSequence | Exception) -> None:
        run = self._runs.pop(name, None)
        if run is not None:
            run.on_end(result)

    def _check_alive(self) -> None:
        if self._error is not None:
            raise RuntimeError(str(self._error))

    async def _fail(self, reason: str) -> None:
        """End every run, because the server is lost."""
        await self._end(RoleLostError(f"the server {self._client.url} is lost: {reason}"))

    async def _end(self, error: RuntimeError) -> None:
        """End every run with an error, and close all connections."""
        self._error = self._error or error
        runs = list(self._runs.values())
        self._runs.clear()
        here = asyncio.current_task()
        for run in runs:
            if run.task is not here:
                _cancel(run)
            run.on_end(error)
        if self._looking is not None and self._looking is not here:
            self._looking.cancel()
        if self._group is not None:
            self._group.close()
        await self._client.close()


def weights_of(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights in the files of a Hugging Face directory, one at a time.

    Raises:
        ConnectionError: it has no safetensors files.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ConnectionError(f"{directory} has no *.safetensors to send")
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                yield name, tensors.get_tensor(name)


def buckets_of(
    tensors: Iterable[tuple[str, torch.Tensor]], most: int
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Yield consecutive tensors in lists of at most `most` bytes; a larger tensor has a list of its own."""
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > most:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


def _cancel(run: _Run) -> None:
    assert run.task is not None
    run.task.cancel()


async def _ended(run: _Run) -> None:
    """Wait until the task of a cancelled run has closed its connection."""
    assert run.task is not None
    with suppress(asyncio.CancelledError):
        await run.task


def _named(error: Exception) -> str:
    """Return an error's text; those of connections often have none, so with the type."""
    return str(error) if isinstance(error, RuntimeError) else f"{type(error).__name__}: {error}"
