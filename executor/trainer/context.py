"""Share the tokens of a pass among context ranks: each computes a part, and attends to the keys and values of all.

All context ranks of a group get the same rollouts. The tokens of a packed pass are cut into twice as many equal blocks as
there are ranks. Rank c computes blocks c and 2 C - 1 - c, so that each has about the same share of a causal attention
(Llama 3, arXiv 2407.21783, section 3.3.2). Keys and values are gathered in each layer, and their gradients are summed and
scattered. Values of the sampled tokens are gathered at the end, so every rank computes the whole loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from streamrl.executor.attention import Segment, attend_segments


@dataclass(frozen=True)
class ContextRanks:
    """This rank within its group of context ranks."""

    group: Any
    """torch's process group; its order of ranks is that of the blocks."""
    rank: int
    size: int

    @property
    def multiple(self) -> int:
        """The number of tokens of a pass must be a multiple of this."""
        return 2 * self.size


def context_of(model: Any) -> ContextRanks | None:
    """Return the context ranks among which a model computes its passes; None if each rank computes whole passes."""
    ranks: ContextRanks | None = getattr(model, "context_ranks", None)
    return ranks


@dataclass(frozen=True)
class ContextShare:
    """The part of a packed pass that a context rank computes."""

    ranks: ContextRanks
    num_tokens: int
    """Of the whole pass, a multiple of `ranks.multiple`."""

    def blocks(self, rank: int | None = None) -> list[tuple[int, int]]:
        """Return the first token of each block of a rank, and the token after its last one, in order."""
        rank = self.ranks.rank if rank is None else rank
        size = self.num_tokens // self.ranks.multiple
        return [(i * size, (i + 1) * size) for i in (rank, self.ranks.multiple - 1 - rank)]

    def indices(self, rank: int | None = None) -> torch.Tensor:
        """Return the tokens of a rank, [tokens / ranks]."""
        return torch.cat([torch.arange(*block) for block in self.blocks(rank)])

    def inputs_of(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's part of a model's inputs of shape (1, tokens)."""
        own = self.indices()
        parts = {
            name: each[:, own.to(each.device)]
            for name, each in inputs.items()
            if _is_by_token(each)
        }
        return {**inputs, **parts, "rollout_context": self}

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gather a tensor of shape (1, heads, own tokens, size) over the ranks: (1, heads, tokens, size)."""
        parts: torch.Tensor = _Gather.apply(tensor, self.ranks)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        order = torch.cat([self.indices(rank) for rank in range(self.ranks.size)]).argsort()
        return torch.cat(list(parts), dim=2)[:, :, order.to(tensor.device)]

    def own_positions(
        self, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return which of these tokens this rank computes, and how values of all ranks become those of `positions`.

        The first and the last tensor have the same length on every rank: the most tokens that one of them has, at least
        1. If this rank has fewer, zeros follow.

        1. For each own token, its index among the tokens of this rank.
        2. For each entry of `positions`, its index among the gathered values of all ranks.
        3. For each own token, its index in `positions`.
        """
        local, owner = torch.zeros(2, self.num_tokens, dtype=torch.long)
        for rank in range(self.ranks.size):
            tokens = self.indices(rank)
            local[tokens], owner[tokens] = torch.arange(len(tokens)), rank
        of_rank = [(owner[positions] == rank).nonzero()[:, 0] for rank in range(self.ranks.size)]
        most = max(1, *map(len, of_rank))
        places = torch.zeros_like(positions)
        for rank, mine in enumerate(of_rank):
            places[mine] = rank * most + torch.arange(len(mine))
        mine = of_rank[self.ranks.rank]
        missing = (0, most - len(mine))
        own = torch.nn.functional.pad(local[positions[mine]], missing)
        return own, places, torch.nn.functional.pad(mine, missing)

    def all_values(self, values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Gather the values of own tokens over the ranks, in the order of `own_positions`; each rank has the same loss."""
        parts: torch.Tensor = _GatherAlike.apply(values, self.ranks)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return parts.flatten(0, 1)[places.to(values.device)]

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        lengths: list[int],
        window: int | None,
        scaling: float | None,
    ) -> torch.Tensor:
        """Return causal attention of own tokens to the tokens of their rollouts, (1, own tokens, heads, size).

        Args:
            query: (1, heads, own tokens, size).
            key: the same shape, but for fewer heads with grouped queries.
            value: as `key`.
            lengths: tokens of each rollout of the whole pass.
            window: as in `streamrl.executor.attention.attend_packed`.
            scaling: as there.
        """
        return attend_segments(
            query,
            self.whole(key),
            self.whole(value),
            segments=self.segments(lengths),
            window=window,
            scaling=scaling,
        )

    def segments(self, lengths: list[int]) -> list[Segment]:
        """Return the parts of rollouts in own blocks, in order, with the tokens that they attend to."""
        found, before = [], 0
        for first, end in self.blocks():
            start = 0
            for length in lengths:
                low, high = max(first, start), min(end, start + length)
                if low < high:
                    queries = (before + low - first, before + high - first)
                    found.append(Segment(queries, (start, high)))
                start += length
            before += end - first
        return found


def _is_by_token(value: Any) -> bool:
    return torch.is_tensor(value) and value.ndim == 2


class _Gather(torch.autograd.Function):
    """Gather a tensor over ranks, [ranks, …]; the gradient is summed over them."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, ranks: ContextRanks) -> torch.Tensor:
        ctx.ranks = ranks
        return _gathered(tensor, ranks)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = gradients
        own = torch.empty_like(gradient[0])
        dist.reduce_scatter_tensor(own, gradient.flatten(0, 1), group=ctx.ranks.group)
        return own, None


class _GatherAlike(_Gather):
    """As `_Gather`, over ranks each of which computes the same loss of the result."""

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0][ctx.ranks.rank].contiguous(), None


def _gathered(tensor: torch.Tensor, ranks: ContextRanks) -> torch.Tensor:
    parts = tensor.new_empty((ranks.size * len(tensor), *tensor.shape[1:]))
    dist.all_gather_into_tensor(parts, tensor.contiguous(), group=ranks.group)
    return parts.view(ranks.size, *tensor.shape)
