"""What a scorer is, and those that compare a completion with the answer of its record."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from streamrl.workload.prompt_records import Record

Grade: TypeAlias = Callable[[str], float]
"""The score of one answer. It may evaluate the answer: call it in a sandbox only."""
Check: TypeAlias = "Callable[[Record], str | None]"
"""Says what is wrong with a record, None where nothing is."""
Grader: TypeAlias = "Callable[[Record], Grade]"
"""Grades the answers to one record. It sees nothing that a model wrote; raises where the record lacks something."""

MOST_PARSED = 256
"""Answers that are parsed before a run: some milliseconds each. Of others that cannot be read the groups are dropped."""
ANSWER_MARKERS = ("####", "#", "answer:", "Answer:")
"""What stands before the final answer where a completion shows its work."""


class Scorer(NamedTuple):
    """How completions are scored; only `load` imports what does it."""

    read: Callable[[str, int], str]
    """Return what of a completion is scored, from its text and its output tokens."""
    expected: Callable[[Record], str | None]
    """Return an answer to the record that is known to be right, None where the record knows none."""
    load: Callable[[], Grader]
    """Import what grades, and let it grade something of our own: sympy's first expression takes a tenth of a
    second, which every worker that is forked before it would take anew."""
    evaluates: bool
    """Whether it may run an answer as code."""
    fields: tuple[tuple[str, ...], ...]
    """What it reads of a record: of every tuple one field."""
    make_check: Callable[[], Check] = lambda: lambda record: None
    """Import what says whether a record that has its fields can be scored by."""
    most_checked: int | None = None
    """Records that are looked at before a run, where each takes a while."""
    bounds: tuple[float, float] = (0.0, 1.0)
    """The least and the most that it gives."""
    is_own: bool = True
    """Whether it is this package's, and no code of the user's."""


_ARITHMETIC = re.compile(r"[0-9.,:;+\-*/%^=<>(){}\[\]$ \t\n]*")
"""Numbers and what stands between them."""
_ALGEBRA = re.compile(r"(?:[0-9,;+\-*/%^=<>$ \t\n]|[A-Za-z](?![0-9]*[A-Za-z]))*")
"""Numbers and names of one letter, and its digits, and what reckons with them: nothing is called, or looked up in anything."""


def final_answer(completion: str) -> str:
    """Return what follows the last answer marker, or the last line where there is none."""
    for marker in ANSWER_MARKERS:
        if marker in completion:
            return completion.rpartition(marker)[2].strip()
    last = completion.strip().rpartition("\n")[
        2
    ]  # an end of line wherever there is one; others are rare
    return last.splitlines()[-1].strip() if last else ""


def can_act(answer: str) -> bool:
    """Return whether an answer, were it evaluated, could do more than compute a value.

    To reach anything it takes a name, and more than the name to do anything with it: brackets, a dot, or a word of the
    language, which has two letters at least. Quotes and backslashes are kept out as well, since text that is evaluated may
    be evaluated again, and spells any name in numbers.
    """
    return not (_ARITHMETIC.fullmatch(answer) or _ALGEBRA.fullmatch(answer) or answer.isalnum())


def whole(completion: str, num_tokens: int) -> str:
    """Return all of a completion."""
    return completion


def _final(completion: str, num_tokens: int) -> str:
    return final_answer(completion)


def _answer_of(record: Record) -> str | None:
    return str(record["answer"])


def _answer_of_entry(record: Record) -> str | None:
    answer = _entry(record)["answer"]
    return None if answer is None else str(answer)


def _entry(record: Record) -> Record:
    return record.get("entry") or {"answer": record["answer"], "metadata": {}}


def _load_exact() -> Grader:
    def grade(record: Record) -> Grade:
        expected = str(record["answer"]).strip()
        return lambda answer: float(answer == expected)

    return grade


def _load_math_verify() -> Grader:
    from math_verify import parse, verify

    def grade(record: Record) -> Grade:
        answer = delimited(str(record["answer"]))

        def compare(completion: str) -> float:
            expected = parse(answer)
            if not expected:
                raise ValueError(f"math-verify reads no answer in {answer!r}")
            return float(verify(expected, parse(completion)))

        return compare

    grade({"answer": "$x^2 + 1$"})("so $\\boxed{\\frac{x}{2}}$")  # see `Scorer.load`
    return grade


def delimited(answer: str) -> str:
    """Return an answer between dollar signs, unless it has signs of its own: of bare LaTeX math-verify reads numbers alone."""
    return (
        answer if any(sign in answer for sign in ("$", "\\boxed", "\\(", "\\[")) else f"${answer}$"
    )


def _check_math_verify() -> Check:
    from math_verify import parse

    def check(record: Record) -> str | None:
        answer = delimited(str(record["answer"]))
        return None if parse(answer) else f"math-verify reads no answer in {answer!r}"

    return check


def _check_reasoning_gym() -> Check:
    from reasoning_gym.factory import DATASETS

    def check(record: Record) -> str | None:
        task = record["task"]
        if isinstance(task, str) and task in DATASETS:
            return None
        return f"reasoning-gym has no task {task!r}"

    return check


def _load_reasoning_gym() -> Grader:
    from reasoning_gym import get_score_answer_fn

    scorer_of = cache(get_score_answer_fn)

    def grade(record: Record) -> Grade:
        task, entry = scorer_of(record["task"]), _entry(record)
        return lambda answer: float(task(answer=answer, entry=entry))

    derivative = {"integrand": "2*x", "variable": "x"}
    entry = {"answer": "x**2 + C", "metadata": derivative}
    grade({"task": "simple_integration", "entry": entry})("x**2 + C")  # see `Scorer.load`
    return grade


EXACT = Scorer(_final, _answer_of, _load_exact, False, (("answer",),))
MATH_VERIFY = Scorer(
    *(whole, _answer_of, _load_math_verify, True, (("answer",),)),
    make_check=_check_math_verify,
    most_checked=MOST_PARSED,
)
REASONING_GYM = Scorer(
    *(_final, _answer_of_entry, _load_reasoning_gym, True),
    (("task",), ("entry", "answer")),
    make_check=_check_reasoning_gym,
)
