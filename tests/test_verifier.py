"""Rewards by name."""

from __future__ import annotations

import asyncio

import pytest

from executor.verifier.scorers import Verifier, final_answer, score


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("2+3=5\n#### 5", "5"),
        ("first #### 4, no: #### 7 ", "7"),
        ("so the answer: 12", "12"),
        ("work\n 9 \n", "9"),
        ("", ""),
    ],
)
def test_the_final_answer_follows_the_last_marker_or_is_the_last_line(
    completion: str, answer: str
) -> None:
    assert final_answer(completion) == answer


def test_exact_wants_the_very_answer() -> None:
    assert score("exact", "#### 12", {"answer": "12"}) == 1.0
    assert score("exact", "#### 120", {"answer": "12"}) == 0.0


def test_reasoning_gym_scores_with_the_task_of_the_record() -> None:
    record = {"task": "chain_sum", "answer": "15"}
    assert score("reasoning-gym", "12+3=15\n#### 15", record) == 1.0
    assert score("reasoning-gym", "12+3=15\n#### 14", record) < 0.5
    with pytest.raises(ValueError, match="no_such_task"):
        score("reasoning-gym", "#### 15", {"task": "no_such_task", "answer": "15"})


def test_math_verify_knows_equal_values_in_other_forms() -> None:
    async def rewards() -> list[float]:
        verifier = Verifier("math-verify", workers=1)
        texts = ["so it is $\\boxed{\\frac{1}{2}}$", "it is $\\boxed{2}$"]
        try:
            return [await verifier.verify(text, {"answer": "0.5"}) for text in texts]
        finally:
            verifier.close()

    assert asyncio.run(rewards()) == [1.0, 0.0]
