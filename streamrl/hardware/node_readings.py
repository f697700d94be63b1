"""What an acceptance test measures on a node: points, and the seconds that each one took."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

PointKind: TypeAlias = Literal[
    "gemm", "prefill_attention", "all_reduce", "all_gather", "memory_copy", "host_copy"
]
COLLECTIVES: tuple[PointKind, ...] = ("all_reduce", "all_gather")
COPIES: tuple[PointKind, ...] = ("memory_copy", "host_copy")


class NodePoint(msgspec.Struct, frozen=True, kw_only=True):
    """One operation of one size."""

    kind: PointKind
    """An operator of `streamrl.hardware.operator_tables`, a copy within a GPU's memory, or one from host memory."""
    dtype: str
    size: float
    """Value of the operator's last axis: rows, tokens of context, or bytes. Copies: bytes that are copied."""
    shape: dict[str, float] = {}
    """Values of the operator's other axes."""

    @property
    def text(self) -> str:
        """Return the point in words."""
        shape = self.shape
        match self.kind:
            case "gemm":
                what = f"{self.size:,.0f} x {shape['k']:,.0f} by {shape['n']:,.0f}"
                return f"matrix product in {self.dtype}, {what}"
            case "prefill_attention":
                return f"attention of {self.size:,.0f} tokens, {shape['heads']:g} heads"
            case "memory_copy":
                return f"copy in GPU memory, {self.size / 1e6:,.0f} MB"
            case "host_copy":
                return f"copy from host memory, {self.size / 1e6:,.0f} MB"
            case _:
                what = self.kind.replace("_", "-")
                return f"{what} of {self.size / 1e6:,.1f} MB over {shape['gpus']:g} GPUs"


class NodeReading(msgspec.Struct, frozen=True, kw_only=True):
    """A measured point."""

    point: NodePoint
    seconds: list[float]
    """Median seconds on each GPU; one value for a collective."""

    @property
    def slowest(self) -> float:
        """Return the seconds of the slowest GPU, because a step waits for it."""
        return max(self.seconds)


class LinkReading(msgspec.Struct, frozen=True, kw_only=True):
    """The connection to a peer."""

    bandwidth: float
    """Bytes per second in the slower direction, over all streams."""
    latency: float
    """Seconds one way: half of the median round trip of a small message."""
    backend: str
    """gloo or nccl."""


class DecodeReading(msgspec.Struct, frozen=True, kw_only=True):
    """One decode step of the plan's model on one replica."""

    running: int
    context: float
    """Mean tokens of a rollout."""
    seconds: float
    """Median seconds of a step."""
