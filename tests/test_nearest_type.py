"""What is said of a config.json of an unknown type: the nearest known one, and what reading it as that would leave out."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from streamrl.hardware.hugging_face import MODEL_TYPES, read_config_json
from streamrl.runfile.errors import RunError
from tests.command_line import streamrl
from tests.public_configs import PUBLIC

PAGE = Path(__file__).parents[1] / "docs" / "executing.md"
KNOWN = {"Mistral-7B-v0.3": 7_248_023_552, "Mixtral-8x7B": 46_702_792_704}
"""Parameters of models whose types are known, as published."""
SAID = {
    "Mistral-Small-3.1": "the nearest to its text_config is mistral, which would ignore vision_config",
    "Phi-4": "the nearest is llama",
    "Phi-3-mini": "the nearest is mistral",
    "Falcon-H1-1.5B": "the nearest is llama, which would ignore mamba_chunk_size, mamba_conv_bias, mamba_d_conv, "
    "mamba_d_head, mamba_d_ssm, mamba_d_state, mamba_expand, mamba_n_groups, mamba_n_heads, mlp_expansion_factor",
    "Jamba-v0.1": "the nearest is mixtral, which would ignore attn_layer_offset, attn_layer_period, expert_layer_offset, "
    "expert_layer_period, mamba_conv_bias, mamba_d_conv, mamba_d_state, mamba_dt_rank, mamba_expand",
    "Llama-4-Scout": "the nearest to its text_config is mixtral, which would ignore attention_chunk_size, "
    "intermediate_size_mlp, use_qk_norm, vision_config",
    "Granite-3.3-8B": "the nearest is llama",
    "Granite-3.1-3B-A800M": "the nearest is mixtral",
    "OLMo-2-7B": "the nearest is llama",
    "OLMo-7B": "the nearest is llama",
    "DeepSeek-V2-Lite": "the nearest is deepseek_v3",
    "Kimi-K2": "the nearest is deepseek_v3",
}


def write(folder: Path, table: object) -> Path:
    (folder / "config.json").write_text(json.dumps(table))
    return folder / "config.json"


@pytest.mark.parametrize("name", KNOWN)
def test_a_public_model_of_a_known_type_has_its_published_parameters(
    name: str, tmp_path: Path
) -> None:
    assert read_config_json(write(tmp_path, PUBLIC[name])).num_parameters == KNOWN[name]


@pytest.mark.parametrize("name", SAID)
def test_of_a_public_model_of_an_unknown_type_the_nearest_is_said_and_all_that_it_would_ignore(
    name: str, tmp_path: Path
) -> None:
    with pytest.raises(RunError) as error:
        read_config_json(write(tmp_path, PUBLIC[name]))
    assert str(error.value).endswith(f"; {SAID[name]}")


def test_a_key_of_the_nearest_type_that_a_config_has_without_a_value_is_not_asked_for(
    tmp_path: Path,
) -> None:
    for change, says in (
        ({"q_lora_rank": None}, "the nearest is deepseek_v3"),
        ({"num_nextn_predict_layers": 1, "moe_layer_freq": 2}, ", which would ignore moe_layer_"),
    ):
        with pytest.raises(RunError) as error:
            read_config_json(write(tmp_path, {**PUBLIC["Kimi-K2"], **change}))
        assert says in str(error.value)
    table = {key: own for key, own in PUBLIC["Kimi-K2"].items() if key != "q_lora_rank"}
    with pytest.raises(RunError, match=r"the nearest is deepseek_v3, which needs q_lora_rank$"):
        read_config_json(write(tmp_path, table))


def test_the_page_on_executing_names_every_type_of_model_that_is_read() -> None:
    (line,) = (each for each in PAGE.read_text().splitlines() if "`[model] path`" in each)
    named = re.findall(r"`(\w+)`", line.partition("whose `model_type` is")[2].partition(".")[0])
    assert tuple(named) == MODEL_TYPES


def test_simulate_says_it_in_one_line_and_doctor_among_its_findings(tmp_path: Path) -> None:
    write(tmp_path, PUBLIC["Llama-4-Scout"])
    run = tmp_path / "run.toml"
    text = Path("examples/h20-h800.toml").read_text()
    run.write_text(text.replace('name = "qwen2.5-7b"', f'path = "{tmp_path}"'))
    done = streamrl("simulate", run)
    assert done.returncode == 2 and done.stdout == ""
    said = done.stderr.strip().splitlines()
    assert len(said) == 1 and said[0].endswith(SAID["Llama-4-Scout"])
    findings = json.loads(streamrl("doctor", run, "--json").stdout)
    assert SAID["Llama-4-Scout"] in json.dumps(findings)
