"""Distribute rollouts over data-parallel ranks, and pack them into micro-batches."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from heapq import heapify, heapreplace

from streamrl.runfile.roles_config import TrainerConfig

MicroBatch = tuple[int, float, int]
"""Tokens of a micro-batch, padding included, its pairs of a token and one before it, and its tokens times its sequences.

A loss that takes packed sequences one by one may touch all tokens for each. The last number is 0 if they are padded.
"""


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


def fewest_micro_batches(
    lengths: Sequence[int], loads: Sequence[float], trainer: TrainerConfig, *, is_full: bool = False
) -> list[list[MicroBatch]]:
    """Pack the rollouts of all ranks into few micro-batches, and return those of each rank.

    The longest rollouts come first, and each goes to the fullest micro-batch that has room for it
    (best fit decreasing). Ranks get them in turn, the one with the least work first, and as many
    each. If there are too few of them, those with the most rollouts give one away. Pipeline stages
    need micro-batches of one size, so all are padded to the largest.

    Args:
        lengths: tokens of each rollout, prompt and output.
        loads: (ranks,) seconds of work that each rank already has.
        trainer: its limits on a micro-batch.
        is_full: whether all are padded to the most tokens of a pass.
    """
    bins = _spread(_best_fit(lengths, trainer), trainer.data_parallel)
    tokens = [sum(one) for one in bins]
    if is_full:
        tokens = [max(total, trainer.max_tokens_per_pass) for total in tokens]
    elif trainer.pipeline_parallel > 1 and bins:
        tokens = [max(tokens)] * len(bins)
    sizes = [
        (total, sum(length * length for length in one) / 2, total * len(one))
        for total, one in zip(tokens, bins, strict=True)
    ]
    turns = sorted(range(len(loads)), key=lambda rank: loads[rank])
    dealt: list[list[MicroBatch]] = [[] for _ in loads]
    for turn, rank in enumerate(turns):
        dealt[rank] = sizes[turn :: len(loads)]
    return dealt


def _best_fit(lengths: Sequence[int], trainer: TrainerConfig) -> list[list[int]]:
    """Return the rollouts of each micro-batch."""
    bins: list[list[int]] = []
    open_bins: list[tuple[int, int]] = []  # tokens of room and place in `bins`, by room
    least = min(lengths, default=0)
    for length in sorted(lengths, reverse=True):
        at = bisect_left(open_bins, (length, 0))
        if at < len(open_bins):
            room, place = open_bins.pop(at)
            bins[place].append(length)
        else:
            room, place = trainer.max_tokens_per_pass, len(bins)
            bins.append([length])
        if room - length >= least and len(bins[place]) < trainer.micro_batch:
            insort(open_bins, (room - length, place))
    return bins


def _spread(bins: list[list[int]], ranks: int) -> list[list[int]]:
    """Split micro-batches of several rollouts until there are equally many for each rank, where possible."""
    fullest = sorted((one for one in bins if len(one) > 1), key=len, reverse=True)
    added = []
    for _ in range(-len(bins) % ranks):
        while fullest and len(fullest[0]) == 1:
            del fullest[0]
        if not fullest:
            break
        added.append([fullest[0].pop()])
    return [*bins, *added]


def _size(count: int, tokens: int, longest: int, squares: int, *, is_packed: bool) -> MicroBatch:
    if is_packed:
        return tokens, squares / 2, tokens * count
    return count * longest, count * longest * longest / 2, 0
