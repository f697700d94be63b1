"""The sections `[model]` and `[cluster]` of a run file: which model, on which GPUs, with what between them."""

from __future__ import annotations

from typing import Literal

import msgspec

from streamrl.runfile.section import Section
from streamrl.runfile.units import Bandwidth, Duration, Size


class ModelConfig(Section, frozen=True, kw_only=True):
    """Which model is post-trained: `name` of a profile, or `path` of a Hugging Face directory."""

    name: str | None = None
    """Name of a model in profiles/models, such as "qwen2.5-7b"."""
    path: str | None = None
    """A Hugging Face directory with config.json, tokenizer and weights."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Type of weights, activations and KV cache, of which `rollout` and `trainer` may depart, each by a `dtype` of its own."""


class PoolConfig(Section, frozen=True, kw_only=True):
    """Machines of one kind in one place."""

    gpu: str
    """Name of a GPU in profiles/gpus; "cpu" counts worker processes of this machine as GPUs."""
    nodes: int = 1
    gpus_per_node: int = 8
    unit: int | None = None
    """GPUs by which a rental of this pool changes; `plan.unit` where absent."""
    price: float | None = None
    """Dollars per GPU-hour; the GPU's own figure where absent."""
    owned: bool = False
    """Whether its GPUs are yours: all of them are charged at `price`, idle or busy, and no plan hands one back."""
    spot_failures_per_gpu_day: float = 0.0
    """Times in 24 hours that a rented GPU of it is taken away, on average: beside `failures.per_gpu_day`, and for
    trainers too."""
    host_memory: Size | None = None
    """Memory of one node beside its GPUs, where models wait that `trainer.offload` moves out; the GPU's own
    figure where absent."""
    transport: Literal["tcp", "rdma"] = "rdma"
    """What its nodes speak to each other; over tcp weights reach a GPU through host memory."""
    node_bandwidth: Bandwidth | None = None
    """One direction between two of its nodes, all network cards together: "3200 Gbps"; for each of its GPUs the GPU's
    own `network` where absent."""
    nvlink_domain: int | None = None
    """GPUs that NVLink joins, of several nodes (72 of a GB200 NVL72, of 4 a node); those of a node where absent."""

    @property
    def domain(self) -> int:
        """GPUs that NVLink joins."""
        return self.nvlink_domain or self.gpus_per_node

    @property
    def num_gpus(self) -> int:
        """GPUs of all nodes."""
        return self.nodes * self.gpus_per_node


class LinkConfig(Section, frozen=True, kw_only=True):
    """What connects two pools."""

    between: tuple[str, str]
    bandwidth: Bandwidth
    """One direction, shared by everything that crosses: "80 Gbps", "400 GB/s"."""
    latency: Duration = Duration(0.0)
    """One way: "20 ms"."""
    transport: Literal["tcp", "rdma"] = "tcp"
    """Its efficiency and latency are in profiles/transports."""
    price_per_gb: float = 0.0
    """Dollars of 10^9 bytes that cross it, as providers charge egress: each push of weights."""


class ClusterConfig(Section, frozen=True, kw_only=True):
    """The pools and the links between them; within a pool the GPU's own network counts."""

    pools: dict[str, PoolConfig]
    links: list[LinkConfig] = msgspec.field(default_factory=list)
