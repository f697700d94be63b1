"""Whether the doctor tells that narrow weights make a replica slower."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from streamrl.runfile.config import Run
from streamrl.runfile.findings import changed
from streamrl.sim.checkup.checkup import check_up, examine, find_slow_format
from tests.patients import bad
from tests.runs import small_run


def many_small_experts(**rollout: Any) -> Run:
    """Return Qwen3-30B-A3B on four H20, whose experts of 768 channels are split four ways."""
    own = {"pool": "far", "replicas": 1, "tensor_parallel": 4, "max_tokens": 4096, **rollout}
    return small_run(
        {
            "model.name": "qwen3-30b-a3b",
            "cluster.pools.near.nodes": 4,
            "trainer": {"pool": "near", "data_parallel": 4, "tensor_parallel": 8},
            "rollout": own,
            "workload.lengths.scale": 0.2,
        }
    )


def test_weights_in_fp8_that_decode_slower_are_told_with_both_seconds_and_mended() -> None:
    run = many_small_experts(dtype="fp8")
    (finding,) = find_slow_format(run)
    assert finding.name == "slow-format" and finding.level == "warning"
    assert "with weights in fp8, and" in finding.text and "in bfloat16" in finding.text
    assert finding.text.count(" ms") == 2
    treated = bad(examine(run))["slow-format"]
    assert treated.changes == {"rollout.weight_only": True}
    assert "slow-format" not in bad(check_up(changed(run, treated.changes)).findings)


def test_weights_that_decode_faster_are_no_finding() -> None:
    run = many_small_experts()
    crowd = {"rollout.max_running": 64, "algorithm.prompts_per_step": 128}
    dense = small_run({"model.name": "qwen2.5-14b", "rollout.dtype": "fp8", **crowd})
    weights_alone = replace(run, rollout=replace(run.rollout, dtype="fp8", weight_only=True))
    for each in (run, dense, weights_alone):
        assert not list(find_slow_format(each))
