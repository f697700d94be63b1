"""Times what relays do with a push: what is sent is made of it, and weights of what arrived; no network is in between."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from streamrl.executor.carriers.handles import Handle
from streamrl.executor.carriers.launch import RELAY
from streamrl.executor.carriers.remote import remote
from streamrl.executor.profiling.readings import Readings
from streamrl.executor.roles import RelayRole
from streamrl.executor.samples import Arrived, Manifest, Parcel
from streamrl.executor.transfer.delta import count_changes
from streamrl.hardware.model_shape import BYTES

Start = Callable[[str, dict[str, object]], contextlib.AbstractAsyncContextManager[Handle]]
"""Starts a role, as runs do, and ends it."""


class RelayBench:
    """A relay beside the trainer, and one at another place for each way of sending weights."""

    def __init__(self, near: RelayRole, whole: RelayRole, delta: RelayRole, dtype: str) -> None:
        self._near, self._whole, self._delta = near, whole, delta
        self._dtype = dtype
        self._base: Manifest | None = None
        """What the place that is sent deltas has."""

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls, start: Start, model: str, dtype: str, merges_adapters: bool
    ) -> AsyncIterator[RelayBench]:
        """Start relays, and leave nothing of them behind."""
        async with contextlib.AsyncExitStack() as ends:
            config = {"model": model, "dtype": dtype, "merges_adapters": merges_adapters}
            relays = []
            for _ in range(3):
                handle = await ends.enter_async_context(start(RELAY, config))
                relays.append(remote(RelayRole, handle))
                await relays[-1].start()
                ends.push_async_callback(relays[-1].stop)
            near, whole, delta = relays
            yield cls(near, whole, delta, dtype)

    async def time(self, manifest: Manifest, readings: Readings) -> None:
        """Bring a push to both places; enter the seconds, and of the first push those of whole weights alone."""
        whole = await self._near.pack(manifest, "full", None)
        readings.unpack["full"].append((await _bring(self._whole, whole)).seconds)
        readings.pack["full"].append(whole.seconds)
        readings.packed["full"] = (whole.num_bytes, whole.num_bytes // BYTES[self._dtype])
        await self._whole.keep([])
        parcel = whole
        if self._base is not None:
            parcel = await self._near.pack(manifest, "delta", self._base)
            changes = sum(count_changes(Path(piece.path).read_bytes()) for piece in parcel.pieces)
            readings.packed["delta"] = (parcel.num_bytes, changes)
            readings.pack["delta"].append(parcel.seconds)
        arrived = await _bring(self._delta, parcel)
        if parcel.kind == "delta":
            readings.unpack["delta"].append(arrived.seconds)
        self._base = arrived.manifest
        await self._delta.keep([arrived.manifest.checksum])

    async def time_adapters(self, manifest: Manifest, readings: Readings) -> Manifest:
        """Bring adapters to a place; enter the seconds, and return what replicas load there, merged or as it came."""
        parcel = await self._near.pack(manifest, "lora", None)
        arrived = await _bring(self._whole, parcel)
        readings.pack["lora"].append(parcel.seconds)
        readings.unpack["lora"].append(arrived.seconds)
        readings.packed["lora"] = (parcel.num_bytes, parcel.num_bytes // BYTES[self._dtype])
        await self._whole.keep([arrived.manifest.checksum])
        return arrived.manifest


async def _bring(relay: RelayRole, parcel: Parcel) -> Arrived:
    """Bring a parcel to a relay, and let it make weights of it."""
    for number, piece in enumerate(parcel.pieces):
        await relay.receive(parcel.result.version, number, 0, Path(piece.path).read_bytes())
    return await relay.unpack(parcel, is_here=False)
