"""`make gpu` on a machine without a GPU: its cheap checks run, and a check that fails or is late hides no other."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_accept
from benchmarks.gpu_card import check_tables
from benchmarks.gpu_checks import PARTS, Place, run_part, run_parts
from benchmarks.gpu_models import ON_GPU, make_samples, model_directory, vocabulary_of
from benchmarks.gpu_record import Recorder, read_results, table
from benchmarks.gpu_rollout import Cell, check_switch, run_gaps
from benchmarks.gpu_training import REFERENCE, check_memory, check_switched_pass, compute, distance
from tests.command_line import streamrl

pytestmark = pytest.mark.skipif(ON_GPU, reason="sizes are a GPU's: make gpu")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scratch")


def test_a_failed_or_late_check_is_a_result_and_the_next_one_runs(tmp_path: Path) -> None:
    def fail(recorder: Recorder, name: str) -> None:
        raise ValueError("broken kernel")

    def sleep(recorder: Recorder, name: str) -> None:
        time.sleep(60)

    def outer(recorder: Recorder, name: str) -> None:
        recorder.check("inner", 30, lambda recorder, name: None)
        time.sleep(60)

    def work(recorder: Recorder, name: str) -> None:
        recorder.add(name, float("nan"), "nats", True)
        recorder.add(name, 2.0, "s", True)

    recorder = Recorder(tmp_path)
    for name, function in {"a": fail, "b": sleep, "c": outer, "d": work}.items():
        recorder.check(name, 0.2, function)
    results = read_results(tmp_path)
    assert [(one.name, one.value, one.ok) for one in results] == [
        ("a", None, False),
        ("b", None, False),
        ("c", None, False),
        ("d", None, False),
        ("d", 2.0, True),
    ]
    assert "ValueError: broken kernel" in results[0].detail
    assert "5 results, 4 failed" in table(results)


def test_a_part_that_dies_or_hangs_is_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(recorder: Recorder, place: Place) -> None:
        raise MemoryError("no room")

    def hang(recorder: Recorder, place: Place) -> None:
        time.sleep(60)

    place = Place(tmp_path, tmp_path, 1.0)
    for run, ending in ((die, "ended with 1: see log.txt"), (hang, "killed after 1 s")):
        monkeypatch.setitem(PARTS, "card", PARTS["card"]._replace(run=run))
        assert run_part("card", place, "fork") == ending
    assert "MemoryError: no room" in (tmp_path / "log.txt").read_text()


def test_a_part_without_time_is_skipped(tmp_path: Path) -> None:
    run_parts(["card"], Place(tmp_path, tmp_path, 1.0))
    (result,) = read_results(tmp_path)
    assert (result.name, result.ok) == ("card", None)
    assert result.detail.startswith("skipped: 1 s are left")


def test_a_gradient_of_other_weights_is_told_from_the_reference(scratch: Path) -> None:
    path = model_directory(scratch, "small")
    samples = make_samples(vocabulary_of(path), 2, 4, 8)
    reference = compute(path, REFERENCE, samples)
    again = compute(path, REFERENCE._replace(packing="padded", recompute="full"), samples)
    assert distance(again.gradients, reference.gradients) < 1e-6
    others = {name: 1.1 * gradient for name, gradient in reference.gradients.items()}
    assert distance(others, reference.gradients) == pytest.approx(0.1)


def test_replica_switch_memory_and_tables_run_without_a_gpu(scratch: Path, tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.check("gap", 20, run_gaps, scratch, Cell("small", "bfloat16"))
    check_switch(recorder, scratch, tmp_path / "weight_sync.csv")
    check_memory(recorder, scratch)
    check_switched_pass(recorder, scratch)
    check_tables(recorder, tmp_path)
    results = read_results(tmp_path)
    assert not [one for one in results if one.ok is False]
    assert {"gap: logprob_gap after a load", "weight sync: load"} <= {one.name for one in results}
    assert (tmp_path / "gemm.torch.bfloat16.csv").is_file()


def test_the_acceptance_test_of_a_node_runs_without_a_gpu(
    scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_here(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(words, *streamrl(*words))

    monkeypatch.setattr(gpu_accept, "run_command", run_here)  # torch is imported here already
    recorder = Recorder(tmp_path)
    gpu_accept.check_acceptance(recorder, scratch, tmp_path, 120)
    results = read_results(tmp_path)
    assert not [one for one in results if one.ok is False]
    assert any(one.name.startswith("accept: matrix product in float32") for one in results)
    assert results[-1].name == "accept: step, predicted again"
