"""A measured profile in closed form, and a run on a CPU that it fits."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import msgspec

from streamrl.hardware.measured_profile import (
    CallRow,
    DecodeRow,
    Host,
    JoinRow,
    MeasuredModel,
    MeasuredProfile,
    ModelOperation,
    PassRow,
    PrefillRow,
    Seconds,
    WeightTransfer,
    shape_digest,
)
from streamrl.hardware.profiles import load_model
from streamrl.runfile.cluster_config import ModelConfig
from streamrl.runfile.config import Run
from streamrl.runfile.files import make_run

SHAPE = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 32,
}
ALONE, PER_ROLLOUT, PER_TOKEN, PER_PAIR = 2e-3, 1e-4, 2e-5, 1e-7
TRAIN_FACTOR = 3.0


def base(running: int) -> float:
    """Seconds of a decode step without context: straight between batches of 1, 4 and 16."""
    return 1e-3 + 1e-4 * running


def slope(running: int) -> float:
    """Seconds of a decode step for a token of context."""
    return 1e-6 + 1e-8 * running


def prefix_time(rollouts: int, tokens: int) -> float:
    """Seconds that prefixes add to a pass."""
    pairs = rollouts * tokens * tokens / 2
    return PER_ROLLOUT * rollouts + PER_TOKEN * rollouts * tokens + PER_PAIR * pairs


def around(seconds: float) -> Seconds:
    """Return quartiles about a median."""
    return 0.9 * seconds, seconds, 1.2 * seconds


def model_directory(path: Path) -> Path:
    """Write the config of a small model."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(SHAPE))
    return path


def make_profile(model: Path, **changes: Any) -> MeasuredProfile:
    """Make a profile whose medians follow the formulas of this file, with fields replaced."""
    shape = load_model(ModelConfig(path=str(model)))
    prefixes = [(1, 16), (1, 64), (4, 16), (2, 64), (8, 32), (1, 128)]
    profile = MeasuredProfile(
        source="closed form",
        date=datetime.date(2026, 11, 21),
        gpu="cpu",
        tensor_parallel=1,
        dtype="float32",
        backend="transformers",
        shares_prefixes=False,
        pads_context=False,
        prefill_tokens=512,
        refill_passes=0,
        repeats=5,
        pace=1.0,
        model=MeasuredModel(
            name=shape.name, num_parameters=shape.num_parameters, digest=shape_digest(shape)
        ),
        host=Host(cpu="a pencil", cores=1, threads=1, device="a pencil"),
        versions={"torch": "none"},
        decode=[
            DecodeRow(running=b, context=c, seconds=around(base(b) + slope(b) * b * c))
            for b in (1, 4, 16)
            for c in (16.0, 64.0, 256.0)
        ],
        prefill=[
            PrefillRow(rollouts=n, tokens=t, seconds=around(ALONE + prefix_time(n, t)))
            for n, t in prefixes
        ],
        join=[
            JoinRow(
                rollouts=n,
                tokens=t,
                running=4,
                context=40.0,
                step=around(base(4)),
                seconds=around(base(4) + prefix_time(n, t)),
            )
            for n, t in prefixes
        ],
        train=_passes(prefixes, TRAIN_FACTOR),
        score=_passes(prefixes, 1.0),
        call=[CallRow(tokens=t, seconds=around(5e-4 + 1e-6 * t)) for t in (100, 1000)],
        optimizer=ModelOperation(seconds=around(3e-3)),
        push=WeightTransfer(bytes=1000, seconds=around(4e-3)),
        load=WeightTransfer(bytes=1000, seconds=around(6e-3)),
    )
    return msgspec.structs.replace(profile, **changes)


def _passes(prefixes: list[tuple[int, int]], factor: float) -> list[PassRow]:
    return [
        PassRow(rollouts=n, tokens=t, seconds=around(factor * (ALONE + prefix_time(n, t))))
        for n, t in prefixes
    ]


def measured_run(model: Path, profile: Path, **changes: Any) -> Run:
    """Return a small run on two cores with a measured profile; `__` stands for the dot of a key."""
    table: dict[str, Any] = {
        "model": {"path": str(model), "dtype": "float32"},
        "cluster": {"pools": {"local": {"gpu": "cpu", "gpus_per_node": 2}}},
        "rollout": {
            "pool": "local",
            "replicas": 1,
            "max_running": 16,
            "max_tokens": 64,
            "shares_prefixes": False,
        },
        "trainer": {"pool": "local", "max_tokens_per_pass": 256},
        "algorithm": {"steps": 2, "prompts_per_step": 4, "group_size": 2},
        "workload": {
            "max_prompt_tokens": 64,
            "lengths": {
                "kind": "histogram",
                "source": "streamrl-codemath-20k",
                "scale": 0.01,
                "prompt_tokens": 16,
            },
        },
        "costs": {"profile": str(profile)},
    }
    for key, value in changes.items():
        *parents, last = key.split("__")
        place = table
        for part in parents:
            place = place.setdefault(part, {})
        place[last] = value
    return make_run(table)
