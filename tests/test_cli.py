"""The command line: what it prints, and what it says of wrong input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parent.parent / "examples" / "h20-h800.toml"
SMALL = ["--set", "algorithm.prompts_per_step=64", "--set", "algorithm.steps=3"]


def streamrl(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the command as a user would."""
    command = [sys.executable, "-c", "from streamrl.cli import main; main()", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_simulate_prints_the_figures_that_scripts_rely_on() -> None:
    done = streamrl("simulate", EXAMPLE, "--json", *SMALL)
    assert done.returncode == 0 and done.stderr == ""
    figures = json.loads(done.stdout)
    for key in (
        "step_time",
        "throughput",
        "goodput",
        "samples_per_second",
        "cost_per_step",
        "cost_per_million_tokens",
    ):
        assert figures[key] > 0
    total = sum(figures["busy"].values()) + sum(figures["idle"].values())
    assert total == pytest.approx(1.0, abs=1e-9)
    assert sum(figures["staleness"].values()) == 3 * 64
    assert sum(figures["tiers"].values()) == pytest.approx(1.0)
    assert figures["tiers"]["composed"] > 0.5


def test_simulate_writes_the_same_trace_for_the_same_seed_and_views_of_it(tmp_path: Path) -> None:
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        done = streamrl("simulate", EXAMPLE, *SMALL, "--set", f"seed={seed}", "-o", tmp_path / name)
        assert done.returncode == 0, done.stderr
        assert "unmeasured" in done.stdout
    first, same, other = ((tmp_path / name / "trace.jsonl").read_bytes() for name in "abc")
    assert first == same != other
    assert json.loads((tmp_path / "a" / "chrome_trace.json").read_bytes())
    assert (tmp_path / "a" / "timeline.png").stat().st_size > 10_000


def test_replay_reads_what_simulate_wrote_and_compare_refuses_it(tmp_path: Path) -> None:
    streamrl("simulate", EXAMPLE, *SMALL, "-o", tmp_path)
    replayed = streamrl("replay", tmp_path, "--json")
    assert replayed.returncode == 0 and json.loads(replayed.stdout)["is_identical"] is True
    compared = streamrl("compare", tmp_path, "--json")
    assert compared.returncode == 2 and "executed run" in compared.stderr
    assert compared.stderr.count("\n") == 1 and compared.stdout == ""


def test_replay_fails_where_a_decision_was_another(tmp_path: Path) -> None:
    streamrl("simulate", EXAMPLE, *SMALL, "-o", tmp_path)
    trace = tmp_path / "trace.jsonl"
    lines = trace.read_text().splitlines(keepends=True)
    index = next(n for n, line in enumerate(lines) if '"type":"Train"' in line)
    lines[index] = lines[index].replace(
        '{"type":"Train","rollouts":[', '{"type":"Train","rollouts":[9999,'
    )
    trace.write_text("".join(lines))
    done = streamrl("replay", tmp_path)
    assert done.returncode == 1 and f"entry': {index - 1}" in done.stdout
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["simulate", "nowhere.toml"], ["nowhere.toml"]),
        (["simulate", EXAMPLE, "--set", "rollout.replicsa=3"], ["rollout.replicsa", "replicas"]),
        (
            ["simulate", EXAMPLE, "--set", "cluster.links.0.bandwidth=80"],
            ["bandwidth", "80", "Gbps"],
        ),
        (["simulate", EXAMPLE, "--set", "rollout.tensor_parallel=3"], ["tensor_parallel", "3"]),
        (["simulate", EXAMPLE, "--set", "model.name=qwen2.5-72b"], ["145.4 GB", "tensor_parallel"]),
        (["simulate", EXAMPLE, "--set", "model.name=qwen"], ["qwen", "qwen2.5-7b"]),
        (["simulate", EXAMPLE, "--set", "workload.lengths.source=no.csv"], ["no.csv"]),
        (["execute", EXAMPLE], ["model.path"]),
        (["replay", "nowhere.jsonl"], ["nowhere.jsonl"]),
        (["compare", EXAMPLE], ["h20-h800.toml:1"]),
    ],
)
def test_wrong_input_gets_one_line_and_exit_status_2_and_writes_nothing(
    arguments: list[str | Path], words: list[str], tmp_path: Path
) -> None:
    output = ["-o", tmp_path / "out"] if arguments[0] == "simulate" else []
    done = streamrl(*arguments, *output)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1 and done.stdout == ""
    for word in words:
        assert word in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_simulation_does_not_overwrite_an_executed_run(tmp_path: Path) -> None:
    streamrl("simulate", EXAMPLE, *SMALL, "-o", tmp_path)
    trace = tmp_path / "trace.jsonl"
    real = trace.read_text().replace('"world":"simulated"', '"world":"real"', 1)
    trace.write_text(real)
    done = streamrl("simulate", EXAMPLE, *SMALL, "-o", tmp_path)
    assert done.returncode == 2 and "executed run" in done.stderr
    assert trace.read_text() == real


def test_a_corrupt_trace_is_refused_by_file_and_line(tmp_path: Path) -> None:
    streamrl("simulate", EXAMPLE, *SMALL, "-o", tmp_path)
    trace = tmp_path / "trace.jsonl"
    lines = trace.read_text().splitlines(keepends=True)
    lines[4] = lines[4][:20] + "\n"
    trace.write_text("".join(lines))
    done = streamrl("replay", trace)
    assert done.returncode == 2 and "trace.jsonl:5" in done.stderr


@pytest.mark.parametrize("command", ["simulate", "execute", "replay", "compare"])
def test_help_has_an_example(command: str) -> None:
    assert f"Example: streamrl {command}" in " ".join(streamrl(command, "--help").stdout.split())
