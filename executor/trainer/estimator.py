"""From rewards to samples: the advantages of a run's rollouts, batch after batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from executor.buffer import Book
from executor.samples import Sample
from executor.trainer.advantages import NO_BASELINE, advantages, batch_baseline
from streamrl.runfile.algorithm_config import AlgorithmConfig


class AdvantageEstimator:
    """Makes samples of rollouts by the run's algorithm, and carries the baseline from one step to the next."""

    def __init__(
        self, algorithm: AlgorithmConfig, book: Book, baseline: float = NO_BASELINE
    ) -> None:
        self._algorithm = algorithm
        self._book = book
        self.baseline = baseline
        """Mean reward of the last step's batch; see `executor.trainer.advantages`."""

    def samples(self, rollouts: Iterable[int]) -> list[Sample]:
        """Return rollouts as the trainer consumes them, with their advantages."""
        return [self._book.sample(rollout, self._advantage(rollout)) for rollout in rollouts]

    def end_step(self, groups: Sequence[int]) -> None:
        """Take the baseline of the next step from the groups that this one was made of, and forget them."""
        self.baseline = batch_baseline([draft.reward for draft in self._book.drafts_of(groups)])
        for group in groups:
            self._book.close_group(group)

    def _advantage(self, rollout: int) -> float:
        name, drafts = self._algorithm.name, self._book.drafts
        if not self._algorithm.trains_whole_groups:
            return advantages(name, [drafts[rollout].reward], self.baseline)[0]
        group = drafts[rollout].group
        rewards = [drafts[sibling].reward for sibling in group]
        return advantages(name, rewards)[group.index(rollout)]
