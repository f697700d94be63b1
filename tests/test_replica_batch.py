"""What limits a replica's batch: one answer for the doctor and for what a plan says that binds."""

from __future__ import annotations

import pytest

from streamrl.doctor.diagnosis import diagnose
from streamrl.hardware.memory import kv_capacity
from streamrl.hardware.resolved import resolve
from streamrl.workload.replica_batch import (
    ReplicaBatch,
    mean_lengths,
    replica_batch,
    rollouts_under_way,
)
from tests.patients import full_run


def test_the_least_of_memory_max_running_and_the_share_limits_a_batch() -> None:
    assert ReplicaBatch(held=221.5, max_running=256, share=300).limit == "memory"
    assert ReplicaBatch(held=371.0, max_running=256, share=300).limit == "max_running"
    assert ReplicaBatch(held=371.0, max_running=256, share=256).limit == "share"
    assert ReplicaBatch(held=128.0, max_running=256, share=128).limit == "share"


def test_memory_holds_rollouts_as_long_as_running_ones_are_on_average() -> None:
    run = full_run()
    lengths, batch = mean_lengths(run), replica_batch(resolve(run))
    assert lengths is not None and batch is not None
    assert batch.held == pytest.approx(kv_capacity(resolve(run).replica) / lengths.context)
    assert lengths.prompt < lengths.context < lengths.total


def test_of_whole_batches_that_follow_each_other_one_is_generated() -> None:
    one = full_run().algorithm.rollouts_per_step
    for system, batches in (("stream-async", 2), ("one-step-async", 1), ("stream-sync", 1)):
        run = full_run({"policies.system": system})
        assert rollouts_under_way(run.policies, run.algorithm) == batches * one


def test_reserved_memory_limits_a_batch_and_is_not_told_twice() -> None:
    reserving = {
        "rollout.admission": "reserve",
        "rollout.max_tokens": 20000,
        "rollout.max_running": 256,
    }
    batch = replica_batch(resolve(full_run({**reserving, "algorithm.prompts_per_step": 300})))
    assert batch is not None and batch.held < batch.share
    assert "batch-limit" not in {f.name for f in diagnose(full_run(reserving))}
