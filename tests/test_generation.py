"""What `profile show` and `profile check` say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from streamrl.cli.main import app
from streamrl.hardware.operator_tables import Peak, check_table
from streamrl.hardware.profiles import PROFILES, load_model
from streamrl.report.profile_report import (
    comparison_table,
    generation_figure,
    generation_notes,
    generation_table,
)
from streamrl.runfile.cluster_config import ModelConfig
from streamrl.sim.costs.sync_profiles import load_transport
from streamrl.sim.studies.hardware_efficiency import study_generation
from tests.command_line import streamrl
from tests.test_tables import make_table

RUNNER = CliRunner()
MODEL = load_model(ModelConfig(name="qwen2.5-7b"))
H20 = study_generation(MODEL, "h20", context=2000)
H800 = study_generation(MODEL, "h800", context=2000)


def render(thing: object) -> str:
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(thing)
    return console.export_text()


def test_no_step_beats_the_datasheet_and_shares_stay_below_one() -> None:
    for curve in (H20, H800):
        for point in curve.points:
            assert point.step_time > point.roofline_time
            assert 0 < point.mbu < 1 and 0 < point.mfu < 1


def test_h20_turns_compute_bound_eight_times_earlier_than_h800() -> None:
    assert H20.ridge == pytest.approx(148 / 4, rel=0.05)  # FLOPs a byte of the datasheet
    assert H800.ridge == pytest.approx(989.5 / 3.35, rel=0.05)
    assert not H20.points[0].is_compute_bound


def test_h20_gives_more_tokens_per_dollar_and_less_so_in_large_batches() -> None:
    ratio = [
        ours.tokens_per_dollar / theirs.tokens_per_dollar
        for ours, theirs in zip(H20.points, H800.points, strict=False)
    ]
    assert min(ratio) > 1
    assert ratio[0] > 2.5 > ratio[8]


def test_tokens_per_dollar_are_tokens_per_gpu_second_over_the_price() -> None:
    point = H20.points[3]
    assert point.tokens_per_second == pytest.approx(point.num_running / point.step_time)
    assert point.tokens_per_dollar == pytest.approx(point.tokens_per_second * 3600 / 1.85)


def test_a_batch_ends_where_memory_does() -> None:
    weights = 15.23e9
    workspace = 512 * 152_064 * 20
    usable = 97_871 * 2**20 - 2**29
    tokens = (usable * 0.9 - weights - workspace) / (56 * 1024)
    assert H20.most_running == pytest.approx(tokens / 2000, rel=0.01)
    assert study_generation(MODEL, "h20", context=20_000).points[-1].num_running == pytest.approx(
        tokens / 20_000, abs=1
    )


def test_a_model_that_leaves_no_room_is_refused_with_the_numbers() -> None:
    big = load_model(ModelConfig(name="qwen2.5-72b"))
    with pytest.raises(ValueError, match=r"1 x NVIDIA H800 80 GB have 85 GB each\. .* 145\.4 GB"):
        study_generation(big, "h800")


def test_the_table_the_comparison_and_the_notes_say_what_is_known() -> None:
    assert "compute" in render(generation_table(H20))
    assert "h20 (2." in render(comparison_table([H20, H800]))
    text = "\n".join(generation_notes([H20, H800]))
    assert "h20: matrix products turn from memory-bound to compute-bound at 3" in text
    assert "roofline (unmeasured)" in text and "flashinfer" in text


def test_an_unmeasured_gpu_is_called_so_in_table_json_and_figure(tmp_path: Path) -> None:
    curve = study_generation(MODEL, "cpu", context=10, dtype="float32", memory_utilization=8.0)
    assert "cpu (unmeasured)" in render(generation_table(curve))
    figure = generation_figure([curve], tmp_path / "cpu.png")
    assert (tmp_path / "cpu.png").stat().st_size > 10_000
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert labels == ["cpu (unmeasured)"]


def test_show_prints_json_with_tier_and_sources() -> None:
    command = ["profile", "show", "qwen2.5-7b", "--gpu", "h20,h800", "--json"]
    done = RUNNER.invoke(app, command)
    assert done.exit_code == 0, done.output
    first, second = json.loads(done.output)
    assert (first["gpu"], second["gpu"]) == ("h20", "h800")
    assert first["provenance"]["sources"]
    assert first["unmeasured"] == pytest.approx(first["provenance"]["shares"]["roofline"])


def test_show_draws_a_figure(tmp_path: Path) -> None:
    path = tmp_path / "new" / "generation.svg"
    done = RUNNER.invoke(app, ["profile", "show", "qwen2.5-7b", "-o", str(path)])
    assert done.exit_code == 0, done.output
    assert "tokens per dollar" in path.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["qwen2.5-7b", "--gpu", "h21"], "no profile 'h21' in profiles/gpus; there is h20"),
        (["qwen-7b"], "no profile 'qwen-7b' in profiles/models"),
        (["qwen2.5-7b", "--tp", "4", "--ep", "2"], "--expert-parallel must be 1 or"),
        (["qwen2.5-7b", "-o", "x.pdf"], "must end in .png or .svg"),
    ],
)
def test_wrong_input_gets_one_line(arguments: list[str], message: str) -> None:
    done = RUNNER.invoke(app, ["profile", "show", *arguments])
    assert message in str(done.exception)
    assert isinstance(done.exception, ValueError)


# Checks ------------------------------------------------------------------------------------------


def test_every_shipped_profile_passes_the_check() -> None:
    done = RUNNER.invoke(app, ["profile", "check", "--json"])
    assert done.exit_code == 0, done.output
    verdicts = json.loads(done.output)
    assert len(verdicts) > 70
    assert all(verdict["is_good"] for verdict in verdicts)


def test_a_wrong_file_is_named_with_row_and_column(tmp_path: Path) -> None:
    folder = tmp_path / "measured" / "h100"
    folder.mkdir(parents=True)
    name = "all_gather.nccl.float16.csv"
    text = (PROFILES / "measured" / "h100" / name).read_text()
    (folder / name).write_text(text.replace("\n2,", "\n2,nan", 1))
    done = RUNNER.invoke(app, ["profile", "check", str(tmp_path)])
    assert "1 of 1 profiles are wrong: measured/h100/all_gather" in str(done.exception)
    assert "row 13" in done.output


def test_a_table_in_the_wrong_place_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "measured" / "h200"
    folder.mkdir(parents=True)
    name = "all_gather.nccl.float16.csv"
    shutil.copy(PROFILES / "measured" / "h100" / name, folder / name)
    done = RUNNER.invoke(app, ["profile", "check", str(tmp_path), "--json"])
    assert "its facts belong to h100" in json.loads(done.output)[0]["notes"][0]


def test_seconds_that_beat_the_datasheet_are_wrong() -> None:
    table = make_table("gemm", {"n": [1024.0], "k": [1024.0]}, {"m": [1.0, 16.0]})
    fast = Peak(flops=1e15, memory=3e12, nvlink=4e11, width=2)
    slow = Peak(flops=1e3, memory=1e3, nvlink=4e11, width=2)
    assert check_table(table, fast) == []
    (finding,) = check_table(table, slow)
    assert finding.is_wrong and "2 of 2 cells beat the datasheet" in finding.text


def test_work_that_gets_faster_as_it_grows_is_wrong_where_it_is_not_noise() -> None:
    table = make_table("gemm", {"n": [1024.0], "k": [64.0]}, {"m": [1.0, 16.0, 64.0]})
    reverse = table.seconds[:, ::-1].copy()
    peak = Peak(flops=1e15, memory=3e12, nvlink=4e11, width=2)
    (finding,) = check_table(
        type(table)(table.facts, table.keys, table.rows, table.columns, reverse), peak
    )
    assert finding.is_wrong and "column 64 2%" in finding.text
    assert np.isfinite(reverse).all()


def test_tensor_ranks_of_two_nodes_reduce_over_the_network_between_them() -> None:
    model = load_model(ModelConfig(name="llama-3.1-70b"))
    one, two = (
        study_generation(model, "h100", tensor_parallel=degree, max_running=1) for degree in (8, 16)
    )
    network = "roofline of NVIDIA H100 80 GB SXM: network between nodes"
    assert network in two.provenance.sources and network not in one.provenance.sources
    messages = 2 * model.num_layers * 2 * load_transport("rdma").message_latency
    assert two.points[0].step_time > one.points[0].step_time / 2 + messages


def test_tensor_ranks_that_fill_no_whole_nodes_are_one_line_and_status_two() -> None:
    done = streamrl("profile", "show", "llama-3.1-70b", "--gpu", "h100", "--tp", "12")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    line = "--tensor-parallel must divide the 8 GPUs of a node or be a multiple of them, got 12"
    assert line in done.stderr
