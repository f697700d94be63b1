"""What the rollouts of a group that finished tell of those that have not."""

from __future__ import annotations

from collections.abc import Iterable

from streamrl.engine.messages import DrawnGroup, ExpectationsChanged, Generated

PRIOR_SAMPLES = 1
"""Finished rollouts of a prompt that what was expected at first counts for. On real groups (R1-Distill-1.5B on AIME,
Qwen3-1.7B on GPQA) least squares puts it between 0.5 and 1.5, whether no past sample of the prompt was known or one."""


class SiblingLengths:
    """Expects of a rollout what its finished siblings took, blended with what was expected at first.

    With n lengths known that is the mean of these and of the first expectation, which counts as `PRIOR_SAMPLES`: an
    estimate moves towards a new length by the share that the length then has.
    """

    def __init__(self) -> None:
        self._groups: dict[int, _Group] = {}
        self._group_of: dict[int, int] = {}

    def add(self, groups: Iterable[DrawnGroup]) -> None:
        """Begin with what groups that are drawn say of their rollouts."""
        for drawn in groups:
            expected = dict(zip(drawn.rollouts, drawn.expected_tokens, strict=True))
            self._groups[drawn.group] = _Group(drawn.rollouts, expected)
            self._group_of.update(dict.fromkeys(drawn.rollouts, drawn.group))

    def learn(self, event: Generated) -> ExpectationsChanged | None:
        """Return what is now expected of the siblings of a rollout that finished.

        None where nothing is: it was aborted, all its siblings have finished, or its group is forgotten.
        """
        if event.finish == "aborted" or event.rollout not in self._group_of:
            return None
        number = self._group_of[event.rollout]
        group = self._groups[number]
        group.learn(event.rollout, event.tokens)
        if not group.expected:
            self.forget(number)
            return None
        return ExpectationsChanged(tuple(group.expected), tuple(group.expected.values()))

    def forget(self, group: int) -> None:
        """Expect nothing more of a group."""
        if group in self._groups:
            for rollout in self._groups.pop(group).rollouts:
                del self._group_of[rollout]


class _Group:
    """The rollouts of one prompt."""

    def __init__(self, rollouts: tuple[int, ...], expected: dict[int, int]) -> None:
        self.rollouts = rollouts
        self.expected = expected
        """Of each that has not finished, its output tokens, in order of draw."""

    def learn(self, finished: int, tokens: int) -> None:
        """Blend the length of a rollout that finished into what is expected of the others."""
        del self.expected[finished]
        num_known = len(self.rollouts) - len(self.expected)
        share = 1 / (PRIOR_SAMPLES + num_known)
        for rollout, expected in self.expected.items():
            self.expected[rollout] += round((tokens - expected) * share)
