"""What simulated rollouts are rewarded with: only whether rewards of a group differ can matter."""

from __future__ import annotations

from hashlib import blake2b

from streamrl.runfile.config import Run

REWARD = 0.0
"""Of a simulated rollout, which has no text to reward."""
BEST = 1.0
"""Of one in a group whose rewards differ."""
BYTES = 8


class SimRewards:
    """Rewards differ in as many groups as the run file says, where anybody heeds them: the same groups in every run of a seed."""

    def __init__(self, run: Run) -> None:
        self._seed = run.seed
        self._size = run.algorithm.group_size
        self._share = run.workload.informative_share if run.leaves_out_uniform else 0.0

    def of(self, rollout: int) -> float:
        """Return the reward of a rollout."""
        group, place = divmod(rollout, self._size)
        if place or not self._share:
            return REWARD
        return BEST if self._draw(group) < self._share else REWARD

    def _draw(self, group: int) -> float:
        """Return a number from 0 on, below 1."""
        digest = blake2b(f"{self._seed} {group}".encode(), digest_size=BYTES).digest()
        number: float = int.from_bytes(digest, "little") / 2.0 ** (8 * BYTES)
        return number
