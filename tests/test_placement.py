"""Which GPUs of which node each role gets: none twice, and what is given back is given again."""

from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.executor.launchers.placement import Place, PlacedRoles, Placement
from streamrl.runfile.config import Run
from streamrl.runfile.gpu_pools import Side, most_replicas, sides_of
from tests.runs import small_run

Gpus = tuple[int, ...]


def run_on(nodes: int, gpus_per_node: int, **changes: Any) -> Run:
    """Return a run of both sides in one pool; `__` stands for the dot of a key."""
    pools = {"here": {"gpu": "h800", "nodes": nodes, "gpus_per_node": gpus_per_node}}
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    table = {"cluster": {"pools": pools}, "rollout.pool": "here", "trainer": {"pool": "here"}}
    return small_run({**table, **keys})


def where(place: Place) -> tuple[int, Gpus]:
    return place.node, place.gpus


def ranks(placement: Placement) -> list[tuple[int, Gpus]]:
    return [where(place) for place in placement.trainers[0]]


def test_a_replica_has_gpus_of_one_node_the_lowest_first() -> None:
    run = run_on(2, 4, rollout__replicas=3, rollout__tensor_parallel=2)
    placement = Placement(PlacedRoles.of(run))
    assert placement.replica(7) == Place("here", 0, (0, 1))
    assert where(placement.replica(8)) == (0, (2, 3))
    assert where(placement.replica(9)) == (1, (0, 1))
    assert ranks(placement) == [(1, (2,))]


def test_six_ranks_of_a_trainer_follow_the_replicas_over_the_nodes() -> None:
    trainer = {"pool": "here", "data_parallel": 3, "tensor_parallel": 2}
    run = run_on(2, 4, rollout__replicas=1, rollout__tensor_parallel=2, trainer=trainer)
    assert ranks(Placement(PlacedRoles.of(run))) == [(0, (2,)), (0, (3,))] + [
        (1, (gpu,)) for gpu in range(4)
    ]


def test_a_tensor_parallel_group_of_the_trainer_is_on_one_node() -> None:
    trainer = {"pool": "here", "pipeline_parallel": 2, "tensor_parallel": 4}
    run = run_on(3, 4, rollout__replicas=1, rollout__tensor_parallel=2, trainer=trainer)
    placement = Placement(PlacedRoles.of(run))
    assert ranks(placement) == [(node, (gpu,)) for node in (1, 2) for gpu in range(4)]
    assert [where(placement.replica(n)) for n in range(2)] == [(0, (0, 1)), (0, (2, 3))]


def test_a_replacement_has_the_gpus_of_the_replica_that_was_lost() -> None:
    placement = Placement(
        PlacedRoles.of(run_on(2, 4, rollout__replicas=3, rollout__tensor_parallel=2))
    )
    places = [placement.replica(n) for n in range(3)]
    placement.free(1)
    placement.free(1)
    assert placement.replica(3) == places[1]
    placement.free(2)
    placement.free(0)
    assert [placement.replica(n) for n in (4, 5)] == [places[0], places[2]]


def test_replicas_that_are_added_come_behind_the_trainer_and_may_go_again() -> None:
    placement = Placement(
        PlacedRoles.of(run_on(2, 4, rollout__replicas=1, rollout__tensor_parallel=2))
    )
    assert [where(placement.replica(n)) for n in range(3)] == [
        (0, (0, 1)),
        (1, (0, 1)),
        (1, (2, 3)),
    ]
    assert ranks(placement) == [(0, (2,))]
    placement.free(1)
    assert where(placement.replica(3)) == (1, (0, 1))


def test_more_replicas_than_gpus_are_refused_by_name() -> None:
    placement = Placement(
        PlacedRoles.of(run_on(1, 4, rollout__replicas=1, rollout__tensor_parallel=2))
    )
    placement.replica(0)
    with pytest.raises(RuntimeError, match="no node of pool 'here' has 2 GPUs left for replica 1"):
        placement.replica(1)


def test_sides_that_take_turns_have_the_same_gpus() -> None:
    trainer = {"pool": "here", "data_parallel": 4}
    changes = {"rollout__replicas": 2, "rollout__tensor_parallel": 2, "trainer": trainer}
    placement = Placement(PlacedRoles.of(run_on(1, 4, policies__system="colocated", **changes)))
    assert ranks(placement) == [(0, (gpu,)) for gpu in range(4)]
    assert [where(placement.replica(n)) for n in range(2)] == [(0, (0, 1)), (0, (2, 3))]


def test_each_side_has_the_lowest_gpus_of_its_own_pool() -> None:
    placement = Placement(PlacedRoles.of(small_run({"rollout.replicas": 1})))
    assert placement.replica(0) == Place("far", 0, (0,))
    assert placement.trainers[0] == tuple(Place("near", 0, (gpu,)) for gpu in range(4))


@given(
    st.integers(1, 3),
    st.sampled_from([1, 2, 4, 8]),
    st.data(),
)
def test_whatever_comes_and_goes_no_gpu_is_taken_twice_and_all_that_fit_find_a_place(
    nodes: int, gpus_per_node: int, data: st.DataObject
) -> None:
    degrees = st.sampled_from([degree for degree in (1, 2, 4, 8) if degree <= gpus_per_node])
    degree, trainer_degree = data.draw(degrees), data.draw(degrees)
    room = nodes * gpus_per_node - trainer_degree
    if room < degree:
        return
    run = run_on(
        nodes,
        gpus_per_node,
        rollout__replicas=data.draw(st.integers(1, room // degree)),
        rollout__tensor_parallel=degree,
        trainer__tensor_parallel=trainer_degree,
        algorithm__prompts_per_step=8,
    )
    placement = Placement(PlacedRoles.of(run))
    living: dict[int, Place] = {}
    for number in range(12):
        if living and (len(living) == most_replicas(run) or data.draw(st.booleans())):
            gone = data.draw(st.sampled_from(sorted(living)))
            del living[gone]
            placement.free(gone)
        else:
            living[number] = placement.replica(number)
        places = [*living.values(), *placement.trainers[0]]
        taken = [(place.node, gpu) for place in places for gpu in place.gpus]
        assert len(taken) == len(set(taken)) == degree * len(living) + trainer_degree
        assert all(node < nodes and gpu < gpus_per_node for node, gpu in taken)


def test_replicas_are_added_beside_sides_of_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_on(2, 4, rollout__replicas=1, rollout__tensor_parallel=2)
    before = most_replicas(run)
    others = [*sides_of(run), Side("judge", cast(Any, "judge"), "here", 2)]
    monkeypatch.setattr("streamrl.runfile.gpu_pools.sides_of", lambda run: others)
    assert most_replicas(run) == before - 1
