"""Hand bytes in GPU memory to other processes on the same GPU, by CUDA IPC handles.

The sender puts a handle into the group's store. Each receiver opens it, copies the bytes, and counts itself done.
Handles are plain numbers and bytes in MessagePack.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from torch import Tensor


class SharedBlock(msgspec.Struct, frozen=True):
    """GPU memory that another process can open."""

    gpu: str
    """UUID of the GPU."""
    num_bytes: int
    handle: list[Any]
    """Arguments of `torch.UntypedStorage._new_shared_cuda` after the device."""


class IpcGroup:
    """One member of a group on one GPU; rank 0 sends, and the others receive."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        """Take the store of the group, whose timeout bounds every wait."""
        self._store, self._rank, self._size = store, rank, size
        self._num_blocks = 0

    def broadcast(self, block: Tensor, root: int) -> IpcWork:
        """Begin to send a block, or to receive one."""
        self._num_blocks += 1
        work = IpcWork(self._store, self._num_blocks, self._size - 1)
        if self._rank == root:
            work.offer(block)
        else:
            work.take(block)
        return work

    def abort(self) -> None:
        """Do nothing: waits end with the store's timeout, or when its first member closes it."""


class IpcWork:
    """One block on its way."""

    def __init__(self, store: Any, number: int, num_receivers: int) -> None:
        self._store, self._num_receivers = store, num_receivers
        self._key, self._done, self._all = (f"{number}/{what}" for what in ("block", "done", "all"))
        self._kept: Tensor | None = None

    def offer(self, block: Tensor) -> None:
        """Put the handle of a block into the store, and keep the block until all have copied it."""
        self._kept = block
        self._store.set(self._key, msgspec.msgpack.encode(share(block)))

    def take(self, block: Tensor) -> None:
        """Copy the sender's block.

        Raises:
            ValueError: this process does not see the sender's GPU.
        """
        found = msgspec.msgpack.decode(bytes(self._store.get(self._key)), type=SharedBlock)
        copy_shared(found, block)
        if self._store.add(self._done, 1) == self._num_receivers:
            self._store.set(self._all, b"")

    def wait(self) -> None:
        """Wait until all receivers have copied the block; the store's timeout bounds this."""
        if self._kept is not None:
            self._store.get(self._all)
            self._kept = None


def share(block: Tensor) -> SharedBlock:
    """Return a handle on a block that owns its memory."""
    import torch

    torch.cuda.current_stream(block.device).synchronize()
    storage: Any = block.untyped_storage()
    _, *handle = storage._share_cuda_()
    return SharedBlock(_uuid(block.device), block.numel(), handle)


def copy_shared(shared: SharedBlock, block: Tensor) -> None:
    """Copy a block of another process."""
    import torch

    if shared.gpu != _uuid(block.device):
        raise ValueError(
            f"sync.wire 'cuda-ipc' needs trainer and replica on one GPU, got {shared.gpu} and {_uuid(block.device)}"
        )
    storage_class: Any = torch.UntypedStorage
    storage = storage_class._new_shared_cuda(block.device.index or 0, *shared.handle)
    theirs = torch.empty(0, dtype=torch.uint8, device=block.device).set_(storage)
    block.copy_(theirs[: shared.num_bytes])
    torch.cuda.current_stream(block.device).synchronize()


def _uuid(device: Any) -> str:
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)
