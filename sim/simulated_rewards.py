"""What simulated rollouts are rewarded with: whether rewards of a group differ, and their mean where anybody heeds it."""

from __future__ import annotations

from bisect import bisect_right
from hashlib import blake2b
from itertools import accumulate

from streamrl.runfile.config import Run
from streamrl.runfile.errors import RunError
from streamrl.runfile.trainers import trainer_key

REWARD = 0.0
"""Of a simulated rollout, which has no text to reward."""
BEST = 1.0
"""Of one in a group whose rewards differ."""
BYTES = 8
MEAN = "mean of "
"""Keeps draws of means apart from those of whether rewards differ."""


class SimRewards:
    """Rewards differ in as many groups, and groups have means, as the run file says: the same in every run of a seed.

    Where nobody heeds the one or the other, there is nothing of it.
    """

    def __init__(self, run: Run) -> None:
        """Take what the run file says.

        Raises:
            RunError: a trainer takes groups by their rewards, and the run file says nothing of these.
        """
        self._seed = run.seed
        self._size = run.algorithm.group_size
        self._share = run.workload.informative_share if run.leaves_out_uniform else 0.0
        pairs = run.workload.group_rewards if run.heeds_rewards else ()
        if run.heeds_rewards and not pairs:
            raise _unknown(run)
        self._means = [mean for mean, _ in pairs]
        self._edges = list(accumulate(share for _, share in pairs))

    def of(self, rollout: int) -> float:
        """Return the reward of a rollout."""
        group, place = divmod(rollout, self._size)
        mean = self._mean(group) if self._means else REWARD
        is_end = place == 0 or (place == self._size - 1 and bool(self._means))
        if not is_end or not self._share or self._draw(str(group)) >= self._share:
            return mean
        if not self._means:
            return BEST
        return mean + (BEST if place == 0 else -BEST) / 2 if self._size > 1 else mean

    def _mean(self, group: int) -> float:
        place = bisect_right(self._edges, self._draw(f"{MEAN}{group}"))
        return self._means[min(place, len(self._means) - 1)]  # shares may add up to a bit less

    def _draw(self, what: str) -> float:
        """Return a number from 0 on, below 1."""
        digest = blake2b(f"{self._seed} {what}".encode(), digest_size=BYTES).digest()
        number: float = int.from_bytes(digest, "little") / 2.0 ** (8 * BYTES)
        return number


def _unknown(run: Run) -> RunError:
    number = next(n for n, each in enumerate(run.followers, start=1) if each.heeds_rewards)
    key = "workload.group_rewards"
    text = (
        f"{key} is missing: {trainer_key(number)} takes groups by their rewards, and nobody knows but you what share "
        "of them has which mean, such as [[0.0, 0.25], [1.0, 0.75]]"
    )
    return RunError(key, None, list, text)
