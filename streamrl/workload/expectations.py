"""What a run learns of lengths while it goes on: from a prompt's past, and from siblings that have finished."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from msgspec.structs import replace

from streamrl.engine.messages import DrawnGroup, ExpectationsChanged, Generated
from streamrl.engine.siblings import SiblingLengths
from streamrl.runfile.config import Run
from streamrl.workload.length_ranker import LengthRanker


class Expectations:
    """The ranker and the siblings of a run, each where it is asked for; both worlds' workloads ask it."""

    def __init__(self, run: Run) -> None:
        self._ranker = None if run.workload.ranker is None else LengthRanker(run)
        self._siblings = SiblingLengths() if run.policies.learns_from_siblings else None

    def draw(self, drawn: DrawnGroup, prompt: Hashable | None) -> DrawnGroup:
        """Return a group with what is expected of it, whose expected tokens are a prior."""
        if self._ranker is not None:
            drawn = self._ranker.draw(drawn, prompt)
        if self._siblings is not None:
            self._siblings.add([drawn])
        return drawn

    def learn(self, event: Generated) -> ExpectationsChanged | None:
        """Return what is expected of other rollouts now that this one has ended; None where nothing has changed."""
        told = None if self._siblings is None else self._siblings.learn(event)
        news = None if self._ranker is None else self._ranker.learn(event)
        if told is None or news is None:
            return told or news
        both = dict(zip(told.rollouts, told.tokens, strict=True))
        both |= zip(news.rollouts, news.tokens, strict=True)
        return replace(news, rollouts=tuple(both), tokens=tuple(both.values()))

    def forget(self, group: int) -> None:
        """Expect nothing more of a group that was dropped."""
        for each in (self._ranker, self._siblings):
            if each is not None:
                each.forget(group)

    @property
    def recall(self) -> float | None:
        """Share of the longest fifth that the ranker found lately; None where there is none, or nobody knows yet."""
        return None if self._ranker is None else self._ranker.recall

    def remember(self, lengths: Sequence[tuple[Hashable, int]], priors: Sequence[int]) -> None:
        """Enter what prompts took in an earlier leg of the run, as (prompt, tokens), and what was expected of each."""
        if self._ranker is not None:
            self._ranker.remember(lengths, priors)
