"""Score completions: exact answers, math-verify, reasoning-gym, text patterns, lengths, and functions of the user.

A function of the user has the signature `score(completion: str, record: dict) -> float`. The fork server imports its file
once, as the user's own code. A worker calls it in the sandbox, because it may run text that a model wrote.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections import deque
from collections.abc import Callable, Mapping
from functools import cache, partial
from math import isfinite
from numbers import Real
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias, TypeVar

from streamrl.executor.verifier.remote_program import ProgramEndedError, Tests, begin_tests
from streamrl.runfile.choices import import_object
from streamrl.runfile.roles_config import RewardConfig, RewardSignature
from streamrl.runfile.scorer_choice import SCORERS, RewardFunction, function_of

if TYPE_CHECKING:
    from streamrl.workload.prompt_records import Record

_Value = TypeVar("_Value")
Grade: TypeAlias = Callable[[str], float]
"""Returns the score of one answer. It may evaluate the answer: call it only in a sandbox."""
Check: TypeAlias = "Callable[[Record], str | None]"
"""Returns what is wrong with a record; None if nothing is."""
Grader: TypeAlias = "Callable[[Record], Grade]"
"""Returns the `Grade` for one record. It sees no model output. It raises if the record lacks a field."""

MOST_PARSED = 256
"""Maximum number of answers that are parsed before a run, some milliseconds each.

Later, a group whose answer cannot be parsed is dropped.
"""
ANSWER_MARKERS = ("####", "#", "answer:", "Answer:")
"""Markers before the final answer of a completion that shows its work."""


class Scorer(NamedTuple):
    """One way of scoring completions; only `load` imports its libraries."""

    read: Callable[[str, int], str]
    """Return the part of a completion that is scored, from its text and its number of output tokens."""
    expected: Callable[[Record], str | None]
    """Return a correct answer to the record; None if the record has none."""
    load: Callable[[], Grader]
    """Import the grading library, and grade an example.

    sympy's first expression takes 0.1 s. Without the example every later worker would spend this time again.
    """
    evaluates: bool
    """Whether it may run an answer as code."""
    fields: tuple[tuple[str, ...], ...]
    """Fields that it needs: one field of each tuple, as `field_of` reads them."""
    make_check: Callable[[], Check] = lambda: lambda record: None
    """Return a check of a record that has all fields: can it be scored?"""
    most_checked: int | None = None
    """Maximum number of records that are checked before a run; None: all."""
    bounds: tuple[float, float] = (0.0, 1.0)
    """Smallest and largest score."""
    is_own: bool = True
    """Whether it belongs to this package; False for functions of the user."""
    must_win: bool = False
    """Whether a run begins only if the own answers of some records score more than the minimum, in the sandbox."""
    runs_programs: bool = False
    """Whether a worker needs a second process, in which programs of completions run."""


_ARITHMETIC = re.compile(r"[0-9.,:;+\-*/%^=<>(){}\[\]$ \t\n]*")
"""Numbers with operators, brackets and spaces."""
_ALGEBRA = re.compile(r"(?:[0-9,;+\-*/%^=<>$ \t\n]|[A-Za-z](?![0-9]*[A-Za-z]))*")
"""Numbers, one-letter names with digits, and operators; no calls and no attribute access."""


def final_answer(completion: str) -> str:
    """Return the text after the last answer marker, or the last line without a marker."""
    for marker in ANSWER_MARKERS:
        if marker in completion:
            return completion.rpartition(marker)[2].strip()
    # Cut at "\n" first, which is fast; `splitlines` then finds other ends of line.
    last = completion.strip().rpartition("\n")[2]
    return last.splitlines()[-1].strip() if last else ""


def can_act(answer: str) -> bool:
    """Return whether evaluating an answer could do more than compute a value.

    An action needs a name, and something to do with it: brackets, a dot, or a keyword, which has at least two letters.
    Quotes and backslashes also count as possible actions: evaluated text may be evaluated again, and escapes can spell
    any name in numbers.
    """
    return not (_ARITHMETIC.fullmatch(answer) or _ALGEBRA.fullmatch(answer) or answer.isalnum())


def whole(completion: str, num_tokens: int) -> str:
    """Return the whole completion."""
    return completion


def _final(completion: str, num_tokens: int) -> str:
    return final_answer(completion)


STATED = ("####", "answer:", "Answer:")
"""Markers before the final answer in a record's answer that shows its work, such as those of GSM8K."""


def accepted_answers(record: Record) -> list[str]:
    """Return the final answers that a completion may give: those of the record, or of each entry of its list.

    Raises:
        ValueError: an answer is neither a text nor a finite number, or its final answer is empty.
    """
    answer = record["answer"]
    found = [_stated(each) for each in (answer if isinstance(answer, list) else [answer])]
    if not found:
        raise ValueError("the answer is an empty list")
    return list(dict.fromkeys(text for texts in found for text in texts))


def _stated(answer: object) -> list[str]:
    """Return the ways to write one answer: the text after its last marker, or all of it."""
    has_value = not isinstance(answer, float) or isfinite(answer)
    if not isinstance(answer, str | int | float) or isinstance(answer, bool) or not has_value:
        raise ValueError(
            f"the answer must be a text, a number, or a list of them, got {answer!r:.80}"
        )
    text = str(answer).strip()
    marker = next((each for each in STATED if each in text), None)
    if marker is not None:
        text = text.rpartition(marker)[2].strip()
    if not text:
        how = "is empty" if marker is None else "ends after its marker"
        raise ValueError(
            f"the answer {answer!r:.80} {how}, so every empty completion would be right"
        )
    if isinstance(answer, float) and answer.is_integer():
        return [text, str(int(answer))]
    return [text]


def _answer_of(record: Record) -> str | None:
    return accepted_answers(record)[0]


def _answer_of_entry(record: Record) -> str | None:
    answer = _entry(record)["answer"]
    return None if answer is None else str(answer)


def _entry(record: Record) -> Record:
    return record.get("entry") or {"answer": accepted_answers(record)[0], "metadata": {}}


OWN_FIELDS = "workload.fields"
"""Key of the columns in complaints about a record; that of its own data set replaces it."""
FINAL_COLUMN = f"name the column of the final answer in {OWN_FIELDS}.answer, or use another scorer"
"""What to do if a record's own answer cannot win."""


def _load_exact() -> Grader:
    def grade(record: Record) -> Grade:
        accepted = accepted_answers(record)
        return lambda answer: float(answer in accepted)

    return grade


def _check_exact(record: Record) -> str | None:
    """Return why no completion can win: its final answer is one line, or the text after a marker."""
    try:
        accepted = accepted_answers(record)
    except ValueError as error:
        return f"exact cannot score it: {error}; {FINAL_COLUMN}"
    wins = [text for text in accepted if "\n" not in text and final_answer(f"#### {text}") == text]
    if wins:
        return None
    num = accepted[0].count("\n") + 1
    return (
        f"exact scores the record's own answer 0: it has {num} lines, and only the last line of a completion counts, "
        f"or the text after ####; {FINAL_COLUMN}"
    )


def _load_math_verify() -> Grader:
    from math_verify import parse, verify

    def grade(record: Record) -> Grade:
        answers = [delimited(text) for text in accepted_answers(record)]

        def compare(completion: str) -> float:
            readings = [parse(answer) for answer in answers]
            if not all(readings):
                unread = answers[readings.index([])]
                raise ValueError(f"math-verify reads no answer in {unread!r}")
            found = parse(completion)
            return float(any(verify(expected, found) for expected in readings))

        return compare

    grade({"answer": "$x^2 + 1$"})("so $\\boxed{\\frac{x}{2}}$")  # see `Scorer.load`
    return grade


def delimited(answer: str) -> str:
    """Return an answer between dollar signs, unless it has some; from bare LaTeX math-verify reads only numbers."""
    return (
        answer if any(sign in answer for sign in ("$", "\\boxed", "\\(", "\\[")) else f"${answer}$"
    )


def _check_math_verify() -> Check:
    from math_verify import parse, verify

    def check(record: Record) -> str | None:
        try:
            answers = [delimited(text) for text in accepted_answers(record)]
        except ValueError as error:
            return f"math-verify cannot score it: {error}; {FINAL_COLUMN}"
        for answer in answers:
            expected = parse(answer)
            if not expected:
                return f"math-verify reads no answer in {answer!r}"
            if not verify(expected, expected):
                return (
                    f"math-verify scores the record's own answer {answer!r:.80} 0; {FINAL_COLUMN}"
                )
        return None

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
    """Return a scorer that compares the final answer with the record's: 1 if the texts are equal, else 0."""
    return Scorer(
        *(_final, _answer_of, _load_exact, False, (("answer",),)),
        make_check=lambda: _check_exact,
    )


def math_verify_scorer(reward: RewardConfig) -> Scorer:
    """Return a scorer that compares a mathematical answer with the record's, using math-verify."""
    return Scorer(
        *(whole, _answer_of, _load_math_verify, True, (("answer",),)),
        make_check=_check_math_verify,
        most_checked=MOST_PARSED,
    )


def reasoning_gym_scorer(reward: RewardConfig) -> Scorer:
    """Return a scorer that uses reasoning-gym's own scorer of the record's task."""
    return Scorer(
        *(_final, _answer_of_entry, _load_reasoning_gym, True),
        (("task",), ("entry", "answer")),
        make_check=_check_reasoning_gym,
        must_win=True,
    )


def regex_scorer(reward: RewardConfig) -> Scorer:
    """Return a scorer that searches a pattern anywhere in a completion: 1 if it matches, else 0.

    A pattern with a group extracts an answer: 1 if the first group of the last match is the record's answer.
    """
    pattern = _given(reward.pattern)
    num_groups = re.compile(pattern).groups

    def load() -> Grader:
        found_by = re.compile(pattern)

        def grade(record: Record) -> Grade:
            if not num_groups:
                return lambda completion: float(found_by.search(completion) is not None)
            accepted = accepted_answers(record)

            def compare(completion: str) -> float:
                matches = deque(found_by.finditer(completion), maxlen=1)
                return float(any((match[1] or "").strip() in accepted for match in matches))

            return compare

        return grade

    if not num_groups:
        return Scorer(whole, lambda record: None, load, False, ())
    return Scorer(
        *(whole, lambda record: None, load, False, (("answer",),)),
        make_check=lambda: partial(_check_group, pattern),
    )


def _check_group(pattern: str, record: Record) -> str | None:
    """Return why the first group of a pattern can never contain the record's answer."""
    try:
        accepted = accepted_answers(record)
    except ValueError as error:
        return f"regex cannot score it: {error}; {FINAL_COLUMN}"
    group = first_group(pattern)
    if group is None or any(_is_within(group, text) for text in accepted):
        return None
    return (
        f"regex scores the record's own answer 0: the group ({group}) of the pattern cannot match {accepted[0]!r:.80}; "
        f"{FINAL_COLUMN}"
    )


def _is_within(group: str, answer: str) -> bool:
    """Return whether a group can match an answer, with the white space around it that is ignored."""
    padded = (f"{before}{answer}{after}" for before in ("", " ", "\n") for after in ("", " ", "\n"))
    return any(re.fullmatch(group, text) for text in padded)


def first_group(pattern: str) -> str | None:
    """Return the expression in the first group of a pattern; None if it depends on the text around it."""
    match = re.match(
        r"((?:[^\\(\[]|\\.|\[\^?\]?(?:[^\\\]]|\\.)*\]|\(\?:)*)\((?:\?P<\w+>)?", pattern, re.DOTALL
    )
    if match is None:
        return None
    start, depth, place = match.end(), 1, match.end()
    while depth and place < len(pattern):
        skipped = re.match(r"\\.|\[\^?\]?(?:[^\\\]]|\\.)*\]", pattern[place:], re.DOTALL)
        depth += 0 if skipped else {"(": 1, ")": -1}.get(pattern[place], 0)
        place += skipped.end() if skipped else 1
    inner = pattern[start : place - 1]
    has_context = re.search(r"\(\?[^:]|\\[1-9bBAZ]|[$^]|\\[Z]", inner) is not None
    try:
        re.compile(inner)
    except re.error:
        return None
    return None if has_context or inner.startswith("?") else inner


def format_scorer(reward: RewardConfig) -> Scorer:
    """Return a scorer that requires the whole completion to match a pattern: 1 if it does, else 0.

    A dot also matches a line break. Whitespace around the completion is ignored.
    """
    pattern = _given(reward.pattern)

    def load() -> Grader:
        wanted = re.compile(pattern, re.DOTALL)
        return lambda record: lambda completion: float(bool(wanted.fullmatch(completion.strip())))

    return Scorer(whole, lambda record: None, load, False, ())


def length_scorer(reward: RewardConfig) -> Scorer:
    """Return a scorer of lengths: 0 up to `beyond` output tokens, -1 from `until`, and linear between them.

    The formula is DAPO's (arXiv 2503.14476, equation 13). It counts tokens, not characters, because
    `rollout.max_tokens` limits tokens and they determine the cost of a rollout.
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
        raise RuntimeError("a model cannot score inside the sandbox")

    return grade


def judge_scorer(reward: RewardConfig) -> Scorer:
    """Return the placeholder for a judge: it reads whole completions, and `Judge` scores them."""
    return Scorer(whole, lambda record: None, _grades_nothing, False, (), bounds=reward.bounds)


def model_scorer(reward: RewardConfig) -> Scorer:
    """Return the placeholder for a reward model; `streamrl.executor.verifier.reward_pool` scores."""
    return Scorer(whole, lambda record: None, _grades_nothing, False, ())


def function_scorer(function: RewardFunction, reward: RewardConfig) -> Scorer:
    """Return a scorer that calls a function by its signature; the result must be in the reward's bounds."""
    bounds, signature = reward.bounds, SIGNATURES[reward.signature]

    def load() -> Grader:
        call = signature.adapt(import_function(function))

        def grade(record: Record) -> Grade:
            return lambda completion: checked(call(completion, record), bounds)

        return grade

    return Scorer(
        *(whole, _record_answer, load, True, signature.fields), bounds=bounds, is_own=False
    )


Plain: TypeAlias = "Callable[[str, Record], object]"
TRUTH = ("reward_model.ground_truth", "answer")
"""Fields with the ground truth of verl's signature: the first one that a record has."""


def field_of(record: Record, name: str) -> object:
    """Return the value of a field, or of a part of one (`FIELD.PART`); None if the record has none."""
    found: object = record
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _from_verl(call: Callable[..., object]) -> Plain:
    """Call a function as verl does (utils/reward_score); a result may be a table with a `score`.

    Without verl's columns, the ground truth is the record's `answer`, and `extra_info` is the whole record.
    """

    def score(completion: str, record: Record) -> object:
        truths = (field_of(record, name) for name in TRUTH)
        found = call(
            data_source=record.get("data_source", record.get("family")),
            solution_str=completion,
            ground_truth=next((truth for truth in truths if truth is not None), None),
            extra_info=record.get("extra_info", record),
        )
        return found["score"] if isinstance(found, Mapping) else found

    return score


def _from_trl(call: Callable[..., object]) -> Plain:
    """Call a function as TRL does (trainer/grpo_trainer.py): with lists, here of one rollout.

    The completion of a chat is a message of the assistant. Columns are those of the record.
    """

    def of_one(completion: str, record: Record) -> object:
        is_chat = not isinstance(record.get("prompt"), str)
        said = [{"role": "assistant", "content": completion}] if is_chat else completion
        columns = {name: [value] for name, value in record.items() if name != "prompt"}
        found: Any = call(prompts=[record.get("prompt")], completions=[said], **columns)
        (score,) = found
        return score

    return of_one


class _Signature(NamedTuple):
    """A way to call functions of the user."""

    adapt: Callable[[Callable[..., object]], Plain]
    """Return how a function is called with a completion and its record."""
    fields: tuple[tuple[str, ...], ...] = ()
    """Fields that every function of it gets; see `Scorer.fields`."""


SIGNATURES: dict[RewardSignature, _Signature] = {
    "plain": _Signature(lambda call: call),
    "verl": _Signature(_from_verl, (TRUTH,)),
    "trl": _Signature(_from_trl),
}


def import_function(function: RewardFunction) -> Callable[..., object]:
    """Import a function; a function in a file can import modules from the file's directory.

    Raises:
        TypeError: there is no callable of that name.
    """
    if function.is_in_file:
        path = Path(function.place)
        sys.path.append(str(path.parent))
        name = f"rewards_of_{path.stem}"  # does not hide a module with the file's name
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise TypeError(f"{path} is no Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look up a class's module there
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(function.place)
    imported: Callable[..., object] | None = getattr(module, function.name, None)
    if not callable(imported):
        raise TypeError(f"{function.place} has no function {function.name}")
    return imported


def checked(score: object, bounds: tuple[float, float]) -> float:
    """Return a function's result as a float.

    Raises:
        TypeError: the result is no number.
        ValueError: the result is not finite, or outside `bounds`.
    """
    score = _plain(score)
    if not isinstance(score, Real):
        raise TypeError(f"a reward must be a number, got {score!r:.80}")
    least, most = bounds
    number = float(score)
    if not isfinite(number) or not least <= number <= most:
        raise ValueError(f"a reward must be in [{least}, {most}], got {number}")
    return number


def _plain(score: object) -> object:
    """Return the number in a numpy or torch scalar, or in an array of one number; everything else as it is.

    numpy's truth values and arrays are no numbers to Python.
    """
    item = getattr(score, "item", None)
    if not callable(item):
        return score
    try:
        plain: object = item()
    except (TypeError, ValueError, RuntimeError):  # several numbers
        return score
    return plain


def _record_answer(record: Record) -> str | None:
    answer = record.get("answer")
    return None if answer is None else str(answer)


FENCE = "```"
LANGUAGES = ("", "python", "py", "python3")
"""Languages that may follow the opening fence of a Python block."""


def unit_tests_scorer(reward: RewardConfig) -> Scorer:
    """Return a scorer that runs a program in one sandboxed process, and each test of its record in another.

    See `streamrl.executor.verifier.remote_program`. A record has `tests`: one program or a list of programs. A test passes if it raises nothing. `setup` (optional) runs
    first. `solution` (optional) is a program that passes.

    With credit "share" the score is the share of tests that pass. With "all" it is 1 if all of them pass, else 0.
    """
    credit = reward.credit

    def load() -> Grader:
        def grade(record: Record) -> Grade:
            compiled = [compile(test, "<test>", "exec") for test in tests_of(record)]
            text = str(record.get("setup") or "")
            setup = compile(text, "<setup>", "exec")

            def share(code: str) -> float:
                tests = begin_tests()
                tests.set_up(setup, text)
                tests.find_names(compiled)
                try:
                    tests.run_program(code)
                except (MemoryError, ProgramEndedError):
                    raise
                except BaseException:  # including SystemExit
                    return 0.0
                return sum(passes(tests, test) for test in compiled) / len(compiled)

            def passes(tests: Tests, test: CodeType) -> bool:
                try:
                    tests.run(test)
                except ProgramEndedError:
                    raise
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
        must_win=True,
        runs_programs=True,
    )


def last_program(completion: str) -> str:
    """Return the last complete Python block between fences; an empty text if there is none."""
    *parts, _ = completion.split(FENCE)  # the last part is after a fence, or in an open block
    for block in reversed(parts[1::2]):
        language, _, code = block.partition("\n")
        if language.strip().lower() in LANGUAGES:
            return code
    return ""


def tests_of(record: Record) -> list[str]:
    """Return the tests of a record.

    Raises:
        KeyError: it has no tests.
        ValueError: they are not texts.
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
    """Return the scorer of a reward whose keys were checked; import none of its libraries yet."""
    function = function_of(reward.scorer)
    if function is not None:
        return function_scorer(function, reward)
    make = import_object(SCORERS[reward.scorer].make)
    assert callable(make), reward.scorer
    scorer: Scorer = make(reward)
    return scorer


def is_scored(record: Record, reward: RewardConfig) -> bool:
    """Return whether a reward applies to completions of a record."""
    return not reward.families or record.get("family") in reward.families


def _given(value: _Value | None) -> _Value:
    assert value is not None, "check_rewards ensures the keys that a scorer needs"
    return value
