"""Compute the advantages of rollouts from their rewards, and make samples for the trainer."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from math import isfinite

from streamrl.executor.buffer import RolloutBuffer
from streamrl.executor.roles import Sample
from streamrl.runfile.algorithm_config import AlgorithmConfig
from streamrl.runfile.algorithms import ALGORITHMS, NO_BASELINE, pair_of
from streamrl.runfile.errors import shown


def batch_baseline(rewards: Sequence[float]) -> float:
    """Return the mean of a batch's rewards, correctly rounded, so that the mean of equal rewards is exact."""
    return statistics.mean(rewards)


class AdvantageEstimator:
    """Makes samples with the advantages of the run's algorithm, and keeps the baseline between steps."""

    def __init__(
        self, algorithm: AlgorithmConfig, buffer: RolloutBuffer, baseline: float = NO_BASELINE
    ) -> None:
        self._algorithm = algorithm.chosen
        self._name = algorithm.name
        self._by_turn = algorithm.credit == "turn"
        self._masks_truncated = algorithm.mask_truncated
        self._buffer = buffer
        self.baseline = baseline
        """Mean reward of the last step's batch; see `streamrl.runfile.algorithms`."""
        self._of_groups: dict[int, float] = {}
        """Advantages by rollout, for groups that were used in this step."""

    def samples(self, rollouts: Iterable[int]) -> list[Sample]:
        """Return samples of rollouts with their advantages."""
        return [
            self._buffer.sample(
                rollout,
                self.advantage(rollout),
                self._partner(rollout),
                turn_advantages=self.turn_advantages(rollout) if self._by_turn else (),
                masks_truncated=self._masks_truncated,
            )
            for rollout in rollouts
        ]

    def _partner(self, rollout: int) -> int | None:
        """Return the other rollout of the pair, if the algorithm compares pairs."""
        if not self._algorithm.compares_pairs or not self.advantage(rollout):
            return None
        group = self._buffer.rollouts[rollout].group
        pair = pair_of([self._buffer.rollouts[sibling].reward for sibling in group])
        return next(group[index] for index in pair if group[index] != rollout)

    def advantage(self, rollout: int) -> float:
        """Return a rollout's advantage, with the baseline of this step."""
        algorithm, rollouts = self._algorithm, self._buffer.rollouts
        if not algorithm.trains_whole_groups:
            return self._advantages_of([rollouts[rollout].reward], self.baseline)[0]
        if rollout not in self._of_groups:
            group = rollouts[rollout].group
            rewards = [rollouts[sibling].reward for sibling in group]
            self._of_groups.update(zip(group, self._advantages_of(rewards), strict=True))
        return self._of_groups[rollout]

    def turn_advantages(self, rollout: int) -> tuple[float, ...]:
        """Return the advantage of each turn of an episode.

        The return of a turn is the sum of the rewards from it on. It is compared with the returns of the same turn of
        the group's other episodes. The advantage of a turn that no other episode has is 0.
        """
        algorithm, rollouts = self._algorithm, self._buffer.rollouts
        own = rollouts[rollout]
        if not algorithm.trains_whole_groups:
            return tuple(self._advantages_of([each], self.baseline)[0] for each in own.returns)
        returns = {sibling: rollouts[sibling].returns for sibling in own.group}
        found = []
        for turn in range(len(returns[rollout])):
            there = [sibling for sibling in own.group if turn < len(returns[sibling])]
            advantages = self._advantages_of([returns[sibling][turn] for sibling in there])
            found.append(advantages[there.index(rollout)] if len(there) > 1 else 0.0)
        return tuple(found)

    def _advantages_of(self, rewards: list[float], *baseline: float) -> list[float]:
        """Return the advantages of rewards.

        Raises:
            ExtensionError: an algorithm from outside this package raised, or did not return a finite number per reward.
        """
        with ALGORITHMS.blaming(self._name):
            found = [
                float(advantage) for advantage in self._algorithm.advantages(rewards, *baseline)
            ]
        if len(found) != len(rewards) or not all(map(isfinite, found)):
            wanted = f"{len(rewards)} finite numbers, one for each reward"
            raise ALGORITHMS.fault(
                self._name, f"returned advantages {shown(found)}; it must return {wanted}"
            )
        return found

    def end_step(self, groups: Sequence[int]) -> None:
        """Compute the baseline of the next step from the groups of this one."""
        self.baseline = batch_baseline(
            [buffered.reward for buffered in self._buffer.rollouts_of(groups)]
        )
        self._of_groups.clear()
