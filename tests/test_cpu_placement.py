"""Which cores of this machine there are for roles on the CPU, and how many threads each gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from streamrl.executor.checkup import readiness
from streamrl.executor.launchers import placement as local_cores
from streamrl.executor.launchers.local_launcher import LocalLauncher
from streamrl.executor.launchers.placement import (
    Place,
    PlacedRoles,
    roles_on_cores,
    threads_of,
    usable_cores,
)
from streamrl.executor.launchers.role_configs import RoleConfigs
from streamrl.executor.record import RunDirectory
from streamrl.hardware.measured_profile import Host, write_measured
from streamrl.hardware.parallelism import threads_per_role
from streamrl.runfile.config import Run
from streamrl.runfile.files import make_run
from streamrl.sim.costs.costs import Costs
from tests.measured_profile import make_profile, measured_run, model_directory
from tests.patients import bad, local_table

GPUS = {"here": {"gpu": "h800", "gpus_per_node": 4}}


def local_run(directory: Path, **changes: Any) -> Run:
    """Return a run of one replica and a trainer; `__` stands for the dot of a key."""
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    return make_run(local_table(directory, keys))


@pytest.fixture
def sixteen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this machine have 16 cores."""
    for module in (local_cores, readiness):
        monkeypatch.setattr(module, "usable_cores", lambda: 16)


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this machine have 2 cores."""
    for module in (local_cores, readiness):
        monkeypatch.setattr(module, "usable_cores", lambda: 2)


@pytest.mark.parametrize(
    ("quota", "most"), [("max 100000", 10**6), ("150000 100000", 2), ("", 10**6), ("1 100000", 1)]
)
def test_a_container_has_the_cores_that_its_quota_is_worth(
    quota: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cpu.max"
    file.write_text(quota)
    monkeypatch.setattr(local_cores, "QUOTA", file)
    monkeypatch.setattr(local_cores.os, "sched_getaffinity", lambda pid: set(range(64)))
    assert usable_cores() == min(64, most)


def test_cores_are_dealt_to_roles_and_none_has_less_than_one() -> None:
    assert [threads_per_role(16, roles) for roles in (1, 2, 3, 16, 17)] == [16, 8, 5, 1, 1]


@pytest.mark.usefixtures("sixteen")
def test_roles_on_the_cpu_have_all_cores_between_them(tmp_path: Path) -> None:
    run = local_run(tmp_path)
    assert (roles_on_cores(PlacedRoles.of(run)), threads_of(PlacedRoles.of(run))) == (2, 8)
    pools = {"here": {"gpu": "cpu", "gpus_per_node": 4}}
    run = local_run(tmp_path, cluster__pools=pools, rollout__replicas=3)
    assert (roles_on_cores(PlacedRoles.of(run)), threads_of(PlacedRoles.of(run))) == (4, 4)
    assert threads_of(PlacedRoles.of(local_run(tmp_path, execute__threads=3))) == 3
    launcher = LocalLauncher(RoleConfigs(run), PlacedRoles.of(run), RunDirectory(tmp_path / "run"))
    assert launcher.environment(Place("here", 0, (0,)))["OMP_NUM_THREADS"] == "4"


@pytest.mark.usefixtures("sixteen")
def test_roles_on_gpus_have_the_cores_to_copy_and_check_weights_with(tmp_path: Path) -> None:
    run = local_run(tmp_path, cluster__pools=GPUS)
    assert (roles_on_cores(PlacedRoles.of(run)), threads_of(PlacedRoles.of(run))) == (0, 8)
    assert "cores" not in {finding.name for finding in readiness.find(run)}
    assert (
        roles_on_cores(
            PlacedRoles.of(local_run(tmp_path, cluster__pools=GPUS, execute__device="cpu"))
        )
        == 2
    )


@pytest.mark.usefixtures("two")
def test_doctor_warns_where_roles_want_more_cores_than_there_are(tmp_path: Path) -> None:
    pools = {"here": {"gpu": "cpu", "gpus_per_node": 4}}
    sound = [f for f in readiness.find(local_run(tmp_path)) if f.name == "cores"]
    assert [finding.level for finding in sound] == ["ok"]
    run = local_run(tmp_path, cluster__pools=pools, rollout__replicas=3)
    found = bad(list(readiness.find(run)))["cores"]
    assert found.level == "warning" and found.changes == {"rollout.replicas": 1}
    assert "4 roles compute on the CPU, with 1 threads each, and it has 2 cores" in found.text
    greedy = bad(list(readiness.find(local_run(tmp_path, execute__threads=2))))["cores"]
    assert greedy.changes == {"execute.threads": 1}


def test_doctor_knows_no_way_to_put_two_roles_on_one_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "usable_cores", lambda: 1)
    monkeypatch.setattr(local_cores, "usable_cores", lambda: 1)
    found = bad(list(readiness.find(local_run(tmp_path))))["cores"]
    assert not found.changes and found.fix == "execute it on a machine with 2 cores"


@pytest.mark.parametrize(("threads", "is_said"), [(None, False), (2, False), (1, True)])
def test_a_profile_of_other_threads_says_so(
    threads: int | None, is_said: bool, tmp_path: Path
) -> None:
    model, path = model_directory(tmp_path / "model"), tmp_path / "profile.toml"
    host = Host(cpu="a pencil", cores=4, threads=2, device="a pencil")
    write_measured(make_profile(model, host=host), path)
    changes = {} if threads is None else {"execute__threads": threads}
    sources = Costs.load(measured_run(model, path, **changes)).provenance["decode"].sources
    assert any("measured with 2 threads a role" in source for source in sources) == is_said
