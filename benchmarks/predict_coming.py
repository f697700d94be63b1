"""Predict RL steps whose seconds were not read yet, and add them with date and commit to docs/predictions.md.

    python -m benchmarks.predict_coming    a minute

profiles/published/coming_steps.toml has the steps. A later version fills in what was published, and moves the
steps to rl_steps.toml. Earlier predictions on the page are never changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt
from pathlib import Path

from streamrl.hardware.profiles import PROFILES
from streamrl.record.band import model_error_of
from streamrl.sim.fidelity.rl_steps import (
    Published,
    Simulated,
    choices_of,
    load_published,
    simulate_step,
)
from streamrl.sim.fidelity.scorecard import stamp
from streamrl.sim.parallel import worker_pool

COMING = PROFILES / "published" / "coming_steps.toml"
PAGE = Path("docs/predictions.md")
HEAD = """# Predictions made before the results

Each section has what one version predicted of steps whose published seconds nobody had read then. The date and the
commit stand above it. A later version fills in the last column, and never changes a prediction.

`python -m benchmarks.predict_coming` adds a section for the steps of `profiles/published/coming_steps.toml`.
"""
STAGES = ("generation", "score", "train", "refit")


def main() -> None:
    """Add a section to the page."""
    steps = load_published(COMING)
    with worker_pool() as pool:
        wanted = [(step, choice) for step in steps for choice in choices_of(step)]
        found = list(pool.map(simulate_step, *zip(*wanted, strict=True)))
    before = PAGE.read_text(encoding="utf-8") if PAGE.is_file() else HEAD
    lines = [before.rstrip(), "", f"## {stamp()}", ""]
    lines += list(_assumptions(steps))
    lines += [
        "",
        f"| step | seconds (band) | {' | '.join(STAGES)} | published |",
        f"|---{'|---' * 6}|",
    ]
    for step in steps:
        ours = [each for (one, _), each in zip(wanted, found, strict=True) if one is step and each]
        lines.append(_line(step, ours))
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


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
