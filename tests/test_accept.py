"""`streamrl profile accept`: what it measures on this machine, and how the plan changes with it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from streamrl.cli.profile_accept import _decide, _Predicted, listen
from streamrl.executor.profiling import peer_link
from streamrl.executor.profiling.node_benchmarks import find_node, measure_points
from streamrl.executor.profiling.peer_link import measure_link
from streamrl.hardware.node_readings import LinkReading, NodePoint, NodeReading
from streamrl.hardware.operator_tables import read_table
from streamrl.hardware.profiles import PROFILES, load_gpu
from streamrl.hardware.resolved import resolve
from streamrl.record.band import Band
from streamrl.runfile.config import Run
from streamrl.runfile.files import load_run, make_run, write_run
from streamrl.runfile.plan_config import PlanConfig
from streamrl.runfile.units import Duration
from streamrl.sim.acceptance.outlook import find_outlook
from streamrl.sim.acceptance.points import (
    compare_link,
    compare_points,
    expected_time,
    link_of,
    points_of,
)
from streamrl.sim.acceptance.result import Acceptance, Outlook
from streamrl.sim.acceptance.scaled_profiles import write_scaled
from streamrl.sim.costs.kernels import peak_of, surface_of
from tests.command_line import streamrl
from tests.runs import small_run
from tests.tiny_model import tiny_model
from tests.verifying import wait_until_gone


def product(rows: float, dtype: str = "bfloat16") -> NodePoint:
    return NodePoint(kind="gemm", dtype=dtype, size=rows, shape={"n": 4096.0, "k": 4096.0})


def reading(point: NodePoint, gpu: str, slowdown: float) -> NodeReading:
    return NodeReading(point=point, seconds=[expected_time(point, gpu) * slowdown])


def cpu_run(model: Path) -> Run:
    """Return a plan that one core generates and trains in turn."""
    return make_run(
        {
            "model": {"path": str(model), "dtype": "float32"},
            "cluster": {"pools": {"cores": {"gpu": "cpu", "gpus_per_node": 1}}},
            "rollout": {"pool": "cores", "replicas": 1, "max_running": 4, "max_tokens": 64},
            "trainer": {"pool": "cores", "micro_batch": 1},
            "algorithm": {"steps": 3, "prompts_per_step": 2, "group_size": 2},
            "workload": {
                "lengths": {
                    "kind": "histogram",
                    "source": "streamrl-codemath-20k",
                    "scale": 0.003,
                    "prompt_tokens": 16,
                }
            },
            "policies": {"system": "colocated"},
        }
    )


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    tiny_model(64, eos_token_id=1).save_pretrained(folder / "model")
    write_run(cpu_run(folder / "model"), folder / "plan.toml")
    return folder


# Measurements -------------------------------------------------------------------------------------


def test_every_point_of_a_plan_is_measured_on_this_machine(plan: Path) -> None:
    resolved = resolve(cpu_run(plan / "model"))
    points = points_of(resolved, "cpu", 2)
    found = measure_points(points, 2, lambda: False, lambda what: None)
    assert [each.point for each in found] == points
    kinds = {"gemm", "prefill_attention", "memory_copy", "all_reduce", "all_gather"}
    assert {each.point.kind for each in found} == kinds
    assert all(0 < seconds < 5 for each in found for seconds in each.seconds)
    products = [each.slowest for each in found if each.point.kind == "gemm"]
    assert products[0] < products[-1]  # 4 rows and 256


def test_no_point_begins_after_the_time_is_over(plan: Path) -> None:
    points, told = points_of(resolve(cpu_run(plan / "model")), "cpu", 2), []
    found = measure_points(points, 2, lambda: len(told) == 1, told.append)
    assert len(found) == len(told) == 1


def test_both_ends_of_a_link_report_the_same_rate() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    script = (
        "from streamrl.executor.profiling.peer_link import measure_link as m; import msgspec, sys;"
        f"sys.stdout.buffer.write(msgspec.json.encode(m('127.0.0.1', {port}, listens=True, backend=None, patience=60)))"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as other:
        ours = measure_link("127.0.0.1", port, listens=False, backend="gloo", patience=60)
        theirs = msgspec.json.decode(other.communicate(timeout=60)[0], type=LinkReading)
    assert ours == theirs
    assert ours.backend == "gloo" and ours.bandwidth > 1e6 and 0 < ours.latency < 0.1


def test_a_listener_is_reached_at_its_address_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    script = f"from streamrl.cli.profile_accept import listen; listen({port}, minutes=1)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as other:
        assert {each.laddr.ip for each in listeners(other)} == {"127.0.0.1"}
        measure_link("127.0.0.1", port, listens=False, backend="gloo", patience=60)
        other.communicate(timeout=60)


def listeners(of: subprocess.Popen[bytes]) -> list[Any]:
    """Wait until a process listens, or one that it has started; return these sockets."""
    own, found = psutil.Process(of.pid), []
    while not found and of.poll() is None:
        time.sleep(0.05)  # a look takes CPU time, which the other needs to start
        with suppress(psutil.NoSuchProcess):
            every = [each.net_connections() for each in (own, *own.children())]
            found = [each for some in every for each in some if each.status == psutil.CONN_LISTEN]
    return found


def test_a_signal_ends_the_wait_for_a_peer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [sys.executable, "-c", "from streamrl.cli import main; main()", "profile", "listen"]
    with subprocess.Popen([*words, str(port)], stderr=subprocess.PIPE) as other:
        assert listeners(other)
        (child,) = psutil.Process(other.pid).children()
        other.send_signal(signal.SIGTERM)
        other.communicate(timeout=60)
        assert other.returncode == 128 + signal.SIGTERM
        wait_until_gone([child.pid], 10.0)


def test_a_peer_that_says_nothing_is_left_when_the_time_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_link, "MEASURE_TIME", 4.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(RuntimeError, match=f"127.0.0.1:{port}: the peer [^\n]+$"):
            measure_link("127.0.0.1", port, listens=False, backend="gloo", patience=1)


@pytest.mark.parametrize("port", [0, 99999])
def test_a_port_out_of_range_is_refused(port: int) -> None:
    with pytest.raises(ValueError, match=f"PORT must be from 1 to 65535, got {port}"):
        listen(port)


def test_a_peer_that_does_not_answer_is_one_line() -> None:
    with pytest.raises(RuntimeError, match=r"127.0.0.1:1: the peer did not answer: [^\n]+$"):
        measure_link("127.0.0.1", 1, listens=False, backend="gloo", patience=1)


@pytest.mark.parametrize("host", ["", "nowhere.invalid", "192.0.2.1"])
def test_an_address_that_is_not_this_machines_is_refused_at_once(host: str) -> None:
    with pytest.raises(ValueError, match=f"--host {host} PORT 29517: cannot listen there: "):
        listen(29517, host)


def test_a_port_that_is_taken_is_refused_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"PORT {port}: cannot listen there: Address already"):
            listen(port, "127.0.0.1")


# Expectations -------------------------------------------------------------------------------------


def test_points_have_the_formats_and_products_of_the_sides_on_this_gpu() -> None:
    resolved = resolve(small_run({"rollout.dtype": "fp8"}))
    of_replicas, of_trainer = (points_of(resolved, gpu, 8) for gpu in ("h20", "h800"))
    assert {each.dtype for each in of_replicas if each.kind == "gemm"} == {"fp8"}
    assert {each.dtype for each in of_trainer if each.kind == "gemm"} == {"bfloat16"}
    assert {each.shape["n"] for each in of_trainer if each.kind == "gemm"} == {18944 / 4}
    assert {each.shape["gpus"] for each in of_trainer if each.kind == "all_reduce"} == {8.0}


def test_a_fast_copy_changes_nothing_where_constants_were_fitted_with_the_datasheet_share() -> None:
    copy = NodePoint(kind="memory_copy", dtype="float32", size=2.0**30)
    fast, slow = (reading(copy, "h100", ratio) for ratio in (0.9, 1.2))
    found = compare_points([fast, slow, reading(copy, "cpu", 0.9)], "h100")
    assert [row.changes for row in found[:2]] == ["", "memory_bandwidth"]
    assert found[1].slowdown == pytest.approx(1.2)
    (on_cpu,) = compare_points([reading(copy, "cpu", 0.9)], "cpu")
    assert on_cpu.changes == "memory_bandwidth"


def test_the_slowest_gpu_counts_and_is_named() -> None:
    expected = expected_time(product(1024), "h100")
    gpus = NodeReading(point=product(1024), seconds=[expected, 1.5 * expected])
    (row,) = compare_points([gpus], "h100")
    assert row.slowdown == pytest.approx(1.5)
    assert row.note == "slowest of 2 GPUs, 50% behind"


def test_a_measured_link_gives_the_keys_that_reproduce_it(tmp_path: Path) -> None:
    run = small_run()
    planned = link_of(run.cluster, "near")
    assert planned is not None and not planned.between_gpus  # over TCP
    found = LinkReading(bandwidth=planned.bandwidth / 2, latency=0.02, backend="gloo")
    rows, settings = compare_link(planned, found)
    assert [row.slowdown for row in rows] == pytest.approx([2, 2])
    write_run(run, tmp_path / "run.toml")
    again = link_of(load_run(tmp_path / "run.toml", settings).cluster, "far")
    assert again is not None and again.bandwidth == pytest.approx(found.bandwidth)
    assert again.latency == pytest.approx(0.02)


def test_the_network_of_a_pool_is_that_of_one_pair_of_gpus(tmp_path: Path) -> None:
    run = small_run({"policies.system": "colocated", "cluster.pools.far.nodes": 2})
    cluster = msgspec.structs.replace(run.cluster, links=[])
    planned = link_of(cluster, "far")
    assert planned is not None and planned.key == "cluster.pools.far.node_bandwidth"
    found = LinkReading(bandwidth=planned.bandwidth / 4, latency=1e-5, backend="nccl")
    _, settings = compare_link(planned, found)
    write_run(msgspec.structs.replace(run, cluster=cluster), tmp_path / "run.toml")
    again = link_of(load_run(tmp_path / "run.toml", settings).cluster, "far")
    assert again is not None and again.bandwidth == pytest.approx(found.bandwidth)
    assert link_of(cluster, "near") is None  # one node


# Scaled profiles ----------------------------------------------------------------------------------


def test_without_a_measurement_a_gpu_keeps_its_seconds_also_those_of_another_gpus_tables(
    tmp_path: Path,
) -> None:
    write_scaled(tmp_path / "own", "h800", [])
    gpu = load_gpu("h800")
    assert gpu.tables["all_reduce"] == "h100/vllm"
    theirs = read_table(PROFILES / "measured" / "h100" / "all_reduce.vllm.bfloat16.csv")
    ours = read_table(tmp_path / "own" / "measured" / "h800" / "all_reduce.vllm.bfloat16.csv")
    peak = peak_of(gpu, "bfloat16")
    shape = dict(zip(theirs.keys, theirs.rows[0].tolist(), strict=True))
    expected, _ = surface_of(theirs).seconds(shape, theirs.columns, peak)
    known = ~np.isnan(theirs.seconds[0])
    assert ours.seconds[0][known] == pytest.approx(expected[known], rel=1e-5)
    assert ours.facts.gpu == "h800"
    table = tomllib.loads((tmp_path / "own" / "gpus" / "h800.toml").read_text())
    assert table["tables"]["all_reduce"] == "h800/vllm"
    assert table["flops"] == gpu.flops


def test_tables_and_training_follow_the_measured_products_and_nothing_else_does(
    tmp_path: Path,
) -> None:
    counted = [
        reading(product(rows), "h100", slowdown) for rows, slowdown in ((16, 1.2), (4096, 1.5))
    ]
    write_scaled(tmp_path / "own", "h100", counted)
    own = tmp_path / "own" / "measured"
    before, after = (
        read_table(folder / "h100" / "gemm.vllm.bfloat16.csv")
        for folder in (PROFILES / "measured", own)
    )
    ratio, columns = after.seconds[0] / before.seconds[0], before.columns
    assert ratio[columns <= 16] == pytest.approx(1.2, rel=1e-4)
    assert ratio[columns >= 4096] == pytest.approx(1.5, rel=1e-4)
    between = ratio[(columns > 16) & (columns < 4096)]
    assert np.all(np.diff(between) >= 0) and 1.2 < between[len(between) // 2] < 1.5
    other = own / "h100" / "decode_attention.vllm.bfloat16.csv"
    assert other.is_symlink() and (own / "h200").is_symlink()
    table, training = (tomllib.loads((tmp_path / "own" / each).read_text()) for each in FILES)
    assert table["flops"]["bfloat16"] == pytest.approx(load_gpu("h100").flops["bfloat16"] / 1.5)
    assert table["flops"]["fp8"] == load_gpu("h100").flops["fp8"]
    shipped = tomllib.loads((PROFILES / FILES[1]).read_text())
    rates = [each["gemm"]["h100"]["flops"] for each in (training, shipped)]
    assert rates[1] / rates[0] == pytest.approx(1.5)
    assert training["gemm"]["h200"] == shipped["gemm"]["h200"]


FILES = ("gpus/h100.toml", "measured/training.toml")


def test_a_plan_takes_longer_with_slower_products_and_as_long_with_links_alone(
    tmp_path: Path, plan: Path
) -> None:
    own = tmp_path / "own"
    write_scaled(own, "cpu", [])
    before = find_outlook(plan / "plan.toml")
    assert find_outlook(plan / "plan.toml", profiles=own) == before
    slow = tmp_path / "slow"
    write_scaled(slow, "cpu", [reading(product(256, "float32"), "cpu", 3.0)])
    after = find_outlook(plan / "plan.toml", profiles=slow)
    assert after.step_time > before.step_time and after.dollars > before.dollars


def test_a_folder_that_is_no_folder_of_profiles_is_refused(plan: Path, tmp_path: Path) -> None:
    script = "import sys; from streamrl.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", script, "simulate", str(plan / "plan.toml")],
        env={**os.environ, "STREAMRL_PROFILES": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"streamrl: STREAMRL_PROFILES is '{tmp_path}', which has no folder gpus")


# Decisions ----------------------------------------------------------------------------------------


def outlook(step_time: float) -> Outlook:
    band = Band(low=step_time, high=step_time)
    whole = {"seconds": 100 * step_time, "dollars": 10 * step_time}
    return Outlook(
        step_time=step_time, step_band=band, seconds_band=band, dollars_band=band, **whole
    )


def test_a_node_is_returned_for_a_longer_step_or_a_limit_that_the_plan_kept() -> None:
    row = compare_points([reading(product(1024), "h100", 1.3)], "h100")

    def decide(after: float, plan: PlanConfig | None = None) -> tuple[str, list[str]]:
        found = _Predicted(row, outlook(100.0), outlook(after))
        return _decide(found, plan or PlanConfig(), 0.1)

    assert decide(109)[0] == "keep"
    decision, reasons = decide(112)
    assert decision == "return"
    assert reasons[0] == "the step is 12.0% longer than planned"
    assert reasons[1].startswith("most behind: matrix product in bfloat16, 1,024 x 4,096 by 4,096")
    late, dear = PlanConfig(deadline=Duration(10_500)), PlanConfig(budget=1_020)
    assert decide(104, late) == decide(103, PlanConfig())
    assert decide(106, late)[1] == ["the run exceeds plan.deadline, which the plan kept"]
    assert decide(103, dear)[1] == ["the run exceeds plan.budget, which the plan kept"]
    assert decide(103, PlanConfig(budget=900))[0] == "keep"  # the plan exceeded it before


# The command --------------------------------------------------------------------------------------


def test_a_plan_is_measured_predicted_again_and_kept_or_returned(
    plan: Path, tmp_path: Path
) -> None:
    done = streamrl("profile", "--accept", plan, "--limit", "1000", "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "keep: the step is within 100000% of the plan" in done.stdout
    found = msgspec.json.decode(
        (tmp_path / "out" / "acceptance.json").read_bytes(), type=Acceptance
    )
    names = [row.name for row in found.comparisons]
    assert names[0].startswith("matrix product in float32, 4 x ")
    assert names[-1].startswith("decode step, 4 rollouts of ")
    assert not any("all-reduce" in name for name in names)  # the plan has one core
    assert found.after.step_time != found.before.step_time
    assert found.after.decode_time is not None and found.profiles is not None
    gpus = tomllib.loads((Path(found.profiles) / "gpus" / "cpu.toml").read_text())
    assert gpus["source"].endswith("scaled to a node by `streamrl profile accept`")
    again = streamrl("profile", "accept", plan, "-o", tmp_path / "out")
    assert again.returncode == 2 and "exists already" in again.stderr


def test_a_node_of_which_nothing_was_measured_is_neither_kept_nor_returned(
    plan: Path, tmp_path: Path
) -> None:
    options = ["--minutes", "1e-9", "--limit", "0", "-o", tmp_path / "out"]
    done = streamrl("profile", "accept", plan, *options)
    assert done.returncode == 1 and "neither kept nor returned; allow more time" in done.stderr
    assert not (tmp_path / "out" / "profiles").exists(), "the same command may run again"


@pytest.mark.parametrize(
    ("changes", "options", "text"),
    [
        ({}, [], r"the plan's pools have h20 \(far\) and h800 \(near\), but this machine has CPU \(cpu\)"),
        ({}, ["--minutes", "11"], "--minutes must be above 0 and at most 10, got 11"),
        ({}, ["--limit", "-1"], "--limit must be a share of 0 or more, got -1"),
        ({"cluster.pools.far.gpu": "cpu", "cluster.pools.far.gpus_per_node": 4096}, [], "gpus_per_node is 4096, but this machine has"),
    ],
)  # fmt: skip
def test_a_plan_for_other_gpus_is_one_line(
    changes: dict[str, object], options: list[str], text: str, tmp_path: Path
) -> None:
    write_run(small_run(), tmp_path / "run.toml")
    sets = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    done = streamrl("profile", "accept", tmp_path / "run.toml", *options, *sets)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert re.search(text, done.stderr), done.stderr


def test_a_directory_without_a_plan_and_a_peer_without_a_link_are_refused(
    plan: Path, tmp_path: Path
) -> None:
    done = streamrl("profile", "accept", tmp_path)
    assert done.returncode == 2 and "has no plan.toml" in done.stderr
    done = streamrl("profile", "accept", plan, "--peer", "host:29500")
    assert done.returncode == 2 and "there is nothing to measure" in done.stderr


def test_this_machine_is_found() -> None:
    node = find_node(2)
    assert node.num_gpus >= 1 and load_gpu(node.gpu)
