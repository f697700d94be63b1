"""A canary for every family of reasoning-gym: what a model wrote is evaluated nowhere but in a sandbox."""

from __future__ import annotations

import builtins
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from reasoning_gym import create_dataset
from reasoning_gym.factory import DATASETS

from streamrl.executor.verifier.verifier import Scoring
from streamrl.workload.prompt_records import Record
from tests.verifying import score, verdicts

NOT_MADE = {"composite": "a mixture of other families, whose own names its records carry"}
FAMILIES = sorted(set(DATASETS) - set(NOT_MADE))
EVALUATING = {
    *("binary_matrix", "countdown", "intermediate_integration", "n_queens"),
    *("polynomial_multiplication", "puzzle24", "simple_integration", "spiral_matrix"),
    "string_insertion",
}
"""Families that evaluate answers, found by trying; version 0.1.19 of the library has these."""

SING = "__import__('builtins').SONGS.append(1)"
"""Evaluated in this process, this is heard here."""
LEAVE_A_FILE = "[open('{path}', 'w'), __import__('os').system('touch {path}'), {sing}]"
"""Evaluated anywhere without a sandbox, this leaves a file."""


class Trial(NamedTuple):
    """What became of one family's answers."""

    expected: Scoring
    """Of the answer that the family itself gives."""
    hostile: Scoring


@pytest.fixture(scope="module")
def songs() -> Iterator[list[int]]:
    """What canaries sing in this process."""
    builtins.SONGS = []  # type: ignore[attr-defined]
    yield builtins.SONGS  # type: ignore[attr-defined]
    del builtins.SONGS  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def records() -> dict[str, Record]:
    """One item of every family, as a line of a prompts file has it."""
    items: dict[str, Any] = {name: create_dataset(name, size=1, seed=3)[0] for name in FAMILIES}
    return {name: {"task": name, "entry": json.loads(json.dumps(items[name]))} for name in FAMILIES}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that a canary would leave."""
    return tmp_path_factory.mktemp("canary") / "sang"


@pytest.fixture(scope="module")
def trials(records: dict[str, Record], songs: list[int], file: Path) -> dict[str, Trial]:
    """Every family's own answer and a hostile one, scored in one go."""
    hostile = LEAVE_A_FILE.format(sing=SING, path=file)
    answers = [(record["entry"]["answer"], record) for record in records.values()]
    answers += [(hostile, record) for record in records.values()]
    work = [(f"#### {answer}", record) for answer, record in answers]
    found = verdicts("reasoning-gym", work, time_limit=30)
    half = len(found) // 2
    return dict(zip(FAMILIES, map(Trial, found[:half], found[half:]), strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_that_a_model_wrote_is_evaluated_beside_the_engine(
    family: str, trials: dict[str, Trial], songs: list[int], file: Path
) -> None:
    assert isinstance(trials[family].hostile, Scoring)
    assert songs == [] and not file.exists()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sandbox_changes_no_reward(
    family: str, trials: dict[str, Trial], records: dict[str, Record]
) -> None:
    record = records[family]
    reward = score("reasoning-gym", f"#### {record['entry']['answer']}", record)
    assert trials[family].expected == Scoring(reward, None)


def test_canaries_sing_where_an_answer_is_evaluated(
    records: dict[str, Record], trials: dict[str, Trial], songs: list[int]
) -> None:
    heard = set()
    for name, record in records.items():
        with suppress(ValueError, KeyError):  # some cannot read it
            score("reasoning-gym", f"#### {SING}", record)
        if songs:
            heard.add(name)
            songs.clear()
    assert heard >= EVALUATING
