"""In which order prompts come: each once an epoch, shuffled anew in every epoch by the run's seed."""

from __future__ import annotations

import numpy as np

KEPT_EPOCHS = 4
"""Orders of prompts in memory: those of the epoch, of the next, and of prompts that tail batching puts off. Others are
made anew, so that memory does not grow with the run."""


class EpochOrder:
    """Which prompt stands at which place of the data."""

    def __init__(self, seed: int, num_prompts: int) -> None:
        self._seed = seed
        self._num_prompts = num_prompts
        self._orders: dict[int, list[int]] = {}

    def prompt(self, place: int) -> int:
        """Return the index of the prompt at `place`, counted from the run's first."""
        epoch, position = divmod(place, self._num_prompts)
        if epoch not in self._orders:
            if len(self._orders) == KEPT_EPOCHS:
                del self._orders[min(self._orders)]
            shuffled = np.random.default_rng([self._seed, epoch]).permutation(self._num_prompts)
            self._orders[epoch] = shuffled.tolist()
        return self._orders[epoch][position]
