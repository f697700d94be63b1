"""The algorithms that `algorithm.name` chooses among: their properties, and how rewards become advantages.

| algorithm                | baseline of a reward                       | known once                     |
|--------------------------|--------------------------------------------|--------------------------------|
| grpo, dr-grpo, rloo      | mean of its group (rloo: of the others)    | the group is whole             |
| raft, dpo                | none: 1 is the best, -1 (dpo) the worst    | the group is whole             |
| reinforce++              | mean of the batch that the last step had   | that step is made              |
| ppo                      | values of a critic, token by token         | the rollout is scored          |

To add an algorithm, subclass `Algorithm` or one of the classes below, and override what differs. A class outside
this package is chosen as `algorithm.name = "module:Class"`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

from streamrl.runfile.choices import ChoiceList

STD_EPSILON = 1e-6
"""Keeps the division finite; far below any spread of rewards that carries signal."""
NO_BASELINE = 0.0
"""Of the first step, which no batch comes before."""

ALGORITHMS = ChoiceList(
    key="algorithm.name",
    group="streamrl.algorithms",
    base="streamrl.runfile.algorithms:Algorithm",
    required="advantages",
    own={
        "grpo": "streamrl.runfile.algorithms:Grpo",
        "dr-grpo": "streamrl.runfile.algorithms:DrGrpo",
        "rloo": "streamrl.runfile.algorithms:Rloo",
        "reinforce++": "streamrl.runfile.algorithms:ReinforcePlusPlus",
        "raft": "streamrl.runfile.algorithms:Raft",
        "dpo": "streamrl.runfile.algorithms:Dpo",
        "ppo": "streamrl.runfile.algorithms:Ppo",
    },
)
AlgorithmName = Annotated[str, ALGORITHMS]


class Algorithm:
    """One algorithm: what it needs of a run, and its advantages."""

    trains_whole_groups = True
    """Whether an advantage needs every rollout of its group."""
    imitates = False
    """Whether likelihoods of chosen rollouts are raised, whichever policy sampled them."""
    has_critic = False
    """Whether a critic of the actor's size is trained beside it."""
    has_rewards_of_tokens = False
    """Whether tokens may have rewards of their own, beside that of their rollout."""
    needs_reference = False
    """Whether the initial policy scores rollouts, even without a KL term."""
    recomputes_log_probs = False
    """Whether the actor scores rollouts before their gradient, whatever the correction is."""
    compares_pairs = False
    """Whether the best and the worst rollout of a group are trained on as a pair."""
    reads: tuple[str, ...] = ("loss_mean", "mask_truncated")
    """Keys of `[algorithm]` that this algorithm reads and some others do not."""
    objective = "streamrl.executor.trainer.objectives:PolicyGradient"
    """The loss, as "module:Class"; imported by the processes that train."""

    def computed_of_group(self, group_size: int) -> float:
        """Return the share of rollouts that are computed, of a group with different rewards."""
        return 1.0

    def advantages(self, rewards: list[float], baseline: float = NO_BASELINE) -> list[float]:
        """Return one advantage per reward.

        Args:
            rewards: of verified rollouts: a whole group, or any of a step (`trains_whole_groups`).
            baseline: mean reward of the last step's batch; only reinforce++ reads it.

        Equal rewards of a group give exact zeros under a group's baseline, as does a reward that is the baseline:
        the trainer then skips the gradient.
        """
        raise NotImplementedError


class DrGrpo(Algorithm):
    """`r - mean`: no division, which favours easy and hard prompts (Dr. GRPO, arXiv 2503.20783)."""

    def advantages(self, rewards: list[float], baseline: float = NO_BASELINE) -> list[float]:
        """Return rewards less the mean of their group."""
        return centred(rewards)


class Grpo(Algorithm):
    """`(r - mean) / (std + epsilon)`, std of the sample (GRPO, arXiv 2402.03300)."""

    def advantages(self, rewards: list[float], baseline: float = NO_BASELINE) -> list[float]:
        """Return rewards less their mean, in units of their standard deviation."""
        values = centred(rewards)
        variance = math.fsum(value * value for value in values) / max(1, len(rewards) - 1)
        return [value / (math.sqrt(variance) + STD_EPSILON) for value in values]


class Rloo(Algorithm):
    """`r - mean of the others`, which is `n/(n-1) * (r - mean)` (RLOO, arXiv 2402.14740)."""

    def advantages(self, rewards: list[float], baseline: float = NO_BASELINE) -> list[float]:
        """Return rewards less the mean of the group's other rewards."""
        scale = len(rewards) / max(1, len(rewards) - 1)
        return [scale * value for value in centred(rewards)]


class ReinforcePlusPlus(Algorithm):
    """`r - mean of the last batch` (REINFORCE++, arXiv 2501.03262).

    The paper takes the mean and the standard deviation of the batch itself, which is whole only after most of it was
    trained on. The mean of the batch before is known to the first rollout, the same for the whole step, and does not
    depend on what it is subtracted from. So the expected gradient is that of the rewards: E[b * grad log p] = 0. It is
    not divided by a standard deviation: that of another batch may be 0 where this one's is not.
    """

    trains_whole_groups = False
    has_rewards_of_tokens = True

    def advantages(self, rewards: list[float], baseline: float = NO_BASELINE) -> list[float]:
        """Return rewards less the baseline."""
        return [reward - baseline for reward in rewards]


class Raft(Algorithm):
    """1 of the best, where any is better than another (RAFT, arXiv 2304.06767; rejection sampling)."""

    imitates = True
    objective = "streamrl.executor.trainer.objectives:Likelihood"

    def computed_of_group(self, group_size: int) -> float:
        """Return the share of one rollout."""
        return 1 / group_size

    def advantages(self, rewards: list[float], baseline: float = NO_BASELINE) -> list[float]:
        """Return 1 for the best rollout and 0 for the others."""
        best, worst = pair_of(rewards)
        return [float(place == best != worst) for place in range(len(rewards))]


class Dpo(Algorithm):
    """1 of the best and -1 of the worst, where they differ (online DPO, arXiv 2402.04792)."""

    imitates = True
    needs_reference = True
    recomputes_log_probs = True
    compares_pairs = True
    reads = ("beta",)
    objective = "streamrl.executor.trainer.objectives:Preference"

    def computed_of_group(self, group_size: int) -> float:
        """Return the share of two rollouts."""
        return min(1.0, 2 / group_size)

    def advantages(self, rewards: list[float], baseline: float = NO_BASELINE) -> list[float]:
        """Return 1 for the best rollout, -1 for the worst, and 0 for the others."""
        best, worst = pair_of(rewards)
        return [float((place == best) - (place == worst)) for place in range(len(rewards))]


class Ppo(Algorithm):
    """The rewards themselves: a critic makes advantages of them (PPO, arXiv 1707.06347)."""

    trains_whole_groups = False
    has_critic = True
    has_rewards_of_tokens = True
    reads = ("loss_mean", "mask_truncated", "critic_learning_rate", "gae_lambda")
    objective = "streamrl.executor.trainer.objectives:ActorCritic"

    def advantages(self, rewards: list[float], baseline: float = NO_BASELINE) -> list[float]:
        """Return the rewards."""
        return list(rewards)


def algorithm_named(name: str) -> Algorithm:
    """Return the algorithm that a value of `algorithm.name` chooses; `RunError` where there is none."""
    return ALGORITHMS.make(name, ALGORITHMS.class_of(name, Algorithm))


def readers_of(key: str) -> tuple[str, ...]:
    """Return the algorithms of this package that read a key of `[algorithm]`, if not all read it."""
    return tuple(name for name in ALGORITHMS.own if key in algorithm_named(name).reads)


def centred(rewards: list[float]) -> list[float]:
    """Return rewards less their mean; exact zeros where all are equal."""
    if len(set(rewards)) <= 1:
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def pair_of(rewards: Sequence[float]) -> tuple[int, int]:
    """Return the places of the best and of the worst reward of a group, of equal ones the first."""
    places = range(len(rewards))
    return max(places, key=rewards.__getitem__), min(places, key=rewards.__getitem__)
