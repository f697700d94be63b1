"""What a total rests on that the run file does not set is named next to it, in JSON, on the terminal and in the report."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from streamrl.record.assumed import assumed_of, assumed_of_failures, assumed_of_hardware
from streamrl.record.metrics import measure
from streamrl.report.page.page import make_page, read_report, render_html
from streamrl.runfile.files import write_run
from streamrl.sim.planner.first_answer import Question, assumptions_of
from streamrl.sim.world import simulate
from tests.command_line import streamrl
from tests.runs import small_run

LINK = {"between": ["far", "near"], "bandwidth": "80 Gbps", "latency": "10 ms"}


def keys_of(changes: dict[str, Any], paid: tuple[str, ...] = ("far", "near")) -> list[str]:
    run = small_run(changes)
    return [
        each.key for each in assumed_of(run.cluster, run.workload.lengths, dict.fromkeys(paid, 8.0))
    ]


def test_prices_of_profiles_are_assumed_and_those_of_the_run_file_are_not() -> None:
    both = ["cluster.pools.far.price", "cluster.pools.near.price"]
    assert keys_of({})[:2] == both
    assert keys_of({"cluster.pools.far.price": 1.0})[0] == both[1]
    assert both[1] not in keys_of({}, ("far",))


def test_a_link_without_latency_and_lengths_of_a_profile_are_assumed(tmp_path: Path) -> None:
    assert "cluster.links.0.latency" not in keys_of({"cluster.links": [LINK]})
    assert "cluster.links.0.latency" in keys_of({"cluster.links": [{**LINK, "latency": "0 ms"}]})
    own = tmp_path / "own.csv"
    own.write_text("output_tokens\n5\n")
    lengths = {"workload.lengths": {"kind": "empirical", "source": str(own)}}
    assert "workload.lengths.source" in keys_of({})
    assert "workload.lengths.source" not in keys_of(lengths)


def test_a_total_names_what_it_rests_on_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    write_run(small_run({"simulate.max_steps": 12}), tmp_path / "run.toml")
    shown = streamrl("simulate", tmp_path / "run.toml", "-o", tmp_path / "run").stdout
    data = json.loads(streamrl("simulate", tmp_path / "run.toml", "--json").stdout)
    assumed = [each["text"] for each in data["whole_run"]["assumed"]]
    assert "$1.85 per GPU-hour of far" in assumed
    page = re.sub("<[^>]*>", "", render_html(make_page(read_report([tmp_path / "run"]))))
    html = page.replace("\xa0", " ")
    assert data["whole_run"]["uncounted"][0] == "set-up" and data["model_error"]["datasheet_share"]
    share = (
        f"{data['model_error']['datasheet_share'] * 100:.0f} % of the seconds are from datasheets"
    )
    for text in (*assumed, "not counted", share):
        assert text in shown and text in html


def test_a_first_answer_names_prices_of_profiles() -> None:
    told = "\n".join(assumptions_of(Question(model="qwen3-8b", gpus="8xH100@2.20,8xH20"), set()))
    assert "h20 costs $1.85 per GPU-hour, by its profile" in told and "h100 costs" not in told


def hardware_of(changes: dict[str, Any], num_gpus: float) -> dict[str, str]:
    found = assumed_of_hardware(small_run(changes).cluster, {"far": num_gpus})
    return {each.key: each.text for each in found}


def test_a_network_between_nodes_is_assumed_if_the_run_crosses_it() -> None:
    key, nodes = "cluster.pools.far.node_bandwidth", {"cluster.pools.far.nodes": 2}
    assert hardware_of(nodes, 16.0) == {key: "1,600 Gbps between nodes of far"}
    assert hardware_of(nodes, 8.0) == {}
    assert hardware_of({**nodes, key: "100 Gbps"}, 16.0) == {}
    assert hardware_of({**nodes, "cluster.pools.far.nvlink_domain": 16}, 16.0) == {}


def test_kernels_of_a_gpu_without_tables_are_assumed() -> None:
    found = hardware_of({"cluster.pools.far.gpu": "mi300x"}, 8.0)
    text = "kernels of far as on measured GPUs, in proportion to datasheets"
    assert found == {"cluster.pools.far.gpu": text}


def test_simulate_and_diagnose_name_an_assumed_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    key, text = "cluster.pools.far.node_bandwidth", "1,600 Gbps between nodes of far"
    changes = {"cluster.pools.far.nodes": 2, "rollout.replicas": 2, "rollout.tensor_parallel": 8}
    run = small_run({**changes, "simulate.max_steps": 8})
    write_run(run, tmp_path / "run.toml")
    for command in (
        ("simulate", tmp_path / "run.toml"),
        ("diagnose", "--run", tmp_path / "run.toml", "--stage", "step=300"),
    ):
        shown, data = (streamrl(*command, *more).stdout for more in ((), ("--json",)))
        assert text in shown and key in shown
        assert key in data and text in data
        stated = streamrl(*command, "--set", f"{key}=400 Gbps").stdout
        assert text not in stated and key not in stated


def test_a_first_answer_names_networks_of_profiles_and_takes_others() -> None:
    def told(gpus: str) -> str:
        return "\n".join(assumptions_of(Question(model="qwen3-8b", gpus=gpus), set()))

    text = "nodes of h20 have 1,600 Gbps to each other"
    assert text in told("16xH20@1.10") and "'with 1600 Gbps'" in told("16xH20@1.10")
    assert text not in told("8xH20@1.10")
    assert "to each other" not in told("16xH20@1.10/1 with 400Gbps") + told("8xGB200@4.0")
    assert "nodes of b200 have 3,200 Gbps" in told("16xB200@5.0,16xH20@1.10 with 100 Gbps")


@pytest.mark.parametrize(
    ("replica", "trainer", "keys"),
    [
        (0.0, None, ["rollout.start_time"]),
        (0.0, 0.0, ["rollout.start_time", "trainer.start_time"]),
        (60.0, 0.0, ["trainer.start_time"]),
        (60.0, 90.0, []),
    ],
)
def test_a_worker_that_is_replaced_at_once_is_assumed(
    replica: float, trainer: float | None, keys: list[str]
) -> None:
    assert [each.key for each in assumed_of_failures(replica, trainer)] == keys


def test_a_simulation_with_failures_names_what_it_assumes_of_them() -> None:
    for changes, is_assumed in (({}, False), ({"failures.per_gpu_day": 1.0}, True)):
        trace = simulate(small_run({**changes, "policies.max_restarts": 1000}))
        whole = measure(trace).whole_run
        assert whole is not None
        keys = [each.key for each in whole.assumed]
        assert ("rollout.start_time" in keys) == is_assumed
