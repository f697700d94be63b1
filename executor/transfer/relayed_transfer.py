"""Send weights through relays: one on the trainer's machine, and one at each other site that has replicas.

A site receives each version once. It receives the whole version, the changes since the newest version that it has, or
adapters. If a site rejects a delta because it restarted or lacks data, it receives the whole version.

The relay of a site starts with the first replica there, not with the first push. By then the machine may be about to
be taken away, and Ray starts no actor on a node that drains.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace

from streamrl.engine.messages import PushWeights, WeightsPushed
from streamrl.executor.launchers.handles import Handle, WorkerLostError, remote
from streamrl.executor.roles import (
    Manifest,
    Parcel,
    RelayRole,
    TransferRole,
    UnreachedError,
    WeightTarget,
    Write,
)
from streamrl.executor.transfer.broadcast import BroadcastPeer, FanOut
from streamrl.executor.transfer.transfer import RetainedVersions
from streamrl.runfile.policies_config import SyncConfig

logger = logging.getLogger(__name__)

CHUNK_BYTES = 8 * 2**20
"""Bytes of a piece that are sent at once: a second on a slow link, far above the latency of a fast one."""
CHUNKS_UNDER_WAY = 4
"""Chunks sent at the same time, so that the link stays busy while the next chunk is read."""
NEAR = "on the trainer's machine"

T = TypeVar("T")
StartRelay = Callable[[str | None], Awaitable[Handle]]
"""Starts the relay of a site; None: the one on the trainer's machine."""


@dataclass
class Site:
    """A relay and the versions that it has."""

    name: str
    handle: Handle
    relay: RelayRole
    directory: Path
    where: str
    """The machine, under the launcher's name."""
    manifests: dict[int, Manifest] = field(default_factory=dict)
    num_deltas: int = 0
    """Number of deltas since the last version that was sent whole."""
    heard: tuple[Parcel, float] | None = None
    """The parcel whose pieces arrived by broadcast, and the seconds that this took."""
    bringing: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass
class Transit:
    """Bytes and seconds of a push; each time is that of the slowest site."""

    num_bytes: int = 0
    encode_time: float = 0.0
    wire_time: float = 0.0
    decode_time: float = 0.0


class RelayedTransfer(TransferRole):
    """Owns the relays and the versions that they have."""

    def __init__(
        self,
        write: Write,
        sync: SyncConfig,
        start_relay: StartRelay,
        trainer_place: Callable[[], str] = lambda: "",
    ) -> None:
        """Store the arguments; relays start later.

        Args:
            write: writes the trainer's weights.
            sync: settings of `sync`: mode, wire and anchors.
            start_relay: starts a relay.
            trainer_place: returns the trainer's machine, where the near relay must run; it changes when the trainer
                restarts elsewhere.
        """
        self._write = write
        self._sync = sync
        self._start_relay = start_relay
        self._trainer_place = trainer_place
        self._near: Site | None = None
        self._places: dict[str, Site] = {}
        self._place_of: dict[int, str] = {}
        self._parcels: dict[tuple[str, str], asyncio.Future[Parcel]] = {}
        """Parcels by checksum of the result and of the base."""
        self._wanted = RetainedVersions()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._starting: defaultdict[str | None, asyncio.Lock] = defaultdict(asyncio.Lock)
        """By site: held while its relay starts. None: the one on the trainer's machine."""
        self._fan_out = FanOut()

    def join(self, replica: int, place: str, target: WeightTarget | None = None) -> None:
        """Record where a replica loads weights."""
        self._place_of[replica] = place

    def leave(self, replica: int) -> None:
        """Forget a replica; its site stays for the replica that replaces it."""
        self._place_of.pop(replica, None)

    async def prepare(self) -> None:
        """Start the relay on the trainer's machine early, so that no push waits for it."""
        try:
            await self._near_place()
        except ConnectionError as error:
            logger.warning(f"{error}; the next push tries again")

    async def reach(self, replica: int) -> None:
        """Start the relay of a replica's site, unless it is there."""
        await self._place(self._place_of[replica])

    async def push(self, command: PushWeights) -> WeightsPushed:
        """Send a version to every site that has replicas."""
        version, near = command.version, await self._near_place()
        self._wanted.begin(version)
        manifest = await self._write_near(version, near)
        before = near.manifests.get(version)
        if before is not None:  # the trainer was rolled back, and its files were overwritten
            self._forget_parcels(before)
        near.manifests[version] = manifest
        sent = Transit()
        places = sorted({*self._place_of.values()})
        if self._sync.wire == "gloo":
            await self._broadcast(places, manifest)
        results = await asyncio.gather(
            *(self._bring(place, manifest, sent) for place in places), return_exceptions=True
        )
        errors = [result for result in results if isinstance(result, BaseException)]
        for error in errors:
            if not isinstance(error, ConnectionError):
                raise error
            logger.warning(f"weights of step {version} did not reach all sites: {error}")
        if errors and len(errors) == len(places):
            raise UnreachedError(
                f"weights of step {version} did not reach any site: {errors[0]}",
                sorted(self._place_of),
            )
        self._wanted.enter(version)
        self._remove_unwanted()
        return WeightsPushed(
            version,
            sent.num_bytes or manifest.num_bytes,
            manifest.checksum,
            sent.encode_time,
            sent.wire_time,
            sent.decode_time,
        )

    async def _write_near(self, version: int, near: Site) -> Manifest:
        """Let the trainer write a version. A relay that dies meanwhile takes the directory along."""
        try:
            return await self._write(version, near.directory)
        except WorkerLostError:
            raise
        except Exception:
            await self._of_near(near, near.relay.remove(version))  # fails if the relay is lost
            raise

    async def fetch(self, version: int, replica: int) -> Manifest | None:
        """Return the manifest for a replica; send the version to its site first if necessary."""
        near = self._near
        if not self._wanted.was_pushed(version):
            return None
        name = self._place_of[replica]
        if near is None or version not in near.manifests:
            there = self._places[name].manifests if name in self._places else {}
            if version not in there:
                raise ConnectionError(
                    f"weights of step {version} were removed; load a newer version"
                )
            return there[version]
        try:
            await self._bring(name, near.manifests[version], Transit())
        except WorkerLostError:  # start another relay and try once more
            await self._bring_again(name, near.manifests[version])
        return self._places[name].manifests[version]

    async def _broadcast(self, names: list[str], manifest: Manifest) -> None:
        """Broadcast to the sites that need the same parcel; a site that receives nothing is sent it later."""
        hearers: dict[str, list[Site]] = {}
        parcels: dict[str, Parcel] = {}
        for name in names:
            with suppress(ConnectionError):  # reported later, when the parcel is sent to this site
                place = await self._place(name)
                if place.where != self._trainer_place():
                    parcel = await self._parcel(manifest, self._base(place, manifest.version))
                    parcels[parcel.base] = parcel
                    hearers.setdefault(parcel.base, []).append(place)
        for base, places in hearers.items():
            near, began_at = await self._near_place(), time.monotonic()
            members = [BroadcastPeer(id(place), place.relay) for place in (near, *places)]
            try:
                await self._fan_out.send(parcels[base], members[0], members[1:])
            except (RuntimeError, ValueError, OSError) as error:
                logger.warning(
                    f"broadcast of the weights of step {manifest.version} failed, sending to each site: {error}"
                )
                continue
            for place in places:
                place.heard = parcels[base], time.monotonic() - began_at

    async def _bring_again(self, name: str, manifest: Manifest) -> None:
        try:
            await self._bring(name, manifest, Transit())
        except WorkerLostError as error:  # the relay is lost, not the replica
            raise ConnectionError(f"weights cannot reach {name}: {error}") from None

    def hold(self, version: int) -> None:
        """Keep a version for a replica that will load it, even if there is a newer one."""
        self._wanted.hold(version)

    def release(self, version: int) -> None:
        """Undo one `hold` of a version."""
        self._wanted.release(version)
        self._remove_unwanted()

    async def close(self) -> None:
        """End the relays, which remove their data."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*map(_end, self._all_places()), return_exceptions=True)
        self.stop()

    def stop(self) -> None:
        """Kill the relays, and remove their data on this machine."""
        for place in self._all_places():
            place.handle.kill("was ended with the run")
            shutil.rmtree(
                place.directory, ignore_errors=True
            )  # exists only if it is on this machine
        self._places.clear()
        self._near = None

    def _all_places(self) -> list[Site]:
        return [*self._places.values(), *([] if self._near is None else [self._near])]

    # Sites --------------------------------------------------------------------------------------

    async def _near_place(self) -> Site:
        async with self._starting[None]:
            near = self._near
            if near is not None and (near.handle.is_lost or near.where != self._trainer_place()):
                self._lose(near)  # it died while idle, or the trainer restarted on another machine
            if self._near is None:
                self._near = await self._start(None)
            return self._near

    async def _place(self, name: str) -> Site:
        async with self._starting[name]:
            known = self._places.get(name)
            if known is not None and known.handle.is_lost:  # it died while idle
                self._lose(known)
            if name not in self._places:
                self._places[name] = await self._start(name)
            return self._places[name]

    async def _start(self, name: str | None) -> Site:
        try:
            handle = await self._start_relay(name)
            # `remote` implements the methods of a Protocol
            relay = remote(RelayRole, handle)
            directory = Path(await relay.start())
        except WorkerLostError as error:
            raise ConnectionError(f"relay {name or NEAR} does not start: {error}") from None
        where = self._trainer_place() if name is None else name
        return Site(name or NEAR, handle, relay, directory, where)

    def _lose(self, place: Site) -> None:
        """Forget a lost relay; the next call that needs it starts another one."""
        place.handle.kill("is lost")
        shutil.rmtree(place.directory, ignore_errors=True)  # a writer may have been at work there
        if self._near is place:
            self._near = None
            self._parcels.clear()
        if self._places.get(place.name) is place:
            del self._places[place.name]

    # Parcels ------------------------------------------------------------------------------------

    async def _bring(self, name: str, manifest: Manifest, sent: Transit) -> None:
        """Make sure that a site has a version, whatever it has now."""
        place, version = await self._place(name), manifest.version
        async with place.bringing:
            here = place.manifests.get(version)
            if here is not None and here.checksum == manifest.checksum:
                return
            base = self._base(place, version)
            try:
                await self._send(place, version, await self._parcel(manifest, base), sent)
            except WorkerLostError:
                self._lose(place)
                raise
            except ConnectionError:
                raise
            except (RuntimeError, ValueError, OSError) as error:
                if base is None:
                    raise
                logger.warning(f"weights of step {version} are sent whole to {name}: {error}")
                await self._send(place, version, await self._parcel(manifest, None), sent)

    def _base(self, place: Site, version: int) -> Manifest | None:
        """Return the base of the next delta for a site; None if the whole version is sent."""
        if self._sync.mode != "delta" or place.num_deltas + 1 >= self._sync.anchor_every:
            return None
        near = self._near.manifests if self._near is not None else {}
        shared = [
            number
            for number, manifest in place.manifests.items()
            if number != version and number in near and near[number].checksum == manifest.checksum
        ]
        return near[max(shared)] if shared else None

    async def _parcel(self, manifest: Manifest, base: Manifest | None) -> Parcel:
        """Return the parcel for sites with this base; these sites share it."""
        key = (manifest.checksum, "" if base is None else base.checksum)
        if key not in self._parcels:
            near = await self._near_place()
            packed = self._of_near(near, near.relay.pack(manifest, self._sync.mode, base))
            self._parcels[key] = asyncio.ensure_future(packed)
        try:
            return await asyncio.shield(self._parcels[key])
        except Exception:
            self._parcels.pop(key, None)
            raise

    async def _of_near(self, near: Site, call: Awaitable[T]) -> T:
        """Await a call of the near relay; its loss is not the loss of a replica or of the trainer."""
        try:
            return await call
        except WorkerLostError as error:
            self._lose(near)
            raise ConnectionError(f"the relay {NEAR} is lost: {error}") from None

    async def _send(self, place: Site, version: int, parcel: Parcel, sent: Transit) -> None:
        """Send a parcel to a site; its result may have another version number if a step changed nothing."""
        began_at, is_here = time.monotonic(), place.where == self._trainer_place()
        heard, wire_time = place.heard or (None, 0.0)
        place.heard = None
        if not is_here and heard is not parcel:
            await self._send_chunks(place, parcel)
            wire_time = time.monotonic() - began_at
        arrived = await place.relay.unpack(parcel, is_here)
        place.manifests[version] = replace(arrived.manifest, version=version)
        place.num_deltas = place.num_deltas + 1 if parcel.kind == "delta" else 0
        sent.num_bytes += parcel.num_bytes
        sent.encode_time = max(sent.encode_time, parcel.seconds)
        sent.wire_time = max(sent.wire_time, wire_time)
        sent.decode_time = max(sent.decode_time, arrived.seconds)

    async def _send_chunks(self, place: Site, parcel: Parcel) -> None:
        near, version = await self._near_place(), parcel.result.version
        room = asyncio.Semaphore(CHUNKS_UNDER_WAY)

        async def send(number: int, path: str, offset: int) -> None:
            async with room:
                data = await self._of_near(near, near.relay.read(path, offset, CHUNK_BYTES))
                await place.relay.receive(version, number, offset, data)

        chunks = [
            asyncio.ensure_future(send(number, piece.path, offset))
            for number, piece in enumerate(parcel.pieces)
            for offset in range(0, piece.num_bytes, CHUNK_BYTES)
        ]
        try:
            await asyncio.gather(*chunks)
        finally:
            for chunk in chunks:
                chunk.cancel()

    # Removal of versions ------------------------------------------------------------------------

    def _remove_unwanted(self) -> None:
        near = self._near
        if near is None:
            return
        for version in [v for v in near.manifests if v not in self._wanted]:
            self._forget(near, near.manifests.pop(version))
        for place in self._places.values():
            gone = [version for version in place.manifests if version not in self._wanted]
            for version in gone:
                del place.manifests[version]
            if gone:
                kept = [manifest.checksum for manifest in place.manifests.values()]
                self._call(place.relay.keep(kept))

    def _forget(self, near: Site, manifest: Manifest) -> None:
        """Remove a version on the trainer's machine, and its parcels."""
        self._forget_parcels(manifest)
        self._call(near.relay.remove(manifest.version))

    def _forget_parcels(self, manifest: Manifest) -> None:
        for key in [key for key in self._parcels if manifest.checksum in key]:
            del self._parcels[key]

    def _call(self, call: Awaitable[None]) -> None:
        """Call a relay without waiting for the result."""
        task = asyncio.ensure_future(call)
        self._tasks.add(task)
        task.add_done_callback(self._forget_call)

    def _forget_call(self, task: asyncio.Future[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or isinstance(task.exception(), WorkerLostError):
            return  # the next call that needs this relay notices
        if (error := task.exception()) is not None:
            logger.warning(f"a relay could not remove weights: {error}")


def _end(place: Site) -> Coroutine[Any, Any, None]:
    async def end() -> None:
        await place.relay.stop()
        await place.handle.close()

    return end()
