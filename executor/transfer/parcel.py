"""One weight version on its way to where replicas are: what is sent, and what comes out of it there."""

from __future__ import annotations

from typing import Literal

import msgspec

from executor.samples import Bucket, Manifest

ParcelKind = Literal["full", "delta", "lora"]


class Parcel(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a far directory needs to have a version, given what it holds."""

    kind: ParcelKind
    """full: the buckets themselves; delta: what changed in them since `base`; lora: adapters, merged with the model that
    the run began with."""
    pieces: list[Bucket]
    """What is sent, as it lies with the sender."""
    result: Manifest
    """full, delta: what comes out, bucket by bucket, as it lies with the sender. lora: the adapters."""
    base: str = ""
    """delta: the checksum of the version that must be there."""
    seconds: float = 0.0
    """That encoding took."""

    @property
    def num_bytes(self) -> int:
        """Bytes that are sent."""
        return sum(piece.num_bytes for piece in self.pieces)


class Arrived(msgspec.Struct, frozen=True, kw_only=True):
    """A version that lies where replicas can load it."""

    manifest: Manifest
    seconds: float
    """That decoding took, with checking and writing."""
