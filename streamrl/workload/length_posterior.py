"""Compute expected output lengths from past samples of a prompt and from finished siblings.

The model of a prompt's output length is a prior, corrected by the prompt's known lengths:

    log tokens = level + slope (prior - its mean) + u + noise,    u ~ N(0, between),  noise ~ N(0, within)

u is the effect of the prompt. Its posterior mean shrinks the mean of n known lengths by n / (n +
within / between): the normal model with known variances (Gelman et al., Bayesian Data Analysis,
section 2.5). The level is estimated for each window of groups. So lengths that grow from epoch to
epoch do not change u.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from streamrl.engine.messages import UNFINISHED, DrawnGroup, ExpectationsChanged, Generated

PRIOR_SAMPLES = 1
"""Weight of the first expectation, in finished rollouts of the prompt. On real groups (R1-Distill-1.5B
on AIME, Qwen3-1.7B on GPQA) least squares gives 0.5 to 1.5, with no past sample of the prompt or
with one.
"""


class SiblingLengths:
    """Update the expected tokens of a rollout from its finished siblings.

    With n known lengths the expectation is the mean of these and of the first expectation, which
    counts as `PRIOR_SAMPLES` lengths. So each new length moves the estimate by the weight that it
    has.
    """

    def __init__(self) -> None:
        self._groups: dict[int, _Group] = {}
        self._group_of: dict[int, int] = {}

    def add(self, groups: Iterable[DrawnGroup]) -> None:
        """Start with the expected tokens of drawn groups."""
        for drawn in groups:
            expected = dict(zip(drawn.rollouts, drawn.expected_tokens, strict=True))
            self._groups[drawn.group] = _Group(drawn.rollouts, expected)
            self._group_of.update(dict.fromkeys(drawn.rollouts, drawn.group))

    def learn(self, event: Generated) -> ExpectationsChanged | None:
        """Return the new expectations of the siblings of a finished rollout.

        None if the rollout goes on, all its siblings have finished, or its group was forgotten.
        """
        if event.finish in UNFINISHED or event.rollout not in self._group_of:
            return None
        number = self._group_of[event.rollout]
        group = self._groups[number]
        group.learn(event.rollout, event.tokens)
        if not group.expected:
            self.forget(number)
            return None
        return ExpectationsChanged(tuple(group.expected), tuple(group.expected.values()))

    def forget(self, group: int) -> None:
        """Forget a group."""
        if group in self._groups:
            for rollout in self._groups.pop(group).rollouts:
                del self._group_of[rollout]


class _Group:
    """The rollouts of one prompt."""

    def __init__(self, rollouts: tuple[int, ...], expected: dict[int, int]) -> None:
        self.rollouts = rollouts
        self.expected = expected
        """Output tokens expected of each unfinished rollout, in order of draw."""

    def learn(self, finished: int, tokens: int) -> None:
        """Update the expectations of the others with the length of a finished rollout."""
        del self.expected[finished]
        num_known = len(self.rollouts) - len(self.expected)
        share = 1 / (PRIOR_SAMPLES + num_known)
        for rollout, expected in self.expected.items():
            self.expected[rollout] += round((tokens - expected) * share)


WINDOWS_KEPT = 8  # windows for variances and slope: enough for steady estimates, few enough to follow the training
SLOPE_GROUPS = (
    8  # groups that the initial slope of 1 counts for: its weight against the run's own groups
)
STEEPEST = 3.0  # largest slope: a larger one is chance, from priors that are nearly equal
MOST_WEIGHT = 20.0  # known lengths that a prior counts for at most, even if all prompts look alike
LEAST_BETWEEN = 1 / MOST_WEIGHT


@dataclass(frozen=True, slots=True)
class KnownGroup:
    """A group whose rollouts have all finished. Lengths are natural logarithms of tokens."""

    prompt: Hashable | None
    prompt_tokens: int
    priors: tuple[float, ...]
    """Expected log length of each rollout before any learning."""
    stated: tuple[float, ...]
    """Expected log length of each rollout when it was drawn."""
    lengths: tuple[float, ...]

    @property
    def prior(self) -> float:
        """Return the mean of the priors."""
        return sum(self.priors) / len(self.priors)

    @property
    def length(self) -> float:
        """Return the mean of the lengths."""
        return sum(self.lengths) / len(self.lengths)


class Posterior:
    """Expected log lengths by prompt. An update and a query take a few microseconds each."""

    def __init__(self) -> None:
        self.slope = 1.0
        """Slope of log lengths over priors."""
        self.weight = float(PRIOR_SAMPLES)
        """Weight of the prior, in known lengths."""
        self.level: float | None = None
        """Mean log length of the last window; None before the first window."""
        self._prior_level = 0.0
        self._known: dict[Hashable, tuple[int, float]] = {}
        """For each prompt, the number of known lengths and the sum of their differences from the level of their window."""
        self._windows: deque[Sequence[KnownGroup]] = deque(maxlen=WINDOWS_KEPT)

    def expect(self, prior: float, prompt: Hashable | None) -> float:
        """Return the expected log length of a rollout; before the first window its prior."""
        if self.level is None:
            return prior
        count, above = (0, 0.0) if prompt is None else self._known.get(prompt, (0, 0.0))
        return self.blend(prior, count, above)

    def blend(self, prior: float, count: int, above: float) -> float:
        """Return the expected log length of a prompt with `count` known lengths, whose differences from the level sum to `above`."""
        assert self.level is not None, "blended before any window was learnt"
        own = self.weight * self.slope * (prior - self._prior_level)
        return self.level + (own + above) / (self.weight + count)

    def learn(self, window: Sequence[KnownGroup]) -> None:
        """Add a window of successive groups, and estimate slope, weight and level again."""
        self.level = float(np.mean([group.length for group in window]))
        self._prior_level = float(np.mean([group.prior for group in window]))
        self._windows.append(window)
        for group in window:
            if group.prompt is not None:
                count, above = self._known.get(group.prompt, (0, 0.0))
                more = sum(group.lengths) - len(group.lengths) * self.level
                self._known[group.prompt] = count + len(group.lengths), above + more
        self._estimate()

    def forget(self, *, keeps_prompts: bool) -> None:
        """Discard the windows so far. The lengths of prompts stay known if `keeps_prompts`."""
        self._windows.clear()
        if not keeps_prompts:
            self._known.clear()

    def _estimate(self) -> None:
        """Estimate slope and weight by moments, from the stored windows."""
        priors, lengths, spreads, sizes = [], [], [], []
        for window in self._windows:
            level = np.mean([group.length for group in window])
            prior_level = np.mean([group.prior for group in window])
            for group in window:
                priors.append(group.prior - prior_level)
                lengths.append(group.length - level)
                spreads.append(sum((length - group.length) ** 2 for length in group.lengths))
                sizes.append(len(group.lengths))
        x, y = np.array(priors), np.array(lengths)
        pseudo = SLOPE_GROUPS * float(np.mean(x * x))
        if pseudo > 0:
            self.slope = float(np.clip((x @ y + pseudo) / (x @ x + pseudo), 0.0, STEEPEST))
        num_spare = sum(sizes) - len(sizes)
        if not num_spare:
            return  # one rollout a group: no information about the variance within a prompt
        within = sum(spreads) / num_spare
        between = float(np.mean((y - self.slope * x) ** 2)) - within / float(np.mean(sizes))
        if within > 0:
            self.weight = within / max(between, LEAST_BETWEEN * within)
