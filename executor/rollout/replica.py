"""The controller side of a replica: each method carries out one command and returns its event."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager

import msgspec

from streamrl.engine.messages import (
    Generate,
    Generated,
    Lend,
    LoadWeights,
    ReplicaStarted,
    StartReplica,
    WeightsLoaded,
)
from streamrl.executor.buffer import RolloutBuffer
from streamrl.executor.launchers.handles import Handle, WorkerLostError, remote
from streamrl.executor.roles import (
    BroadcastRank,
    Completion,
    Manifest,
    ReplicaRole,
    Request,
    reason_of,
)
from streamrl.executor.tokens import count_tokens, is_whole


def check_completion(request: Request, completion: Completion) -> None:
    """Reject a completion that does not fit its request, before any of it enters the buffer.

    Raises:
        ValueError: the completion belongs to another rollout, has too many or missing tokens, or does not say which
            policy versions sampled them.
    """
    output, least = completion.output, 0 if completion.finish == "aborted" else 1
    most = request.max_tokens - count_tokens(request.prefix)
    starts = [start for _, start in completion.versions]
    if completion.rollout != request.rollout:
        wrong = f"rollout {completion.rollout}"
    elif not least <= output.num_tokens <= most:
        wrong = f"{output.num_tokens} tokens, expected {least} to {most}"
    elif count_tokens(completion.segments) != output.num_tokens:
        wrong = f"{output.num_tokens} tokens but segments of {count_tokens(completion.segments)}"
    elif output.num_tokens and (
        starts[:1] != [0] or starts != sorted({*starts}) or starts[-1] >= output.num_tokens
    ):
        wrong = f"versions {completion.versions} for {output.num_tokens} tokens"
    elif output.path not in (None, request.output_path) or not is_whole(output):
        wrong = f"missing tokens: {output.path} is another file, or shorter than it says"
    else:
        return
    raise ValueError(f"rollout {request.rollout}: the replica answered with {wrong}")


class Replica:
    """A `ReplicaWorker` behind a handle, and the buffer for its rollouts."""

    def __init__(
        self, handle: Handle, buffer: RolloutBuffer, *, tells_pressure: bool = False
    ) -> None:
        """Connect to a worker; with `tells_pressure`, events also report how full its KV cache is."""
        self._handle = handle
        self._tells_pressure = tells_pressure
        self._num_preempted = 0
        """Preemptions that events have reported so far."""
        self._worker = remote(ReplicaRole, handle)
        self._buffer = buffer
        self._may_generate = asyncio.Event()
        """Cleared between a `load` and its sending: rollouts sent after a load must start under the new weights."""
        self._may_generate.set()
        self._num_generating = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self.is_up = False
        """Whether the worker has loaded its model."""

    async def start(self, command: StartReplica, manifest: Manifest | None) -> ReplicaStarted:
        """Load the model and the manifest's weights, if any, and begin to serve."""
        checksum = await self._worker.start(manifest, command.version)
        self.is_up = True
        cache = await self._worker.cache() if self._tells_pressure else None
        tokens = None if cache is None else cache.tokens
        return ReplicaStarted(command.replica, command.version, checksum, tokens)

    async def generate(self, command: Generate) -> Generated:
        """Generate a rollout and put it into the buffer; a rollout that ended before a restart is there already."""
        self._num_generating += 1
        self._is_idle.clear()
        try:
            return await self._generate(command)
        finally:
            self._num_generating -= 1
            if not self._num_generating:
                self._is_idle.set()

    async def _generate(self, command: Generate) -> Generated:
        with self._buffer.hold([command.rollout]) as (buffered,):
            if buffered.finish is not None:
                num_tokens, version = buffered.kept
                return Generated(command.rollout, num_tokens, buffered.finish, version, 0.0, 0.0)
            await self._may_generate.wait()
            if command.rollout not in self._buffer.rollouts:  # its group was dropped meanwhile
                num_tokens, version = buffered.kept
                return Generated(command.rollout, num_tokens, "aborted", version, 0.0, 0.0)
            if not self._buffer.room(buffered):  # the turn before ended with the last token
                num_tokens, version = buffered.kept
                return Generated(command.rollout, num_tokens, "length", version, 0.0, 0.0)
            request = self._buffer.request(command)
            completion = await self._worker.generate(request)
            check_completion(request, completion)
            return self._with_pressure(self._buffer.end(buffered, completion), completion)

    async def evaluate(self, request: Request) -> Completion:
        """Generate a rollout on a held-out prompt, which is in no buffer."""
        await self._may_generate.wait()
        completion = await self._worker.generate(request)
        check_completion(request, completion)
        return completion

    def _with_pressure(self, event: Generated, completion: Completion) -> Generated:
        """Add the cache's use to an event, and the preemptions since the last report."""
        cache = completion.cache
        if not self._tells_pressure or cache is None:
            return event
        num_new = cache.num_preempted - self._num_preempted
        self._num_preempted = cache.num_preempted
        return msgspec.structs.replace(event, cache_use=cache.use, num_preempted=num_new)

    async def abort(self, rollout: int) -> None:
        """End a rollout with the tokens sampled so far; then its `generate` returns."""
        await self._worker.abort(rollout)

    async def load(
        self, command: LoadWeights, fetched: Awaitable[Manifest | None]
    ) -> WeightsLoaded:
        """Load new weights as soon as they are on this machine, after a drain or in flight.

        Raises:
            WorkerLostError: the weights do not arrive. The replica is then useless, so it is killed.
            ValueError: the weights were never pushed.
        """
        self.hold()
        try:
            manifest = await fetched
            if manifest is None:
                raise ValueError(f"weights of version {command.version} were never pushed")
        except ConnectionError as error:
            self.kill(f"cannot be given weights: {error}")
            raise WorkerLostError(f"the replica cannot be given weights: {error}") from None
        finally:  # one turn of the event loop later, when the load has been sent
            asyncio.get_running_loop().call_soon(self._may_generate.set)
        loaded = await self._worker.load(manifest, command.drain)
        return WeightsLoaded(command.replica, command.version, loaded.load_time, loaded.checksum)

    def hold(self) -> None:
        """Let rollouts that are sent from now on wait for new weights."""
        self._may_generate.clear()

    async def lend(self, command: Lend, fetched: Awaitable[Manifest | None]) -> str:
        """Wake up, load weights unless they are the initial ones, and let held rollouts begin; return the checksum.

        Raises:
            WorkerLostError: the weights do not arrive, it does not wake up, or cannot load. It is then useless, so it
                is killed.
        """
        try:
            with self._lost_by_error("cannot generate on GPUs of the trainer"):
                manifest = await fetched
                await self.wake()
                if manifest is None:
                    return ""
                return (await self._worker.load(manifest, True)).checksum
        finally:
            self._may_generate.set()

    async def take_back(self) -> None:
        """Wait until its aborted rollouts have ended, then free the devices' memory until `wake`.

        Raises:
            WorkerLostError: it does not fall asleep. It is then killed, which frees the memory.
        """
        await self._is_idle.wait()
        with self._lost_by_error("did not sleep"):
            await self.sleep()

    @contextmanager
    def _lost_by_error(self, what: str) -> Iterator[None]:
        """Kill the replica after an error, whose message begins with `what`, and report it as lost."""
        try:
            yield
        except WorkerLostError:
            raise
        except Exception as error:
            reason = f"{what}: {reason_of(error)}"
            self.kill(reason)
            raise WorkerLostError(f"the replica {reason}") from None

    async def receive(self, manifest: Manifest, seat: BroadcastRank, kept: list[int]) -> None:
        """Receive packed weights from the trainer, for a later `load` or `start`."""
        await self._worker.receive(manifest, seat, kept)

    async def sleep(self) -> None:
        """Free the devices' memory until `wake`."""
        await self._worker.sleep()

    async def wake(self) -> None:
        """Allocate the devices' memory again, so that generation can go on."""
        await self._worker.wake()

    def expect_end(self) -> None:
        """Do not report the end of the worker as a loss any more."""
        self._handle.watch(None)

    def kill(self, reason: str) -> None:
        """Kill the worker; its queued and running rollouts are lost."""
        self._handle.kill(reason)

    async def stop(self) -> None:
        """End the worker; its queued and running rollouts are lost."""
        await self._handle.close()
