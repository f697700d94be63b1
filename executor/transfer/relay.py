"""A relay: holds weight versions on one machine, for all replicas there, and makes what other relays need of them.

    trainer -- writes --> relay beside it -- parcels --> a relay at every other place -- buckets --> its replicas

A version crosses the network once for each place, however many replicas wait there, and lies there whole, checked against
the checksums that it was written with, before any replica is told of it. What comes out of order, or damaged, is
refused: whoever sent it sends the whole version then.
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
    Circle,
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
    """What a relay needs to know."""

    model: str
    """Hugging Face directory of the weights that adapters are merged with."""
    dtype: str
    """That replicas serve."""
    merges_adapters: bool = True
    """Whether replicas here load whole weights, with adapters merged in, or adapters alone."""
    num_threads: int = 1

    def __post_init__(self) -> None:
        if self.dtype not in WIDTHS:
            raise ValueError(f"dtype must be one of {', '.join(WIDTHS)}, got {self.dtype!r}")


class RelayWorker(RelayRole):
    """The relay of one machine; call every method on one event loop."""

    def __init__(self, config: RelaySettings) -> None:
        """Make nothing yet."""
        self.config = config
        self._directory: SharedDirectory | None = None
        self._versions: dict[str, Manifest] = {}
        """Versions that came from elsewhere, by checksum."""
        self._meeting: Rendezvous | None = None
        self._hears: Circle | None = None
        self._tells: Circle | None = None

    async def start(self) -> str:
        """Make the directory, and return its path."""
        self._directory = SharedDirectory("weights")
        return str(self._directory.path)

    async def pack(self, manifest: Manifest, kind: str, base: Manifest | None) -> Parcel:
        """Return what another place needs to have a version; of a delta's base the buckets must lie here.

        Raises:
            ValueError: the base has other tensors.
        """
        if kind != "delta" or base is None:
            whole: ParcelKind = "lora" if kind == "lora" else "full"
            return Parcel(kind=whole, pieces=manifest.buckets, result=manifest)
        return await asyncio.to_thread(self._encode, manifest, base)

    async def read(self, path: str, offset: int, size: int) -> bytes:
        """Return bytes of a file below the relay's directory."""
        found = Path(os.path.realpath(path))
        if not found.is_relative_to(os.path.realpath(self._path)):
            raise ValueError(f"{path} is not below {self._path}")
        return await asyncio.to_thread(_read, found, offset, size)

    async def receive(self, version: int, piece: int, offset: int, data: bytes) -> None:
        """Take bytes of a piece of a parcel."""
        await asyncio.to_thread(_write, self._inbox(version) / str(piece), offset, data)

    async def listen(self) -> str:
        """Open a meeting for the circle that this one will tell, and return its address."""
        self._meeting = Rendezvous()
        return self._meeting.address

    async def join_broadcast(
        self, hears: BroadcastRank | None, tells: BroadcastRank | None
    ) -> None:
        """Take the seats of this one; the first in the circle that it tells is the one that listens."""
        self._hears = self._tells = None
        if hears is not None:
            self._hears = await asyncio.to_thread(Circle, hears)
        if tells is not None:
            meeting, self._meeting = self._meeting, None
            self._tells = await asyncio.to_thread(Circle, tells, meeting)

    async def broadcast(self, parcel: Parcel) -> None:
        """Hear or read the pieces of a parcel, and tell them on.

        Raises:
            ConnectionError: a member of a circle is gone.
        """
        await asyncio.to_thread(self._broadcast, parcel)

    async def unpack(self, parcel: Parcel, is_here: bool) -> Arrived:
        """Make a version out of a parcel whose pieces were received, or lie on this machine, and return it.

        Raises:
            ValueError: its base is not here, a piece or what comes out is not what was sent; nothing has changed then.
        """
        return await asyncio.to_thread(self._unpack, parcel, is_here)

    async def keep(self, checksums: list[str]) -> None:
        """Remove every version that came from elsewhere but these."""
        for checksum in set(self._versions) - set(checksums):
            gone = self._versions.pop(checksum)
            shutil.rmtree(Path(gone.buckets[0].path).parent, ignore_errors=True)

    async def remove(self, version: int) -> None:
        """Remove a version that was written here, with what was packed of it."""
        remove_version(self._path, version)
        shutil.rmtree(_packed(self._path, version), ignore_errors=True)

    async def stop(self) -> None:
        """Remove the directory with all that lies in it."""
        if self._directory is not None:
            self._directory.remove()

    @property
    def _path(self) -> Path:
        assert self._directory is not None, "call start first"
        return self._directory.path

    def _inbox(self, version: int) -> Path:
        return self._path / f"{INBOX}-v{version:06d}"

    def _broadcast(self, parcel: Parcel) -> None:
        inbox, is_first = self._inbox(parcel.result.version), self._hears is None
        for number, piece in enumerate(parcel.pieces):
            blocks = read_blocks(Path(piece.path)) if is_first else new_blocks(piece.num_bytes)
            offset = 0
            for block in forward_blocks(blocks, self._hears, self._tells):
                if not is_first:
                    _write(inbox / str(number), offset, block.numpy().data)
                offset += block.numel()

    def _encode(self, manifest: Manifest, base: Manifest) -> Parcel:
        """Write what changed since `base`."""
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
            if parcel.kind != "full":  # whose pieces are what comes out, and checked as that
                for path, piece in zip(pieces, parcel.pieces, strict=True):
                    _checked(path, piece)
            manifest = self._made(parcel, pieces)
        finally:
            shutil.rmtree(inbox, ignore_errors=True)
        self._versions[manifest.checksum] = manifest
        return Arrived(manifest=manifest, seconds=time.perf_counter() - began_at)

    def _made(self, parcel: Parcel, pieces: list[Path]) -> Manifest:
        """Write the buckets that come out of a parcel."""
        version, here = parcel.result.version, self._versions.get(parcel.result.checksum)
        if here is not None:  # sent once more
            return here
        target = _fresh(version_directory(self._path, version))
        try:
            if parcel.kind == "lora" and self.config.merges_adapters:
                from streamrl.executor.transfer.adapters import merge  # takes torch

                config = self.config
                return merge(config.model, config.dtype, parcel.result, pieces, target)
            make: list[Callable[[Path], None]]
            if parcel.kind != "delta":
                make = [partial(_place, piece) for piece in pieces]
            else:
                base = self._versions.get(parcel.base)
                if base is None:
                    raise ValueError(f"version {version} is told from {parcel.base}, not here")
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
    """Make every bucket in a directory, and return them as they lie there, checked."""
    found = []
    for bucket, make_one in zip(expected, make, strict=True):
        path = target / Path(bucket.path).name
        make_one(path)
        found.append(Bucket(str(_checked(path, bucket)), bucket.num_bytes, bucket.checksum))
    return found


def _place(piece: Path, path: Path) -> None:
    """Put a whole bucket where it belongs, without a copy where its disk can."""
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
    """Return a directory like this one that was never there: who reads another version of its number keeps it."""
    number = 0
    while (found := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    found.mkdir(parents=True)
    return found


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
