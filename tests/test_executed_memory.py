"""What the doctor counts of our trainer on a GPU, against peaks that `make gpu` measured on one H200."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from streamrl.executor.checkup import readiness
from streamrl.executor.checkup.executed_memory import executed_memory
from streamrl.hardware.memory import trainer_memory
from streamrl.hardware.resolved import resolve
from streamrl.runfile.config import Run
from streamrl.runfile.files import make_run

SIZES = {"medium": (12, 32768), "large": (28, 151936)}
"""Layers and vocabulary of the Qwen3 models whose steps were measured."""
PEAKS = [
    ("medium", "none", "eager", 15.05),
    ("medium", "full", "eager", 6.60),
    ("medium", "mlp", "chunked", 9.76),
    ("large", "full", "eager", 22.15),
    ("large", "full", "chunked", 13.40),
]
"""GB of a step of 8 rollouts of 1,024 tokens in bfloat16, packed: torch 2.11, one H200."""


def executed_run(path: Path, model: str, **trainer: Any) -> Run:
    layers, vocabulary = SIZES[model]
    shape = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": vocabulary,
        "tie_word_embeddings": True,
        "max_position_embeddings": 4096,
    }
    (path / "config.json").write_text(json.dumps(shape))
    passes = {"pool": "local", "micro_batch": 8, "max_tokens_per_pass": 8192}
    return make_run(
        {
            "model": {"path": str(path), "dtype": "bfloat16"},
            "cluster": {"pools": {"local": {"gpu": "h200", "gpus_per_node": 2}}},
            "rollout": {"pool": "local", "replicas": 1, "max_tokens": 768},
            "trainer": passes | trainer,
            "algorithm": {"name": "grpo", "steps": 1, "prompts_per_step": 8, "group_size": 2},
            "workload": {"max_prompt_tokens": 256},
        }
    )


@pytest.mark.parametrize(("model", "recompute", "logits", "measured"), PEAKS)
def test_counted_memory_is_within_five_percent_of_peaks_on_a_gpu(
    tmp_path: Path, model: str, recompute: str, logits: str, measured: float
) -> None:
    run = executed_run(tmp_path, model, recompute=recompute, logits=logits)
    found = executed_memory(resolve(run).trainer, 768)
    assert found is not None
    assert sum(found.values()) == pytest.approx(measured * 1e9, rel=0.05)


def test_what_our_trainer_does_not_hold_is_not_counted_for_it(tmp_path: Path) -> None:
    run = executed_run(tmp_path, "medium", backend="deepspeed", zero=2)
    assert executed_memory(resolve(run).trainer, 768) is None


def test_few_output_tokens_leave_the_last_layer_as_the_fullest_moment(tmp_path: Path) -> None:
    changes = {"recompute": "full", "logits": "chunked", "max_tokens_per_pass": 65536}
    run = executed_run(tmp_path, "medium", **changes, micro_batch=64)
    found = executed_memory(resolve(run).trainer, 768)
    assert found is not None
    waiting = 4 * 32768 * 1024
    assert found["logits"] == waiting, "the output layer's gradient, which the embedding's joins"


def test_the_doctor_says_it_beside_the_figure_of_plans(tmp_path: Path) -> None:
    run = executed_run(tmp_path, "medium", recompute="none", logits="eager")
    (told,) = [one for one in readiness.find(run) if one.name == "executed-memory"]
    assert told.level == "ok"
    assert "15.0 of" in told.text
    assert sum(trainer_memory(resolve(run).trainer).values()) == pytest.approx(12.12e9, rel=0.01), (
        "as it was"
    )
    run = executed_run(tmp_path, "large", recompute="none", max_tokens_per_pass=65536, micro_batch=64)  # fmt: skip
    (told,) = [one for one in readiness.find(run) if one.name == "executed-memory"]
    assert (told.level, "chunked" in told.fix) == ("warning", True)


@pytest.mark.parametrize(("share", "level"), [(0.95, "error"), (0.5, "ok")])
def test_vllm_beside_the_trainer_on_one_gpu_leaves_it_room(
    share: float, level: str, tmp_path: Path
) -> None:
    run = executed_run(tmp_path, "medium", recompute="none", logits="eager")
    rollout = replace(run.rollout, backend="vllm", memory_utilization=share)
    run = replace(run, rollout=rollout, execute=replace(run.execute, device="cuda:0"))
    (told,) = [one for one in readiness.find(run) if one.name == "executed-memory"]
    assert told.level == level
    assert ("memory_utilization" in told.fix) == (level == "error")
