"""Check what is lost with spot machines: replicas without a notice, and trainers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from streamrl.runfile.cluster_config import PoolConfig
from streamrl.runfile.findings import Changes, Finding, Fix
from streamrl.runfile.keys import pool_key

SHORTEST = "30 s"
"""Notice of Google Cloud, the shortest of the large providers by their documentation."""


def find(
    pools: Mapping[str, PoolConfig], of_replicas: Sequence[str], of_trainers: Sequence[str]
) -> Iterator[Finding]:
    """Find spot pools whose machines go without a notice, or with a trainer.

    Args:
        pools: those of the run file.
        of_replicas: pools of its replicas.
        of_trainers: pools of its trainers.
    """
    for name, pool in pools.items():
        if not pool.spot_failures_per_gpu_day:
            continue
        if name in of_replicas and not pool.spot_warning:
            text = (
                f"pool {name!r}: spot machines go without a notice ({pool_key(name, 'spot_warning')}=0), so each loss counts "
                "against policies.max_restarts, and rollouts continue from their last saved tokens"
            )
            yield _finding("spot-without-notice", text)
        if name in of_trainers:
            text = (
                f"pool {name!r}: a trainer is on spot machines; it gets no notice, and repeats the steps after its last "
                "checkpoint (execute.checkpoint_every)"
            )
            yield _finding("spot-trainer", text)


def _finding(name: str, text: str) -> Finding:
    return Finding(level="warning", topic="run file", name=name, text=text)


def _warned(pools: Mapping[str, PoolConfig], of_replicas: Sequence[str]) -> Iterator[Changes]:
    yield {
        pool_key(name, "spot_warning"): SHORTEST
        for name in dict.fromkeys(of_replicas)
        if pools[name].spot_failures_per_gpu_day and not pools[name].spot_warning
    }


FIXES = {
    "spot-without-notice": Fix(
        lambda run: _warned(run.cluster.pools, [own.pool for own in run.rollout.kinds]),
        "set spot_warning if the provider gives a notice",
    ),
    "spot-trainer": Fix(lambda run: iter(()), "train on machines that stay"),
}
