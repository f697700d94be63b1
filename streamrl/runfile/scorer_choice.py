"""The scorers that `scorer` of a reward chooses among, and the functions of users.

A value is one of three:

- a name of `SCORERS`;
- "MODULE:FUNCTION", or "python:FILE.py:FUNCTION";
- a name that an installed package declares as an entry point of the group `streamrl.scorers`: its value is such a
  "MODULE:FUNCTION".

A function is called as `score(completion: str, record: dict) -> float`.
"""

from __future__ import annotations

import re
from importlib.metadata import entry_points
from typing import NamedTuple

REWARD_MODEL = "reward-model"
"""The scorer that computes on GPUs of the verifier's own."""
GROUP = "streamrl.scorers"
OF_A_FILE = "python:"
"""What a scorer begins with that is a function in a file."""
_OF_A_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


class ScorerChoice(NamedTuple):
    """One scorer of this package."""

    make: str
    """A function, as "module:NAME", that returns the scorer of a `RewardConfig`."""
    needs: tuple[str, ...] = ()
    """Keys of the reward that it must have, and that scorers without them refuse."""
    has_model: bool = False
    """Whether it computes on GPUs of the verifier's own."""
    scores_length: bool = False
    """Whether it scores the length alone. Evaluations leave it out."""


SCORERS: dict[str, ScorerChoice] = {
    "exact": ScorerChoice("streamrl.executor.verifier.scorers:exact_scorer"),
    "math-verify": ScorerChoice("streamrl.executor.verifier.scorers:math_verify_scorer"),
    "reasoning-gym": ScorerChoice("streamrl.executor.verifier.scorers:reasoning_gym_scorer"),
    "regex": ScorerChoice("streamrl.executor.verifier.scorers:regex_scorer", ("pattern",)),
    "format": ScorerChoice("streamrl.executor.verifier.scorers:format_scorer", ("pattern",)),
    "length-penalty": ScorerChoice(
        "streamrl.executor.verifier.scorers:length_scorer", ("beyond", "until"), scores_length=True
    ),
    "unit-tests": ScorerChoice("streamrl.executor.verifier.scorers:unit_tests_scorer"),
    "judge": ScorerChoice("streamrl.executor.verifier.scorers:judge_scorer", ("endpoint", "model")),
    REWARD_MODEL: ScorerChoice(
        "streamrl.executor.verifier.scorers:model_scorer", ("model",), has_model=True
    ),
}


class RewardFunction(NamedTuple):
    """A function of the user's that scores completions: `score(completion: str, record: dict) -> float`."""

    place: str
    """Path of a Python file, or dotted name of a module."""
    name: str
    is_in_file: bool


def scorer_names() -> tuple[str, ...]:
    """Return the names that a reward may have: those of this package, then those of installed packages."""
    return (*SCORERS, *sorted(each.name for each in entry_points(group=GROUP)))


def readers_of_reward_keys() -> dict[str, tuple[str, ...]]:
    """Return the scorers that need a key, by key; the others do not have it."""
    keys = dict.fromkeys(key for choice in SCORERS.values() for key in choice.needs)
    return {
        key: tuple(name for name, choice in SCORERS.items() if key in choice.needs) for key in keys
    }


def function_of(scorer: str) -> RewardFunction | None:
    """Return the function that a scorer is; None where it is none, well-formed or not."""
    if scorer in SCORERS:
        return None
    is_in_file = scorer.startswith(OF_A_FILE)
    if not is_in_file and ":" not in scorer:
        found = next((each.value for each in entry_points(group=GROUP, name=scorer)), "")
        return function_of(found) if ":" in found else None
    place, _, name = scorer.removeprefix(OF_A_FILE).rpartition(":")
    is_place = bool(place) if is_in_file else _OF_A_MODULE.fullmatch(place) is not None
    return RewardFunction(place, name, is_in_file) if is_place and name.isidentifier() else None


def file_of(scorer: str) -> str | None:
    """Return the path that a scorer names; None where it names none."""
    function = function_of(scorer)
    return function.place if function is not None and function.is_in_file else None


def with_file(scorer: str, path: str) -> str:
    """Return a scorer that is a function in a file, with the path of another file."""
    function = function_of(scorer)
    assert function is not None and function.is_in_file, f"{scorer} names no file"
    return f"{OF_A_FILE}{path}:{function.name}"
