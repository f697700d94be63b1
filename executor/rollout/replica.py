"""A replica on the controller's side: each method carries out one command and returns the event that it ends in."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import msgspec

from streamrl.engine.messages import (
    Generate,
    Generated,
    LoadWeights,
    ReplicaStarted,
    StartReplica,
    WeightsLoaded,
)
from streamrl.executor.buffer import RolloutBuffer
from streamrl.executor.launchers.handles import Handle, WorkerLostError, remote
from streamrl.executor.roles import Completion, Manifest, ReplicaRole, Request
from streamrl.executor.tokens import count_tokens, is_whole


def check_completion(request: Request, completion: Completion) -> None:
    """Refuse what is no answer to a request, before anything is entered of it.

    Raises:
        ValueError: it is another rollout's, has tokens that nobody asked for or that are not there, or does not say whose
            they are.
    """
    output, least = completion.output, 0 if completion.finish == "aborted" else 1
    most = request.max_tokens - count_tokens(request.prefix)
    starts = [start for _, start in completion.versions]
    if completion.rollout != request.rollout:
        wrong = f"rollout {completion.rollout}"
    elif not least <= output.num_tokens <= most:
        wrong = f"{output.num_tokens} tokens where {least} to {most} can be"
    elif count_tokens(completion.segments) != output.num_tokens:
        wrong = f"{output.num_tokens} tokens but segments of {count_tokens(completion.segments)}"
    elif output.num_tokens and (
        starts[:1] != [0] or starts != sorted({*starts}) or starts[-1] >= output.num_tokens
    ):
        wrong = f"versions {completion.versions} of {output.num_tokens} tokens"
    elif output.path not in (None, request.output_path) or not is_whole(output):
        wrong = f"tokens that are not where they should be: {output.path}"
    else:
        return
    raise ValueError(f"rollout {request.rollout} is answered with {wrong}")


class Replica:
    """A `ReplicaWorker` at the other end of a handle, and the buffer that its rollouts go to."""

    def __init__(
        self, handle: Handle, buffer: RolloutBuffer, *, tells_pressure: bool = False
    ) -> None:
        """Reach a worker; with `tells_pressure` what it reports says how full its KV cache is."""
        self._handle = handle
        self._tells_pressure = tells_pressure
        self._num_told = 0
        """Preemptions that completions have told of."""
        self._worker = remote(ReplicaRole, handle)
        self._buffer = buffer
        self._may_generate = asyncio.Event()
        """Cleared while a load that was commanded is not yet sent, as what is sent after it must start under what it brings."""
        self._may_generate.set()

    async def start(self, command: StartReplica, manifest: Manifest | None) -> ReplicaStarted:
        """Load the model, then the manifest's weights if there are any newer, and begin to serve."""
        checksum = await self._worker.start(manifest, command.version)
        cache = await self._worker.cache() if self._tells_pressure else None
        tokens = None if cache is None else cache.tokens
        return ReplicaStarted(command.replica, command.version, checksum, tokens)

    async def generate(self, command: Generate) -> Generated:
        """Generate a rollout, and put what was made of it into the buffer; one that an earlier leg has ended is there."""
        with self._buffer.hold([command.rollout]) as (buffered,):
            if buffered.finish is not None:
                num_tokens, version = buffered.kept
                return Generated(command.rollout, num_tokens, buffered.finish, version, 0.0, 0.0)
            await self._may_generate.wait()
            request = self._buffer.request(command)
            completion = await self._worker.generate(request)
            check_completion(request, completion)
            return self._with_pressure(self._buffer.end(buffered, completion), completion)

    def _with_pressure(self, event: Generated, completion: Completion) -> Generated:
        """Say with what ended how full the cache is, and what was put off since that was last told."""
        cache = completion.cache
        if not self._tells_pressure or cache is None:
            return event
        put_off, self._num_told = cache.num_preempted - self._num_told, cache.num_preempted
        return msgspec.structs.replace(event, cache_use=cache.use, num_preempted=put_off)

    async def abort(self, rollout: int) -> None:
        """End a rollout with what it has made so far; its `generate` returns then."""
        await self._worker.abort(rollout)

    async def load(
        self, command: LoadWeights, fetched: Awaitable[Manifest | None]
    ) -> WeightsLoaded:
        """Take new weights as soon as they are here, once drained or in flight.

        Raises:
            WorkerLostError: they do not come: the replica is of no use any more, and killed.
            ValueError: they were never pushed.
        """
        self._may_generate.clear()
        try:
            manifest = await fetched
            if manifest is None:
                raise ValueError(f"weights of version {command.version} were never pushed")
        except ConnectionError as error:
            self.kill(f"cannot be given weights: {error}")
            raise WorkerLostError(f"the replica cannot be given weights: {error}") from None
        finally:  # once this task waits for something, so that the load is sent by then
            asyncio.get_running_loop().call_soon(self._may_generate.set)
        loaded = await self._worker.load(manifest, command.drain)
        return WeightsLoaded(command.replica, command.version, loaded.load_time, loaded.checksum)

    async def sleep(self) -> None:
        """Give the devices' memory back until `wake`."""
        await self._worker.sleep()

    async def wake(self) -> None:
        """Be ready to generate again."""
        await self._worker.wake()

    def kill(self, reason: str) -> None:
        """Let the worker be lost, with what is queued or runs."""
        self._handle.kill(reason)

    async def stop(self) -> None:
        """End the worker; what was queued or running is lost."""
        await self._handle.close()
