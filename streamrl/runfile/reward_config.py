"""`[[verifier.reward]]` of a run file: what completions are scored by, and how much each score counts."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from streamrl.runfile.section import Section
from streamrl.runfile.units import Duration

ScorerName = Literal[
    "exact",
    "math-verify",
    "reasoning-gym",
    "regex",
    "format",
    "length-penalty",
    "unit-tests",
    "judge",
    "reward-model",
]
OverSteps = Literal["min", "mean", "last"]
REWARD_MODEL = "reward-model"
"""The scorer that computes on GPUs of the verifier's own."""
OF_A_FILE = "python:"
"""What a scorer begins with that is a function in a file."""
_OF_A_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


class RewardFunction(NamedTuple):
    """A function of the user's that scores completions: `score(completion: str, record: dict) -> float`."""

    place: str
    """Path of a Python file, or dotted name of a module."""
    name: str
    is_in_file: bool


class RewardConfig(Section, frozen=True, kw_only=True):
    """One score of a completion; a rollout's reward is the weighted sum of all."""

    scorer: str
    """The name of a scorer, or a function: "python:FILE.py:FUNCTION" or "MODULE:FUNCTION"."""
    weight: float = 1.0
    """What the score is multiplied by; below 0 for what is not wanted."""
    name: str | None = None
    """Its mean is `reward/NAME` in metrics.jsonl; the scorer's name, or the function's, where absent."""
    families: tuple[str, ...] = ()
    """The "family" of the prompts whose completions it scores; all prompts where empty."""
    pattern: str | None = None
    """Of regex and format: a regular expression of Python's `re`."""
    beyond: int | None = None
    """Of length-penalty: output tokens up to which the score is 0; from there it falls in a line."""
    until: int | None = None
    """Of length-penalty: output tokens from which the score is -1."""
    credit: Literal["all", "share"] = "all"
    """Of unit-tests: 1 where all tests pass and else 0, or the share of tests that pass."""
    bounds: tuple[float, float] = (0.0, 1.0)
    """Of a function: the least and the most that it returns; anything else is an error of it. Of judge: of its scores."""
    endpoint: str | None = None
    """Of judge: where an OpenAI-compatible server is, such as "http://127.0.0.1:8000/v1"."""
    model: str | None = None
    """Of judge: the model that the server is asked for. Of reward-model: a Hugging Face directory, or "hf://NAME" on the hub:
    a sequence classifier with one output, or with `step_end` a token classifier."""
    step_end: str | None = None
    """Of reward-model: what a step of a completion ends with, such as "\n\n": the model scores each step at its last token
    (a process reward), and not the whole at its last one."""
    over_steps: OverSteps = "min"
    """Of reward-model with `step_end`: which of the scores of its steps a completion gets."""
    template: str | None = None
    """Of judge: what it is asked, a Jinja template of the record's fields, `completion`, `least` and `most`; its last
    "Score: X" counts. A question of our own where absent."""
    key_variable: str | None = None
    """Of judge: the environment variable that holds the key which the server wants, if any."""
    at_once: int = 8
    """Of judge: questions under way at a time."""
    request_time: Duration = Duration(60.0)
    """Of judge: time for an answer."""

    @property
    def label(self) -> str:
        """What the reward is called in metrics."""
        function = function_of(self.scorer)
        return self.name or (self.scorer if function is None else function.name)


def function_of(scorer: str) -> RewardFunction | None:
    """Return the function that a scorer is; None where it is none, well-formed or not."""
    is_in_file = scorer.startswith(OF_A_FILE)
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
