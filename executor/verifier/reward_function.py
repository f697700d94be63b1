"""A function of the user's as a scorer: `score(completion: str, record: dict) -> float`.

Its file is the user's own code and is imported as such, once, by the process that forks the workers; it is called in
a worker, in the sandbox, since what it makes of a model's text may be to run it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from math import isfinite
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl.executor.verifier.scorers import Grade, Grader, Scorer, whole
from streamrl.runfile.reward_config import RewardFunction

if TYPE_CHECKING:
    from streamrl.workload.prompt_records import Record


def function_scorer(function: RewardFunction, bounds: tuple[float, float]) -> Scorer:
    """Return what calls a function with a completion and its record, and wants a number within `bounds` of it."""

    def load() -> Grader:
        call = import_function(function)

        def grade(record: Record) -> Grade:
            return lambda completion: checked(call(completion, record), bounds)

        return grade

    return Scorer(whole, _answer_of, load, True, (), bounds=bounds, is_own=False)


def import_function(function: RewardFunction) -> Callable[[str, Any], object]:
    """Import a function; of a file, modules that stand beside it can be imported as well.

    Raises:
        TypeError: there is nothing of that name that can be called.
    """
    if function.is_in_file:
        path = Path(function.place)
        sys.path.append(str(path.parent))
        name = f"rewards_of_{path.stem}"  # hides no module that is called as the file is
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise TypeError(f"{path} is no Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # where dataclasses look for the module of a class
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(function.place)
    found: Callable[[str, Any], object] | None = getattr(module, function.name, None)
    if not callable(found):
        raise TypeError(f"{function.place} has no function {function.name}")
    return found


def checked(score: object, bounds: tuple[float, float]) -> float:
    """Return what a function returned as a float.

    Raises:
        TypeError: it is no number.
        ValueError: it is not finite, or outside `bounds`.
    """
    if not isinstance(score, Real):
        raise TypeError(f"a reward must be a number, got {score!r:.80}")
    least, most = bounds
    number = float(score)
    if not isfinite(number) or not least <= number <= most:
        raise ValueError(f"a reward must be in [{least}, {most}], got {number}")
    return number


def _answer_of(record: Record) -> str | None:
    answer = record.get("answer")
    return None if answer is None else str(answer)
