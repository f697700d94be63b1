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
from functools import partial
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist

from streamrl.executor.trainer.rank_group import RankGroup

BLANK = 1
"""Code of the MessagePack extension that stands for a tensor: its shape, dtype and kind of device."""


class Joinable(Protocol):
    """A training backend whose ranks all have all of its state."""

    def state(self) -> dict[str, Any]:
        """Return all that training changes, as tables and lists of tensors and numbers."""

    def take_state(self, state: dict[str, Any]) -> None:
        """Continue from the state of another rank."""


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
    described = _broadcast(ranks, _described(state) if ranks.is_first else b"", group)
    if not ranks.is_first:
        state = _allocated(described, torch.device(device))
    ranks.broadcast(list(_tensors(state)), group)
    dist.destroy_process_group(group)
    return None if ranks.is_first else state


def _described(state: Any) -> bytes:
    """Encode a state without the contents of its tensors."""
    return msgspec.msgpack.encode(state, enc_hook=_blank)


def _blank(tensor: Any) -> msgspec.msgpack.Ext:
    """Return the shape, dtype and kind of device of a tensor.

    Raises:
        TypeError: it is no tensor, and nothing else that MessagePack has.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"a value of type {type(tensor).__name__} cannot be sent to a rank that joins"
        )
    dtype = str(tensor.dtype).removeprefix("torch.")
    described = (list(tensor.shape), dtype, tensor.device.type)
    return msgspec.msgpack.Ext(BLANK, msgspec.msgpack.encode(described))


def _allocated(described: bytes, device: torch.device) -> Any:
    """Return the state of `_described` with uninitialized tensors; those of GPUs are on `device`."""
    return msgspec.msgpack.decode(described, ext_hook=partial(_allocate, device))


def _allocate(device: torch.device, code: int, data: memoryview) -> torch.Tensor:
    shape, dtype, kind = msgspec.msgpack.decode(data, type=tuple[list[int], str, str])
    place = torch.device("cpu") if kind == "cpu" else device
    return torch.empty(shape, dtype=getattr(torch, dtype), device=place)


def _broadcast(ranks: RankGroup, data: bytes, group: dist.ProcessGroup) -> bytes:
    """Return the bytes of the first rank."""
    size = torch.tensor([len(data)])
    ranks.broadcast([size], group)
    content = bytearray(data if ranks.is_first else int(size))
    sent = torch.frombuffer(content, dtype=torch.uint8)
    ranks.broadcast([sent], group)
    return bytes(content)  # `sent` shares its memory


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a state, in the same order on every rank."""
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict | list | tuple):
        for value in state.values() if isinstance(state, dict) else state:
            yield from _tensors(value)
