"""The run files of `make bench-reality`: twelve that nothing was tuned on, with two small models on this machine's cores."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from streamrl.runfile.config import Run
from streamrl.runfile.files import load_run

EXAMPLES = Path(__file__).parent.parent / "examples"
STEPS = 12
"""Optimizer steps of each run. The first ones do not count."""
PAIR_STEPS = 36
"""Optimizer steps of the runs that are compared with each other. With twelve steps, their
difference is mostly noise.
"""
LEARNING_RATE = 1e-6
"""Learning rate of published runs. Lengths do not change within twelve steps, so they can be known before
the run. `LEARNS` has the quickstart's learning rate, with which outputs grow by half. This growth cannot
be known before the run.
"""
LEARNS = 4e-4
LONG = 200
"""Most output tokens of any run."""
MAX_PROMPT = 48
TOKENS_PER_TERM = 13
"""Output tokens per term of a prompt's sum, for policies that need expected lengths."""
SECOND_MODEL: dict[str, int] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
}
"""Six times the quickstart's size. Untrained, so its outputs end by chance, and more of them are
long.
"""


class Cell(NamedTuple):
    """One run file."""

    name: str
    model: str
    """A directory of `make_models`."""
    overrides: dict[str, object]
    """Changes of examples/quickstart.toml."""


def cell(name: str, model: str, system: str, replicas: int, **changes: object) -> Cell:
    """Return a cell; `__` is the dot of a key."""
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    own: dict[str, object] = {"policies.system": system, "rollout.replicas": replicas}
    own["cluster.pools.local.gpus_per_node"] = replicas + 1
    return Cell(name, model, own | keys)


CELLS = (
    cell(
        *("synchronous", "first", "stream-sync", 1),
        **{"algorithm__group_size": 4, "algorithm__learning_rate": LEARNS},
    ),
    cell("round-robin", "first", "one-step-async", 2, policies__dispatch="round-robin"),
    cell("whole batches", "first", "disaggregated", 3, algorithm__prompts_per_step=32),
    cell("random dispatch", "first", "stream-async", 2, policies__dispatch="random"),
    cell(
        *("in flight", "first", "fully-async", 3),
        **{"policies__weight_sync": "abort-and-resume", "policies__max_staleness": 2},
    ),
    cell(
        *("longest first", "first", "stream-async", 1),
        **{
            "policies__order": "longest-first",
            "rollout__max_running": 16,
            "algorithm__learning_rate": LEARNS,
        },
    ),
    cell("colocated", "second", "colocated", 1, rollout__max_tokens=64),
    cell("long outputs", "second", "stream-async", 1, rollout__max_tokens=LONG),
    cell(
        *("skewness-aware", "second", "stream-async", 2),
        **{"policies__dispatch": "skewness-aware", "algorithm__group_size": 4},
    ),
    cell(
        *("small groups", "second", "stream-sync", 3),
        **{"algorithm__group_size": 2, "algorithm__prompts_per_step": 48},
    ),
    cell(
        *("between batches", "second", "one-step-async", 2),
        **{"policies__weight_sync": "between-batches", "rollout__max_tokens": 96},
    ),
    cell(
        *("one rollout per prompt", "second", "fully-async", 1),
        **{
            "algorithm__name": "reinforce++",
            "algorithm__group_size": 1,
            "algorithm__prompts_per_step": 96,
        },
    ),
)


def asynchrony_pair(replicas: int) -> tuple[Cell, Cell]:
    """Return a run in which generation waits for training, and one in which it does not."""
    sync, streams = (
        cell(
            *(f"{system}, {replicas}", "first", system, replicas),
            **{"algorithm__prompts_per_step": 32, "algorithm__steps": PAIR_STEPS},
        )
        for system in ("stream-sync", "stream-async")
    )
    return sync, streams


def make_run(one: Cell, data: Path, output: Path) -> Run:
    """Return the run of a cell, with models and prompts in `data`."""
    model = data / one.model
    keys = {
        "model.path": model / "model",
        "workload.prompts": data / "prompts.jsonl",
        "workload.lengths.source": model / "lengths.csv",
        "execute.output": output,
        "execute.checkpoint_every": 10**6,
        "algorithm.steps": STEPS,
        "algorithm.learning_rate": LEARNING_RATE,
        "algorithm.kl_coefficient": 0.01 if one.model == "second" else 0.0,
        **one.overrides,
    }
    return load_run(EXAMPLES / "quickstart.toml", [f"{key}={value}" for key, value in keys.items()])


def with_expectations(lines: Iterable[str]) -> Iterator[str]:
    """Yield prompts with expected output tokens, computed from the terms of their sum."""
    for line in lines:
        record = json.loads(line)
        terms = record["entry"]["metadata"]["num_terms"]
        yield json.dumps({**record, "expected_tokens": TOKENS_PER_TERM * terms}) + "\n"
