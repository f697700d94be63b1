"""Starting points: the Slurm script on a Slurm that only notes what it is told, what KubeRay is given, and an installation."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

CLUSTERS = Path(__file__).parents[1] / "examples" / "clusters"
STUBS = {
    "srun": 'echo "srun $*" >> "$NOTES"',
    "scontrol": 'tr "," "\\n" <<< "$3"',
    "ray": 'if [ "$1" = list ]; then printf \'"node_id"\\n%.0s\' $(seq "$ALIVE"); fi',
    "streamrl": 'echo "streamrl $*" >> "$NOTES"',
}


def slurm(directory: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the script where Slurm, Ray and streamrl are stubs."""
    for name, line in STUBS.items():
        stub = directory / name
        stub.write_text(f"#!/usr/bin/env bash\n{line}\n")
        stub.chmod(0o755)
    own = {"PATH": f"{directory}:{os.environ['PATH']}", "NOTES": str(directory / "notes")}
    return subprocess.run(
        [CLUSTERS / "slurm.sh", "run.toml"],
        env=own | environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def notes(directory: Path) -> list[str]:
    return sorted((directory / "notes").read_text().splitlines())


def test_a_job_begins_a_cluster_of_its_nodes_and_executes_on_it(tmp_path: Path) -> None:
    done = slurm(tmp_path, SLURM_JOB_NODELIST="a,b,c", POOLS="h800", ALIVE="3")
    assert done.returncode == 0, done.stderr
    resources = '--resources={"pool-h800": 1}'
    common = "srun --nodes=1 --ntasks=1 --overlap --nodelist"
    assert notes(tmp_path) == [
        f"{common}=a ray start --block {resources} --head --port=6379 --include-dashboard=false",
        f"{common}=b ray start --block {resources} --address=a:6379",
        f"{common}=c ray start --block {resources} --address=a:6379",
        "streamrl execute run.toml --set execute.launcher=ray --set execute.ray_address=a:6379",
    ]


def test_each_component_of_a_heterogeneous_job_is_a_pool(tmp_path: Path) -> None:
    done = slurm(
        tmp_path,
        SLURM_HET_SIZE="2",
        SLURM_JOB_NODELIST_HET_GROUP_0="a",
        SLURM_JOB_NODELIST_HET_GROUP_1="b",
        POOLS="h800 h20",
        ALIVE="2",
    )
    assert done.returncode == 0, done.stderr
    first, second, _ = notes(tmp_path)
    assert "--het-group=0" in first and '"pool-h800": 1' in first
    assert "--het-group=1" in second and '"pool-h20": 1' in second and "--address=a:" in second


def test_pools_that_are_not_the_job_s_are_refused(tmp_path: Path) -> None:
    done = slurm(tmp_path, SLURM_JOB_NODELIST="a", POOLS="h800 h20", ALIVE="1")
    assert done.returncode == 2
    assert "POOLS names 2 pools, the job has 1 components" in done.stderr


def test_what_kuberay_is_given_says_of_each_group_which_pool_it_is() -> None:
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((CLUSTERS / "kuberay.yaml").read_text())
    spec = job["spec"]["rayClusterSpec"]
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    said = [json.loads(json.loads(group["rayStartParams"]["resources"])) for group in groups]
    assert said == [{"pool-training": 1}, {"pool-generation": 1}]
    assert "--set execute.launcher=ray" in job["spec"]["entrypoint"]


@pytest.mark.ray
def test_the_container_s_steps_install_what_starts(tmp_path: Path) -> None:
    target = tmp_path / "installed"
    done = subprocess.run(
        [CLUSTERS / "install.sh", "ray", str(target)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PIP_NO_COMPILE": "false"},  # which is how pip wants to be told not to
    )
    assert done.returncode == 0, done.stderr[-2000:]
    help_text = subprocess.run(
        [target / "bin" / "streamrl", "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert "execute" in help_text
