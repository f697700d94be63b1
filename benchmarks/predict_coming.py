"""Predict RL steps whose seconds were not read yet, and add them with date and commit to docs/predictions.md.

    python -m benchmarks.predict_coming              a minute
    python -m benchmarks.predict_coming --lending    two minutes: what verl gains by lending GPUs of its trainer

profiles/published/coming_steps.toml has the steps. A later version fills in what was published, and moves the
steps to rl_steps.toml. Earlier predictions on the page are never changed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from math import sqrt
from pathlib import Path

from msgspec.structs import replace

from streamrl.hardware.profiles import PROFILES
from streamrl.record.band import model_error_of
from streamrl.runfile.files import load_run
from streamrl.sim.fidelity.rl_steps import (
    Published,
    Simulated,
    choices_of,
    load_published,
    simulate_step,
)
from streamrl.sim.fidelity.scorecard import stamp
from streamrl.sim.parallel import worker_pool
from streamrl.sim.steady_state import measure_steady

COMING = PROFILES / "published" / "coming_steps.toml"
PAGE = Path("docs/predictions.md")
HEAD = """# Predictions made before the results

Each section has what one version predicted of steps whose published seconds nobody of this project had read then. Some
may already have been public. The date and the commit stand above it. A later version fills in the last column, and never changes a prediction.

`python -m benchmarks.predict_coming` adds a section for the steps of `profiles/published/coming_steps.toml`.
"""
LONGEST = 20480
"""Maximum output tokens at a scale of 1."""
STAGES = ("generation", "score", "train", "refit")


def main() -> None:
    """Add a section to the page."""
    if sys.argv[1:] == ["--lending"]:
        _append(_lending_section())
        return
    steps = load_published(COMING)
    with worker_pool() as pool:
        wanted = [(step, choice) for step in steps for choice in choices_of(step)]
        found = list(pool.map(simulate_step, *zip(*wanted, strict=True)))
    lines = [f"## {stamp()}", "", *_assumptions(steps)]
    lines += [
        "",
        f"| step | seconds (band) | {' | '.join(STAGES)} | published |",
        f"|---{'|---' * 6}|",
    ]
    for step in steps:
        ours = [each for (one, _), each in zip(wanted, found, strict=True) if one is step and each]
        lines.append(_line(step, ours))
    _append(lines)


def _append(lines: list[str]) -> None:
    """Add lines at the end of the page."""
    before = PAGE.read_text(encoding="utf-8") if PAGE.is_file() else HEAD
    PAGE.write_text("\n".join([before.rstrip(), "", *lines]) + "\n", encoding="utf-8")


LENDING = Path("benchmarks/verl-lending.toml")
SPLITS = {"24 H100: 16 train, 8 generate": 8, "32 H100: 16 train, 16 generate": 16}
"""Number of replicas by the words for a split of GPUs; each replica has one GPU."""
SCALES = {"1,000": 0.2, "2,000": 0.4, "3,000": 0.6}
"""Scale of lengths by mean output tokens."""
RULES = (
    "Rules and defaults: `trainer.v1.separate_async.hybrid_rollout` of verl "
    "(verl/trainer/ppo/v1/trainer_separate_async.py), with waits summed over four steps. "
    "Assumptions (benchmarks/verl-lending.toml): Qwen3-8B, 64 prompts of 16 rollouts, lengths of math and code, "
    "two nodes that train with FSDP2. The published gain was not read."
)


def _lending_section() -> list[str]:
    """Return what lending changes, by split of GPUs and mean length."""
    lines = [f"## {stamp()}: verl lends GPUs of its trainer", "", RULES, ""]
    lines += ["| GPUs | mean tokens | step without, s | step with, s | change | published |"]
    lines += ["|---|---|---|---|---|---|"]
    for gpus, replicas in SPLITS.items():
        for tokens, scale in SCALES.items():
            changes = {
                "rollout.replicas": replicas,
                "cluster.pools.h100.nodes": (16 + replicas) // 8,
                "workload.lengths.scale": scale,
                "rollout.max_tokens": round(scale * LONGEST),
            }
            lent = load_run(LENDING, changes)
            without, with_lending = (
                measure_steady(run).step_time for run in (replace(lent, lending=None), lent)
            )
            change = with_lending / without - 1
            lines.append(
                f"| {gpus} | {tokens} | {without:.1f} | {with_lending:.1f} | {change:+.1%} | not read |"
            )
    return [
        *lines,
        "",
        "Both runs have the same prompts and lengths, so errors of the cost model cancel in part.",
    ]


def _assumptions(steps: list[Published]) -> Iterator[str]:
    """Yield the sources of the steps and what they do not state."""
    for source, note in dict.fromkeys((step.source, step.note) for step in steps):
        yield f"Inputs: {source}; {note}."


def _line(step: Published, ours: list[Simulated]) -> str:
    """Return a line of the table: the middle of all combinations of inputs, and the hull of their bands."""
    if not ours:
        return f"| {step.name} | refused by our memory model |{' |' * (len(STAGES) + 1)}"
    errors = [(each.seconds["step"], model_error_of(each.basis)) for each in ours]
    low = min(seconds * error.low for seconds, error in errors)
    high = max(seconds * error.high for seconds, error in errors)
    stages = [
        _middle([each.seconds[stage] for each in ours if stage in each.seconds]) for stage in STAGES
    ]
    seconds = _middle([each.seconds["step"] for each in ours])
    return (
        f"| {step.name} | {seconds} ({low:.3g} to {high:.3g}) | {' | '.join(stages)} | not read |"
    )


def _middle(values: list[float]) -> str:
    """Return the geometric middle of values as text; nothing where generation and training overlap."""
    return f"{sqrt(min(values) * max(values)):.3g}" if values else ""


if __name__ == "__main__":
    main()
