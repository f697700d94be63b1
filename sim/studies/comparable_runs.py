"""Check that two run files train the same model on the same work, so that their results are comparable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import asdict

from streamrl.runfile.config import Run
from streamrl.runfile.errors import RunError, shown
from streamrl.runfile.keys import join_key, trainer_key
from streamrl.runfile.section import Section

GUESSES = ("workload.lengths.ranker", "workload.ranker")
"""Prefixes of keys that describe expected lengths. They do not change the lengths themselves."""
OF_SHARE = ("every", "min_staleness", "max_staleness", "min_reward", "max_reward", "families")
"""Keys of a secondary trainer that decide which rollouts it trains on."""


class IncomparableError(RunError):
    """Two valid runs whose dollars and hours cannot be compared."""


FRAMEWORK_KEYS = ("algorithm.old_log_probs", "framework.optimizer_steps", "framework.epochs")
"""Keys that a framework sets. Runs of two frameworks do the same work where these alone differ."""


def check_same_work(one: Run, other: Run, names: tuple[str, str] = ("in A", "in B")) -> None:
    """Reject two run files that do not train the same model on the same rollouts.

    Args:
        one: a run file.
        other: the other run file.
        names: where each key is set, for the error message.

    Raises:
        IncomparableError: they differ; it names the first key that differs.
    """
    ours, theirs = work_of(one), work_of(other)
    own = FRAMEWORK_KEYS if one.framework.name != other.framework.name else ()
    for key in [*ours, *(key for key in theirs if key not in ours)]:
        a, b = ours.get(key), theirs.get(key)
        if a != b and key not in own:
            here, there = names
            text = f"{key} is {shown(a)} {here} and {shown(b)} {there}; both runs must do the same work"
            raise IncomparableError(key, a, None, text)


def work_of(run: Run) -> dict[str, object]:
    """Return the values of a run file that define its model and its work, by dotted key."""
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
    """Return the keys of a section, including those of its subsections."""
    found: dict[str, object] = {}
    values: dict[str, Any] = asdict(section)
    for key, value in values.items():
        here = join_key(name, key)
        found |= _entries(here, value) if isinstance(value, Section) else {here: value}
    return found
