"""Join a Ray cluster and check that it has the resources of a run."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

from streamrl.executor.launchers.placement import PlacedRoles

logger = logging.getLogger(__name__)

CALLS_AT_ONCE = 100_000
"""Limit of concurrent calls of one actor. A replica has one call for each rollout that it runs or queues."""
LEAST = 1e-4
"""Amount of a pool's resource that a role takes. The resource only selects nodes, so the amount is tiny."""
KNOCKING = 10.0
"""Seconds that the port of a cluster has to accept a connection."""


def pool_resource(pool: str) -> str:
    """Return the Ray resource that marks the nodes of a pool."""
    return f"pool-{pool}"


@contextlib.contextmanager
def joined_cluster(roles: PlacedRoles) -> Iterator[None]:
    """Join the cluster of a run until the context ends.

    Raises:
        ValueError: no cluster could be joined, or its nodes lack resources that the run needs.
    """
    with contextlib.redirect_stdout(sys.stderr):  # Ray prints events of its nodes to stdout
        yield from _joined(roles)


def _joined(roles: PlacedRoles) -> Iterator[None]:
    import ray

    join_cluster(roles.execute.ray_address, "execute.ray_address")
    try:
        check_cluster(roles, [node["Resources"] for node in ray.nodes() if node["Alive"]])
        if os.environ.get("RAY_AUTH_MODE") != "token":
            logger.warning(
                "anyone who can reach the ports of the Ray cluster can run code there; "
                "to require a token, run ray get-auth-token --generate"
            )
        yield
    finally:
        ray.shutdown()


def join_cluster(address: str, key: str) -> None:
    """Join the cluster at an address, which a key or an option names.

    Raises:
        ValueError: no cluster could be joined.
    """
    import ray

    try:
        _knock(address)
        ray.init(
            address,
            configure_logging=True,
            logging_level=logging.ERROR,
            log_to_driver=False,
            namespace="streamrl",
        )
    except Exception as error:  # Ray raises many kinds of errors
        first, *_ = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(
            f"{key} {address!r}: no Ray cluster could be joined ({first}). "
            "Start one with ray start --head; set RAY_AUTH_MODE=token to send your token"
        ) from None


def _knock(address: str) -> None:
    """Raise `OSError` if no process listens at the address; Ray would retry for minutes and ignore signals."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCKING).close()


def check_cluster(roles: PlacedRoles, nodes: list[dict[str, Any]]) -> None:
    """Raise `ValueError` if the nodes of a cluster lack resources that a run needs."""
    wanted: Counter[str] = Counter()
    largest: Counter[str] = Counter()
    for own in roles.rollout.kinds:
        wanted[own.pool] += own.replicas * own.tensor_parallel
        largest[own.pool] = max(largest[own.pool], own.tensor_parallel)
    for trainer in roles.trainers:
        wanted[trainer.pool] += trainer.num_gpus
    if roles.verifier.pool is not None:
        wanted[roles.verifier.pool] += roles.verifier.num_gpus
    for pool, count in wanted.items():
        resource = pool_resource(pool)
        members = [node for node in nodes if node.get(resource)]
        if not members:
            raise ValueError(
                f"cluster.pools.{pool}: no node of the Ray cluster is in this pool; "
                f"start its nodes with ray start --resources='{{\"{resource}\": 1}}'"
            )
        kind = "CPU" if roles.device_of(pool) == "cpu" else "GPU"
        each = (roles.execute.threads or 1) if kind == "CPU" else 1
        available = sum(node.get(kind, 0) for node in members)
        if available < count * each:
            raise ValueError(
                f"cluster.pools.{pool}: the run needs {count * each} {kind}s, "
                f"but the {len(members)} nodes of this pool in the Ray cluster have {available:g}"
            )
        most = max(node.get(kind, 0) for node in members)
        if most < largest[pool] * each:
            raise ValueError(
                f"cluster.pools.{pool}: a replica needs {largest[pool] * each} {kind}s of one node, "
                f"but no node of this pool in the Ray cluster has more than {most:g}"
            )
