"""The ranker of a run while it goes on: it learns from finished rollouts, is tested for drift, and is switched off where it is useless.

Is a ranker worth listening to, and does it still know the work? Permutation tests over windows of groups.

worse than random    its recall is below chance, and so is its order: among 1,000 in which groups swap expectations it
                     agrees with the lengths as little as the ten worst, so nobody should listen
better               the same the other way round: one that was switched off is worth listening to again
drift                beside the windows since it was fitted, in a window recall or agreement are lower, outputs longer
                     or shorter, or prompts others; groups, whose rollouts are alike, are what is permuted, so the rate
                     of false alarms is the one that was asked for, whatever the distribution (Good, Permutation
                     Tests, 2000)

Recall alone, which some six groups of 32 decide, would tell a ranker that says the opposite from chance one time in two.

The ranker of a run: what it says of rollouts when they are drawn, learns from their ends, and when it is not heeded.

Both worlds hold one. It learns and is watched by windows of groups in draw order: those that finish first are short, so
that an order of ends would tell of other lengths than there are. What it says reaches the engine in `PromptsDrawn`
and `ExpectationsChanged` alone, so a replay decides as the run did.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from streamrl.engine.messages import DrawnGroup, ExpectationsChanged, Generated
from streamrl.runfile.config import Run
from streamrl.runfile.workload_config import TAIL_SHARE
from streamrl.workload.length_posterior import KnownGroup, Posterior, SiblingLengths

Floats = npt.NDArray[np.float64]

PERMUTATIONS = 999
REFERENCE_WINDOWS = 2  # that a later window is set beside: more wait longer, fewer see less
SURE = 0.01
"""Chance that a ranker that knows nothing is switched off after a window, or on again."""
SHIFTS = (
    "it finds fewer of the longest",
    "its order agrees less with the lengths",
    "outputs have other lengths",
    "other lengths are expected",
    "prompts have other lengths",
)
RANKER_LOSSES = SHIFTS[:2]
"""Those which say that what was learnt of prompts does not hold any more."""


class WindowVerdict(NamedTuple):
    """What a window says of a ranker."""

    recall: float
    """Share of the window's longest fifth that it put in its own."""
    at_random: float
    """The same of expectations that were dealt out to groups at random."""
    is_worse: bool
    is_better: bool
    shift: str | None
    """What has changed most since it was fitted; None where nothing has, but for chance."""


class RankerMonitor:
    """Judges a ranker window by window."""

    def __init__(self, false_alarms: float, seed: int) -> None:
        """Take the chance of an alarm after a window in which nothing has changed."""
        self._false_alarms = false_alarms
        self._seed = seed
        self._num_windows = 0
        self._reference: list[Floats] = []

    def judge(self, window: Sequence[KnownGroup]) -> WindowVerdict:
        """Compare what was stated of a window's rollouts, which each group has as many of, with what they took."""
        rng = np.random.default_rng([self._seed, self._num_windows])
        self._num_windows += 1
        long = longest(np.array([group.lengths for group in window]))
        picked = longest(np.array([group.stated for group in window]))
        num_long = float(long.sum())
        recall = float((picked * long).sum()) / num_long
        at_random = float(picked.mean(axis=0) @ long.sum(axis=0)) / num_long
        stated = _ranks([sum(group.stated) for group in window])
        lengths = _ranks([group.length for group in window])
        dealt = np.argsort(rng.random((PERMUTATIONS, len(window))), axis=1)
        agrees, chance = float(stated @ lengths), stated[dealt] @ lengths
        return WindowVerdict(
            recall=recall,
            at_random=at_random,
            is_worse=recall < at_random and _share(chance <= agrees) <= SURE,
            is_better=recall > at_random and _share(chance >= agrees) <= SURE,
            shift=self._shift(_features(window, picked * long, stated * lengths), rng),
        )

    def begin_anew(self) -> None:
        """Take the windows to come as the ones that later ones are set beside: the ranker was fitted anew."""
        self._reference.clear()

    def _shift(self, features: Floats, rng: np.random.Generator) -> str | None:
        """Return which feature of groups [groups, features] lies further from the reference than chance explains."""
        if len(self._reference) < REFERENCE_WINDOWS:
            self._reference.append(features)
            return None
        pool = np.concatenate([features, *self._reference])
        picks = np.argsort(rng.random((PERMUTATIONS, len(pool))), axis=1)[:, : len(features)]
        drawn = pool[picks].sum(axis=1)
        spread = drawn.std(axis=0)
        scale = np.divide(1.0, spread, out=np.zeros_like(spread), where=spread > 0)
        found, chance = ((s - drawn.mean(axis=0)) * scale for s in (features.sum(axis=0), drawn))
        found, chance = _one_sided(found), _one_sided(chance)
        if _share(chance.max(axis=-1) >= found.max()) > self._false_alarms:
            return None
        return SHIFTS[int(found.argmax())]


def longest(values: Floats) -> Floats:
    """Return 1 for the longest fifth of `values` [groups, rollouts] and those that tie with its shortest; of ties a share."""
    count = max(1, round(TAIL_SHARE * values.size))
    shortest = np.partition(values, values.size - count, axis=None)[values.size - count]
    above, tied = values > shortest, values == shortest
    found: Floats = above + tied * ((count - above.sum()) / tied.sum())
    return found


def _ranks(values: Sequence[float]) -> Floats:
    """Return the places of values, of those that tie their mean, with mean 0 and spread 1; all 0 where all tie."""
    ordered = np.sort(values)
    places = np.searchsorted(ordered, values, "left") + np.searchsorted(ordered, values, "right")
    spread = float(places.std())
    found: Floats = (places - places.mean()) / (spread or 1.0)
    return found


def _features(window: Sequence[KnownGroup], hits: Floats, agreement: Floats) -> Floats:
    """Return [groups, len(SHIFTS)], of which sums over groups are compared."""
    found: Floats = np.column_stack(
        [
            -hits.sum(axis=1),
            -agreement,
            [group.length for group in window],
            [group.prior for group in window],
            np.log([group.prompt_tokens for group in window]),
        ]
    )
    return found


def _one_sided(scores: Floats) -> Floats:
    """Return how far standard scores lie out: of recall and agreement, the first, only a loss counts."""
    far = np.abs(scores)
    far[..., :2] = scores[..., :2]
    return far


def _share(of: npt.NDArray[np.bool_]) -> float:
    """Return the p-value: how often chance is as far out, what was seen counted in."""
    return float((1 + of.sum()) / (1 + PERMUTATIONS))


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
        self._watch = RankerMonitor(config.false_alarms, run.seed)
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
            self._posterior.forget(keeps_prompts=judgement.shift not in RANKER_LOSSES)
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

    def _heed(self, judgement: WindowVerdict) -> str:
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
