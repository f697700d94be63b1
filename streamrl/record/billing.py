"""Compute what a run is billed: GPUs by whole units of time, a minimum term, set-up, failed attempts and storage.

    rented time  =  set-up + seconds of the run x (1 + failed share)
    bill         =  billed time of each pool x its rent  +  egress x (1 + failed share)  +  storage

A pool is billed for the rented time, rounded up to whole `billing_unit`, and at least for `minimum_term`.
By default nothing is added to the rent and the egress.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeVar

import numpy as np

from streamrl.hardware.operator_tables import Floats
from streamrl.runfile.cluster_config import BillingConfig, ClusterConfig, PoolConfig
from streamrl.runfile.units import SECONDS_PER_HOUR

SECONDS_PER_MONTH = 730 * SECONDS_PER_HOUR
"""A month of storage, as providers bill it: a twelfth of 365 days."""
BYTES_PER_GB = 1e9
ROUNDING = 9
"""Decimal places to which a number of units is rounded before it is rounded up, so that 3 h are 3 units."""

SANDBOXES = "CPU sandboxes"
"""Name of the sandboxes of episodes among the rents of pools."""
BILLING_KEYS = "cluster.billing, and keys of pools and links"
"""Where a run file says what a bill has besides rent."""

Seconds = TypeVar("Seconds", float, Floats)
"""Seconds of one run or of many."""


class Bill(NamedTuple):
    """The dollars of a whole run."""

    pools: dict[str, float]
    """GPUs by pool, and sandboxes if they cost anything."""
    egress: float
    storage: float

    @property
    def total(self) -> float:
        """Return all dollars."""
        return sum(self.pools.values()) + self.egress + self.storage


def rented_time(billing: BillingConfig, seconds: Seconds) -> Seconds:
    """Return the seconds for which GPUs are rented, given those of the run."""
    return billing.setup_time + seconds * (1 + billing.failed_share)


def billed_time(pool: PoolConfig, rented: Seconds) -> Seconds:
    """Return the seconds that a pool is billed for, given those for which it is rented."""
    billed = np.asarray(rented, dtype=float)
    if pool.billing_unit:
        units = np.ceil(np.round(billed / pool.billing_unit, ROUNDING))
        billed = units * pool.billing_unit
    longest: Seconds = np.maximum(billed, pool.minimum_term)
    return longest if isinstance(rented, np.ndarray) else float(longest)


def _billed(pool: PoolConfig | None, rented: Seconds) -> Seconds:
    """Return the seconds that are billed. Sandboxes are no pool, and are billed by the second."""
    return rented if pool is None else billed_time(pool, rented)


def storage_dollars(billing: BillingConfig, rented: Seconds) -> Seconds:
    """Return the dollars of storage for the time for which GPUs are rented."""
    per_month = billing.storage / BYTES_PER_GB * billing.storage_price
    return rented * (per_month / SECONDS_PER_MONTH)


def bill_of(
    cluster: ClusterConfig, rents: Mapping[str, float], egress: float, seconds: float
) -> Bill:
    """Return the bill of a whole run.

    Args:
        cluster: the section `[cluster]`.
        rents: dollars a second of all paid GPUs by pool, and of `SANDBOXES`.
        egress: dollars for traffic over links in all steps.
        seconds: seconds of the run.
    """
    billing, pools = cluster.billing, cluster.pools
    rented = rented_time(billing, seconds)
    return Bill(
        {name: rent * _billed(pools.get(name), rented) for name, rent in rents.items()},
        egress * (1 + billing.failed_share),
        storage_dollars(billing, rented),
    )


def billing_ratio(
    cluster: ClusterConfig, rents: Mapping[str, float], egress: float, seconds: float
) -> float:
    """Return the bill relative to the rent and egress of the run's own seconds; see `bill_of`."""
    plain = sum(rents.values()) * seconds + egress
    return bill_of(cluster, rents, egress, seconds).total / plain if plain else 1.0


def billing_ratios(
    cluster: ClusterConfig, rents: Mapping[str, Floats], egress: Floats, seconds: Floats
) -> Floats:
    """Return `billing_ratio` of many runs, which differ in their rents, egress and seconds."""
    billing = cluster.billing
    rented = rented_time(billing, seconds)
    billed = egress * (1 + billing.failed_share) + storage_dollars(billing, rented)
    for name, rent in rents.items():
        billed = billed + rent * _billed(cluster.pools.get(name), rented)
    plain = sum(rents.values()) * seconds + egress
    ratios: Floats = np.where(plain > 0, billed / np.where(plain > 0, plain, 1.0), 1.0)
    return ratios


def uncounted(cluster: ClusterConfig) -> list[str]:
    """Return which parts of a bill are zero, because the run file does not set their keys.

    Billing units and minimum terms are parts of a rent, so owned pools have none.
    """
    is_rented = not all(pool.owned for pool in cluster.pools.values())
    return [
        name
        for name, is_counted in _parts(cluster)
        if not is_counted and (is_rented or name not in OF_RENTS)
    ]


def adds_nothing(cluster: ClusterConfig) -> bool:
    """Return whether the bill is the rent and the egress of the run's own seconds."""
    return not any(is_counted for name, is_counted in _parts(cluster) if name != "egress")


OF_RENTS = ("billing units", "minimum terms")


def _parts(cluster: ClusterConfig) -> Iterator[tuple[str, bool]]:
    billing, pools = cluster.billing, cluster.pools.values()
    yield "set-up", billing.setup_time > 0
    yield "failed attempts", billing.failed_share > 0
    yield "storage", billing.storage * billing.storage_price > 0
    yield "egress", any(link.price_per_gb for link in cluster.links)
    yield "billing units", any(pool.billing_unit for pool in pools)
    yield "minimum terms", any(pool.minimum_term for pool in pools)
