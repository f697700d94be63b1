"""Give ranks that join a trainer the state of its first rank, without a checkpoint.

| what                            | where a new rank gets it                                      |
|---------------------------------|---------------------------------------------------------------|
| trained weights, their buffers  | the first rank                                                |
| optimizer, version              | the first rank                                                |
| weights below adapters          | the directory of the initial model                            |
| reference model                 | the directory of the initial model                            |
| counts of the batch             | the first rank                                                |
| gradient of the batch           | nowhere: its part is 0 until it has trained                   |

The first rank and the new ones form a group for this. The other ranks that stay have the same state already.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from streamrl.executor.trainer.rank_group import RankGroup


class Joinable(Protocol):
    """A training backend whose ranks all have all of its state."""

    def state(self) -> dict[str, Any]:
        """Return all that training changes, as tables and lists of tensors and numbers."""

    def take_state(self, state: dict[str, Any]) -> None:
        """Continue from the state of another rank."""


class Blank(NamedTuple):
    """A tensor that is still to be received."""

    shape: torch.Size
    dtype: torch.dtype
    device: str
    """Type of its device."""


def hand_over(ranks: RankGroup, num_kept: int, state: Any, device: str) -> Any:
    """Send the first rank's state to the ranks from `num_kept` on; every rank must call this.

    Args:
        ranks: all ranks.
        num_kept: ranks that have the state already.
        state: tables and lists of tensors and plain values; the first rank's is sent.
        device: the torch device of this rank.

    Returns:
        The first rank's state on a new rank; None on the others.
    """
    if num_kept >= ranks.size:
        return None
    members = [0, *range(num_kept, ranks.size)]
    group = dist.new_group(members)
    if ranks.rank not in members:
        return None
    described = [_described(state) if ranks.is_first else None]
    dist.broadcast_object_list(described, 0, group=group)
    if not ranks.is_first:
        state = _allocated(described[0], torch.device(device))
    ranks.broadcast(list(_tensors(state)), group)
    dist.destroy_process_group(group)
    return None if ranks.is_first else state


def _described(state: Any) -> Any:
    """Return a state with a `Blank` in place of each tensor."""
    return _mapped(state, torch.Tensor, lambda t: Blank(t.shape, t.dtype, t.device.type))


def _allocated(described: Any, device: torch.device) -> Any:
    """Return a state with an uninitialized tensor in place of each `Blank`; those of GPUs are on `device`."""

    def allocate(blank: Blank) -> torch.Tensor:
        place = torch.device("cpu") if blank.device == "cpu" else device
        return torch.empty(blank.shape, dtype=blank.dtype, device=place)

    return _mapped(described, Blank, allocate)


def _mapped(state: Any, kind: type, change: Any) -> Any:
    """Return a state with each value of a type replaced by `change` of it."""
    if isinstance(state, kind):
        return change(state)
    if isinstance(state, dict):
        return {key: _mapped(value, kind, change) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)([_mapped(value, kind, change) for value in state])
    return state


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a state, in the same order on every rank."""
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict | list | tuple):
        for value in state.values() if isinstance(state, dict) else state:
            yield from _tensors(value)
