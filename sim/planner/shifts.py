"""List the changes of a run file by which a plan is tested: lengths, training speed, bandwidth and prices.

Each is 20 % lower and higher. Lengths are drawn longer or shorter under the same `rollout.max_tokens`, as by
`simulate --sweep workload.lengths.scale`: a user who guessed the mean wrong keeps the maximum.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from msgspec.structs import replace

from streamrl.runfile.cluster_config import ClusterConfig
from streamrl.runfile.config import CostsConfig, Run
from streamrl.runfile.units import SECONDS_PER_HOUR, Bandwidth
from streamrl.runfile.workload_config import LengthsConfig
from streamrl.sim.planner.space import Candidate, price_per_second
from streamrl.workload.replica_batch import mean_lengths

SHARE = 0.2
"""Relative size of each change, about the error of a guess."""


class Shift(NamedTuple):
    """One change of the run file, such as longer outputs."""

    thing: str
    """The changed thing, such as "price of h20"."""
    kind: Literal["lengths", "training", "links", "price"]
    factor: float
    """Ratio of the changed to the present value."""
    run: Run
    """The changed run file."""
    pool: str = ""
    """The pool whose price changes."""

    @property
    def what(self) -> str:
        """The thing and its change, such as "lengths +20%"."""
        return f"{self.thing} {self.factor - 1:+.0%}"

    def note(self, unchanged: Run) -> str:
        """Return what longer or shorter outputs change: mean tokens and the share that is cut off; else empty."""
        before, after = mean_lengths(unchanged), mean_lengths(self.run)
        if self.kind != "lengths" or before is None or after is None:
            return ""
        return (
            f"outputs are drawn {self.factor:g} times as long, rollout.max_tokens stays "
            f"{self.run.rollout.max_tokens:,}: mean {before.output:,.0f} to {after.output:,.0f} tokens, "
            f"cut off {before.cut_off:.1%} to {after.cut_off:.1%}"
        )

    def touches(self, candidate: Candidate) -> bool:
        """Return whether a plan uses the changed thing."""
        if self.kind not in ("links", "price"):
            return True
        if self.kind == "links":
            return candidate.replicas.pools != (candidate.trainer.pool,)
        return self.pool in candidate.pools or self.run.cluster.pools[self.pool].owned


def shifts(run: Run) -> Iterator[Shift]:
    """Yield the changes, first all lower and then all higher ones."""
    cluster = run.cluster
    for factor in (1 - SHARE, 1 + SHARE):
        if (lengths := run.workload.lengths) is not None:
            workload = replace(run.workload, lengths=_scaled(lengths, factor))
            yield Shift("lengths", "lengths", factor, replace(run, workload=workload))
        faster = replace(run, costs=_with_speed(run.costs, factor))
        yield Shift("speed of training (MFU)", "training", factor, faster)
        if cluster.links:
            wider = replace(run, cluster=_with_bandwidth(cluster, factor))
            yield Shift("bandwidth of links", "links", factor, wider)
        for pool in cluster.pools:
            repriced = replace(run, cluster=_with_price(cluster, pool, factor))
            yield Shift(f"price of {pool}", "price", factor, repriced, pool)


def _scaled(lengths: LengthsConfig, factor: float) -> LengthsConfig:
    scale_to = None if lengths.scale_to is None else lengths.scale_to * factor
    return replace(lengths, scale=lengths.scale * factor, scale_to=scale_to)


def _with_speed(costs: CostsConfig, factor: float) -> CostsConfig:
    return replace(costs, training_factor=costs.training_factor * factor)


def _with_bandwidth(cluster: ClusterConfig, factor: float) -> ClusterConfig:
    links = [replace(link, bandwidth=Bandwidth(link.bandwidth * factor)) for link in cluster.links]
    return replace(cluster, links=links)


def _with_price(cluster: ClusterConfig, name: str, factor: float) -> ClusterConfig:
    pool = cluster.pools[name]
    price = price_per_second(pool) * SECONDS_PER_HOUR * factor
    return replace(cluster, pools={**cluster.pools, name: replace(pool, price=price)})
