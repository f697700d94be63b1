"""Name the prices, links, networks, lengths and parts of the model that a profile or a default supplied, not the run file.

Each output names them next to the total that rests on them.
"""

from __future__ import annotations

import datetime
from collections.abc import Container, Iterator, Mapping
from pathlib import Path

import msgspec

from streamrl.hardware.hugging_face import ModelDirectory, read_model_directory
from streamrl.hardware.profiles import gpu_of, load_gpu, price_of
from streamrl.runfile.cluster_config import ClusterConfig, ModelConfig, PoolConfig
from streamrl.runfile.errors import RunError
from streamrl.runfile.formatting import format_dollars
from streamrl.runfile.keys import pool_key
from streamrl.runfile.list_prices import is_old
from streamrl.runfile.workload_config import LengthsConfig


class Assumed(msgspec.Struct, frozen=True, kw_only=True):
    """A value that the run file leaves to a profile or a default."""

    key: str
    """The key that sets it."""
    text: str
    """The value in a few words."""
    source: str
    """Its origin."""


DEFAULT = "the default"


def assumed_of(
    cluster: ClusterConfig, lengths: LengthsConfig | None, paid: Mapping[str, float]
) -> list[Assumed]:
    """Return what the total of a run rests on without being set for it: prices, hardware, links, lengths.

    Args:
        cluster: the section `[cluster]`.
        lengths: the section `[workload.lengths]`; None if prompts have lengths of their own.
        paid: by name of a pool that is paid for, the GPUs of it that the run uses.
    """
    return [
        *_prices(cluster, paid),
        *assumed_of_hardware(cluster, paid),
        *_links(cluster, paid),
        *_lengths(lengths),
    ]


def assumed_of_model(model: ModelConfig, dtype: str | None) -> list[Assumed]:
    """Return what a simulation assumes about a model directory: formats, parts that are left out, and defaults.

    Args:
        model: the section `[model]`.
        dtype: format of the replicas' weights; None for `model.dtype`.
    """
    if model.path is None:
        return []
    try:
        found = read_model_directory(Path(model.path))
    except RunError:  # the directory of an older run may be gone
        return []
    return list(_of_directory(found, model, dtype))


def assumed_of_failures(replica: float, trainer: float | None) -> list[Assumed]:
    """Return what a run with simulated failures assumes: workers start again at once without `start_time`.

    Args:
        replica: seconds in which a replica starts.
        trainer: seconds in which the trainer starts; None if trainers do not fail.
    """
    starts = {
        "rollout.start_time": ("replica", replica),
        "trainer.start_time": ("trainer", trainer),
    }
    return [
        Assumed(key=key, text=f"0 s until a lost {what} is replaced", source=DEFAULT)
        for key, (what, seconds) in starts.items()
        if seconds == 0
    ]


def _of_directory(
    found: ModelDirectory, model: ModelConfig, dtype: str | None
) -> Iterator[Assumed]:
    source = found.shape.source
    if found.checkpoint is not None and dtype is None:
        text = f"replicas in {model.dtype}, although the checkpoint is in {found.checkpoint.dtype}"
        yield Assumed(key="rollout.dtype", text=text, source=DEFAULT)
    for part in found.not_simulated:
        yield Assumed(key="model.path", text=f"a model without {part}", source=source)
    for text in found.assumed:
        yield Assumed(key="model.path", text=text, source=source)


def _prices(cluster: ClusterConfig, paid: Container[str]) -> Iterator[Assumed]:
    for name, pool in cluster.pools.items():
        if name in paid and pool.price_source is not None:
            yield Assumed(
                key=pool_key(name, "price"),
                text=f"{format_dollars(price_of(pool))} per GPU-hour of {name} ({price_note(pool.price_source)})",
                source=pool.price_source,
            )
        if name in paid and pool.price is None and price_of(pool):
            own = "your own " if pool.owned else ""
            yield Assumed(
                key=pool_key(name, "price"),
                text=f"{format_dollars(price_of(pool))} per GPU-hour of {own}{name}",
                source=load_gpu(pool.gpu).price_source,
            )


def price_note(source: str) -> str:
    """Return who asks a list price since when, and whether it is old."""
    old = ", an old price" if is_old(source, datetime.date.today()) else ""
    return f"{source.partition(' (')[0]}{old}"


def assumed_of_hardware(cluster: ClusterConfig, gpus: Mapping[str, float]) -> list[Assumed]:
    """Return what seconds rest on without being measured or stated: kernels of a GPU, and the network of its nodes.

    Args:
        cluster: the section `[cluster]`.
        gpus: by name of a pool, the GPUs of it that the run uses.
    """
    return [*_kernels(cluster, gpus), *_networks(cluster, gpus)]


def _networks(cluster: ClusterConfig, gpus: Mapping[str, float]) -> Iterator[Assumed]:
    for name, pool in cluster.pools.items():
        if gpus.get(name, 0.0) > pool.domain and pool.node_bandwidth is None:
            yield Assumed(
                key=pool_key(name, "node_bandwidth"),
                text=f"{network_text(pool)} between nodes of {name}",
                source=load_gpu(pool.gpu).source,
            )


def network_text(pool: PoolConfig) -> str:
    """Return the bandwidth between two nodes of a pool: "3,200 Gbps"."""
    return f"{gpu_of(pool).network * pool.gpus_per_node * 8 / 1e9:,.4g} Gbps"


def _kernels(cluster: ClusterConfig, gpus: Mapping[str, float]) -> Iterator[Assumed]:
    for name, pool in cluster.pools.items():
        gpu = load_gpu(pool.gpu)
        if name in gpus and gpu.is_scaled:
            yield Assumed(
                key=pool_key(name, "gpu"),
                text=f"kernels of {name} as on measured GPUs, in proportion to datasheets",
                source="profiles/efficiency",
            )


def _links(cluster: ClusterConfig, paid: Container[str]) -> Iterator[Assumed]:
    for place, link in enumerate(cluster.links):
        if all(name in paid for name in link.between) and not link.latency:
            yield Assumed(
                key=f"cluster.links.{place}.latency",
                text=f"no latency between {' and '.join(link.between)}",
                source=DEFAULT,
            )


def _lengths(lengths: LengthsConfig | None) -> Iterator[Assumed]:
    if lengths is not None and lengths.kind != "stated" and not lengths.names_a_file:
        scale = f", scaled by {lengths.scale:g}" if lengths.scale != 1 else ""
        yield Assumed(
            key="workload.lengths.source",
            text=f"output lengths of {lengths.source}{scale}",
            source=f"profiles/lengths/{lengths.source}.csv",
        )
