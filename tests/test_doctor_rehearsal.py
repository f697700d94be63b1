"""What the doctor finds by simulating a few steps: runs that never end, and links that steps wait for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from streamrl.engine.engine import Engine
from streamrl.engine.messages import Command
from streamrl.engine.policies.staleness import TakeInLine
from streamrl.engine.state import State
from streamrl.engine.systems import build_policies, build_state
from streamrl.runfile.failure_rates import expected_losses
from streamrl.runfile.findings import changed
from streamrl.runfile.formatting import format_duration
from streamrl.sim.checkup import rehearsal
from streamrl.sim.checkup.checkup import check_up
from tests.patients import FULL, bad, doctor, full_run
from tests.runs import small_run


class NeverTakes(TakeInLine):
    """Consumption that waits for a step that never comes."""

    def decide(self, state: State) -> Iterator[Command]:
        """Yield nothing."""
        return iter(())


def test_a_run_whose_consumption_never_takes_what_admission_waits_for_is_stuck() -> None:
    world = rehearsal.make_world(full_run())
    policies = build_policies(world.run_file)
    kept = [NeverTakes(0) if isinstance(policy, TakeInLine) else policy for policy in policies]
    world.engine = Engine(build_state(world.run_file), kept)
    went = rehearsal.perform(world)
    assert went.version == 0 and "stuck" in went.problem
    assert not rehearsal.perform(rehearsal.make_world(full_run())).problem


@pytest.mark.parametrize("own", [{"prompts": "held_out.jsonl"}, {"share": 0.1}])
def test_held_out_prompts_are_rehearsed_without_their_number(own: dict[str, Any]) -> None:
    changes = {"workload.prompts": "prompts.jsonl", "evaluation": {**own, "every": 1}}
    went = rehearsal.rehearse(full_run(changes))
    assert not went.refusal and not went.problem


def test_a_run_that_loses_replicas_before_they_finish_anything_goes_in_circles() -> None:
    changes = {
        "failures": {"per_gpu_day": 3e6},
        "policies.max_restarts": 10**9,
        "policies.max_attempts": 10**9,
        "workload.lengths.scale": 0.1,
        "rollout.max_tokens": 4096,
    }
    finding = bad(doctor(changes).findings)["no-progress"]
    assert finding.level == "error" and "again and again" in finding.text
    num_rollouts = full_run().algorithm.rollouts_per_step * rehearsal.LEAST_STEPS
    most = rehearsal.FEWEST_EVENTS + rehearsal.EVENTS_PER_ROLLOUT * num_rollouts
    assert len(rehearsal.rehearse(full_run(changes)).trace.entries) == most
    assert "no-progress" not in bad(check_up(changed(full_run(changes), finding.changes)).findings)


def test_a_run_that_stops_for_lack_of_restarts_is_an_error_and_more_restarts_mend_it() -> None:
    changes = {
        "failures": {"per_gpu_day": 3e4},
        "policies.max_restarts": 0,
        "workload.lengths.scale": 0.1,
        "rollout.max_tokens": 4096,
    }
    finding = bad(doctor(changes).findings)["stops-early"]
    assert finding.level == "error" and "0 replicas were restarted" in finding.text
    assert "stops-early" not in bad(check_up(changed(full_run(changes), finding.changes)).findings)


def test_restarts_that_last_for_a_rehearsal_but_not_for_the_run_are_warned_of() -> None:
    changes = {"failures": {"per_gpu_day": 50.0}, "algorithm.steps": 100_000}
    finding = bad(doctor(changes).findings)["restarts"]
    assert "policies.max_restarts=4 stops the run" in finding.text
    assert "restarts" not in bad(doctor({**changes, **finding.changes}).findings)


def test_losses_of_a_trainer_larger_than_the_replicas_are_warned_of_and_mended() -> None:
    failures = {"per_gpu_day": 1.0, "trainers": True}
    changes = {"failures": failures, "policies.max_restarts": 100}
    run = full_run(changes)
    whole = 101 / run.trainer.num_gpus * 86_400 / run.algorithm.steps
    assert expected_losses(run, whole) == pytest.approx((101, "times the trainer"))
    replicas_alone = full_run({**changes, "failures": {"per_gpu_day": 1.0}})
    assert expected_losses(replicas_alone, whole).what == "replicas"


def test_losses_of_every_kind_of_replica_count() -> None:
    changes = {"failures": {"per_gpu_day": 1.0}, "cluster.pools.far.nodes": 8}
    run = full_run(changes)
    others = ({"pool": run.rollout.pool, "replicas": 2, "tensor_parallel": 2},)
    mixed = full_run({**changes, "rollout.others": others})
    day = 86_400 / run.algorithm.steps
    of_one, of_both = (expected_losses(each, day).mean for each in (run, mixed))
    assert (of_one, of_both) == (run.rollout.num_gpus, run.rollout.num_gpus + 4)


@pytest.mark.parametrize(
    ("system", "bandwidth", "name"),
    [
        ("stream-async", "0.1 Gbps", "link-saturated"),
        ("stream-sync", "1 Gbps", "sync-exposed"),
        ("disaggregated", "1 Gbps", "sync-exposed"),
    ],
)
def test_a_link_that_steps_wait_for_is_warned_of_and_its_fix_is_simulated(
    system: str, bandwidth: str, name: str
) -> None:
    changes: dict[str, Any] = {"policies.system": system, "cluster.links": link(bandwidth)}
    if name == "sync-exposed":
        changes |= {"workload.lengths.scale": 1.0, "rollout.max_tokens": 20000}
    finding = bad(doctor(changes).findings)[name]
    assert "% of a rehearsed step" in finding.text
    if finding.changes:
        run = changed(full_run(changes), finding.changes)
        assert name not in bad(check_up(run).findings)
    enough = {**changes, "cluster.links": link("100 Tbps")}
    assert name not in bad(doctor(enough).findings)


def link(bandwidth: str) -> list[dict[str, Any]]:
    return [{"between": ["far", "near"], "bandwidth": bandwidth}]


def test_what_does_not_fit_is_rehearsed_with_a_stand_in() -> None:
    run = full_run({"model.name": "deepseek-v3"})
    went = rehearsal.rehearse(run)
    assert went.is_stand_in and went.version == went.steps and not went.problem
    assert not rehearsal.rehearse(full_run()).is_stand_in


def test_the_stand_in_of_a_run_with_a_reward_model_is_rehearsed_without_it() -> None:
    rewards = [{"scorer": "exact"}, {"scorer": "reward-model", "model": "nowhere/rm"}]
    pools = {**FULL["cluster.pools"], "scores": {"gpu": "h20"}}
    run = full_run(
        {
            "model.name": "deepseek-v3",
            "cluster.pools": pools,
            "verifier": {"pool": "scores", "gpus_per_worker": 1, "reward": rewards},
        }
    )
    went = rehearsal.rehearse(run)
    assert went.is_stand_in and went.version == went.steps and not went.problem


def test_a_rehearsal_says_where_most_of_decoding_is_in_batches_far_from_full() -> None:
    def progress(**changes: Any) -> str:
        run = full_run({key.replace("__", "."): value for key, value in changes.items()})
        return next(f.text for f in check_up(run).findings if f.name == "progress")

    assert "far from full" in progress(rollout__max_running=512, algorithm__prompts_per_step=8)
    assert "far from full" not in progress(rollout__max_running=1)


def test_replicas_that_put_rollouts_off_are_warned_of_and_mended_only_where_they_do() -> None:
    crowded = {
        "workload.lengths.scale": 1.0,
        "rollout.max_tokens": 20000,
        "rollout.max_running": 64,
        "rollout.memory_utilization": 0.25,
        "algorithm.prompts_per_step": 100,
    }
    finding = bad(doctor(crowded).findings)["preempted"]
    assert (
        finding.level == "warning"
        and "a rollout is preempted 2.7 times on average, and its recomputation takes 9% of"
        in finding.text
    )
    assert finding.changes == {"policies.concurrency": "kv-pressure"}
    assert "preempted" not in bad(doctor({**crowded, **finding.changes}).findings)
    roomy = {**crowded, "rollout.max_running": 512, "rollout.memory_utilization": 0.9}
    found = check_up(full_run({**roomy, "algorithm.prompts_per_step": 300}))
    assert "preempted" not in bad(found.findings)


def test_a_rehearsal_gives_no_step_time_beside_that_of_a_simulation() -> None:
    for system in ("stream-async", "colocated", "disaggregated"):
        pool = {"rollout.pool": "near", "rollout.replicas": 4} if system == "colocated" else {}
        found = check_up(full_run({"policies.system": system, **pool}))
        assert found.metrics is not None
        seconds = format_duration(found.metrics.step_time)
        texts = [
            finding.text for finding in found.findings if finding.topic in ("link", "staleness")
        ]
        assert any("of a rehearsed step" in text for text in texts)
        assert not any(seconds in text for text in texts)


@pytest.mark.parametrize("system", ["stream-async", "colocated"])
def test_the_stand_in_has_every_trainer_and_no_pool_that_is_not_there(system: str) -> None:
    follower = {"name": "second", "pool": "aside", "algorithm": {"prompts_per_step": 500}}
    run = small_run(
        {
            "policies.system": system,
            "cluster.pools.aside": {"gpu": "h20"},
            "followers": [follower, {**follower, "name": "third", "algorithm": {}}],
            "verifier": {"pool": "aside", "gpus_per_worker": 1},
        }
    )
    went = rehearsal.perform(
        rehearsal.make_world(rehearsal.stand_in(rehearsal.shortened(run))), is_stand_in=True
    )
    assert went.version == went.steps and not went.problem
    assert went.trace.run.num_trainers == 3
