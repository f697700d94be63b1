"""Score completions: exact answers, math-verify, reasoning-gym, text patterns, lengths, and functions of the user.

A function of the user's as a scorer: `score(completion: str, record: dict) -> float`.

Its file is the user's own code and is imported as such, once, by the process that forks the workers; it is called in
a worker, in the sandbox, since what it makes of a model's text may be to run it.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections import deque
from collections.abc import Callable
from functools import cache
from math import isfinite
from numbers import Real
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias, TypeVar

from streamrl.runfile.choices import import_object
from streamrl.runfile.roles_config import RewardConfig
from streamrl.runfile.scorer_choice import SCORERS, RewardFunction, function_of

if TYPE_CHECKING:
    from streamrl.workload.prompt_records import Record

_Value = TypeVar("_Value")
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


def exact_scorer(reward: RewardConfig) -> Scorer:
    """Return a scorer that compares the final answer with the record's: 1 where they are the same text, else 0."""
    return Scorer(_final, _answer_of, _load_exact, False, (("answer",),))


def math_verify_scorer(reward: RewardConfig) -> Scorer:
    """Return a scorer that compares mathematical expressions with the record's answer, by math-verify."""
    return Scorer(
        *(whole, _answer_of, _load_math_verify, True, (("answer",),)),
        make_check=_check_math_verify,
        most_checked=MOST_PARSED,
    )


def reasoning_gym_scorer(reward: RewardConfig) -> Scorer:
    """Return the scorer of the record's task of reasoning-gym."""
    return Scorer(
        *(_final, _answer_of_entry, _load_reasoning_gym, True),
        (("task",), ("entry", "answer")),
        make_check=_check_reasoning_gym,
    )


def regex_scorer(reward: RewardConfig) -> Scorer:
    """Return a scorer that looks for a pattern anywhere in a completion: 1 where it is found, else 0.

    A pattern with a group finds an answer: 1 where what the last match has in its first group is the record's answer.
    """
    pattern = _given(reward.pattern)
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


def format_scorer(reward: RewardConfig) -> Scorer:
    """Return a scorer that wants a completion to match a pattern from end to end: 1 where it does, else 0.

    Dots match ends of lines too, and blanks around the completion do not count.
    """
    pattern = _given(reward.pattern)

    def load() -> Grader:
        wanted = re.compile(pattern, re.DOTALL)
        return lambda record: lambda completion: float(bool(wanted.fullmatch(completion.strip())))

    return Scorer(whole, lambda record: None, load, False, ())


def length_scorer(reward: RewardConfig) -> Scorer:
    """Return a scorer of output tokens: 0 up to `beyond`, -1 from `until`, in a line between (DAPO, arXiv 2503.14476, equation 13).

    Tokens, not characters: they are what `rollout.max_tokens` cuts off and what a rollout costs.
    """
    beyond, until = _given(reward.beyond), _given(reward.until)

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


def judge_scorer(reward: RewardConfig) -> Scorer:
    """Return the scorer of a judge, as far as it has one: it reads whole completions, and knows no right answers."""
    return Scorer(whole, lambda record: None, _grades_nothing, False, (), bounds=reward.bounds)


def model_scorer(reward: RewardConfig) -> Scorer:
    """Return the scorer of a reward model, as far as it has one: see `streamrl.executor.verifier.reward_pool`."""
    return Scorer(whole, lambda record: None, _grades_nothing, False, ())


def function_scorer(function: RewardFunction, bounds: tuple[float, float]) -> Scorer:
    """Return what calls a function with a completion and its record, and wants a number within `bounds` of it."""

    def load() -> Grader:
        call = import_function(function)

        def grade(record: Record) -> Grade:
            return lambda completion: checked(call(completion, record), bounds)

        return grade

    return Scorer(whole, _record_answer, load, True, (), bounds=bounds, is_own=False)


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


def _record_answer(record: Record) -> str | None:
    answer = record.get("answer")
    return None if answer is None else str(answer)


FENCE = "```"
LANGUAGES = ("", "python", "py", "python3")
"""What may stand behind the fence that a block of Python begins with."""


def unit_tests_scorer(reward: RewardConfig) -> Scorer:
    """Return a scorer that runs a program and then each test of its record, in one process with its limits.

    A record has `tests`: a program that raises nothing where all is well, or a list of such, each one test. What both
    need may stand in its `setup`, which runs first, and a program that passes in its `solution`.

    The score is the share of the tests that pass (credit "share"), or 1 where all of them do, else 0 ("all").
    """
    credit = reward.credit

    def load() -> Grader:
        run, translate = exec, compile  # what a program does to the names of builtins is its own

        def grade(record: Record) -> Grade:
            tests = [translate(test, "<test>", "exec") for test in tests_of(record)]
            setup = translate(str(record.get("setup") or ""), "<setup>", "exec")

            def share(code: str) -> float:
                names: dict[str, Any] = {"__name__": "program"}
                run(setup, names)
                try:
                    run(translate(code, "<program>", "exec"), names)
                except MemoryError:
                    raise
                except BaseException:  # SystemExit among them
                    return 0.0
                return sum(_passes(test, names) for test in tests) / len(tests)

            def _passes(test: CodeType, names: dict[str, Any]) -> bool:
                try:
                    run(test, names)
                except BaseException:
                    return False
                return True

            def score(code: str) -> float:
                passed = share(code) if code else 0.0
                return passed if credit == "share" else float(passed == 1.0)

            return score

        return grade

    return Scorer(
        lambda completion, num_tokens: last_program(completion),
        _solution_of,
        load,
        True,
        (("tests",),),
        make_check=lambda: _check,
    )


def last_program(completion: str) -> str:
    """Return the last whole block of Python that stands between fences; nothing where there is none."""
    *parts, _ = completion.split(FENCE)  # the last part lies behind a fence, or is not closed
    for block in reversed(parts[1::2]):
        language, _, code = block.partition("\n")
        if language.strip().lower() in LANGUAGES:
            return code
    return ""


def tests_of(record: Record) -> list[str]:
    """Return the tests of a record.

    Raises:
        KeyError: it has none.
        ValueError: these are no texts.
    """
    tests = record["tests"]
    tests = [tests] if isinstance(tests, str) else tests
    if not (isinstance(tests, list) and tests and all(isinstance(each, str) for each in tests)):
        raise ValueError(f"tests must be a program or a list of programs, got {tests!r:.80}")
    return tests


def _solution_of(record: Record) -> str | None:
    solution = record.get("solution")
    return solution if isinstance(solution, str) else None


def _check(record: Record) -> str | None:
    try:
        for source in (*tests_of(record), str(record.get("setup") or "")):
            compile(source, "<test>", "exec")
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        return f"unit-tests cannot run its tests: {type(error).__name__}: {error}"
    return None


def make_scorer(reward: RewardConfig) -> Scorer:
    """Return what scores by a reward whose keys were checked; nothing is imported for it yet."""
    function = function_of(reward.scorer)
    if function is not None:
        return function_scorer(function, reward.bounds)
    make = import_object(SCORERS[reward.scorer].make)
    assert callable(make), reward.scorer
    scorer: Scorer = make(reward)
    return scorer


def is_scored(record: Record, reward: RewardConfig) -> bool:
    """Whether completions to a record are scored by a reward."""
    return not reward.families or record.get("family") in reward.families


def _given(value: _Value | None) -> _Value:
    assert value is not None, "check_rewards wants what a scorer needs"
    return value
