"""The ranker of a run: what it says of rollouts when they are drawn, learns from their ends, and when it is not heeded.

Both worlds hold one. It learns and is watched by windows of groups in draw order: those that finish first are short, so
that an order of ends would tell of other lengths than there are. What it says reaches the engine in `PromptsDrawn`
and `ExpectationsChanged` alone, so a replay decides as the run did.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from streamrl.engine.messages import DrawnGroup, ExpectationsChanged, Generated
from streamrl.runfile.config import Run
from streamrl.workload.posterior import KnownGroup, Posterior
from streamrl.workload.ranker_watch import LOSSES, Judgement, RankerWatch

LEAST_GROUPS = (
    8  # of a window that is judged: dropped groups may leave fewer, of which chance says all
)


@dataclass(slots=True)
class _Open:
    """A group that was drawn and has not finished."""

    window: int
    drawn: DrawnGroup
    prompt: Hashable | None
    priors: tuple[float, ...]
    stated: tuple[float, ...]
    lengths: dict[int, float] = field(default_factory=dict)

    def known(self) -> KnownGroup:
        """Return the group as it ended."""
        lengths = tuple(self.lengths[rollout] for rollout in self.drawn.rollouts)
        tokens = max(1, self.drawn.prompt_tokens)
        return KnownGroup(self.prompt, tokens, self.priors, self.stated, lengths)


@dataclass(slots=True)
class _Window:
    """Groups drawn one after the other."""

    num_open: int
    known: list[KnownGroup] = field(default_factory=list)


class LengthRanker:
    """A prior, what prompts took before, and a watch over both."""

    def __init__(self, run: Run) -> None:
        config = run.workload.ranker
        assert config is not None, "a run without a ranker has none"
        self._uses_history = config.history
        self._window = max(config.window, run.algorithm.prompts_per_step)
        self._most = run.rollout.max_tokens
        self._posterior = Posterior()
        self._watch = RankerWatch(config.false_alarms, run.seed)
        self._num_drawn = 0
        self._next = 0
        self._news: ExpectationsChanged | None = None
        """What a window that has ended says, until anyone can be told."""
        self._windows: dict[int, _Window] = {}
        self._open: dict[int, _Open] = {}
        self._group_of: dict[int, int] = {}
        self.is_heeded = True
        """Whether what it says is passed on; while it is not, all rollouts are expected to be alike."""
        self.recall: float | None = None
        """Share of the longest fifth that it found in the last window; None before any."""

    def draw(self, drawn: DrawnGroup, prompt: Hashable | None) -> DrawnGroup:
        """Return a group whose expected tokens, its prior, are corrected by what is known."""
        window = self._num_drawn // self._window
        self._num_drawn += 1
        self._windows.setdefault(window, _Window(self._window))
        key = prompt if self._uses_history else None
        priors = tuple(math.log(tokens) for tokens in drawn.expected_tokens)
        stated = tuple(self._posterior.expect(prior, key) for prior in priors)
        self._open[drawn.group] = _Open(window, drawn, key, priors, stated)
        self._group_of.update(dict.fromkeys(drawn.rollouts, drawn.group))
        said = tuple(map(self._tokens, stated)) if self.is_heeded else self._alike(len(stated))
        return replace(drawn, expected_tokens=said)

    def learn(self, event: Generated) -> ExpectationsChanged | None:
        """Enter that a rollout has ended; return what has changed for others, at the end of a window its recall."""
        if event.finish != "aborted" and event.rollout in self._group_of:
            group = self._open[self._group_of[event.rollout]]
            group.lengths[event.rollout] = math.log(max(1, event.tokens))
            if len(group.lengths) == len(group.drawn.rollouts):
                self._windows[group.window].known.append(group.known())
                self._close(group)
        news, self._news = self._news, None
        return news

    def forget(self, number: int) -> None:
        """Expect nothing more of a group that was dropped."""
        if number in self._open:
            self._close(self._open[number])

    def remember(self, lengths: Sequence[tuple[Hashable, int]], priors: Sequence[int]) -> None:
        """Enter what prompts took in an earlier leg of the run, as (prompt, tokens), and what was expected of each."""
        by_prompt: dict[Hashable, list[float]] = {}
        prior_of = dict(zip((prompt for prompt, _ in lengths), map(math.log, priors), strict=True))
        for prompt, tokens in lengths:
            by_prompt.setdefault(prompt, []).append(math.log(max(1, tokens)))
        if by_prompt and self._uses_history:
            known = [_remembered(p, prior_of[p], tuple(t)) for p, t in by_prompt.items()]
            self._posterior.learn(known)

    def _close(self, group: _Open) -> None:
        """Forget a group, and judge the windows that end with it, oldest first."""
        del self._open[group.drawn.group]
        for rollout in group.drawn.rollouts:
            del self._group_of[rollout]
        self._windows[group.window].num_open -= 1
        while self._next in self._windows and not self._windows[self._next].num_open:
            known = self._windows.pop(self._next).known
            self._next += 1
            if len(known) >= LEAST_GROUPS:
                self._news = self._judge(known)

    def _judge(self, window: list[KnownGroup]) -> ExpectationsChanged:
        judgement = self._watch.judge(window)
        self.recall = judgement.recall
        reason = self._heed(judgement)
        if judgement.shift is not None:
            reason = "; ".join(filter(None, (reason, f"it is fitted anew: {judgement.shift}")))
            self._posterior.forget(keeps_prompts=judgement.shift not in LOSSES)
            self._watch.begin_anew()
        self._posterior.learn(window)
        lost = tuple(self._unfinished()) if reason and not self.is_heeded else ()
        return ExpectationsChanged(
            lost, self._alike(len(lost)), recall=judgement.recall, reason=reason
        )

    def _unfinished(self) -> Iterator[int]:
        """Yield every rollout that was drawn and has not finished."""
        for rollout, group in self._group_of.items():
            if rollout not in self._open[group].lengths:
                yield rollout

    def _heed(self, judgement: Judgement) -> str:
        """Switch the ranker off where it is worse than none, and on again where it is better; return what to say."""
        found = f"it finds {judgement.recall:.0%} of the longest fifth, chance {judgement.at_random:.0%}"
        if self.is_heeded and judgement.is_worse:
            self.is_heeded = False
            return f"the ranker is switched off: {found}"
        if not self.is_heeded and judgement.is_better:
            self.is_heeded = True
            return f"the ranker is switched on again: {found}"
        return ""

    def _alike(self, num: int) -> tuple[int, ...]:
        level = self._posterior.level
        return (self._most if level is None else self._tokens(level),) * num

    def _tokens(self, length: float) -> int:
        return min(self._most, max(1, round(math.exp(length))))


def _remembered(prompt: Hashable, prior: float, lengths: tuple[float, ...]) -> KnownGroup:
    own = (prior,) * len(lengths)
    return KnownGroup(prompt, 1, own, own, lengths)
