"""What the doctor makes of run files that `load_run` refuses: fixes come from the data of errors."""

from __future__ import annotations

from typing import Any

import pytest

from streamrl.cli.doctor import examine
from streamrl.doctor.invalid_keys import fix_contradictions, fix_profile_names, read_leniently
from streamrl.runfile.checks import check_run
from streamrl.runfile.files import convert_run
from streamrl.runfile.findings import toml
from streamrl.runfile.keys import override, read_value
from tests.patients import NOWHERE, bad, doctor, full_table


def fixes_of(changes: dict[str, Any]) -> list[str]:
    """Return the fixes of a run file, after which it is one."""
    reading = read_leniently(full_table(changes), NOWHERE.parent)
    assert reading.run is not None
    consistency = fix_contradictions(reading.run)
    assert consistency.run is not None
    check_run(consistency.run)
    return [finding.fix for finding in [*reading.findings, *consistency.findings]]


@pytest.mark.parametrize(
    ("changes", "fixes"),
    [
        # keys and types
        ({"rollout.replicas": "2"}, ["set rollout.replicas=2"]),
        ({"rollout.replicas": 2.2}, ["set rollout.replicas=2"]),
        (
            {"rollout.replicas": float("nan")},
            ["set rollout.replicas=1, or the value that you need"],
        ),
        ({"policies.max_replicas": 2.5}, ["set policies.max_replicas=2"]),
        ({"policies.learns_from_siblings": "no"}, ["set policies.learns_from_siblings=false"]),
        ({"workload.lengths.kind": "histogramm"}, ["set workload.lengths.kind=histogram"]),
        ({"algorithm.correction": "tis"}, ["set algorithm.correction=token-tis"]),
        ({"algorithm.correction": "seq_tis"}, ["set algorithm.correction=seq-tis"]),
        (
            {"algorithm.clip": 0.1, "algorithm.clip_high": 0.28},
            ["set algorithm.correction=decoupled"],
        ),
        (
            {"algorithm.clip": 0.1, "algorithm.correction": "m2po"},
            ["remove algorithm.clip"],
        ),
        (
            {"algorithm.name": "grop", "algorithm.beta": 0.2},
            ["set algorithm.name=grpo", "remove algorithm.beta"],
        ),
        ({"rollout.pool": "dc1.far"}, ["set rollout.pool=far"]),
        ({"rollout.start_time": 3}, ['set rollout.start_time="3 ms"']),
        ({"plan": {"micro_batch": 4}}, ["set plan.micro_batch=[4]"]),
        ({"plan": {"zero": [1, 4]}}, ["set plan.zero.1=0"]),
        ({"trainer.max_staleness": 1}, ["rename trainer.max_staleness to policies.max_staleness"]),
        (
            {"rollout": 3},
            [
                'set rollout={pool = "far", replicas = 1, max_tokens = 4096}, or the value that you need'
            ],
        ),
        # bounds
        ({"workload.lengths.scale": 0}, ["set workload.lengths.scale=1.0"]),
        ({"rollout.memory_utilization": 1.5}, ["set rollout.memory_utilization=1"]),
        ({"trainer.max_tokens_per_pass": 0}, ["set trainer.max_tokens_per_pass=16384"]),
        ({"seed": -1, "policies.tail_every": 1}, ["set seed=0", "set policies.tail_every=3"]),
        # contradictions
        (
            {"trainer.pipeline_parallel": 8, "trainer.tensor_parallel": 1},
            ["set trainer.pipeline_parallel=4"],
        ),
        ({"trainer.expert_parallel": 3}, ["set trainer.expert_parallel=4"]),
        (
            {
                "policies.tail_batching": "defer",
                "workload.lengths.ranker": "oracle",
                "algorithm.steps": 100,
            },
            ["set algorithm.steps=99"],
        ),
        ({"policies.tail_batching": "defer"}, ["set policies.tail_batching=none"]),
        ({"plan": {"rollout_pools": ["far", "moon"]}}, ['set plan.rollout_pools=["far", "near"]']),
        ({"plan": {"max_staleness": [1, -1]}}, ["set plan.max_staleness=[1]"]),
        ({"plan": {"systems": []}}, ["remove plan.systems"]),
        ({"model": {"name": "qwen2.5-7b", "path": "x"}}, ["remove model.name"]),
        ({"model": {}}, ["set model.name=qwen2.5-7b"]),
        ({"algorithm.group_size": 10**12}, ["set algorithm.group_size=16384"]),
        ({"algorithm.prompts_per_step": 10**12}, ["set algorithm.prompts_per_step=5000000"]),
        ({"cluster.pools.far.nodes": 10**12}, ["set cluster.pools.far.nodes=50000"]),
        ({"workload.lengths.ranker": "scores"}, ["set workload.lengths.ranker=none"]),
        ({"workload.lengths.ranker": "history"}, ["set workload.lengths.ranker=none"]),
        ({"execute.output": "x" * 300}, ["set execute.output=runs/run"]),
        ({"costs.profile": "a\0b"}, ["remove costs.profile"]),
        ({"execute.device": "gpu"}, ["set execute.device=auto"]),
        ({"execute.device": "cuda0"}, ["set execute.device=cuda"]),
        ({"verifier.scorer": "exactly"}, ["set verifier.scorer=exact"]),
        (
            {"cluster.links": []},
            [
                'set cluster.links=[{between = ["far", "near"], bandwidth = "10 Gbps", '
                'latency = "0 s", transport = "tcp", price_per_gb = 0.0}]'
            ],
        ),
    ],
    ids=str,
)
def test_a_wrong_run_file_gets_one_fix_for_each_error(
    changes: dict[str, Any], fixes: list[str]
) -> None:
    assert fixes_of(changes) == fixes


def test_what_cannot_be_mended_is_told_with_all_that_is_wrong_beside_it() -> None:
    table = {"rollout": {"replicas": "2"}, "trainer": {"pool": "near"}, "sync": {"modus": "full"}}
    reading = read_leniently(table, NOWHERE.parent)
    assert reading.run is None
    texts = [finding.text for finding in reading.findings]
    assert [text for text in texts if text.startswith("cluster is missing")]
    assert [text for text in texts if text.startswith("sync.modus is not a key")]
    assert table["rollout"] == {"replicas": "2"}, "the table that was read stays as it is"


def test_a_link_of_pools_that_are_not_there_is_left_out() -> None:
    table = full_table({"rollout.pool": "only", "trainer.pool": "only"})
    table["cluster"]["pools"] = {"only": {"gpu": "h800"}}
    reading = read_leniently(table, NOWHERE.parent)
    assert reading.run is not None and not reading.findings
    consistency = fix_contradictions(reading.run)
    assert [finding.fix for finding in consistency.findings] == ["set cluster.links=[]"]


def test_a_name_like_no_other_is_mended_with_a_usual_one() -> None:
    run = convert_run(full_table({"model.name": "xyzzy", "cluster.pools.far.gpu": "wse"}))
    fixes = [finding.fix for finding in fix_profile_names(run).findings]
    assert fixes == ["set cluster.pools.far.gpu=h800", "set model.name=qwen2.5-7b"]


def test_what_only_a_simulation_refuses_is_found() -> None:
    found = bad(doctor({"costs.backend": "foo"}).findings)["refused"]
    assert "costs.backend: nothing of 'foo' was measured on h20" in found.text
    assert "refused" not in bad(doctor({"model.name": "deepseek-v3"}).findings)


def test_a_pool_with_a_dot_in_its_name_is_mended() -> None:
    table = full_table({"rollout.pool": "dc1.far"})
    table["cluster"]["pools"]["dc1.far"] = {"gpu": "h20", "nodes": "2"}
    table["cluster"]["links"][0]["between"] = ["dc1.far", "near"]
    reading = read_leniently(table, NOWHERE.parent)
    assert [finding.fix for finding in reading.findings] == ['set cluster.pools."dc1.far".nodes=2']
    override(table, 'cluster.pools."dc1.far".nodes=2')
    assert reading.run == convert_run(table, NOWHERE.parent)


def test_an_idle_pool_with_a_dot_in_its_name_is_given_back() -> None:
    table = full_table({})
    table["cluster"]["pools"]["dc1.spare"] = {"gpu": "h20"}
    finding = bad(examine(table, NOWHERE).findings)["pool-dc1.spare"]
    assert finding.fix.startswith('remove cluster.pools."dc1.spare"')


@pytest.mark.parametrize(
    "value",
    [
        *(1, -1, 0.5, 1e-30, 1e300, float("inf"), True, "word", "two words", "1", "true", "1e3"),
        *("2024-01-01", "", "a\nb", 'quoted "x"', "ä", ["a", 1.5], [], {"a b": ["x"], "c": 1}),
    ],
    ids=str,
)
def test_a_value_is_written_as_set_reads_it(value: object) -> None:
    assert read_value(toml(value)) == value
