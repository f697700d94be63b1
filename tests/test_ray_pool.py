"""Studies on a Ray cluster: the results are those of one core, whatever happens to workers: make test-ray."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from math import ceil
from pathlib import Path

import pytest

from streamrl.runfile.files import load_run
from streamrl.runfile.sweep import make_grid, parse_axis
from streamrl.sim.parallel import spread_over
from streamrl.sim.studies.sweep import run_sweep

pytestmark = pytest.mark.ray

RUN = Path(__file__).parent.parent / "examples" / "h20-h800.toml"
JOBS = run_sweep.__module__
NUM_JOBS = 200
SMALL = ["algorithm.prompts_per_step=64", "simulate.max_steps=3", "workload.lengths.scale=0.1"]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Start a cluster of one node with two CPUs, whose workers import this checkout."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    yield cluster.address
    cluster.shutdown()


def die_once(marker: str) -> str:
    """Kill this worker the first time; return an answer the second time."""
    path = Path(marker)
    if not path.exists():
        path.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "answer"


def fail(number: int) -> None:
    raise ValueError(f"job {number} is wrong")


def test_a_study_has_the_same_rows_on_ray_as_on_this_machine(address: str) -> None:
    from streamrl.executor.launchers.ray_pool import ray_pool

    axes = (
        parse_axis("rollout.replicas=8,16"),
        parse_axis("policies.system=stream-sync,stream-async"),
    )
    grid = make_grid(partial(load_run, RUN), SMALL, axes)
    with spread_over(partial(ThreadPoolExecutor, 1)):
        here = run_sweep(grid, 2)[1]
    with ray_pool(address, JOBS) as pool, spread_over(lambda: nullcontext(pool)):
        there = run_sweep(grid, 2)[1]
    assert repr(there) == repr(here)  # NaN is not equal to itself


def test_jobs_survive_a_killed_worker_and_their_own_errors_arrive(
    address: str, tmp_path: Path
) -> None:
    from streamrl.executor.launchers.ray_pool import ray_pool

    with ray_pool(address, JOBS) as pool:
        killed = [pool.submit(die_once, str(tmp_path / str(number))) for number in range(3)]
        wrong = pool.submit(fail, 7)
        assert [future.result(120) for future in killed] == ["answer"] * 3
        with pytest.raises(ValueError, match="job 7 is wrong"):
            wrong.result(120)


def test_jobs_that_a_task_has_no_time_for_are_done_by_others(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from streamrl.executor.launchers import ray_pool

    monkeypatch.setattr(ray_pool, "BATCH_TIME", 0.0)
    with ray_pool.ray_pool(address, JOBS) as pool:
        found = [pool.submit(abs, -number) for number in range(40)]
        assert [future.result(120) for future in found] == [*range(40)]


def note(number: int, marker: str) -> int:
    """Write down that a job was begun; kill this worker once, at the job in the middle."""
    with (Path(marker) / "begun").open("a") as file:
        file.write(f"{number}\n")
    if number == NUM_JOBS // 2:
        die_once(str(Path(marker) / "killed"))
    return number


def test_a_killed_worker_costs_its_batch_and_no_other(address: str, tmp_path: Path) -> None:
    from streamrl.executor.launchers.ray_pool import TASKS_PER_CPU, ray_pool

    with ray_pool(address, JOBS) as pool:
        found = [pool.submit(note, number, str(tmp_path)) for number in range(NUM_JOBS)]
        assert [future.result(120) for future in found] == [*range(NUM_JOBS)]
    begun = Counter(map(int, (tmp_path / "begun").read_text().split()))
    repeated = [number for number, times in begun.items() if times > 1]
    largest_batch = ceil(NUM_JOBS / (TASKS_PER_CPU * 2))
    assert NUM_JOBS // 2 in repeated and len(repeated) <= largest_batch
    assert begun.total() == NUM_JOBS + len(repeated)


def test_a_cancelled_job_does_not_begin(address: str, tmp_path: Path) -> None:
    from streamrl.executor.launchers.ray_pool import ray_pool

    with ray_pool(address, JOBS) as pool:
        running = [pool.submit(time.sleep, 3.0) for _ in range(2)]
        waiting = pool.submit(Path.touch, tmp_path / "begun")
        assert waiting.cancel()
        for future in running:
            future.result(120)
    assert not (tmp_path / "begun").exists()


def test_a_cluster_that_is_not_there_is_refused_in_one_line() -> None:
    from streamrl.executor.launchers.ray_pool import ray_pool

    refused = r"^--ray '127.0.0.1:1': no Ray cluster could be joined"
    with pytest.raises(ValueError, match=refused), ray_pool("127.0.0.1:1", JOBS):
        pass
