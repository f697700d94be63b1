"""The ranks of one trainer: processes that each train on a share of the batch.

The controller calls the same methods on every rank, in the same order. If one rank rejects its input, all reject
(`agree`), so that no rank waits for one that has stopped. Any other failure of one rank fails the whole trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from streamrl.executor.trainer.trainer_settings import TrainerSettings

BUCKET_BYTES = 64 * 2**20
"""Bytes of gradient that are summed at once: enough to use the network fully, and small compared with a model."""
SENT_ALONE = 2**20
"""Least bytes of a tensor that is broadcast without a copy. It takes longer than the call."""
OTHER_RANK = "another rank of the trainer rejected its share"
"""Error of a rank that has nothing to reject itself."""

R = TypeVar("R")


class RankGroup:
    """This process and the other ranks of its trainer."""

    def __init__(self, settings: TrainerSettings) -> None:
        """Connect to the other ranks; a single rank has a process group only if its backend needs one."""
        self._num_alike = settings.num_alike
        self._connect(settings)

    def _connect(self, settings: TrainerSettings) -> None:
        self.rank, self.size = settings.rank, settings.num_ranks
        if settings.rendezvous is not None:
            dist.init_process_group(
                "gloo" if settings.device == "cpu" else "cpu:gloo,cuda:nccl",
                init_method=settings.rendezvous,
                rank=self.rank,
                world_size=self.size,
            )

    def regroup(self, settings: TrainerSettings) -> None:
        """Leave the process group, and connect to the ranks of another one; all of them must call this."""
        self.leave()
        self._connect(settings)

    @property
    def is_first(self) -> bool:
        """Return whether this rank acts for all: it writes weights and checkpoints."""
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sum these values over all ranks; ranks that share the same rollouts count once."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor)
        return (tensor / self._num_alike).tolist()

    def most(self, value: int) -> int:
        """Return the largest value over all ranks."""
        if self.size == 1:
            return value
        tensor = torch.tensor(value)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return int(tensor)

    def agree(self, work: Callable[[], R]) -> R:
        """Run `work`, which raises `ValueError` to reject its input; if one rank rejects, all raise."""
        result: list[R] = []
        error: ValueError | None = None
        try:
            result.append(work())
        except ValueError as rejection:
            error = rejection
        (num_refusing,) = self.sum([error is not None])
        if error is not None:
            raise error
        if num_refusing:
            raise ValueError(OTHER_RANK)
        return result[0]

    def sum_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace tensors by their sums over all ranks; every rank passes them in the same order."""
        if self.size == 1:
            return
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.flatten() for tensor in bucket])
            dist.all_reduce(flat)
            _fill(bucket, flat)

    def broadcast(self, tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
        """Replace tensors of the other ranks of a group, which has the first rank, by those of the first rank.

        Tensors of the other ranks must be contiguous.
        """
        for tensor in tensors:
            if tensor.nbytes >= SENT_ALONE:
                dist.broadcast(tensor.detach().contiguous(), 0, group=group)
        for bucket in _buckets([tensor for tensor in tensors if tensor.nbytes < SENT_ALONE]):
            flat = torch.cat([tensor.detach().flatten() for tensor in bucket])
            dist.broadcast(flat, 0, group=group)
            if not self.is_first:
                _fill(bucket, flat)

    def wait(self) -> None:
        """Wait until every rank calls this."""
        self.sum([0.0])

    def leave(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()


def _fill(tensors: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
    """Copy consecutive parts of a flat tensor into tensors."""
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield consecutive tensors of the same dtype and device, in lists of at most `BUCKET_BYTES`."""
    some: list[torch.Tensor] = []
    for tensor in tensors:
        filled = sum(other.nbytes for other in some)
        is_alike = not some or (tensor.dtype, tensor.device) == (some[0].dtype, some[0].device)
        if some and (not is_alike or filled + tensor.nbytes > BUCKET_BYTES):
            yield some
            some = []
        some.append(tensor)
    if some:
        yield some
