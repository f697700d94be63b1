"""Distribute rollouts over data-parallel ranks, and pack them into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heapreplace

from streamrl.runfile.roles_config import TrainerConfig

MicroBatch = tuple[int, float]
"""Tokens of a micro-batch, padding included, and its pairs of a token and one before it."""


def distribute_rollouts(
    lengths: Sequence[int],
    loads: Sequence[float],
    time_of: Callable[[int], float],
    trainer: TrainerConfig,
) -> list[list[int]]:
    """Distribute rollouts over ranks; each goes to the rank with the least work.

    Args:
        lengths: tokens of each rollout, prompt and output.
        loads: (ranks,) seconds of work that each rank already has.
        time_of: seconds of a rollout.
        trainer: its `order` says whether the longest rollouts come first, or rollouts keep their
            order.
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
    """Pack a rank's rollouts into micro-batches, in order.

    A micro-batch has at most `micro_batch` rollouts. It has at most `max_tokens_per_pass` tokens,
    unless a single rollout has more. Packed rollouts follow each other without padding; padded ones
    have the length of the longest.
    """
    is_packed, most, room = (
        trainer.packing == "packed",
        trainer.micro_batch,
        trainer.max_tokens_per_pass,
    )
    batches: list[MicroBatch] = []
    count = tokens = longest = squares = 0
    for length in lengths:
        longest_then = length if length > longest else longest
        grown = tokens + length if is_packed else (count + 1) * longest_then
        if count and (count == most or grown > room):
            batches.append(_size(count, tokens, longest, squares, is_packed=is_packed))
            count = tokens = squares = 0
            longest_then = length
        count += 1
        tokens += length
        squares += length * length
        longest = longest_then
    if count:
        batches.append(_size(count, tokens, longest, squares, is_packed=is_packed))
    return batches


def _size(count: int, tokens: int, longest: int, squares: int, *, is_packed: bool) -> MicroBatch:
    if is_packed:
        return tokens, squares / 2
    return count * longest, count * longest * longest / 2
