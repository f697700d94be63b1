"""Tokens that mean nothing, for work that is only timed."""

from __future__ import annotations

import random

from streamrl.executor.samples import Sample
from streamrl.executor.tokens import TokenSegment, encode_ids, write_block


class MadeUp:
    """Draws tokens of a vocabulary, the same ones every time."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._random = random.Random(0)

    def tokens(self, count: int) -> list[int]:
        """Return so many token ids."""
        return [self._random.randrange(self._vocabulary) for _ in range(count)]

    def samples(self, rollouts: int, width: int, advantage: float) -> list[Sample]:
        """Return rollouts of `width` tokens, a quarter of them prompt."""
        prompt = max(1, width // 4)
        output = width - prompt
        return [
            Sample(
                rollout=index,
                prompt=encode_ids(self.tokens(prompt)),
                output=(write_block(self.tokens(output), [-1.0] * output, None),),
                segments=(TokenSegment(output, is_policy=True),),
                advantage=advantage,
            )
            for index in range(rollouts)
        ]
