"""A relay keeps weight versions on one machine for all replicas there, and prepares them for other relays.

    trainer -- writes --> its relay -- parcels --> one relay on each other machine -- buckets --> its replicas

A version crosses the network once for each machine, however many replicas are there. The receiving relay rebuilds the
whole version and verifies its checksums before any replica loads it. It rejects a parcel that is damaged or has the
wrong base. Then the sender sends the whole version.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from streamrl.executor.checksums import file_checksum
from streamrl.executor.roles import (
    Arrived,
    BroadcastRank,
    Bucket,
    Manifest,
    Parcel,
    ParcelKind,
    RelayRole,
)
from streamrl.executor.transfer.broadcast import (
    BroadcastGroup,
    Rendezvous,
    forward_blocks,
    new_blocks,
    read_blocks,
)
from streamrl.executor.transfer.delta import decode_delta, encode_delta
from streamrl.executor.transfer.shared_directory import (
    SharedDirectory,
    remove_version,
    version_directory,
)

INBOX = "inbox"
WIDTHS = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of a value, by the dtype that replicas serve."""

R = TypeVar("R")


class RelaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a relay."""

    model: str
    """Hugging Face directory of the weights that adapters are merged with."""
    dtype: str
    """Dtype that replicas serve."""
    merges_adapters: bool = True
    """Whether replicas here load whole weights with merged adapters (True), or only adapters (False)."""
    num_threads: int = 1
    room: int = 0
    """Bytes that weight versions take in its directory."""

    def __post_init__(self) -> None:
        if self.dtype not in WIDTHS:
            raise ValueError(f"dtype must be one of {', '.join(WIDTHS)}, got {self.dtype!r}")


class RelayWorker(RelayRole):
    """The relay of one machine; call all methods on one event loop."""

    def __init__(self, config: RelaySettings) -> None:
        """Store the settings; `start` creates the directory."""
        self.config = config
        self._directory: SharedDirectory | None = None
        self._versions: dict[str, Manifest] = {}
        """Received versions, by checksum."""
        self._rendezvous: Rendezvous | None = None
        self._receives: BroadcastGroup | None = None
        self._sends: BroadcastGroup | None = None

    async def start(self) -> str:
        """Create the directory, and return its path."""
        self._directory = SharedDirectory("weights", self.config.room)
        return str(self._directory.path)

    async def pack(self, manifest: Manifest, kind: str, base: Manifest | None) -> Parcel:
        """Return the parcel that another relay needs for a version; the buckets of a delta's base must be here.

        Raises:
            ValueError: the base has other tensors.
        """
        if kind != "delta" or base is None:
            whole: ParcelKind = "lora" if kind == "lora" else "full"
            return Parcel(kind=whole, pieces=manifest.buckets, result=manifest)
        return await asyncio.to_thread(self._encode, manifest, base)

    async def read(self, path: str, offset: int, size: int) -> bytes:
        """Return bytes of a file in the relay's directory."""
        real = Path(os.path.realpath(path))
        if not real.is_relative_to(os.path.realpath(self._path)):
            raise ValueError(f"{path} is not below the relay's directory {self._path}")
        return await asyncio.to_thread(_read, real, offset, size)

    async def receive(self, version: int, piece: int, offset: int, data: bytes) -> None:
        """Write received bytes to a piece of a parcel."""
        await asyncio.to_thread(_write, self._inbox(version) / str(piece), offset, data)

    async def listen(self) -> str:
        """Open the rendezvous of the group that this relay will send to, and return its address."""
        self._rendezvous = Rendezvous()
        return self._rendezvous.address

    async def join_broadcast(
        self, receives: BroadcastRank | None, sends: BroadcastRank | None
    ) -> None:
        """Join the group that this relay receives from, the group that it sends to, or both."""
        self._receives = self._sends = None
        if receives is not None:
            self._receives = await asyncio.to_thread(BroadcastGroup, receives)
        if sends is not None:
            rendezvous, self._rendezvous = self._rendezvous, None
            self._sends = await asyncio.to_thread(BroadcastGroup, sends, rendezvous)

    async def broadcast(self, parcel: Parcel) -> None:
        """Receive or read the pieces of a parcel, and send them on.

        Raises:
            ConnectionError: a member of a group has died.
        """
        await asyncio.to_thread(self._broadcast, parcel)

    async def unpack(self, parcel: Parcel, is_here: bool) -> Arrived:
        """Build a version from a parcel whose pieces were received, or are on this machine, and return it.

        Raises:
            ValueError: the base is missing, or a checksum of a piece or of the result differs; then nothing has changed.
        """
        return await asyncio.to_thread(self._unpack, parcel, is_here)

    async def keep(self, checksums: list[str]) -> None:
        """Remove all received versions except these."""
        for checksum in set(self._versions) - set(checksums):
            gone = self._versions.pop(checksum)
            shutil.rmtree(Path(gone.buckets[0].path).parent, ignore_errors=True)

    async def remove(self, version: int) -> None:
        """Remove a version that was written here, and its parcels."""
        remove_version(self._path, version)
        shutil.rmtree(_packed(self._path, version), ignore_errors=True)

    async def stop(self) -> None:
        """Remove the directory with its content."""
        if self._directory is not None:
            self._directory.remove()

    @property
    def _path(self) -> Path:
        assert self._directory is not None, "call start first"
        return self._directory.path

    def _inbox(self, version: int) -> Path:
        return self._path / f"{INBOX}-v{version:06d}"

    def _broadcast(self, parcel: Parcel) -> None:
        inbox, is_first = self._inbox(parcel.result.version), self._receives is None
        for number, piece in enumerate(parcel.pieces):
            blocks = read_blocks(Path(piece.path)) if is_first else new_blocks(piece.num_bytes)
            offset = 0
            for block in forward_blocks(blocks, self._receives, self._sends):
                if not is_first:
                    _write(inbox / str(number), offset, block.numpy().data)
                offset += block.numel()

    def _encode(self, manifest: Manifest, base: Manifest) -> Parcel:
        """Write the changes since `base`."""
        began_at = time.perf_counter()
        if len(base.buckets) != len(manifest.buckets):
            raise ValueError(f"{len(manifest.buckets)} buckets, but {len(base.buckets)} before")
        target, width = _packed(self._path, manifest.version), WIDTHS[self.config.dtype]
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        pieces = []
        for old, new in zip(base.buckets, manifest.buckets, strict=True):
            path = target / f"{Path(new.path).stem}.delta"
            path.write_bytes(encode_delta(Path(old.path), Path(new.path), width))
            pieces.append(Bucket(str(path), path.stat().st_size, file_checksum(path)))
        return Parcel(
            kind="delta",
            pieces=pieces,
            result=manifest,
            base=base.checksum,
            seconds=time.perf_counter() - began_at,
        )

    def _unpack(self, parcel: Parcel, is_here: bool) -> Arrived:
        began_at, version = time.perf_counter(), parcel.result.version
        inbox = self._inbox(version)
        try:
            pieces = [
                Path(piece.path) if is_here else inbox / str(number)
                for number, piece in enumerate(parcel.pieces)
            ]
            if parcel.kind != "full":  # the pieces of a full parcel are the result, verified below
                for path, piece in zip(pieces, parcel.pieces, strict=True):
                    _checked(path, piece)
            manifest = self._made(parcel, pieces)
        finally:
            shutil.rmtree(inbox, ignore_errors=True)
        self._versions[manifest.checksum] = manifest
        return Arrived(manifest=manifest, seconds=time.perf_counter() - began_at)

    def _made(self, parcel: Parcel, pieces: list[Path]) -> Manifest:
        """Write the buckets of the version that a parcel describes."""
        version, here = parcel.result.version, self._versions.get(parcel.result.checksum)
        if here is not None:  # sent a second time
            return here
        target = _fresh(version_directory(self._path, version))
        try:
            if parcel.kind == "lora" and self.config.merges_adapters:
                from streamrl.executor.transfer.adapters import merge  # imports torch

                config = self.config
                return merge(config.model, config.dtype, parcel.result, pieces, target)
            make: list[Callable[[Path], None]]
            if parcel.kind != "delta":
                make = [partial(_place, piece) for piece in pieces]
            else:
                base = self._versions.get(parcel.base)
                if base is None:
                    raise ValueError(
                        f"version {version}: its delta needs {parcel.base}, which is not here"
                    )
                make = [
                    partial(_rebuild, Path(old.path), piece)
                    for old, piece in zip(base.buckets, pieces, strict=True)
                ]
            return msgspec.structs.replace(
                parcel.result, buckets=_buckets(parcel.result.buckets, make, target)
            )
        except BaseException:
            shutil.rmtree(target, ignore_errors=True)
            raise


def _buckets(
    expected: Iterable[Bucket], make: Iterable[Callable[[Path], None]], target: Path
) -> list[Bucket]:
    """Build every bucket in a directory, verify it, and return the buckets with their new paths."""
    buckets = []
    for bucket, make_one in zip(expected, make, strict=True):
        path = target / Path(bucket.path).name
        make_one(path)
        buckets.append(Bucket(str(_checked(path, bucket)), bucket.num_bytes, bucket.checksum))
    return buckets


def _place(piece: Path, path: Path) -> None:
    """Put a whole bucket at its path: by a hard link, or by a copy if the file system allows none."""
    try:
        os.link(piece, path)
    except OSError:
        shutil.copyfile(piece, path)


def _rebuild(base: Path, piece: Path, path: Path) -> None:
    with path.open("wb") as file:
        for block in decode_delta(base, piece.read_bytes()):
            file.write(block)


def _checked(path: Path, expected: Bucket) -> Path:
    found = file_checksum(path) if path.is_file() else "no file"
    if found != expected.checksum:
        raise ValueError(f"{path}: expected checksum {expected.checksum}, found {found}")
    return path


def _fresh(path: Path) -> Path:
    """Return a new directory named after `path`.

    A version may be written twice. Readers of the first one keep its files.
    """
    number = 0
    while (fresh := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    fresh.mkdir()
    return fresh


def _packed(directory: Path, version: int) -> Path:
    return directory / f"packed-v{version:06d}"


def _read(path: Path, offset: int, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(size)


def _write(path: Path, offset: int, data: bytes | memoryview) -> None:
    path.parent.mkdir(exist_ok=True)
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY)
    try:
        os.pwrite(descriptor, data, offset)
    finally:
        os.close(descriptor)
