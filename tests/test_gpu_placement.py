"""Which GPU of this machine each role gets: those that this process was given, and no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from streamrl.executor.checkup import readiness
from streamrl.executor.execute import check_executable, execute
from streamrl.executor.launchers import placement as local_gpus
from streamrl.executor.launchers.local_launcher import LocalLauncher
from streamrl.executor.launchers.placement import (
    LocalGpus,
    Place,
    PlacedRoles,
    Placement,
    claim_gpus,
    gpus_needed,
    roles_on_cores,
    usable_gpus,
)
from streamrl.executor.launchers.role_configs import RoleConfigs
from streamrl.executor.record import RunDirectory
from streamrl.runfile.config import Run
from streamrl.runfile.files import make_run
from tests.patients import bad, local_table

GPU, OTHER = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "GPU-2"
MIG, SECOND = "MIG-c7384736-a75d-5afc-978f-d2f1294409fd", "MIG-b9a2"
FAR = {"here": {"gpu": "h800", "gpus_per_node": 4}}


def local_run(directory: Path, **changes: Any) -> Run:
    """Return a run of one replica and a trainer; `__` stands for the dot of a key."""
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    return make_run(local_table(directory, keys))


@pytest.mark.parametrize(
    ("inherited", "num_seen", "usable"),
    [
        (None, 2, ["0", "1"]),
        (None, 0, []),
        ("", 0, []),
        ("-1", 0, []),
        ("2", 1, ["2"]),
        ("5, 3", 2, ["5", "3"]),
        ("3,-1,5", 1, ["3"]),
        ("3,,5", 1, ["3"]),
        ("1,64", 1, ["1"]),  # the machine has no GPU 64
        ("0,0", 0, []),  # CUDA shows none where one is named twice
        (f"{GPU},{OTHER}", 2, [GPU, OTHER]),
        (f"{MIG},{SECOND}", 1, [MIG, SECOND]),
        (f"{MIG},0", 1, [MIG]),
        (MIG, 0, []),
        ("none", 0, []),
    ],
)
def test_gpus_are_those_that_the_process_inherited(
    inherited: str | None, num_seen: int, usable: list[str]
) -> None:
    assert usable_gpus(inherited, num_seen) == usable


def seen(run: Run, names: str, *places: Place) -> list[str]:
    """Return which of some GPUs, a letter each, each place shows."""
    gpus = LocalGpus(PlacedRoles.of(run), list(names))
    return [gpus.environment(place).get(local_gpus.VARIABLE, "") for place in places]


def test_each_role_sees_only_the_inherited_gpu_of_its_place(tmp_path: Path) -> None:
    run = local_run(tmp_path, execute__device="cuda")
    launcher, placement = (
        LocalLauncher(RoleConfigs(run), PlacedRoles.of(run), RunDirectory(tmp_path), ["7", GPU]),
        Placement(PlacedRoles.of(run)),
    )
    assert launcher.environment(placement.replica(0))[local_gpus.VARIABLE] == "7"
    assert launcher.environment(placement.trainers[0][0])[local_gpus.VARIABLE] == GPU
    run = local_run(tmp_path)
    on_cpu = LocalLauncher(RoleConfigs(run), PlacedRoles.of(run), RunDirectory(tmp_path))
    assert local_gpus.VARIABLE not in on_cpu.environment(placement.trainers[0][0])


def test_replicas_come_first_then_the_trainer_then_replicas_that_are_added(tmp_path: Path) -> None:
    """Also where pools and nodes are several: all stand for this one machine."""
    pools = {"here": {"gpu": "h800", "nodes": 2, "gpus_per_node": 2}, "there": {"gpu": "h20"}}
    link = {"between": ["here", "there"], "bandwidth": "8 Gbps"}
    changes: dict[str, Any] = {"cluster": {"pools": pools, "links": [link]}}
    changes |= {"policies__resize": "adjust", "policies__resize_unit": 1}
    run = local_run(
        tmp_path, **changes, trainer={"pool": "there", "micro_batch": 2}, rollout__replicas=3
    )
    assert gpus_needed(PlacedRoles.of(run)) == 5
    places = [Place("here", node, (gpu,)) for node in (0, 1) for gpu in (0, 1)]
    assert seen(run, "abcde", *places, Place("there", 0, (0,))) == ["a", "b", "c", "e", "d"]


def test_a_place_of_several_gpus_shows_them_all(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"rollout__tensor_parallel": 2, "trainer": {"pool": "here"}}
    changes |= {"cluster__pools": {"here": {"gpu": "h800", "nodes": 2, "gpus_per_node": 4}}}
    run = local_run(tmp_path, **changes, rollout__replicas=2, trainer__data_parallel=2)
    assert gpus_needed(PlacedRoles.of(run)) == 6
    placement = Placement(PlacedRoles.of(run))
    replicas = [placement.replica(n) for n in range(2)]
    assert seen(run, "abcdef", *replicas, *placement.trainers[0]) == ["a,b", "c,d", "e", "f"]
    shared = local_run(tmp_path, **changes, policies__system="colocated", trainer__data_parallel=4)
    assert gpus_needed(PlacedRoles.of(shared)) == 4
    both = [
        Placement(PlacedRoles.of(shared)).replica(0),
        *Placement(PlacedRoles.of(shared)).trainers[0],
    ]
    assert seen(shared, "abcd", *both) == ["a,b", "a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({}, 0),
        ({"execute__device": "cuda"}, 2),
        ({"execute__device": "cuda:2"}, 3),
        ({"execute__device": "cuda", "execute__launcher": "in-process"}, 1),
        ({"cluster__pools": FAR}, 2),
        ({"cluster__pools": FAR, "execute__device": "cpu"}, 0),
        ({"cluster__pools": FAR, "policies__system": "colocated"}, 1),
        ({"cluster__pools": FAR, "rollout__replicas": 3}, 4),
        ({"cluster__pools": FAR, "policies__resize": "adjust", "policies__resize_unit": 1}, 4),
        (
            {
                "cluster__pools": FAR,
                "policies__resize": "adjust",
                "policies__resize_unit": 1,
                "policies__max_replicas": 2,
            },
            3,
        ),
    ],
)
def test_a_run_needs_a_gpu_for_each_replica_that_there_may_be_and_one_for_its_trainer(
    changes: dict[str, Any], needed: int, tmp_path: Path
) -> None:
    assert gpus_needed(PlacedRoles.of(local_run(tmp_path, **changes))) == needed


def test_a_trainer_has_the_first_gpu_where_replicas_have_none(tmp_path: Path) -> None:
    pools = {"here": {"gpu": "cpu"}, "there": {"gpu": "h800"}}
    link = {"between": ["here", "there"], "bandwidth": "8 Gbps"}
    changes: dict[str, Any] = {"cluster": {"pools": pools, "links": [link]}}
    run = local_run(tmp_path, **changes, trainer={"pool": "there", "micro_batch": 2})
    assert gpus_needed(PlacedRoles.of(run)) == 1
    assert seen(run, "a", Place("here", 0, (0,)), Place("there", 0, (0,))) == ["", "a"]


def test_each_replica_of_a_reward_model_has_a_gpu_after_the_trainers(tmp_path: Path) -> None:
    pools = {"here": {"gpu": "h800", "gpus_per_node": 2}, "third": {"gpu": "a100"}}
    model = {"scorer": "reward-model", "model": "hf://nobody/knows"}
    verifier = {"pool": "third", "gpus_per_worker": 1, "workers": 2, "reward": [model]}
    run = local_run(tmp_path, cluster__pools=pools, verifier=verifier)
    assert gpus_needed(PlacedRoles.of(run)) == 4 and roles_on_cores(PlacedRoles.of(run)) == 0
    assert Placement(PlacedRoles.of(run)).reward_models == [
        Place("third", 0, (0,)),
        Place("third", 0, (1,)),
    ]
    both = [
        *Placement(PlacedRoles.of(run)).trainers[0],
        *Placement(PlacedRoles.of(run)).reward_models,
    ]
    assert seen(run, "abcd", Placement(PlacedRoles.of(run)).replica(0), *both) == [
        "a",
        "b",
        "c",
        "d",
    ]
    pools["third"]["gpu"] = "cpu"
    run = local_run(tmp_path, cluster__pools=pools, verifier=verifier)
    assert gpus_needed(PlacedRoles.of(run)) == 2 and roles_on_cores(PlacedRoles.of(run)) == 2


def test_fewer_gpus_than_needed_are_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_gpus, "find_gpus", lambda: ["3"])
    monkeypatch.setattr(readiness, "find_gpus", lambda: ["3"])
    monkeypatch.setenv(local_gpus.VARIABLE, "3")
    run = local_run(tmp_path, execute__device="cuda")
    words = (
        r"execute\.device 'cuda' needs 2 GPUs .* sees 1 \(CUDA_VISIBLE_DEVICES='3'\).*device=cpu"
    )
    with pytest.raises(ValueError, match=words) as refusal:
        execute(run)
    assert "\n" not in str(refusal.value) and not (tmp_path / "run").exists()
    finding = bad(list(readiness.find(run)))["gpus"]
    assert finding.level == "error" and "CUDA_VISIBLE_DEVICES='3'" in finding.text


def test_as_many_gpus_as_needed_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (local_gpus, readiness):
        monkeypatch.setattr(module, "find_gpus", lambda: ["3", GPU])
    run = local_run(tmp_path, execute__device="cuda")
    check_executable(run)
    assert claim_gpus(PlacedRoles.of(run)) == ["3", GPU]
    assert "gpus" not in bad(list(readiness.find(run)))


@pytest.mark.parametrize("device", ["banana", "gpu", "cuda:x", "CUDA", ""])
def test_what_is_no_device_is_refused_when_the_run_file_is_read(
    device: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=rf"^execute\.device must be auto, .*, got {device!r}"):
        local_run(tmp_path, execute__device=device)


def test_a_gpu_that_is_named_is_all_that_processes_see(tmp_path: Path) -> None:
    run = local_run(tmp_path, execute__device="cuda:2")
    placement = Placement(PlacedRoles.of(run))
    assert seen(run, "abc", placement.replica(0), *placement.trainers[0]) == ["c", "c"]
    assert (
        LocalLauncher(RoleConfigs(run), PlacedRoles.of(run), RunDirectory(tmp_path / "run")).device(
            "here"
        )
        == "cuda"
    )
    within = local_run(tmp_path, execute__device="cuda:2", execute__launcher="in-process")
    assert (
        LocalLauncher(
            RoleConfigs(within), PlacedRoles.of(within), RunDirectory(tmp_path / "run")
        ).device("here")
        == "cuda:2"
    )
