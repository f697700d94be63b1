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
    vision_tower: Literal["frozen", "none"] = "frozen"
    """Simulated: what happens to the vision tower of a model that has one. frozen: replicas and trainers hold its
    weights in 16 bits and full syncs send them, but nothing computes with them. none: it is not loaded (vLLM's
    `--language-model-only`)."""


class PoolConfig(Section, frozen=True, kw_only=True):
    """Machines of one kind in one place."""

    gpu: str
    """Name of a GPU in profiles/gpus; "cpu" counts worker processes of this machine as GPUs."""
    nodes: int = 1
    """Nodes that the run has; for `plan`, the most that may be rented."""
    gpus_per_node: int = 8
    """GPUs of a node; where absent, 4 of GB200 and GB300, and 8 of all others."""
    unit: int | None = None
    """GPUs by which a rental of this pool changes; `plan.unit` where absent."""
    price: float | None = None
    """Dollars per GPU-hour, or a list price of profiles/prices.toml, such as "runpod/h100" or "coreweave/h100/spot"; the
    GPU's own figure where absent."""
    price_source: str | None = None
    """Who asks that price, since when; filled in where `price` names a list price."""
    owned: bool = False
    """Whether its GPUs are yours: all of them are charged at `price`, idle or busy, and no plan hands one back."""
    billing_unit: Duration = Duration(0.0)
    """Time by which a rental of it is billed, such as "1 h": each rental is rounded up to whole units. 0: by the second."""
    minimum_term: Duration = Duration(0.0)
    """Shortest time that a rental of it is billed for, such as "24 h"."""
    spot_failures_per_gpu_day: float = 0.0
    """Times in 24 hours that a rented GPU of it is taken away, on average: beside `failures.per_gpu_day`, and for
    trainers too."""
    spot_warning: Duration = Duration(0.0)
    """Time between the provider's notice and the loss of a spot machine: 120 s at AWS, 30 s at Google Cloud, at
    least 30 s at Azure, by their documentation. Replicas then finish or move their rollouts and stop; no rollout is
    lost. 0: no notice. Trainers get none."""
    spot_replacement_time: Duration = Duration(0.0)
    """Simulated: mean time from the loss of a spot machine with a warning to its replacement, which is not paid
    for. `rollout.start_time` comes in addition."""
    spot_replacement_variation: float = 1.0
    """Simulated: standard deviation of that time, relative to its mean. The time is log-normal; 0: always the mean.
    The default is an assumption."""
    on_demand_price: float | None = None
    """Dollars per GPU-hour of the same machines without interruptions, for a spot pool. `simulate` and `plan` then
    show what spot machines save."""
    host_memory: Size | None = None
    """Memory of one node beside its GPUs, where models wait that `trainer.offload` moves out; the GPU's own
    figure where absent."""
    nvme: Size | None = None
    """Capacity of the NVMe drives of one node, for optimizers with `trainer.offload_to` nvme; no limit where absent."""
    nvme_read: Bandwidth = Bandwidth(10e9)
    """Bandwidth at which all NVMe drives of a node read together: "10 GB/s". DeepSpeed measured 10 with four PCIe 4.0
    drives, 27 with four of PCIe 5.0 and 48 with eight (blogs/deepnvme/03-2025, ds_io on Azure)."""
    nvme_write: Bandwidth = Bandwidth(5e9)
    """The same of writes. The same source has 5, 11 and 26 GB/s."""
    transport: Literal["tcp", "rdma"] = "rdma"
    """What its nodes speak to each other; over tcp weights reach a GPU through host memory."""
    node_bandwidth: Bandwidth | None = None
    """One direction between two of its nodes, all network cards together: "3200 Gbps". Where absent,
    that of a usual machine with its GPU, and outputs name it as assumed if the run uses more than one node."""
    nvlink_domain: int | None = None
    """GPUs that NVLink joins, of several nodes; where absent, 72 of GB200 and GB300, and those of a node of all others."""

    @property
    def domain(self) -> int:
        """GPUs of this pool that NVLink joins."""
        return min(self.nvlink_domain or self.gpus_per_node, self.num_gpus)

    @property
    def num_domains(self) -> int:
        """Nodes that its GPUs are in, or NVLink domains of several nodes; the last may be a part of one."""
        return -(-self.num_gpus // self.domain)

    def joins(self, ranks: int) -> bool:
        """Return whether NVLink joins all of a group of ranks: an equal part of a domain, or whole nodes of one."""
        is_whole_nodes = ranks <= self.domain and ranks % self.gpus_per_node == 0
        return self.domain % ranks == 0 or is_whole_nodes

    def holds(self, num_groups: int, ranks: int) -> bool:
        """Return whether its NVLink domains hold so many groups of ranks, none of which is in two domains.

        A rack of 72 GPUs holds four groups of 16. Groups of several whole domains always fit.
        """
        held, rest = divmod(self.domain, ranks)
        return not rest or not held or num_groups <= held * self.num_domains

    @property
    def num_gpus(self) -> int:
        """GPUs of all nodes."""
        return self.nodes * self.gpus_per_node


class LinkConfig(Section, frozen=True, kw_only=True):
    """What connects two pools."""

    between: tuple[str, str]
    """Names of the two pools."""
    bandwidth: Bandwidth
    """One direction, shared by everything that crosses: "80 Gbps", "400 GB/s"."""
    latency: Duration = Duration(0.0)
    """One way: "20 ms"."""
    transport: Literal["tcp", "rdma"] = "tcp"
    """Its efficiency and latency are in profiles/transports."""
    price_per_gb: float = 0.0
    """Dollars of 10^9 bytes that cross it, as providers charge egress: each push of weights."""


class BillingConfig(Section, frozen=True, kw_only=True):
    """What a run is billed for beside the GPU-hours of its steps and the traffic over links."""

    setup_time: Duration = Duration(0.0)
    """Time for which all GPUs are rented before the first step, such as "2 h": images, weights, tests."""
    failed_share: float = 0.0
    """Time lost in failed attempts that are repeated, as a share of the run's time: 0.1 for a tenth."""
    storage: Size = Size(0.0)
    """Checkpoints and data that are stored while GPUs are rented, such as "2 TB"."""
    storage_price: float = 0.0
    """Dollars a month for 10^9 bytes of storage."""


class ClusterConfig(Section, frozen=True, kw_only=True):
    """The pools and the links between them; within a pool the GPU's own network counts."""

    pools: dict[str, PoolConfig]
    links: list[LinkConfig] = msgspec.field(default_factory=list)
    billing: BillingConfig = BillingConfig()
