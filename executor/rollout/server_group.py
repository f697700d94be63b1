"""Send weights to the processes of an inference server over a process group of torch, which the server asks to join.

This process is rank 0 and the source; the server's processes are the other ranks. The group has gloo's connections, so
the weights pass through host memory on both sides and this process needs no GPU.

The server finds the group by address, port and name. Its keys in the store have the prefixes that SGLang's
`init_custom_process_group` and torch's `_new_process_group_helper` give them: NAME/, NAME/, cpu/.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch

from streamrl.executor.transfer.broadcast import INTERFACE, Rendezvous


class ServerGroup:
    """A group of this process and the ranks of one server."""

    def __init__(self, name: str, num_ranks: int, patience: float) -> None:
        """Open the rendezvous; `num_ranks` counts the server's ranks, and each wait ends after `patience` seconds."""
        os.environ.setdefault(INTERFACE, "lo")
        self.name = name
        self.size = num_ranks + 1
        self._limit = timedelta(seconds=patience)
        self._rendezvous = Rendezvous()
        self.host, _, port = self._rendezvous.address.rpartition(":")
        self.port = int(port)
        self._group: Any = None

    def join(self) -> None:
        """Wait until all ranks of the server have joined.

        Raises:
            RuntimeError: they do not join in time.
        """
        dist: Any = torch.distributed  # its C++ names have no types
        store = dist.TCPStore(
            self.host,
            self.port,
            self.size,
            is_master=True,
            timeout=self._limit,
            wait_for_workers=False,
            master_listen_fd=self._rendezvous.hand_over(),
        )
        for prefix in (self.name, f"{self.name}/", "cpu/"):
            store = dist.PrefixStore(prefix, store)
        self._group = dist.ProcessGroupGloo(store, 0, self.size, self._limit)

    def send(self, tensors: Iterable[torch.Tensor]) -> None:
        """Send tensors to all ranks, one after the other.

        Raises:
            RuntimeError: a rank is gone, or does not receive in time.
        """
        for tensor in tensors:
            self._group.broadcast(tensor.contiguous(), 0).wait()

    def close(self) -> None:
        """Close all connections; a running `send` ends with an error."""
        if self._group is None:
            self._rendezvous.close()
        self._group = None
