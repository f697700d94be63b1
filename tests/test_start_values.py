"""Start values that `plan` replaces need not fit; every other wrong value is refused as by `simulate`."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from streamrl.runfile.config import Run
from streamrl.runfile.errors import RunError
from streamrl.runfile.files import load_offer, load_run
from streamrl.runfile.keys import place_of
from streamrl.sim.planner.plan import PLAN_JSON, PLAN_TOML
from streamrl.sim.planner.space import Space
from tests.command_line import streamrl
from tests.runs import make_table
from tests.test_search_space import OFFER

PLAN: dict[str, Any] = {
    "mixes_replicas": False,
    "micro_batch": [2],
    "rollout_tensor_parallel": [1, 2],
    "trainer_tensor_parallel": [2, 4],
}


def table_of(changes: dict[str, Any] | None = None, **plan: Any) -> dict[str, Any]:
    """Return the table of a small offer with dotted keys replaced."""
    table = make_table(copy.deepcopy({**OFFER, "plan": {**PLAN, **plan}}))
    for key, value in (changes or {}).items():
        place, last = place_of(table, key)
        place[last] = value
    return table


def offered(table: dict[str, Any]) -> Run:
    return load_offer(table).run


def plans_of(run: Run) -> list[Run]:
    """Return the run files of some plans of an offer."""
    space = Space.open(run)
    return [space.candidate(index).apply(run) for index in range(0, len(space), 23)]


@cache
def good_plans() -> list[Run]:
    """Return the plans of an offer whose start values fit."""
    return plans_of(load_run(table_of()))


MORE = {"pool": "h800", "replicas": 99, "tensor_parallel": 3, "max_running": 4}
BAD: list[dict[str, Any]] = [
    # more GPUs than there are
    {"rollout.replicas": 99},
    {"rollout.replicas": 0},
    {"rollout.replicas": -1, "trainer.data_parallel": 0},
    {"trainer.data_parallel": 99},
    {"trainer.pipeline_parallel": 64},
    {"trainer.context_parallel": 32},
    {"rollout.pipeline_parallel": 30},
    {"rollout.others": [MORE]},
    # degrees that divide nothing
    {"rollout.tensor_parallel": 3},
    {"rollout.tensor_parallel": 0},
    {"trainer.tensor_parallel": 5},
    {"trainer.tensor_parallel": 16},
    {"rollout.expert_parallel": 7},
    {"trainer.expert_parallel": 7},
    {"rollout.data_parallel": 2},
    {"trainer.micro_batch": 0},
    # pools that are not there
    {"rollout.pool": "nowhere"},
    {"trainer.pool": ""},
    {"rollout.pool": "a", "trainer.pool": "b", "rollout.replicas": 7},
    {"rollout.others": [{**MORE, "pool": "nowhere"}]},
    # one that contradicts the next
    {"trainer.data_parallel": 6, "trainer.tensor_parallel": 4, "trainer.pool": "h20"},
    {"rollout.replicas": 17, "rollout.tensor_parallel": 2, "trainer.expert_parallel": 3},
]


@pytest.mark.parametrize("changes", BAD, ids=str)
def test_a_start_that_does_not_fit_gives_the_plans_of_one_that_does(
    changes: dict[str, Any],
) -> None:
    table = table_of(changes)
    with pytest.raises(RunError):
        load_run(table)
    assert plans_of(offered(table)) == good_plans()


@pytest.mark.parametrize(
    "changes",
    [
        {"trainer.pool": "h800", "rollout.pool": "h20"},
        {"trainer.data_parallel": 99},
        {"rollout.others": [{**MORE, "replicas": 1, "tensor_parallel": 1}]},
    ],
    ids=str,
)
def test_sides_that_share_gpus_may_start_in_different_pools(changes: dict[str, Any]) -> None:
    good = table_of({"policies.system": "colocated", "trainer.pool": "h20"})
    bad = table_of({"policies.system": "colocated", "trainer.pool": "h20", **changes})
    with pytest.raises(RunError):
        load_run(bad)
    assert plans_of(offered(bad)) == plans_of(load_run(good))


def test_pools_without_a_link_may_be_the_start() -> None:
    alone = table_of({"cluster.links": [], "trainer.pool": "h20"})
    apart = table_of({"cluster.links": []})
    with pytest.raises(RunError, match=r"no link between 'h20' and 'h800'"):
        load_run(apart)
    assert plans_of(offered(apart)) == plans_of(load_run(alone))


def test_a_batch_smaller_than_the_ranks_of_the_start_is_planned() -> None:
    few = {"algorithm.prompts_per_step": 2, "algorithm.group_size": 2}
    wide = table_of({**few, "trainer.data_parallel": 8, "trainer.tensor_parallel": 1})
    with pytest.raises(RunError, match=r"fewer than trainer\.data_parallel=8"):
        load_run(wide)
    assert plans_of(offered(wide)) == plans_of(load_run(table_of(few)))


@pytest.mark.parametrize(
    "policies",
    [
        {"system": "colocated", "max_staleness": 2},
        {"system": "colocated", "sync_every": 2},
        {"system": "colocated", "streaming": "stream"},
    ],
    ids=str,
)
def test_a_system_that_contradicts_a_key_that_stays_is_replaced(policies: dict[str, Any]) -> None:
    table = table_of({"policies": policies, "trainer.pool": "h20"})
    with pytest.raises(RunError):
        load_run(table)
    run = offered(table)
    assert run.policies.system != "colocated"
    key, value = list(policies.items())[1]
    assert getattr(run.policies, key) == value
    assert plans_of(run)


def test_one_gpu_is_planned_as_one_that_both_sides_share() -> None:
    pools = {"h800": {"gpu": "h800", "gpus_per_node": 1}}
    table = table_of(
        {"cluster": {"pools": pools}, "rollout.pool": "h800", "model.name": "qwen2.5-0.5b"}
    )
    table["plan"] = {}
    table["trainer"] = {"pool": "h800"}
    with pytest.raises(RunError, match="has 1 GPUs"):
        load_run(table)
    assert {run.policies.system for run in plans_of(offered(table))} == {"colocated"}


def test_values_that_fit_stay_because_plans_try_them_too() -> None:
    start = {"policies.system": "fully-async", "trainer.expert_parallel": 2}
    table = table_of({**start, "rollout.replicas": 99, "rollout.pipeline_parallel": 2})
    run = offered(table)
    assert run.policies.system == "fully-async" and run.trainer.expert_parallel == 2
    assert run.rollout.pipeline_parallel == 2 and run.rollout.replicas == 1


@pytest.mark.parametrize(
    "absent",
    [["rollout.pool"], ["rollout.replicas"], ["trainer.pool"], ["rollout.pool", "trainer.pool"]],
)
def test_start_values_may_be_absent(absent: list[str]) -> None:
    table = table_of()
    for key in absent:
        place, last = place_of(table, key)
        del place[last]
    with pytest.raises(RunError, match="is missing"):
        load_run(table)
    offer = load_offer(table)
    assert plans_of(offer.run) == good_plans()
    assert offer.absent == absent and not offer.ignored and not offer.has_layout


def test_a_file_without_a_trainer_is_planned_and_one_without_lengths_is_refused() -> None:
    table = table_of()
    del table["trainer"]
    assert load_offer(table).absent == ["trainer.pool"]
    assert load_offer(table_of()).has_layout
    del table["rollout"]["max_tokens"]
    with pytest.raises(RunError, match=r"^rollout\.max_tokens is missing"):
        load_offer(table)
    with pytest.raises(RunError, match=r"^cluster is missing"):
        load_offer({key: value for key, value in table_of().items() if key != "cluster"})


def test_ignored_values_are_listed_as_set_takes_them() -> None:
    offer = load_offer(
        table_of({"rollout.replicas": 99, "rollout.others": [{**MORE, "pool": "x"}]})
    )
    replicas, others = offer.ignored
    assert replicas == "rollout.replicas=99"
    assert others.startswith("rollout.others=[") and 'pool = "x"' in others
    shared = {"system": "colocated", "max_staleness": 2}
    table = table_of({"policies": shared, "trainer.pool": "h20"})
    assert load_offer(table).ignored == ["policies.system=colocated"]
    assert load_offer(table_of()).ignored == []


def test_workers_and_pool_of_a_reward_model_are_replaced_if_plan_lists_pools() -> None:
    verifier = {"pool": "nowhere", "gpus_per_worker": 1, "workers": 99, "time": "1 s"}
    listed = offered(table_of({"verifier": verifier}, reward_pools=["h20"]))
    assert (listed.verifier.pool, listed.verifier.workers) == ("h20", 1)
    with pytest.raises(RunError, match=r"^verifier\.pool 'nowhere' is not one of"):
        offered(table_of({"verifier": verifier}))
    many = offered(table_of({"verifier": {**verifier, "pool": "h20"}}))
    assert plans_of(many)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"rollout.max_running": 0}, "rollout.max_running"),
        ({"algorithm.group_size": 0}, "algorithm.group_size"),
        ({"cluster.pools.h20.nodes": 0}, "cluster.pools.h20.nodes"),
        ({"cluster.links": [{"between": ["h20", "x"], "bandwidth": "1 Gbps"}]}, "cluster.links"),
        ({"plan.rollout_pools": ["x"]}, "plan.rollout_pools"),
        ({"plan.unit": 0}, "plan.unit"),
        ({"model": {}}, "model.name"),
        ({"trainer.expert_tensor_parallel": 3}, "trainer.expert_tensor_parallel"),
        ({"policies.learns_from_siblings": True}, "policies.order"),
        ({"sync.mode": "delta", "model.dtype": "float32"}, "sync.mode"),
        ({"policies.oversampling": 2.0}, "policies.oversampling"),
    ],
    ids=str,
)
@pytest.mark.parametrize("start", [{}, {"rollout.replicas": 99, "trainer.pool": "nowhere"}])
def test_a_wrong_value_that_plans_keep_is_refused(
    start: dict[str, Any], changes: dict[str, Any], key: str
) -> None:
    with pytest.raises(RunError) as refused:
        offered(table_of({**start, **changes}))
    assert refused.value.key.startswith(key)


def test_values_of_the_wrong_type_and_unknown_keys_are_refused() -> None:
    for changes in ({"rollout.replicas": "four"}, {"rollout.replica": 4}):
        with pytest.raises(RunError):
            offered(table_of(changes))


def test_plan_accepts_what_simulate_and_execute_refuse(tmp_path: Path) -> None:
    small = {"algorithm.steps": 2, "algorithm.prompts_per_step": 8, "simulate.max_steps": 2}
    sides = {"rollout_gpus": [8], "trainer_gpus": [8], "rollout_pools": ["h20"], "unit": 8}
    one = {
        "trainer_tensor_parallel": [4],
        "rollout_tensor_parallel": [1],
        "systems": ["stream-sync"],
    }
    plan = {**sides, **one, "trainer_pools": ["h800"], "sync_modes": ["full"]}
    table = table_of({**small, "rollout.replicas": 99, "rollout.pool": "nowhere"}, **plan)
    (tmp_path / "run.toml").write_text(tomli_w.dumps(table))
    for command in ("simulate", "execute"):
        refused = streamrl(command, tmp_path / "run.toml")
        assert refused.returncode == 2 and "nowhere" in refused.stderr
    done = streamrl("plan", tmp_path / "run.toml", "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    told = "ignored, because it does not fit and plans replace it: rollout.replicas=99, rollout.pool=nowhere"
    assert told in done.stderr.splitlines()
    options = json.loads((tmp_path / "out" / PLAN_JSON).read_text())["options"]
    assert "your own file" not in {label for each in options for label in each["labels"]}
    planned = load_run(tmp_path / "out" / PLAN_TOML)
    assert planned.rollout.pool == "h20" and planned.rollout.num_gpus == 8
