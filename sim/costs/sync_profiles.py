"""Read profiles/transports and profiles/sync: measured costs of moving weights."""

from __future__ import annotations

import datetime
from functools import cache

from streamrl.hardware.profile_table import ProfileTable, check_positive
from streamrl.hardware.profiles import find_profile, read_profile
from streamrl.runfile.units import NO_FACTOR, Bandwidth, Duration, Factor


class Transport(ProfileTable, frozen=True, kw_only=True):
    """How bytes cross a network."""

    name: str
    source: str
    date: datetime.date
    efficiency: float
    """Share of line rate that large messages reach."""
    message_latency: Duration
    """Seconds of one message of a collective in addition to its bytes."""
    is_through_host: bool
    """Whether bytes arrive in host memory and are copied to the GPU from there."""

    def __post_init__(self) -> None:
        check_positive(self, ("message_latency",))


class SyncBackend(ProfileTable, frozen=True, kw_only=True):
    """One library that moves weights: its sender, and the time that it adds to the bytes on the wire."""

    name: str
    source: str
    date: datetime.date
    fitted_to: list[str]
    """Measured rows that the constants come from; empty if nothing is published."""
    setup_time: Duration = Duration(0.0)
    tensor_time: Duration = Duration(0.0)
    """Seconds for each tensor: gather, launch, load."""
    offload_bandwidth: Bandwidth | None = None
    """Bytes per second at which all weights go to host memory before the transfer; None if they do
    not.
    """
    sender_bandwidth: Bandwidth
    """Most bytes per second of the sender, including its gather."""
    error: Factor = NO_FACTOR
    """Seconds of the sender relative to those at `sender_bandwidth`."""
    broadcast_share: float = 1.0
    """Share of the bytes that every receiver gets in full; of the rest each receives its own
    shard.
    """

    def __post_init__(self) -> None:
        check_positive(self, ("setup_time", "tensor_time", "broadcast_share"))

    def fixed_time(self, num_bytes: float, num_tensors: int) -> float:
        """Return the seconds before, or in parallel to, the bytes on the wire."""
        offload = num_bytes / self.offload_bandwidth if self.offload_bandwidth else 0.0
        return self.setup_time + num_tensors * self.tensor_time + offload


class RankGroup(ProfileTable, frozen=True, kw_only=True):
    """How the ranks of a trainer make a new group, and new ones get the trainer's state."""

    name: str
    source: str
    date: datetime.date
    setup_time: Duration = Duration(0.0)
    """Seconds until a group is there, whatever its size."""
    rank_time: Duration = Duration(0.0)
    """Seconds for each rank of the group."""
    sender_bandwidth: Bandwidth | None = None
    """Most bytes per second of the first rank to another one; None if the network decides."""
    sends_on: bool
    """Whether a rank sends bytes on while it still receives others."""

    def __post_init__(self) -> None:
        check_positive(self, ("setup_time", "rank_time"))


class HandOver(ProfileTable, frozen=True, kw_only=True):
    """How replicas get weights from the trainer ranks on their own GPUs."""

    name: str
    source: str
    date: datetime.date
    fitted_to: list[str]
    tensor_time: Duration
    """Seconds for each tensor: gather, convert to the checkpoint's format, load."""

    def __post_init__(self) -> None:
        check_positive(self)


class Delta(ProfileTable, frozen=True, kw_only=True):
    """Costs to find and pack the values that a step changed."""

    name: str
    source: str
    date: datetime.date
    fitted_to: list[str]
    bytes_per_value: float
    """Compressed bytes on the wire for one changed value, including its index."""
    compare_bandwidth: Bandwidth
    """Bytes of all weights per second."""
    codec_bandwidth: Bandwidth
    """Bytes of the payload per second."""

    def __post_init__(self) -> None:
        check_positive(self)


@cache
def load_transport(name: str) -> Transport:
    """Read a file of profiles/transports."""
    return read_profile(find_profile("transports", name, ".toml"), Transport)


@cache
def load_backend(name: str) -> SyncBackend:
    """Read a weight-sync backend from profiles/sync."""
    return read_profile(find_profile("sync", name, ".toml"), SyncBackend)


@cache
def load_rank_group(name: str) -> RankGroup:
    """Read how ranks of a trainer meet from profiles/sync."""
    return read_profile(find_profile("sync", name, ".toml"), RankGroup)


@cache
def load_hand_over(name: str) -> HandOver:
    """Read a hand-over between trainers and replicas on the same GPUs from profiles/sync."""
    return read_profile(find_profile("sync", name, ".toml"), HandOver)


@cache
def load_delta() -> Delta:
    """Read profiles/sync/delta.toml."""
    return read_profile(find_profile("sync", "delta", ".toml"), Delta)
