"""Scorers that look at a completion itself: what stands in it, what it is made up of, how long it is."""

from __future__ import annotations

import re
from collections import deque
from typing import TYPE_CHECKING, NoReturn

from streamrl.executor.verifier.scorers import Grade, Grader, Scorer, whole

if TYPE_CHECKING:
    from streamrl.workload.prompt_records import Record


def regex_scorer(pattern: str) -> Scorer:
    """Return a scorer that looks for a pattern anywhere in a completion: 1 where it is found, else 0.

    A pattern with a group finds an answer: 1 where what the last match has in its first group is the record's answer.
    """
    num_groups = re.compile(pattern).groups

    def load() -> Grader:
        found_by = re.compile(pattern)

        def grade(record: Record) -> Grade:
            if not num_groups:
                return lambda completion: float(found_by.search(completion) is not None)
            expected = str(record["answer"]).strip()

            def compare(completion: str) -> float:
                matches = deque(found_by.finditer(completion), maxlen=1)
                return float(any((match[1] or "").strip() == expected for match in matches))

            return compare

        return grade

    fields = (("answer",),) if num_groups else ()
    return Scorer(whole, lambda record: None, load, False, fields)


def format_scorer(pattern: str) -> Scorer:
    """Return a scorer that wants a completion to match a pattern from end to end: 1 where it does, else 0.

    Dots match ends of lines too, and blanks around the completion do not count.
    """

    def load() -> Grader:
        wanted = re.compile(pattern, re.DOTALL)
        return lambda record: lambda completion: float(bool(wanted.fullmatch(completion.strip())))

    return Scorer(whole, lambda record: None, load, False, ())


def length_scorer(beyond: int, until: int) -> Scorer:
    """Return a scorer of output tokens: 0 up to `beyond`, -1 from `until`, in a line between (DAPO, arXiv 2503.14476, equation 13).

    Tokens, not characters: they are what `rollout.max_tokens` cuts off and what a rollout costs.
    """

    def grade(record: Record) -> Grade:
        return lambda num_tokens: -min(1.0, max(0.0, (int(num_tokens) - beyond) / (until - beyond)))

    return Scorer(
        lambda completion, num_tokens: str(num_tokens),
        lambda record: None,
        lambda: grade,
        False,
        (),
        bounds=(-1.0, 0.0),
    )


def _grades_nothing() -> Grader:
    def grade(record: Record) -> NoReturn:
        raise RuntimeError("a model is not asked from the sandbox")

    return grade


def judge_scorer(bounds: tuple[float, float]) -> Scorer:
    """Return the scorer of a judge, as far as it has one: it reads whole completions, and knows no right answers."""
    return Scorer(whole, lambda record: None, _grades_nothing, False, (), bounds=bounds)


def model_scorer() -> Scorer:
    """Return the scorer of a reward model, as far as it has one: see `streamrl.executor.verifier.reward_pool`."""
    return Scorer(whole, lambda record: None, _grades_nothing, False, ())
