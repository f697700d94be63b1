"""Run files: quantities, overrides, and errors of one line that name the key and the value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from streamrl.runfile.errors import RunError
from streamrl.runfile.files import decode_run, encode_run, load_run, make_run
from streamrl.runfile.units import Bandwidth, Duration, Size, quantity_text
from streamrl.sim.costs.costs import Costs
from tests.measured_profile import model_directory
from tests.runs import make_table, small_run

EXAMPLE = Path(__file__).parent.parent / "examples" / "h20-h800.toml"


def link(**changes: object) -> dict[str, Any]:
    return {"cluster.links": [{"between": ["far", "near"], "bandwidth": "80 Gbps", **changes}]}


def error_of(changes: dict[str, Any]) -> str:
    """Return the one line that says what is wrong with a run file."""
    with pytest.raises(ValueError) as caught:
        Costs.load(make_run(make_table(changes)))
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"rollout.replica": 3}, ["rollout.replica is not a key", "did you mean replicas?"]),
        ({"cluster.pools.far.nodez": 1}, ["cluster.pools.far.nodez is not a key", "nodes?"]),
        ({"polices": {}}, ["polices is not a key", "policies?"]),
        ({"rollout.replicas": "many"}, ["rollout.replicas", "a whole number", "'many'"]),
        ({"algorithm.steps": 1.5}, ["algorithm.steps", "a whole number", "1.5"]),
        ({"cluster.pools.far.nodes": "two"}, ["cluster.pools.far.nodes", "'two'"]),
        ({"policies.system": "async"}, ["policies.system", "'async'", "stream-async"]),
        ({"rollout.replicas": 0}, ["rollout.replicas", "at least 1", "0"]),
        ({"execute.checkpoint_every": 0}, ["execute.checkpoint_every", "at least 1"]),
        ({"policies.max_staleness": -1}, ["policies.max_staleness", "-1"]),
        ({"seed": -1}, ["seed", "-1"]),
        ({"algorithm.learning_rate": -1e-6}, ["algorithm.learning_rate", "at least 0", "-1e-06"]),
        ({"algorithm.max_grad_norm": 0.0}, ["algorithm.max_grad_norm", "above 0", "0.0"]),
        ({"rollout.memory_utilization": 1.5}, ["rollout.memory_utilization", "1.5"]),
        (link(bandwidth=80), ["cluster.links.0.bandwidth", "80 needs a unit", "'80 Gbps'"]),
        (link(bandwidth="80"), ["cluster.links.0.bandwidth", "'80' needs a unit"]),
        (link(bandwidth="80 Gb"), ["cluster.links.0.bandwidth", "'80 Gb'"]),
        (link(bandwidth="0 Gbps"), ["cluster.links.0.bandwidth", "above 0"]),
        (link(latency=3), ["cluster.links.0.latency", "3 needs a unit"]),
        (link(latency="-3 ms"), ["cluster.links.0.latency", "'-3 ms' is below 0"]),
        (link(between=["far", "far"]), ["cluster.links.0.between", "two pools, got 'far' twice"]),
        (link(between=["far", "moon"]), ["cluster.links.0.between", "'moon'"]),
        ({"cluster.links": []}, ["cluster.links", "'far'", "'near'"]),
        (
            {"cluster.links": [{"between": ["far", "near"]}]},
            ["cluster.links.0.bandwidth is missing"],
        ),
        ({"rollout.pool": "moon"}, ["rollout.pool 'moon'", "'far'"]),
        ({"rollout.tensor_parallel": 3}, ["rollout.tensor_parallel", "8 GPUs", "got 3"]),
        ({"rollout.replicas": 9}, ["'far' has 8 GPUs", "rollout.replicas=9", "need 9"]),
        ({"trainer.data_parallel": 3}, ["'near' has 8 GPUs", "data_parallel=3", "need 12"]),
        ({"trainer.pool": "far", "rollout.replicas": 5}, ["'far' has 8 GPUs", "need 9"]),
        ({"model": {}}, ["model", "name", "path"]),
        ({"model.name": "qwen2.5-8b"}, ["model.name", "'qwen2.5-8b'", "qwen2.5-7b"]),
        ({"cluster.pools.far.gpu": "h21"}, ["cluster.pools.far.gpu", "'h21'", "h20"]),
        ({"cluster.pools.far.gpu": "../models/qwen2.5-7b"}, ["cluster.pools.far.gpu", "h20"]),
        ({"workload.lengths.source": "codemath"}, ["workload.lengths.source", "streamrl-codemath"]),
        ({"model": {"path": "/nowhere"}}, ["model.path", "/nowhere/config.json"]),
        ({"algorithm.group_size": 1}, ["algorithm.group_size", "grpo", "got 1"]),
        ({"workload.lengths.prompt_tokens": 3000}, ["workload.lengths.prompt_tokens", "3000"]),
        ({"workload.lengths.scale": 0}, ["workload.lengths.scale", "above 0"]),
    ],
)
def test_a_wrong_run_file_is_refused_with_one_line_that_names_key_and_value(
    changes: dict[str, Any], parts: list[str]
) -> None:
    message = error_of(changes)
    assert [part for part in parts if part not in message] == []


def test_a_model_that_does_not_fit_a_replica_is_refused_with_the_numbers() -> None:
    message = error_of({"model.name": "qwen2.5-72b"})
    for part in ("rollout.tensor_parallel=1", "145.4 GB", "91.9 GB", "2304 tokens"):
        assert part in message


def test_a_model_that_does_not_fit_the_trainer_is_refused_with_the_numbers() -> None:
    message = error_of({"model.name": "qwen2.5-72b", "rollout.tensor_parallel": 4})
    for part in ("trainer", "332.3 GB", "tensor_parallel=4", "80 GB"):
        assert part in message


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "no such run file"), ("seed = ", "not a TOML file"), ("seed = 1", "is missing")],
)
def test_a_file_that_is_no_run_file_is_refused(
    tmp_path: Path, text: str | None, message: str
) -> None:
    path = tmp_path / "run.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_run(path)


# Overrides ----------------------------------------------------------------------------------------


def test_set_reads_numbers_strings_tables_and_entries_of_lists() -> None:
    run = load_run(
        EXAMPLE,
        [
            "rollout.replicas=8",
            "rollout.memory_utilization = 0.5",
            "policies.order=fifo",
            'policies.system="stream-sync"',
            "cluster.links.0.latency=20 ms",
            "cluster.pools.h20.nodes=1",
            "execute.checkpoint_every=7",
        ],
    )
    assert (run.rollout.replicas, run.rollout.memory_utilization) == (8, 0.5)
    assert (run.policies.order, run.policies.system) == ("fifo", "stream-sync")
    assert run.cluster.links[0].latency == pytest.approx(0.02)
    assert run.cluster.pools["h20"].num_gpus == 8
    assert run.execute.checkpoint_every == 7


def test_a_path_that_is_set_takes_the_place_of_the_name_of_a_model(tmp_path: Path) -> None:
    model_directory(tmp_path / "own")
    run = load_run(EXAMPLE, [f"model.path={tmp_path / 'own'}"])
    assert (run.model.name, run.model.path) == (None, str(tmp_path / "own"))
    again = load_run(EXAMPLE, [f"model.path={tmp_path / 'own'}", "model.name=qwen2.5-7b"])
    assert (again.model.name, again.model.path) == ("qwen2.5-7b", None)


def test_set_reaches_the_entry_of_a_list_that_it_names(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        EXAMPLE.read_text()
        + '[cluster.pools.spare]\ngpu = "h20"\n'
        + '[[cluster.links]]\nbetween = ["h20", "spare"]\nbandwidth = "1 Gbps"\n'
    )
    run = load_run(path, ["cluster.links.1.latency=5 ms"])
    assert [link.latency for link in run.cluster.links] == pytest.approx([0.01, 0.005])


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("rollout.replicas", "'rollout.replicas' must read key=value"),
        ("=3", "'=3' must read key=value"),
        ("rollout.=3", "'rollout.=3' must read key=value"),
        ("rollout.replicas=eight", "'eight'"),
        ("rollout.replicas.x=3", "rollout.replicas: 32 is not a table"),
        ("cluster.links.3.latency=1 s", "no entry '3' in a list of 1"),
        ("cluster.links.first.latency=1 s", "no entry 'first'"),
        ("cluster.links.0=3", "cluster.links.0 must be a table, got 3"),
        ("nothing.at.all=1", "nothing is not a key"),
    ],
)
def test_a_bad_set_is_refused_with_one_line(override: str, part: str) -> None:
    with pytest.raises(ValueError) as caught:
        load_run(EXAMPLE, [override])
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_paths_start_where_the_run_file_is() -> None:
    table = make_table({"workload.lengths.source": "lengths.csv", "model": {"path": "weights"}})
    run = make_run(table, Path("/somewhere"))
    assert run.workload.lengths is not None
    assert run.workload.lengths.source == "/somewhere/lengths.csv"
    assert run.model.path == "/somewhere/weights"
    assert run.execute.output == "/somewhere/runs/run"


# Quantities ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (Bandwidth, "80 Gbps", 1e10),
        (Bandwidth, "400 GB/s", 4e11),
        (Bandwidth, "1.5 TB/s", 1.5e12),
        (Bandwidth, "1 GiB/s", 2**30),
        (Bandwidth, "100Mbps", 1.25e7),
        (Size, "96 GB", 9.6e10),
        (Size, "80 GiB", 80 * 2**30),
        (Duration, "20 ms", 0.02),
        (Duration, "1.5 s", 1.5),
        (Duration, "2 min", 120.0),
        (Duration, "250us", 250e-6),
    ],
)
def test_a_quantity_is_read_into_base_units(kind: Any, text: str, value: float) -> None:
    assert kind.parse(text) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Bandwidth, 80),
        (Bandwidth, "80"),
        (Bandwidth, "80 GB"),
        (Bandwidth, "80 Xbps"),
        (Bandwidth, "-8 Gbps"),
        (Bandwidth, "1e308 TB/s"),
        (Size, "1e999 B"),
        (Duration, "1e308 h"),
        (Size, "96"),
        (Size, "96 Gb"),
        (Duration, 2),
        (Duration, "2"),
        (Duration, "2 months"),
    ],
)
def test_a_quantity_without_its_unit_is_refused(kind: Any, text: object) -> None:
    with pytest.raises(ValueError, match=str(text)):
        kind.parse(text)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Bandwidth(1.25e9), "10 Gbps"),
        (Bandwidth(3.125e8), "2.5 Gbps"),
        (Bandwidth(4e11), "3200 Gbps"),
        (Bandwidth(1.25e7), "100 Mbps"),
        (Bandwidth(1e8 / 3), "33333333.333333332 B/s"),
        (Duration(345_600.0), "4 days"),
        (Duration(86_400.0), "1 day"),
        (Duration(129_600.0), "36 h"),
        (Duration(5400.0), "90 min"),
        (Duration(90.0), "90 s"),
        (Duration(12_345_678.0), "12345678 s"),
        (Duration(1.5), "1.5 s"),
        (Duration(0.0), "0 s"),
        (Duration(0.02), "20 ms"),
        (Duration(250e-6), "250 us"),
        (Duration(3600.1234567), "3600.1234567 s"),
        (Size(2e12), "2 TB"),
        (Size(80 * 2.0**30), "80 GiB"),
        (Size(12_345_678_901.0), "12345678901 B"),
    ],
)
def test_a_quantity_is_written_as_people_do_and_reads_back_the_same(value: Any, text: str) -> None:
    assert quantity_text(value) == text
    assert type(value).parse(text) == value


@given(st.floats(0, 1e15, allow_subnormal=False), st.sampled_from([Bandwidth, Duration, Size]))
def test_any_quantity_reads_back_the_same(number: float, kind: Any) -> None:
    for value in (kind(number), kind(round(number)), kind(round(number, 3))):
        assert kind.parse(quantity_text(value)) == value


def test_an_encoded_run_decodes_to_itself() -> None:
    for run in (load_run(EXAMPLE), small_run({"verifier.time": "30 ms"})):
        assert decode_run(encode_run(run)) == run
        assert encode_run(decode_run(encode_run(run))) == encode_run(run)


@pytest.mark.parametrize(
    "key",
    [
        "execute.patience",
        "execute.save_tokens_every",
        "execute.deadline",
        "policies.max_step_time",
        "verifier.time_limit",
    ],
)
def test_no_process_waits_longer_than_the_kernel_can(key: str) -> None:
    with pytest.raises(RunError, match=rf"^{key} must be in \(0 s, .*\], got"):
        small_run({key: "1e12 s"})


def test_no_judge_is_waited_for_longer_than_the_kernel_can() -> None:
    judge = {"scorer": "judge", "model": "m", "endpoint": "http://h/v1", "request_time": "1e12 s"}
    with pytest.raises(RunError, match=r"request_time must be in \(0, .*\], got"):
        small_run({"verifier.reward": [judge]})
