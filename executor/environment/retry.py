"""The environment "reasoning-gym": a wrong answer is answered with feedback, and the policy tries again."""

from __future__ import annotations

from functools import cache
from typing import Any

from streamrl.executor.verifier.scorers import Grader, Scorer, make_scorer
from streamrl.runfile.roles_config import RewardConfig


@cache
def loaded(name: str) -> tuple[Scorer, Grader]:
    """Return a scorer with its libraries loaded."""
    scorer = make_scorer(RewardConfig(scorer=name))
    return scorer, scorer.load()


class Retry:
    """Scores each turn with a scorer of the verifier; by default that of reasoning-gym for the record's task."""

    def __init__(
        self,
        attempts: int = 3,
        feedback: str = "Your answer is wrong. Try again.",
        discount: float = 0.5,
        scorer: str = "reasoning-gym",
    ) -> None:
        """Set what happens after a wrong answer.

        Args:
            attempts: maximum number of answers.
            feedback: the observation; `{answer}` and `{prompt}` are replaced.
            discount: factor of the reward for each wrong answer before.
            scorer: a name of `verifier.scorer`.
        """
        self._attempts = attempts
        self._feedback = feedback
        self._discount = discount
        self._scorer, self._grader = loaded(scorer)
        self._num_wrong = 0
        self._task: dict[str, Any] = {}

    @classmethod
    def prepare(cls, scorer: str = "reasoning-gym", **others: Any) -> None:
        """Import the scorer's libraries, which a worker in the sandbox could not."""
        loaded(scorer)

    def reset(self, task: dict[str, Any]) -> None:
        """Begin with a record that the scorer can read."""
        self._task = task

    def step(self, action: str) -> tuple[str | None, float, bool]:
        """Score an answer; the episode ends with a right one, or with the last attempt."""
        answer = self._scorer.read(action, 0)
        score = self._grader(self._task)(answer)
        if score >= self._scorer.bounds[1] or self._num_wrong + 1 >= self._attempts:
            return None, score * self._discount**self._num_wrong, True
        self._num_wrong += 1
        told = self._feedback.replace("{answer}", answer)
        return told.replace("{prompt}", str(self._task["prompt"])), 0.0, False
