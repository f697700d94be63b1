"""Read the answers that stand for a run file, as people write them: "6k", "3 days", "16xH100@2.20".

Commands and notebooks give the same answers. Errors name them as the options of `streamrl plan`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from streamrl.hardware.profiles import find_profile, load_model
from streamrl.runfile.cluster_config import ModelConfig
from streamrl.runfile.config import Run
from streamrl.runfile.files import make_run
from streamrl.runfile.python_values import Changes, apply_changes
from streamrl.runfile.short_forms import model_keys, read_offer
from streamrl.runfile.units import count_of, without_thousands_marks
from streamrl.sim.parallel import worker_pool
from streamrl.sim.planner.first_answer import (
    FirstAnswer,
    Question,
    check_lengths,
    check_units,
    first_answer,
    run_table_of,
)

MOST_SECONDS = 120.0
"""Seconds after which a first answer simulates nothing more, on a very slow or busy machine. Others end it by
`MOST_ROLLOUTS`, so its choice does not depend on what else the machine does.
"""


COUNTS = ("prompts", "group", "mean_tokens", "max_tokens", "prompt_tokens", "steps")
"""Answers that are whole numbers, such as 32k."""
ANSWERS = (
    "model",
    "gpus",
    "algorithm",
    *COUNTS,
    "link",
    "deadline",
    "budget",
    "setup_time",
    "minimum_term",
)
"""Names of the answers, which are the fields of a `Question`."""


def stated_of(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answers among a command's parameters that were given, numbers written out.

    Raises:
        ValueError: a number cannot be read.
    """
    stated = {name: parameters[name] for name in ANSWERS if parameters.get(name) is not None}
    return {name: read_answer(name, value) for name, value in stated.items()}


def read_answer(name: str, value: str | float) -> str | int | float:
    """Return the answer to a question of one name: numbers stay, and texts are read."""
    try:
        if name == "budget":
            return float(without_thousands_marks(str(value).lstrip("$")))
        return count_of(str(value)) if name in COUNTS else str(value)
    except ValueError as error:
        text = f"{value!r} is no number of dollars" if name == "budget" else error
        raise ValueError(f"--{name.replace('_', '-')}: {text}") from None


def check_answers(stated: Mapping[str, Any]) -> None:
    """Check each answer on its own, before any other is asked for.

    Raises:
        ValueError: there is no such model or GPU, or a value cannot be.
    """
    if "model" in stated:
        _check_model(stated["model"])
    for pool in read_offer(stated["gpus"]).values() if "gpus" in stated else ():
        _check_gpu(pool["gpu"])
    for name in COUNTS:
        if stated.get(name, 1) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {stated[name]}")
    if "mean_tokens" in stated and "max_tokens" in stated:
        check_lengths(stated["mean_tokens"], stated["max_tokens"])
    check_units(stated)


def _check_model(text: str) -> None:
    keys = model_keys(text)
    try:
        load_model(ModelConfig(name=keys.get("name"), path=keys.get("path")))
    except ValueError as error:
        is_other_directory = "name" in keys and Path(text.strip()).is_dir()
        reason = f"{text} has no config.json" if is_other_directory else error
        raise ValueError(f"--model: {reason}") from None


def _check_gpu(name: str) -> None:
    try:
        find_profile("gpus", name, ".toml")
    except ValueError as error:
        raise ValueError(f"--gpus: {error}") from None


def question_of(stated: dict[str, Any]) -> Question:
    """Return the question that the options ask.

    Raises:
        ValueError: there is no model or no GPU.
    """
    for name, example in (("model", "Qwen/Qwen3-8B"), ("gpus", "16xH100@2.20")):
        if name not in stated:
            raise ValueError(
                f"--{name} is missing, such as --{name} {example}; without a run file, --model and --gpus are needed"
            )
    check_answers(stated)
    return Question(**stated)


def run_of(question: Question, changes: Changes) -> Run:
    """Return the run of a question, with changes as `load_run` takes them."""
    table = run_table_of(question)
    apply_changes(table, changes)
    return make_run(table)


def estimate(run: Run) -> FirstAnswer:
    """Estimate the plans that a decision is between."""
    with worker_pool() as pool:
        return first_answer(run, pool, MOST_SECONDS)
