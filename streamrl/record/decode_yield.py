"""What a replica yields when it decodes a full batch: what a trace must hold so that a batch can be called underfilled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil

import msgspec

EVERY_BATCH = 32  # up to here each batch is kept, as products of few rows take uneven seconds
SPACING = 1.08  # of batches that are kept beyond it: seconds between them are all but straight


class DecodeYield(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a replica's decode step at some batches, and how large a batch it may have.

    A step of b rollouts with S tokens of context in all takes `base + per_context_token * S` seconds.
    """

    batches: list[int]
    base: list[float]
    per_context_token: list[float]
    most_running: int
    """Most rollouts at once, whatever they hold."""
    kv_capacity: float | None = None
    """Tokens that bound the batch too; absent where the longest output of each has its memory."""

    @classmethod
    def of(
        cls, base: Sequence[float], per_context_token: Sequence[float], kv_capacity: float | None
    ) -> DecodeYield:
        """Keep some batches of a decode curve whose lists begin with a batch of none."""
        batches = list(_kept(len(base) - 1))
        return cls(
            batches=batches,
            base=[base[batch] for batch in batches],
            per_context_token=[per_context_token[batch] for batch in batches],
            most_running=len(base) - 1,
            kv_capacity=kv_capacity,
        )


def _kept(most: int) -> Iterator[int]:
    batch = 1
    while batch < most:
        yield batch
        batch = batch + 1 if batch < EVERY_BATCH else ceil(batch * SPACING)
    yield most
