"""Directories to report on: a plan with its simulation, runs beside it, a what-if study."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from streamrl.runfile.config import Run
from streamrl.runfile.files import load_run, write_run
from streamrl.sim.planner.plan import PLAN_TOML, write_plan
from streamrl.sim.steady_state import simulate_steady
from tests.runs import small_run
from tests.test_plan import few, planned

STUDY: dict[str, Any] = {
    "title": "How long may outputs be?",
    "question": "Does <i>length</i> matter?",
    "run": "run.toml",
    "seeds": 2,
    "axes": [
        {
            "keys": ["workload.lengths.scale"],
            "points": [["1"], ["2"]],
            "name": "length",
            "labels": ["1", "1, twice"],
        },
        {
            "keys": ["policies.system"],
            "points": [["stream-sync"], ["stream-async"]],
            "name": "system",
            "labels": ["sync", "async"],
        },
    ],
    "findings": {"cost_per_million_tokens": "Async costs less throughout."},
    "rows": [
        {
            "values": {
                "workload.lengths.scale": str(at + 1),
                "policies.system": f"stream-{system}",
            },
            "label": f"{length}, {system}",
            "place": [at, ("sync", "async").index(system)],
            "metrics": {
                "cost_per_million_tokens": {"median": cost, "least": cost - 0.1, "most": cost + 0.1}
            },
        }
        for at, length, system, cost in (
            (0, "1", "sync", 2.0),
            (0, "1", "async", 1.5),
            (1, "1, twice", "sync", 3.0),
            (1, "1, twice", "async", 2.5),
        )
    ],
    "refused": [{"values": {"workload.lengths.scale": "9"}, "reason": "9 does not fit"}],
}


def write_trace(directory: Path, run: Run) -> Path:
    """Simulate a run into a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    short = replace(run, simulate=replace(run.simulate, max_steps=4))
    (directory / "trace.jsonl").write_bytes(simulate_steady(short).encode())
    return directory


def write_runs(parent: Path, **changes: dict[str, Any]) -> list[Path]:
    """Simulate small runs into directories by name."""
    return [write_trace(parent / name, small_run(change)) for name, change in changes.items()]


def as_executed(directory: Path) -> Path:
    """Mark the trace of a directory as one of an executed run."""
    file = directory / "trace.jsonl"
    header, _, rest = file.read_bytes().partition(b"\n")
    changed = {**json.loads(header), "world": "real", "facts": {"host": "x86_64", "python": "3"}}
    file.write_bytes(json.dumps(changed).encode() + b"\n" + rest)
    return directory


def write_planned(directory: Path, **plan: Any) -> Path:
    """Plan a small offer into a directory; its own seed is one of two."""
    return write_plan_of(few(**{"seeds": 2, "finalists": 2, **plan}), directory)


def write_plan_of(run: Run, directory: Path) -> Path:
    """Plan an offer into a directory."""
    directory.mkdir(parents=True)
    found = planned(run)
    write_plan(found.plan, directory)
    write_run(found.run, directory / PLAN_TOML, ["a plan"], found.plan.allocation.settings)
    return directory


def simulate_plan(directory: Path) -> None:
    """Simulate a directory's plan into it."""
    write_trace(directory, load_run(directory / PLAN_TOML))


def write_study(directory: Path) -> Path:
    """Write a study of two axes."""
    directory.mkdir(parents=True)
    (directory / "study.json").write_text(json.dumps(STUDY))
    rows = ["workload.lengths.scale,policies.system,seed,tiers.composed,tiers.roofline"]
    rows += ["1,sync,0,1,0", "1,async,0,0.5,0.5"]
    (directory / "study.csv").write_text("\n".join(rows) + "\n")
    return directory
