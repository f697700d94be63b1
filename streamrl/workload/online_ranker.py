"""Predict output lengths during a run, learn from finished rollouts, detect drift, and switch off a useless ranker.

Permutation tests over windows of groups decide whether a ranker is useful:

    worse than random    Recall and rank agreement are both below chance: among 1,000 random exchanges of expectations
                         between groups, at most ten agree with the lengths so little. The ranker is switched off.
    better               The same test in the other direction. The ranker is switched on again.
    drift                Compared with the windows since the ranker was fitted, recall or agreement are lower, outputs
                         are longer or shorter, or prompts differ. The ranker is fitted again.

The drift test permutes groups, because rollouts of one group are alike. So the rate of false alarms
is the configured one for every distribution (Good, Permutation Tests, 2000).

About six groups of 32 decide the recall. Recall alone would fail to detect an inverted ranker half
of the time.

`LengthRanker` learns and is tested in windows of groups in draw order. In order of completion,
short groups would come first and bias the lengths. The engine receives expectations only in
`PromptsDrawn` and `ExpectationsChanged`, so a replay decides as the run did. Simulated and real
runs use the same class.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from streamrl.engine.messages import UNFINISHED, DrawnGroup, ExpectationsChanged, Generated
from streamrl.runfile.workload_config import TAIL_SHARE, RankerConfig
from streamrl.workload.length_posterior import KnownGroup, Posterior, SiblingLengths

Floats = npt.NDArray[np.float64]

PERMUTATIONS = 999
REFERENCE_WINDOWS = 2  # reference of the drift test: more windows delay the test, fewer weaken it
SURE = 0.01
"""Probability that a ranker without information is switched off, or on again, after one window."""
SHIFTS = (
    "it finds fewer of the longest",
    "its order agrees less with the lengths",
    "outputs have other lengths",
    "other lengths are expected",
    "prompts have other lengths",
)
RANKER_LOSSES = SHIFTS[:2]
"""Shifts after which the learned lengths of prompts are invalid."""


class WindowVerdict(NamedTuple):
    """Result of the tests on one window."""

    recall: float
    """Share of the window's longest fifth that the ranker put into its own longest fifth."""
    at_random: float
    """The same share if expectations are assigned to groups at random."""
    is_worse: bool
    is_better: bool
    shift: str | None
    """The largest significant change since the ranker was fitted; None if there is none."""


class RankerMonitor:
    """Tests a ranker window by window."""

    def __init__(self, false_alarms: float, seed: int) -> None:
        """Start with the probability of a false alarm after a window without change."""
        self._false_alarms = false_alarms
        self._seed = seed
        self._num_windows = 0
        self._reference: list[Floats] = []

    def judge(self, window: Sequence[KnownGroup]) -> WindowVerdict:
        """Compare the stated expectations of a window with its lengths. All groups have the same number of rollouts."""
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

    def restart_reference(self) -> None:
        """Use the next windows as the reference, because the ranker was fitted again."""
        self._reference.clear()

    def _shift(self, features: Floats, rng: np.random.Generator) -> str | None:
        """Return the feature of groups [groups, features] that differs from the reference by more than chance."""
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
    """Return 1 for the longest fifth of `values` [groups, rollouts]; ties with the shortest of them get a share."""
    count = max(1, round(TAIL_SHARE * values.size))
    shortest = np.partition(values, values.size - count, axis=None)[values.size - count]
    above, tied = values > shortest, values == shortest
    found: Floats = above + tied * ((count - above.sum()) / tied.sum())
    return found


def _ranks(values: Sequence[float]) -> Floats:
    """Return the ranks of values, with mean 0 and standard deviation 1. Ties get their mean rank; all 0 if all tie."""
    ordered = np.sort(values)
    places = np.searchsorted(ordered, values, "left") + np.searchsorted(ordered, values, "right")
    spread = float(places.std())
    found: Floats = (places - places.mean()) / (spread or 1.0)
    return found


def _features(window: Sequence[KnownGroup], hits: Floats, agreement: Floats) -> Floats:
    """Return the features of groups [groups, len(SHIFTS)]; the tests compare their sums over groups."""
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
    """Return the distance of standard scores from 0. For the first two, recall and agreement, only a loss counts."""
    far = np.abs(scores)
    far[..., :2] = scores[..., :2]
    return far


def _share(of: npt.NDArray[np.bool_]) -> float:
    """Return the p-value: the share of permutations at least as extreme, including the observed one."""
    return float((1 + of.sum()) / (1 + PERMUTATIONS))


LEAST_GROUPS = 8  # fewest groups of a window for a test: a window can lose groups that were dropped


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
        """Return the finished group."""
        lengths = tuple(self.lengths[rollout] for rollout in self.drawn.rollouts)
        tokens = max(1, self.drawn.prompt_tokens)
        return KnownGroup(self.prompt, tokens, self.priors, self.stated, lengths)


@dataclass(slots=True)
class _Window:
    """Successive groups in draw order."""

    num_open: int
    known: list[KnownGroup] = field(default_factory=list)


class LengthRanker:
    """The ranker of a run: a prior, past lengths of prompts, and a monitor of both."""

    def __init__(
        self, config: RankerConfig, *, prompts_per_step: int, max_tokens: int, seed: int
    ) -> None:
        self._uses_history = config.history
        self._window = max(config.window, prompts_per_step)
        self._most = max_tokens
        self._posterior = Posterior()
        self._watch = RankerMonitor(config.false_alarms, seed)
        self._num_drawn = 0
        self._next = 0
        self._pending: ExpectationsChanged | None = None
        """Result of the last finished window, until the next event can carry it."""
        self._windows: dict[int, _Window] = {}
        self._open: dict[int, _Open] = {}
        self._group_of: dict[int, int] = {}
        self.is_heeded = True
        """Whether expectations are passed on. If not, all rollouts get the same expectation."""
        self.recall: float | None = None
        """Share of the longest fifth that was predicted in the last window; None before the first."""

    def draw(self, drawn: DrawnGroup, prompt: Hashable | None) -> DrawnGroup:
        """Return a group whose expected tokens (the prior) are corrected by known lengths."""
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
        """Add a finished rollout. Return the changed expectations, and the recall at the end of a window."""
        if event.finish not in UNFINISHED and event.rollout in self._group_of:
            group = self._open[self._group_of[event.rollout]]
            group.lengths[event.rollout] = math.log(max(1, event.tokens))
            if len(group.lengths) == len(group.drawn.rollouts):
                self._windows[group.window].known.append(group.known())
                self._close(group)
        news, self._pending = self._pending, None
        return news

    def forget(self, number: int) -> None:
        """Forget a dropped group."""
        if number in self._open:
            self._close(self._open[number])

    def remember(self, lengths: Sequence[tuple[Hashable, int]], priors: Sequence[int]) -> None:
        """Load lengths from before a restart as (prompt, tokens), with the prior of each."""
        by_prompt: dict[Hashable, list[float]] = {}
        prior_of = dict(zip((prompt for prompt, _ in lengths), map(math.log, priors), strict=True))
        for prompt, tokens in lengths:
            by_prompt.setdefault(prompt, []).append(math.log(max(1, tokens)))
        if by_prompt and self._uses_history:
            known = [_remembered(p, prior_of[p], tuple(t)) for p, t in by_prompt.items()]
            self._posterior.learn(known)

    def _close(self, group: _Open) -> None:
        """Forget a group, and test the windows that end with it, oldest first."""
        del self._open[group.drawn.group]
        for rollout in group.drawn.rollouts:
            del self._group_of[rollout]
        self._windows[group.window].num_open -= 1
        while self._next in self._windows and not self._windows[self._next].num_open:
            known = self._windows.pop(self._next).known
            self._next += 1
            if len(known) >= LEAST_GROUPS:
                self._pending = self._judge(known)

    def _judge(self, window: list[KnownGroup]) -> ExpectationsChanged:
        judgement = self._watch.judge(window)
        self.recall = judgement.recall
        reason = self._switch(judgement)
        if judgement.shift is not None:
            reason = "; ".join(filter(None, (reason, f"it is fitted anew: {judgement.shift}")))
            self._posterior.forget(keeps_prompts=judgement.shift not in RANKER_LOSSES)
            self._watch.restart_reference()
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

    def _switch(self, judgement: WindowVerdict) -> str:
        """Switch the ranker off if it is worse than chance, and on if it is better. Return the reason, or ""."""
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
    """The ranker and the sibling updates of a run, each if configured; simulated and real workloads call it."""

    def __init__(
        self,
        config: RankerConfig | None,
        *,
        prompts_per_step: int,
        max_tokens: int,
        seed: int,
        learns_from_siblings: bool,
    ) -> None:
        """Begin without any length.

        Args:
            config: the ranker of the run file; None if it has none.
            prompts_per_step: prompts of the primary trainer's step.
            max_tokens: maximum output tokens of a rollout.
            seed: seed of the run.
            learns_from_siblings: whether finished siblings change the expectations.
        """
        self._ranker = None
        if config is not None:
            self._ranker = LengthRanker(
                config, prompts_per_step=prompts_per_step, max_tokens=max_tokens, seed=seed
            )
        self._siblings = SiblingLengths() if learns_from_siblings else None
        self.is_fixed = self._ranker is None and self._siblings is None
        """Whether no rollout changes an expectation."""

    def draw(self, drawn: DrawnGroup, prompt: Hashable | None) -> DrawnGroup:
        """Return a group with its expectations; its expected tokens are the prior."""
        if self._ranker is not None:
            drawn = self._ranker.draw(drawn, prompt)
        if self._siblings is not None:
            self._siblings.add([drawn])
        return drawn

    def learn(self, event: Generated) -> ExpectationsChanged | None:
        """Return the changed expectations of other rollouts after this one ended; None if there are none."""
        told = None if self._siblings is None else self._siblings.learn(event)
        news = None if self._ranker is None else self._ranker.learn(event)
        if told is None or news is None:
            return told or news
        both = dict(zip(told.rollouts, told.tokens, strict=True))
        both |= zip(news.rollouts, news.tokens, strict=True)
        return replace(news, rollouts=tuple(both), tokens=tuple(both.values()))

    def forget(self, group: int) -> None:
        """Forget a dropped group."""
        for each in (self._ranker, self._siblings):
            if each is not None:
                each.forget(group)

    @property
    def recall(self) -> float | None:
        """Return the latest share of the longest fifth that the ranker predicted; None without a ranker or before a window."""
        return None if self._ranker is None else self._ranker.recall

    def remember(self, lengths: Sequence[tuple[Hashable, int]], priors: Sequence[int]) -> None:
        """Load lengths from before a restart as (prompt, tokens), with the prior of each."""
        if self._ranker is not None:
            self._ranker.remember(lengths, priors)
