"""How rollouts become micro-batches: dealt out to data-parallel ranks, then put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heapreplace

from streamrl.runfile.sides_config import TrainerConfig

MicroBatch = tuple[int, float]
"""Tokens of a micro-batch, padding included, and its pairs of a token and one before it."""


def deal(
    lengths: Sequence[int],
    loads: Sequence[float],
    time_of: Callable[[int], float],
    trainer: TrainerConfig,
) -> list[list[int]]:
    """Deal rollouts out to ranks, each to the one that has the least to do.

    Args:
        lengths: tokens of each rollout, prompt and output.
        loads: (ranks,) seconds that each rank has to do already.
        time_of: seconds of a rollout.
        trainer: whose `order` says whether the longest are dealt out first, or rollouts as they come.
    """
    ranks = [(load, rank) for rank, load in enumerate(loads)]
    heapify(ranks)
    dealt: list[list[int]] = [[] for _ in loads]
    for length in sorted(lengths, reverse=True) if trainer.order == "sorted" else lengths:
        load, rank = ranks[0]
        dealt[rank].append(length)
        heapreplace(ranks, (load + time_of(length), rank))
    return dealt


def micro_batches(lengths: Sequence[int], trainer: TrainerConfig) -> list[MicroBatch]:
    """Put a rank's rollouts together, in order.

    A micro-batch has at most `micro_batch` rollouts, and `max_tokens_per_pass` tokens unless one rollout has more.
    Packed rollouts follow each other without padding; padded ones are all as long as the longest.
    """
    batches: list[list[int]] = []
    tokens = longest = 0
    for length in lengths:
        longest = max(longest, length)
        count = len(batches[-1]) + 1 if batches else 0
        grown = tokens + length if trainer.packing == "packed" else count * longest
        if batches and count <= trainer.micro_batch and grown <= trainer.max_tokens_per_pass:
            batches[-1].append(length)
            tokens += length
        else:
            batches.append([length])
            tokens = longest = length
    return [_size(batch, trainer) for batch in batches]


def _size(batch: Sequence[int], trainer: TrainerConfig) -> MicroBatch:
    if trainer.packing == "packed":
        return sum(batch), sum(length * length for length in batch) / 2
    longest = max(batch)
    return len(batch) * longest, len(batch) * longest * longest / 2
