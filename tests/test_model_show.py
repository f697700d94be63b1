"""`streamrl model show`, and what a simulation says about the model of its run file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from streamrl.doctor.diagnosis import diagnose
from streamrl.hardware.model_shape import ModelShape
from streamrl.hardware.profiles import PROFILES, load_model
from streamrl.record.assumed import assumed_of_model
from streamrl.report.model_report import describe_model
from streamrl.runfile.cluster_config import ModelConfig
from tests.command_line import streamrl
from tests.runs import small_run
from tests.test_public_models import FILES, KV_BYTES, PARAMETERS, directory

PROFILES_OF_MODELS = sorted(path.stem for path in (PROFILES / "models").glob("*.toml"))


@pytest.mark.parametrize("name", PROFILES_OF_MODELS)
def test_the_parts_of_a_profile_sum_to_its_parameters(name: str) -> None:
    found, shape = describe_model(name, "bfloat16", 1000), load_model(ModelConfig(name=name))
    assert sum(kind.parameters for kind in found.kinds) == shape.num_parameters
    *_, norms = found.kinds
    assert norms.kind == "norms" and 0 <= norms.parameters - expected_norms(shape) < 10


def expected_norms(shape: ModelShape) -> int:
    return (shape.norms_per_layer * shape.num_layers + 1) * shape.hidden_size


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_parts_of_a_public_model_sum_to_its_parameters_and_bytes(
    name: str, tmp_path: Path
) -> None:
    found = describe_model(str(directory(name, tmp_path)), "bfloat16", 10**6)
    assert sum(kind.parameters for kind in found.kinds) == found.parameters
    assert found.kv_bytes_per_token == KV_BYTES[name]
    assert found.bytes_per_rollout == 10**6 * KV_BYTES[name] + found.state_bytes_per_rollout
    sums = sum(kind.num_layers for kind in found.kinds if kind.num_layers)
    assert sums == load_model(ModelConfig(path=str(tmp_path))).num_blocks


def test_a_window_that_is_not_full_keeps_its_tokens_alone(tmp_path: Path) -> None:
    found = describe_model(str(directory("gpt-oss-20b", tmp_path)), "bfloat16", 100)
    assert found.kv_bytes_per_first_token == 24 * 4 * 8 * 64
    assert found.bytes_per_rollout == 100 * 24 * 4 * 8 * 64
    narrow = describe_model(str(tmp_path), "fp8", 100)
    assert narrow.bytes_per_rollout == found.bytes_per_rollout / 2


def test_the_table_has_a_row_for_each_kind_and_the_notes_say_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    done = streamrl("model", "show", directory("gemma-4-26B-A4B", tmp_path))
    assert done.returncode == 0 and not done.stderr
    for text in (
        "full attention: 16 heads, 2 KV heads of 512",
        "sliding window of 1,024: 16 heads, 8 KV heads of 256",
        "128 experts of 704: 8 a token + 3 shared",
        "grows by 20,480 bytes a token in bfloat16, and keeps 209,715,200 bytes",
        "Not simulated: vision_config: about 0.573B parameters, in memory and full syncs only.",
    ):
        assert text in done.stdout


def test_a_model_with_compressed_attention_prints_its_kinds_of_layers() -> None:
    found = json.loads(streamrl("model", "show", "deepseek-v4-flash", "--json").stdout)
    rows = {row["kind"].partition(":")[0]: row for row in found["kinds"]}
    kinds = [rows[kind] for kind in ("sliding window of 128", "compressed sparse", "compressed")]
    assert [row["num_layers"] for row in kinds] == [2, 21, 20]
    assert [row["bytes_per_token"] for row in kinds] == [2 * 1024, 6069, 160]
    assert rows["the same layers' sliding window of 128"]["bytes_per_token"] == 41 * 1024
    assert rows["hyper-connections of 4 residual streams"]["parameters"] == 33_884_439
    assert sum(row["parameters"] for row in found["kinds"]) == found["parameters"]


def test_json_has_the_same_figures(tmp_path: Path) -> None:
    path = directory("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", tmp_path)
    found = json.loads(streamrl("model", "show", path, "--json", "--context", "8").stdout)
    assert (found["parameters"], found["context"]) == (31_577_940_288, 8)
    kinds = {row["kind"].partition(":")[0]: row["num_layers"] for row in found["kinds"]}
    assert (kinds["full attention"], kinds["linear (mamba-2)"]) == (6, 23)
    assert found["state_bytes_per_rollout"] == 23 * (64 * 64 * 128 * 4 + 6144 * 3 * 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no-such-model",), "no profile 'no-such-model' in profiles/models"),
        (("{refused}",), "compress_ratios must be 0 (sliding attention), 4"),
        (("qwen3-8b", "--kv-dtype", "int3"), "--kv-dtype must be one of bfloat16"),
        (("qwen3-8b", "--context", "0"), "--context"),
        (("{empty}",), "config.json cannot be read"),
    ],
)
def test_wrong_input_is_one_line(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    (tmp_path / "refused").mkdir()
    (tmp_path / "empty").mkdir()
    refused = directory("DeepSeek-V4-Flash", tmp_path / "refused")
    table = json.loads((tmp_path / "refused" / "config.json").read_text())
    (tmp_path / "refused" / "config.json").write_text(
        json.dumps({**table, "compress_ratios": [16] * 43})
    )
    places = {
        "refused": refused,
        "empty": tmp_path / "empty",
    }
    done = streamrl("model", "show", *(each.format(**places) for each in arguments))
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    assert message in line


# What a simulation says ---------------------------------------------------------------------------


def texts(path: Path, dtype: str | None = None) -> list[str]:
    return [each.text for each in assumed_of_model(ModelConfig(path=str(path)), dtype)]


def test_a_simulation_says_that_replicas_are_wider_than_their_checkpoint(tmp_path: Path) -> None:
    path = directory("DeepSeek-R1", tmp_path)
    assert texts(path) == ["replicas in bfloat16, although the checkpoint is in fp8"]
    assert texts(path, "fp8") == []
    assert texts(tmp_path / "gone") == []


def test_a_simulation_names_the_vision_tower_that_it_leaves_out(tmp_path: Path) -> None:
    path = directory("Qwen3-VL-2B-Instruct", tmp_path)
    assert texts(path) == [
        "a model without vision_config: about 0.407B parameters, in memory and full syncs only"
    ]


def test_a_name_that_promises_a_format_is_doubted(tmp_path: Path) -> None:
    name = "NVIDIA-Nemotron-3-Super-120B-A12B-FP8"
    (tmp_path / name).mkdir()
    (text,) = texts(directory(name, tmp_path / name))
    assert "the name says FP8, but neither config.json nor hf_quant_config.json does" in text


def test_simulate_names_what_it_assumes_of_the_model(tmp_path: Path) -> None:
    table: dict[str, Any] = FILES["Qwen3-VL-2B-Instruct"]["config.json"]
    (tmp_path / "config.json").write_text(json.dumps(table))
    text = Path("examples/h20-h800.toml").read_text()
    run = tmp_path / "run.toml"
    run.write_text(text.replace('name = "qwen2.5-7b"', f'path = "{tmp_path}"'))
    done = streamrl("simulate", run, "--set", "simulate.max_steps=6")
    assert done.returncode == 0, done.stderr
    assert "vision_config: about 0.407B parameters" in " ".join(done.stdout.split())


def test_doctor_lists_what_a_simulation_assumes(tmp_path: Path) -> None:
    found = diagnose(small_run({"model": {"path": str(directory("DeepSeek-R1", tmp_path))}}))
    texts = [each.text for each in found if each.name == "model-assumed"]
    assert texts == [
        "rollout.dtype: replicas in bfloat16, although the checkpoint is in fp8",
    ]


# The index of weights -----------------------------------------------------------------------------


def indexed(name: str, size: float, folder: Path) -> str:
    index = {"metadata": {"total_size": round(size)}}
    (directory(name, folder) / "model.safetensors.index.json").write_text(json.dumps(index))
    return str(describe_model(str(folder), "bfloat16", 1).checked)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("DeepSeek-R1", 688_586_727_753),
        ("gpt-oss-20b", 13_761_264_768),
        ("Qwen3-1.7B", 4_063_479_808),
        ("Qwen3-8B", 16_381_470_720),
    ],
)
def test_indexes_of_public_checkpoints_agree_with_their_shapes(
    name: str, size: int, tmp_path: Path
) -> None:
    """Sizes are those of the files on the hub: with draft layers, scales, or a stored tied head."""
    assert "as the shape says" in indexed(name, size, tmp_path)


def test_a_quantised_checkpoint_of_another_size_is_doubted_and_not_refused(tmp_path: Path) -> None:
    assert "other layers may be narrow" in indexed("DeepSeek-R1", 500e9, tmp_path)


def test_a_reward_model_has_no_output_head(tmp_path: Path) -> None:
    table = FILES["Qwen3-8B"]["config.json"]
    size = 2 * (8_190_735_360 - 151_936 * 4096)
    with pytest.raises(ValueError, match="of different models"):
        indexed("Qwen3-8B", size, tmp_path)
    head = {**table, "architectures": ["Qwen3ForSequenceClassification"]}
    (tmp_path / "config.json").write_text(json.dumps(head))
    assert "as the shape says" in str(describe_model(str(tmp_path), "bfloat16", 1).checked)


def test_kimi_stores_scales_for_groups_of_32(tmp_path: Path) -> None:
    found = describe_model(str(directory("Kimi-K2.5", tmp_path)), "bfloat16", 1)
    routed = 60 * 384 * 3 * 7168 * 2048
    assert found.weight_bytes == round((1_026_408_232_448 - routed) * 2 + routed * 4.5 / 8)
