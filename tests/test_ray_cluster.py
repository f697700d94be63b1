"""Whether a Ray cluster has what a run needs, by what its nodes say of themselves; no cluster is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from streamrl.executor.checkup import readiness
from streamrl.executor.launchers.placement import PlacedRoles
from streamrl.executor.launchers.ray_cluster import check_cluster
from streamrl.runfile.config import Run
from streamrl.runfile.files import make_run
from tests.patients import full_run, local_table


def run_of(**changes: Any) -> Run:
    """Return a run of two replicas of two GPUs and a trainer of one."""
    parallel = {f"trainer.{name}_parallel": 1 for name in ("data", "tensor", "pipeline")}
    sides = {"rollout.replicas": 2, "rollout.tensor_parallel": 2, "execute.launcher": "ray"}
    return full_run({**parallel, **sides, "cluster.pools": POOLS, **changes})


POOLS = {
    "far": {"gpu": "h20", "gpus_per_node": 4},
    "near": {"gpu": "h800", "gpus_per_node": 4},
}
FAR, NEAR = {"pool-far": 1.0, "GPU": 4.0, "CPU": 8.0}, {"pool-near": 1.0, "GPU": 1.0, "CPU": 8.0}


def test_a_cluster_that_has_all_is_taken() -> None:
    check_cluster(PlacedRoles.of(run_of()), [FAR, NEAR])


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([FAR], r"cluster\.pools\.near: no node of the Ray cluster is in this pool"),
        ([{**FAR, "GPU": 3.0}, NEAR], "needs 4 GPUs, but the 1 nodes .* have 3"),
        ([{"pool-far": 1.0, "CPU": 8.0}, NEAR], "needs 4 GPUs, but the 1 nodes .* have 0"),
        ([{**FAR, "GPU": 1.0}] * 4 + [NEAR], "a replica needs 2 GPUs of one node"),
    ],
)
def test_what_a_cluster_lacks_is_told(nodes: list[dict[str, float]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_cluster(PlacedRoles.of(run_of()), nodes)


def test_on_cpus_cores_count() -> None:
    run = run_of(**{"execute.device": "cpu", "execute.threads": 3})
    check_cluster(PlacedRoles.of(run), [{"pool-far": 1.0, "CPU": 12.0}, NEAR])
    with pytest.raises(ValueError, match=r"needs 12 CPUs, but the 1 nodes .* have 11"):
        check_cluster(PlacedRoles.of(run), [{"pool-far": 1.0, "CPU": 11.0}, NEAR])


def test_the_doctor_leaves_gpus_to_the_cluster(tmp_path: Path) -> None:
    changes = {"execute.launcher": "ray", "cluster.pools": {"here": {"gpu": "h20"}}}
    found = {
        finding.name: finding
        for finding in readiness.find(make_run(local_table(tmp_path, changes)))
    }
    assert found["cluster"].level == "ok" and "gpus" not in found and "cores" not in found
