"""Read profiles/transports and profiles/sync: what moving weights was measured to cost."""

from __future__ import annotations

import datetime
from functools import cache

from streamrl.hardware.profile_table import ProfileTable, check_positive
from streamrl.hardware.profiles import find_profile, read_profile
from streamrl.runfile.units import Bandwidth, Duration


class Transport(ProfileTable, frozen=True, kw_only=True):
    """How bytes cross a network."""

    name: str
    source: str
    date: datetime.date
    efficiency: float
    """Share of line rate that large messages reach."""
    message_latency: Duration
    """Seconds that one message of a collective costs beside its bytes."""
    is_through_host: bool
    """Whether bytes arrive in host memory and are copied to the GPU from there."""

    def __post_init__(self) -> None:
        check_positive(self, ("message_latency",))


class SyncBackend(ProfileTable, frozen=True, kw_only=True):
    """One library's way of moving weights: what it adds to the time that bytes need on the wire."""

    name: str
    source: str
    date: datetime.date
    fitted_to: list[str]
    """The measured rows that the constants come from; none where nothing is published."""
    setup_time: Duration
    tensor_time: Duration
    """Seconds for each tensor: gather, launch, load."""
    offload_bandwidth: Bandwidth | None = None
    """Rate at which all weights go to host memory before anything is sent; absent where they do not."""
    sender_bandwidth: Bandwidth | None = None
    """The most that the sender gives, its gathering counted; absent where gathering is counted by itself."""
    broadcast_share: float
    """Share of the bytes that go to every receiver whole; of the rest each takes its own shard."""

    def __post_init__(self) -> None:
        check_positive(self, ("setup_time", "tensor_time", "broadcast_share"))

    def fixed_time(self, num_bytes: float, num_tensors: int) -> float:
        """Seconds before, or beside, the bytes on their way."""
        offload = num_bytes / self.offload_bandwidth if self.offload_bandwidth else 0.0
        return self.setup_time + num_tensors * self.tensor_time + offload


class Delta(ProfileTable, frozen=True, kw_only=True):
    """What it costs to find and pack the values that a step changed."""

    name: str
    source: str
    date: datetime.date
    fitted_to: list[str]
    bytes_per_value: float
    """Bytes on the wire for one changed value, its index counted, compressed."""
    compare_bandwidth: Bandwidth
    """Bytes of all weights a second."""
    codec_bandwidth: Bandwidth
    """Bytes of the payload a second."""

    def __post_init__(self) -> None:
        check_positive(self)


@cache
def load_transport(name: str) -> Transport:
    """Read profiles/transports."""
    return read_profile(find_profile("transports", name, ".toml"), Transport)


@cache
def load_backend(name: str) -> SyncBackend:
    """Read a way of moving weights from profiles/sync."""
    return read_profile(find_profile("sync", name, ".toml"), SyncBackend)


@cache
def load_delta() -> Delta:
    """Read profiles/sync/delta.toml."""
    return read_profile(find_profile("sync", "delta", ".toml"), Delta)
