"""Check that two run files train the same model on the same work, so that their results can be compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import asdict

from streamrl.runfile.config import Run
from streamrl.runfile.errors import RunError, shown
from streamrl.runfile.keys import join_key, trainer_key
from streamrl.runfile.section import Section

GUESSES = ("workload.lengths.ranker", "workload.ranker")
"""Keys that begin so say what is known of lengths, not how long outputs are."""
OF_SHARE = ("every", "min_staleness", "max_staleness", "min_reward", "max_reward", "families")
"""Keys of a trainer that follows which say what it learns from."""


def check_same_work(one: Run, other: Run, names: tuple[str, str] = ("in A", "in B")) -> None:
    """Refuse two run files that train another model, or on other rollouts, or otherwise.

    Args:
        one: a run file.
        other: the other.
        names: where each has its keys, for the line that says so.

    Raises:
        RunError: one line that names the first key in which they differ.
    """
    ours, theirs = work_of(one), work_of(other)
    for key in [*ours, *(key for key in theirs if key not in ours)]:
        a, b = ours.get(key), theirs.get(key)
        if a != b:
            here, there = names
            text = f"{key} is {shown(a)} {here} and {shown(b)} {there}: both must do the same work"
            raise RunError(key, a, None, text)


def work_of(run: Run) -> dict[str, object]:
    """Return by dotted key what a run file says of what is trained, and on what."""
    found: dict[str, object] = {"seed": run.seed, "rollout.max_tokens": run.rollout.max_tokens}
    found |= _entries("model", run.model)
    found |= _entries("algorithm", run.algorithm)
    found |= _entries("workload", run.workload)
    found["framework.optimizer_steps"] = run.framework.optimizer_steps
    found["framework.epochs"] = run.framework.epochs
    found["sync.mode"] = "lora" if run.sync.mode == "lora" else "full or delta"
    for number in range(1, run.num_trainers):
        key = join_key(trainer_key(number), "algorithm")
        found |= _entries(key, run.as_seen_by(number).algorithm)
        follower = run.followers[number - 1]
        found |= {join_key(trainer_key(number), name): getattr(follower, name) for name in OF_SHARE}
    return {key: value for key, value in found.items() if not key.startswith(GUESSES)}


def _entries(name: str, section: Section) -> Mapping[str, object]:
    """Return the keys of a section, and those of sections in it."""
    found: dict[str, object] = {}
    values: dict[str, Any] = asdict(section)
    for key, value in values.items():
        here = join_key(name, key)
        found |= _entries(here, value) if isinstance(value, Section) else {here: value}
    return found
