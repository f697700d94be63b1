"""Runs for the doctor, and its findings by name."""

from __future__ import annotations

import copy
import json
import string
from pathlib import Path
from typing import Any

from streamrl.cli.doctor import examine
from streamrl.doctor.examination import Examination
from streamrl.runfile.config import Run
from streamrl.runfile.files import make_run
from streamrl.runfile.findings import Finding
from tests.runs import make_table

NOWHERE = Path("nowhere/run.toml")
FULL = {  # a small run with nothing to complain of: every GPU used, every fill whole
    "cluster.pools": {
        "far": {"gpu": "h20", "gpus_per_node": 2},
        "near": {"gpu": "h800", "gpus_per_node": 4},
    },
    "cluster.links": [{"between": ["far", "near"], "bandwidth": "8 Tbps"}],
    "trainer.max_tokens_per_pass": 4096,
}


def full_table(changes: dict[str, Any]) -> dict[str, Any]:
    return make_table({**copy.deepcopy(FULL), **changes})


def full_run(changes: dict[str, Any] | None = None) -> Run:
    return make_run(full_table(changes or {}))


def doctor(changes: dict[str, Any]) -> Examination:
    return examine(full_table(changes), NOWHERE)


def bad(findings: list[Finding]) -> dict[str, Finding]:
    """Return errors and warnings by name."""
    return {finding.name: finding for finding in findings if finding.level != "ok"}


TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "pre_tokenizer": {
        "type": "Split",
        "pattern": {"String": ""},
        "behavior": "Isolated",
        "invert": False,
    },
    "model": {
        "type": "WordLevel",
        "vocab": {letter: at for at, letter in enumerate(string.printable)},
        "unk_token": "?",
    },
}
"""To which every character is a token."""


def local_table(directory: Path, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a run file with a model directory and prompts that can be executed."""
    model = directory / "model"
    model.mkdir(exist_ok=True)
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}
    config = {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "intermediate_size": 128,
        "num_key_value_heads": 4,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        **shape,
    }
    (model / "config.json").write_text(json.dumps(config))
    (model / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    prompts = directory / "prompts.jsonl"
    prompts.write_text('{"prompt": "1+1=", "answer": "2"}\n' * 3)
    return make_table(
        {
            "model": {"path": str(model), "dtype": "float32"},
            "cluster": {"pools": {"here": {"gpu": "cpu", "gpus_per_node": 2}}},
            "rollout": {"pool": "here", "replicas": 1, "max_running": 4, "max_tokens": 256},
            "trainer": {"pool": "here", "micro_batch": 2},
            "workload.prompts": str(prompts),
            "verifier.scorer": "exact",
            "execute": {"output": str(directory / "run")},
            **(changes or {}),
        }
    )
