"""Compute advantages of rollouts from their rewards, batch after batch.

Advantages of rollouts from their rewards.

| estimator                | baseline of a reward                       | known once                     |
|--------------------------|--------------------------------------------|--------------------------------|
| grpo, dr-grpo, rloo      | mean of its group (rloo: of the others)    | the group is whole             |
| raft, dpo                | none: 1 is the best, -1 (dpo) the worst    | the group is whole             |
| reinforce++              | mean of the batch that the last step had   | that step is made              |

REINFORCE++ (arXiv 2501.03262) takes the mean and the standard deviation of the batch itself, which is whole only
after most of it was trained on. The mean of the batch before is known to the first rollout, the same for the whole
step, and does not depend on what it is subtracted from, so the expected gradient is that of the rewards themselves:
E[b * grad log p] = 0. It is not divided by a standard deviation: that of another batch may be 0 where this one's
is not.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import assert_never

from streamrl.executor.buffer import RolloutBuffer
from streamrl.executor.roles import Sample
from streamrl.runfile.algorithm_config import AlgorithmConfig, AlgorithmName

STD_EPSILON = 1e-6
"""Keeps the division finite; far below any spread of rewards that carries signal."""


NO_BASELINE = 0.0
"""Of the first step, which no batch comes before."""


def advantages(
    name: AlgorithmName, rewards: list[float], baseline: float = NO_BASELINE
) -> list[float]:
    """Return one advantage per reward, by the estimator `name`.

    Args:
        name: grpo, dr-grpo, rloo, raft or dpo, for the rewards of a whole group; or reinforce++ or ppo, for any rewards
            of a step.
        rewards: of verified rollouts.
        baseline: what `batch_baseline` gave for the batch of the last step; only reinforce++ reads it.

    Equal rewards of a group give exact zeros under a group's baseline, as does a reward that is the baseline: the
    trainer then skips the gradient. For ppo these are the rewards themselves: a critic makes advantages of them.
    """
    match name:
        case "grpo":
            return _grpo(rewards)
        case "dr-grpo":
            return _dr_grpo(rewards)
        case "rloo":
            return _rloo(rewards)
        case "reinforce++":
            return [reward - baseline for reward in rewards]
        case "raft":
            return _raft(rewards)
        case "dpo":
            return _dpo(rewards)
        case "ppo":
            return list(rewards)
        case _:
            assert_never(name)


def pair_of(rewards: Sequence[float]) -> tuple[int, int]:
    """Return the places of the best and of the worst reward of a group, of equal ones the first."""
    places = range(len(rewards))
    return max(places, key=rewards.__getitem__), min(places, key=rewards.__getitem__)


def batch_baseline(rewards: Sequence[float]) -> float:
    """Return the mean of a batch's rewards, correctly rounded: of equal rewards that very reward."""
    return statistics.mean(rewards)


def _grpo(rewards: list[float]) -> list[float]:
    """`(r - mean) / (std + epsilon)`, std of the sample (GRPO, arXiv 2402.03300)."""
    centred = _dr_grpo(rewards)
    variance = math.fsum(value * value for value in centred) / max(1, len(rewards) - 1)
    return [value / (math.sqrt(variance) + STD_EPSILON) for value in centred]


def _dr_grpo(rewards: list[float]) -> list[float]:
    """`r - mean`: no division, which favours easy and hard prompts (Dr. GRPO, arXiv 2503.20783)."""
    if len(set(rewards)) <= 1:
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def _rloo(rewards: list[float]) -> list[float]:
    """`r - mean of the others`, which is `n/(n-1) * (r - mean)` (RLOO, arXiv 2402.14740)."""
    scale = len(rewards) / max(1, len(rewards) - 1)
    return [scale * value for value in _dr_grpo(rewards)]


def _raft(rewards: list[float]) -> list[float]:
    """1 of the best, where any is better than another (RAFT, arXiv 2304.06767; rejection sampling)."""
    best, worst = pair_of(rewards)
    return [float(place == best != worst) for place in range(len(rewards))]


def _dpo(rewards: list[float]) -> list[float]:
    """1 of the best and -1 of the worst, where they differ (online DPO, arXiv 2402.04792)."""
    best, worst = pair_of(rewards)
    return [float((place == best) - (place == worst)) for place in range(len(rewards))]


class AdvantageEstimator:
    """Makes samples of rollouts by the run's algorithm, and carries the baseline from one step to the next."""

    def __init__(
        self, algorithm: AlgorithmConfig, buffer: RolloutBuffer, baseline: float = NO_BASELINE
    ) -> None:
        self._algorithm = algorithm
        self._buffer = buffer
        self.baseline = baseline
        """Mean reward of the last step's batch; see `streamrl.executor.trainer.advantages`."""
        self._of_groups: dict[int, float] = {}
        """Advantages by rollout, of groups that this step has asked for."""

    def samples(self, rollouts: Iterable[int]) -> list[Sample]:
        """Return rollouts as the trainer consumes them, with their advantages."""
        return [
            self._buffer.sample(rollout, self.advantage(rollout), self._partner(rollout))
            for rollout in rollouts
        ]

    def _partner(self, rollout: int) -> int | None:
        """Return the other rollout of the pair that is compared."""
        if self._algorithm.name != "dpo" or not self.advantage(rollout):
            return None
        group = self._buffer.rollouts[rollout].group
        pair = pair_of([self._buffer.rollouts[sibling].reward for sibling in group])
        return next(group[place] for place in pair if group[place] != rollout)

    def advantage(self, rollout: int) -> float:
        """Return a rollout's advantage, by the baseline of this step."""
        name, rollouts = self._algorithm.name, self._buffer.rollouts
        if not self._algorithm.trains_whole_groups:
            return advantages(name, [rollouts[rollout].reward], self.baseline)[0]
        if rollout not in self._of_groups:
            group = rollouts[rollout].group
            rewards = [rollouts[sibling].reward for sibling in group]
            self._of_groups.update(zip(group, advantages(name, rewards), strict=True))
        return self._of_groups[rollout]

    def end_step(self, groups: Sequence[int]) -> None:
        """Take the baseline of the next step from the groups that this one was made of."""
        self.baseline = batch_baseline(
            [buffered.reward for buffered in self._buffer.rollouts_of(groups)]
        )
        self._of_groups.clear()
