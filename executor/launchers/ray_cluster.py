"""Join a Ray cluster and check that it has what a run needs."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

from streamrl.executor.launchers.placement import device_of
from streamrl.runfile.config import Run

logger = logging.getLogger(__name__)

CALLS_AT_ONCE = 100_000
"""Of one actor: a replica has one for each rollout that it runs or queues."""
LEAST = 1e-4
"""Of a pool's resource, that a role takes: it says where to be, not how much of it there is."""
KNOCKING = 10.0
"""Seconds in which a cluster's port answers."""


def pool_resource(pool: str) -> str:
    """Return the resource by which a node says that it is of a pool."""
    return f"pool-{pool}"


@contextlib.contextmanager
def joined_cluster(run: Run) -> Iterator[None]:
    """Join the cluster that a run names, for as long as you need it.

    Raises:
        ValueError: there is none, or its nodes have not what the run needs.
    """
    with contextlib.redirect_stdout(sys.stderr):  # where Ray prints what befalls its nodes
        yield from _joined(run)


def _joined(run: Run) -> Iterator[None]:
    import ray

    address = run.execute.ray_address
    try:
        _knock(address)
        ray.init(
            address,
            configure_logging=True,
            logging_level=logging.ERROR,
            log_to_driver=False,
            namespace="streamrl",
        )
    except Exception as error:  # Ray has one of its own for every reason
        first, *_ = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(
            f"execute.ray_address {address!r}: no Ray cluster could be joined ({first}); "
            "ray start --head begins one, and RAY_AUTH_MODE=token shows it this user's token"
        ) from None
    try:
        check_cluster(run, [node["Resources"] for node in ray.nodes() if node["Alive"]])
        if os.environ.get("RAY_AUTH_MODE") != "token":
            logger.warning(
                "whoever reaches the Ray cluster's ports may run code there: ray get-auth-token --generate"
            )
        yield
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Raise `OSError` where nobody listens at a host's port: Ray would try for minutes, and heed no signal."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCKING).close()


def check_cluster(run: Run, nodes: list[dict[str, Any]]) -> None:
    """Raise `ValueError` where the nodes of a cluster, by their resources, have not what a run needs."""
    wanted: Counter[str] = Counter()
    largest: Counter[str] = Counter()
    for own in run.rollout.kinds:
        wanted[own.pool] += own.replicas * own.tensor_parallel
        largest[own.pool] = max(largest[own.pool], own.tensor_parallel)
    for trainer in run.trainers:
        wanted[trainer.pool] += trainer.num_gpus
    if run.verifier.pool is not None:
        wanted[run.verifier.pool] += run.verifier.num_gpus
    for pool, count in wanted.items():
        resource = pool_resource(pool)
        members = [node for node in nodes if node.get(resource)]
        if not members:
            raise ValueError(
                f"cluster.pools.{pool}: no node of the Ray cluster is of it; "
                f"ray start --resources='{{\"{resource}\": 1}}' says so of a node"
            )
        kind = "CPU" if device_of(run.execute.device, run.cluster.pools, pool) == "cpu" else "GPU"
        each = (run.execute.threads or 1) if kind == "CPU" else 1
        there = sum(node.get(kind, 0) for node in members)
        if there < count * each:
            raise ValueError(
                f"cluster.pools.{pool}: the run needs {count * each} {kind}s, "
                f"the {len(members)} nodes of the Ray cluster that are of it have {there:g}"
            )
        most = max(node.get(kind, 0) for node in members)
        if most < largest[pool] * each:
            raise ValueError(
                f"cluster.pools.{pool}: a replica needs {largest[pool] * each} {kind}s of one node, "
                f"no node of the Ray cluster has more than {most:g}"
            )
