"""Expected lengths of a prompt's rollouts, updated by its past samples and by siblings that have finished.

What a prompt's rollouts are expected to take: a prior, corrected by what it took before.

    log tokens = level + slope (prior - its mean) + u + noise,    u ~ N(0, between),  noise ~ N(0, within)

u is the prompt's own. With n known lengths its posterior mean shrinks their mean by n / (n + within / between): the
normal model with known variances (Gelman et al., Bayesian Data Analysis, section 2.5). The level is that of the window
of groups in which a length was drawn, so that lengths which grow from epoch to epoch leave a prompt's place as it was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

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


WINDOWS_KEPT = 8  # that variances and slope are estimated from: enough to be steady, few enough to follow a training
SLOPE_GROUPS = (
    8  # groups that a slope of 1 counts for: what was measured of the prior before the run
)
STEEPEST = 3.0  # of a slope: more is chance, in priors that are nearly all alike
MOST_WEIGHT = 20.0  # known lengths that a prior may count for, however alike prompts look
LEAST_BETWEEN = 1 / MOST_WEIGHT


@dataclass(frozen=True, slots=True)
class KnownGroup:
    """A group whose rollouts have all finished; lengths are natural logarithms of tokens."""

    prompt: Hashable | None
    prompt_tokens: int
    priors: tuple[float, ...]
    """What was expected of each rollout before anything was learnt."""
    stated: tuple[float, ...]
    """What was expected of each when it was drawn."""
    lengths: tuple[float, ...]

    @property
    def prior(self) -> float:
        """The mean of the priors."""
        return sum(self.priors) / len(self.priors)

    @property
    def length(self) -> float:
        """The mean of the lengths."""
        return sum(self.lengths) / len(self.lengths)


class Posterior:
    """Expected log lengths by prompt; an update and a question each take a few microseconds."""

    def __init__(self) -> None:
        self.slope = 1.0
        """Of log lengths over priors."""
        self.weight = float(PRIOR_SAMPLES)
        """Known lengths that the prior counts for."""
        self.level: float | None = None
        """Mean log length of the last window; None before any."""
        self._prior_level = 0.0
        self._known: dict[Hashable, tuple[int, float]] = {}
        """By prompt: how many lengths, and the sum of what they were above the level of their window."""
        self._windows: deque[Sequence[KnownGroup]] = deque(maxlen=WINDOWS_KEPT)

    def expect(self, prior: float, prompt: Hashable | None) -> float:
        """Return the expected log length of a rollout; before the first window its prior."""
        if self.level is None:
            return prior
        count, above = (0, 0.0) if prompt is None else self._known.get(prompt, (0, 0.0))
        return self.blend(prior, count, above)

    def blend(self, prior: float, count: int, above: float) -> float:
        """Return the expected log length of a prompt with `count` lengths, which were `above` the level together."""
        assert self.level is not None, "blended before any window was learnt"
        own = self.weight * self.slope * (prior - self._prior_level)
        return self.level + (own + above) / (self.weight + count)

    def learn(self, window: Sequence[KnownGroup]) -> None:
        """Enter what a window of successive groups took, and estimate anew."""
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
        """Estimate from the windows to come alone; what prompts took stays known where `keeps_prompts`."""
        self._windows.clear()
        if not keeps_prompts:
            self._known.clear()

    def _estimate(self) -> None:
        """Estimate slope and weight by moments, from the windows kept."""
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
            return  # one rollout a group: nothing tells how alike a prompt's rollouts are
        within = sum(spreads) / num_spare
        between = float(np.mean((y - self.slope * x) ** 2)) - within / float(np.mean(sizes))
        if within > 0:
            self.weight = within / max(between, LEAST_BETWEEN * within)
