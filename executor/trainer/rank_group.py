"""The ranks of one trainer: processes that each train on a share of the batch, and are called with the same methods.

Whoever calls them gives every rank the same calls in the same order. What one of them refuses all refuse (`agree`), so
that none waits for another that has given up; one that fails in any other way takes the trainer with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from streamrl.executor.trainer.trainer_settings import TrainerSettings

BUCKET_BYTES = 64 * 2**20
"""Of a gradient that is summed at once: enough to fill a network, little beside a model."""
OTHER_RANK = "another rank of the trainer refuses its share"
"""What a rank says that has nothing to refuse itself."""

R = TypeVar("R")


class RankGroup:
    """This process and the others of its trainer."""

    def __init__(self, settings: TrainerSettings) -> None:
        """Join the others; a trainer of one rank has a group only where its backend wants one."""
        self.rank, self.size = settings.rank, settings.num_ranks
        if settings.rendezvous is not None:
            dist.init_process_group(
                "gloo" if settings.device == "cpu" else "cpu:gloo,cuda:nccl",
                init_method=settings.rendezvous,
                rank=self.rank,
                world_size=self.size,
            )

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that speaks for all."""
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sums of these values over all ranks."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor)
        return tensor.tolist()

    def most(self, value: int) -> int:
        """Return the largest value of any rank."""
        if self.size == 1:
            return value
        tensor = torch.tensor(value)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return int(tensor)

    def agree(self, work: Callable[[], R]) -> R:
        """Do work that raises `ValueError` for what it refuses; where one rank does, all raise."""
        result: list[R] = []
        error: ValueError | None = None
        try:
            result.append(work())
        except ValueError as refused:
            error = refused
        (num_refusing,) = self.sum([error is not None])
        if error is not None:
            raise error
        if num_refusing:
            raise ValueError(OTHER_RANK)
        return result[0]

    def sum_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace tensors by their sums over all ranks, which have them in the same order."""
        if self.size == 1:
            return
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.flatten() for tensor in bucket])
            dist.all_reduce(flat)
            parts = torch.split(flat, [tensor.numel() for tensor in bucket])
            for tensor, part in zip(bucket, parts, strict=True):
                tensor.copy_(part.view_as(tensor))

    def wait(self) -> None:
        """Return once every rank is here."""
        self.sum([0.0])

    def leave(self) -> None:
        """Part from the others."""
        if dist.is_initialized():
            dist.destroy_process_group()


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield tensors of one dtype that follow each other, as many as fill a bucket."""
    some: list[torch.Tensor] = []
    for tensor in tensors:
        filled = sum(other.nbytes for other in some)
        if some and (tensor.dtype != some[0].dtype or filled + tensor.nbytes > BUCKET_BYTES):
            yield some
            some = []
        some.append(tensor)
    if some:
        yield some
