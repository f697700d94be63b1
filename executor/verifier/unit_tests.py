"""The scorer of programs: the code that a completion ends with, run with the tests of its record."""

from __future__ import annotations

from types import CodeType
from typing import TYPE_CHECKING, Any

from streamrl.executor.verifier.scorers import Grade, Grader, Scorer

if TYPE_CHECKING:
    from streamrl.workload.prompt_records import Record

FENCE = "```"
LANGUAGES = ("", "python", "py", "python3")
"""What may stand behind the fence that a block of Python begins with."""


def unit_tests_scorer(credit: str) -> Scorer:
    """Return a scorer that runs a program and then each test of its record, in one process with its limits.

    A record has `tests`: a program that raises nothing where all is well, or a list of such, each one test. What both
    need may stand in its `setup`, which runs first, and a program that passes in its `solution`.

    Args:
        credit: "share" of the tests that pass, or "all": 1 where all of them do, else 0.
    """

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
