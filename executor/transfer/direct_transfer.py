"""Send weights from the trainer's process to the replicas in one broadcast, without files or relays between them.

The trainer packs a version in memory and sends it to all replicas that have started: over NCCL between GPUs, over gloo
between CPUs, or by CUDA IPC within one GPU. Replicas generate meanwhile, and load what they have received later.

What is packed is lost with the trainer's process. A restarted trainer packs its version with its next push, and no
replica starts or loads before that.

The group stays while its members do. If a member dies or hangs, the broadcast fails for all. Then each replica is sent
its own copy in a group of two, and the next push makes a new group. A replica that starts later is sent its own copy too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from streamrl.engine.messages import PushWeights, WeightsPushed
from streamrl.executor.launchers.handles import WorkerLostError
from streamrl.executor.roles import (
    BroadcastRank,
    Channel,
    Manifest,
    TransferRole,
    UnreachedError,
    WeightSource,
    WeightTarget,
    reason_of,
)
from streamrl.executor.transfer.transfer import RetainedVersions

logger = logging.getLogger(__name__)

LOSS_TIME = 1.0
"""Seconds in which the end of the trainer's process is noticed after its connections broke. An assumption."""
LEAST_PATIENCE = 5.0
"""Seconds that the members of a group may take to join it, whatever `execute.patience` is: NCCL takes one or two."""


@dataclass(frozen=True)
class SendingGroup:
    """A group that was made."""

    worker: object
    """The trainer's worker that sends."""
    members: tuple[int, ...]
    """Replicas that receive."""
    address: str


class DirectTransfer(TransferRole):
    """Knows what the trainer has packed, and what each replica has received."""

    def __init__(self, source: WeightSource, channel: Channel, patience: float) -> None:
        """Send nothing yet.

        Args:
            source: the primary trainer.
            channel: how bytes travel.
            patience: seconds in which a replica must have received what was sent.
        """
        self._source = source
        self._channel: Channel = channel
        self._least_patience = LEAST_PATIENCE
        self._patience = float(patience)  # not a duration of a run file, which messages cannot have
        self._targets: dict[int, WeightTarget] = {}
        self._manifests: dict[int, Manifest] = {}
        """Manifests of what `_packer` has packed, by version."""
        self._packer: object = None
        """The trainer's worker that packed last."""
        self._received: defaultdict[int, dict[int, str]] = defaultdict(dict)
        """By replica: the checksum of each version that it has received."""
        self._group: SendingGroup | None = None
        """The current group; None while it sends, and after a failure."""
        self._turn = asyncio.Lock()
        self._wanted = RetainedVersions()

    def join(self, replica: int, place: str, target: WeightTarget | None = None) -> None:
        """Send pushes to a replica once it has started."""
        assert target is not None, "a direct transfer sends to replicas"
        self._targets[replica] = target

    def leave(self, replica: int) -> None:
        """Send nothing more to a replica."""
        self._targets.pop(replica, None)
        self._received.pop(replica, None)

    async def prepare(self) -> None:
        """Do nothing: the first push makes the group."""

    async def reach(self, replica: int) -> None:
        """Do nothing: replicas receive weights in their own processes."""

    async def push(self, command: PushWeights) -> WeightsPushed:
        """Pack a version, and send it to all replicas that have started."""
        version = command.version
        self._wanted.begin(version)
        began_at = time.monotonic()
        # at once, because the trainer's next step changes the weights
        manifest = await self._packed(version)
        packed_at = time.monotonic()
        async with self._turn:
            turn_at = time.monotonic()
            await self._send_to_all(manifest)
            sent_at = time.monotonic()
        self._wanted.enter(version)
        self._forget_unwanted()
        return WeightsPushed(
            version,
            manifest.num_bytes,
            manifest.checksum,
            encode_time=packed_at - began_at,
            wire_time=sent_at - turn_at,
        )

    async def _packed(self, version: int) -> Manifest:
        """Return the manifest of a version after packing it, unless this worker has packed it already."""
        if self._packer is not self._source.worker:
            self._manifests.clear()
            self._received.clear()
            self._packer = self._source.worker
        if version not in self._manifests:
            self._manifests[version] = await self._source.pack(version, self._kept())
        return self._manifests[version]

    async def fetch(self, version: int, replica: int) -> Manifest | None:
        """Return the manifest of a version that a replica has received; send it first if it has not."""
        async with self._turn:
            manifest = self._manifests.get(version)
            if manifest is None:
                if self._wanted.was_pushed(version):
                    raise ConnectionError(
                        f"weights of step {version} were removed; load a newer version"
                    )
                return None
            if self._received[replica].get(version) != manifest.checksum:
                if self._packer is not self._source.worker:
                    raise ConnectionError(f"weights of step {version} were lost with the trainer")
                try:
                    await self._send(manifest, (replica,))
                except WorkerLostError as error:  # not the replica
                    raise ConnectionError(f"the trainer is lost: {error}") from None
            return manifest

    def hold(self, version: int) -> None:
        """Keep a version for a replica that will load it, even if there is a newer one."""
        self._wanted.hold(version)

    def release(self, version: int) -> None:
        """Undo one `hold` of a version."""
        self._wanted.release(version)
        self._forget_unwanted()

    async def close(self) -> None:
        """Do nothing: trainer and replicas free their memory."""

    def stop(self) -> None:
        """Do nothing: no files are here."""

    async def _send_to_all(self, manifest: Manifest) -> None:
        """Send a version to all replicas that have started: at once, or one by one if that fails.

        Raises:
            UnreachedError: no replica was reached.
        """
        members = tuple(sorted(n for n, target in self._targets.items() if target.is_up))
        if not members:
            return
        what = f"weights of step {manifest.version}"
        try:
            await self._send(manifest, members)
            return
        except WorkerLostError:
            raise
        except ConnectionError as error:
            failure, unreached = error, list(members)
        if len(members) > 1:
            logger.warning(f"a broadcast of {what} failed, sending to each replica: {failure}")
            unreached = []
            for replica in members:
                try:
                    await self._send(manifest, (replica,))
                except WorkerLostError:
                    raise
                except ConnectionError as error:
                    failure = error
                    unreached.append(replica)
                    logger.warning(f"{what} did not reach replica {replica}: {error}")
        if len(unreached) == len(members):
            raise UnreachedError(f"{what} did not reach any replica: {failure}", unreached)

    async def _send(self, manifest: Manifest, members: tuple[int, ...]) -> None:
        """Send a version to replicas.

        Raises:
            WorkerLostError: the trainer is lost.
            ConnectionError: the version did not reach all of them.
        """
        group, self._group = self._group, None  # until all have received it
        worker, kept = self._source.worker, self._kept()
        for replica in members:
            if replica not in self._targets:
                raise ConnectionError(f"replica {replica} is gone")
            self._received[replica].pop(manifest.version, None)
        if group is None or (group.worker, group.members) != (worker, members):
            group = SendingGroup(worker, members, await self._listen())
        seats = [
            BroadcastRank(
                address=group.address,
                rank=rank,
                size=len(members) + 1,
                channel=self._channel,
                patience=max(self._least_patience, self._patience),
            )
            for rank in range(len(members) + 1)
        ]
        sending = asyncio.ensure_future(self._send_from_source(manifest.version, seats[0]))
        receiving = [
            asyncio.ensure_future(self._receive(replica, manifest, seat, kept))
            for replica, seat in zip(members, seats[1:], strict=True)
        ]
        await self._all_done(sending, receiving)
        self._group = group

    async def _all_done(
        self, sending: asyncio.Future[None], receiving: Sequence[asyncio.Future[None]]
    ) -> None:
        """Wait until all is sent and received; after the first error, wait for nothing more."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as limit:

                def end_soon(_: object) -> None:
                    limit.reschedule(loop.time() + self._patience)

                sending.add_done_callback(end_soon)
                try:
                    await asyncio.gather(sending, *receiving)
                finally:
                    sending.remove_done_callback(end_soon)
        except ConnectionError:
            await asyncio.wait([sending], timeout=LOSS_TIME)
            if sending.done() and isinstance(lost := sending.exception(), WorkerLostError):
                raise lost from None
            raise
        except TimeoutError:
            raise ConnectionError(
                f"a replica has not received all weights {self._patience:g} s after they were sent"
            ) from None
        finally:
            for call in (sending, *receiving):
                call.cancel()

    async def _listen(self) -> str:
        try:
            return await self._source.listen()
        except WorkerLostError:
            raise
        except Exception as error:
            raise ConnectionError(f"the trainer cannot listen: {reason_of(error)}") from None

    async def _send_from_source(self, version: int, seat: BroadcastRank) -> None:
        try:
            await self._source.send(version, seat)
        except WorkerLostError:
            raise
        except Exception as error:
            raise ConnectionError(f"the trainer cannot send: {reason_of(error)}") from None

    async def _receive(
        self, replica: int, manifest: Manifest, seat: BroadcastRank, kept: list[int]
    ) -> None:
        """Let a replica receive a version; its loss is not that of the trainer."""
        try:
            await self._targets[replica].receive(manifest, seat, kept)
        except Exception as error:
            if isinstance(error, WorkerLostError):
                self.leave(replica)  # no group should wait for it
            raise ConnectionError(f"replica {replica} cannot receive: {reason_of(error)}") from None
        if replica in self._targets:
            self._received[replica][manifest.version] = manifest.checksum

    def _kept(self) -> list[int]:
        return [version for version in self._manifests if version in self._wanted]

    def _forget_unwanted(self) -> None:
        """Forget versions here; trainer and replicas forget them with the next push."""
        for version in [v for v in self._manifests if v not in self._wanted]:
            del self._manifests[version]
            for received in self._received.values():
                received.pop(version, None)
