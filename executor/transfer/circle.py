"""A circle of relays that hear one broadcast of bytes from the first of them, over torch's gloo.

Whoever hears in one circle may tell in another: the relay beside the trainer tells one far relay, which tells all others, so
that a payload leaves the trainer's machine once. A circle is as good as its members: where one dies, what is under way fails
for all, at once for its neighbours and after `PATIENCE` for the others, and another circle is made without it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl.executor.samples import Seat

if TYPE_CHECKING:
    from torch import Tensor

INTERFACE = "GLOO_SOCKET_IFNAME"
"""Where a launcher says over which network processes talk; this machine's own where it says nothing."""
BLOCK_BYTES = 8 * 2**20
PATIENCE = 60.0
"""Seconds for one block, which is a second of a slow link."""


class Meeting:
    """A place where the members of a circle find each other; whoever is first in it opens it."""

    def __init__(self) -> None:
        """Listen on the network that this process talks over, and on no other."""
        self._listener = socket.create_server((_own_address(), 0))

    @property
    def address(self) -> str:
        """Host and port."""
        host, port = self._listener.getsockname()[:2]
        return f"{host}:{port}"

    def hand_over(self) -> int:
        """Return the descriptor of the socket, whose owner you are from now on."""
        return self._listener.detach()


class Circle:
    """One member's seat in a circle; the others must take theirs meanwhile."""

    def __init__(self, seat: Seat, meeting: Meeting | None = None, patience: float = PATIENCE):
        """Take a seat, the first one at the meeting that you opened.

        Raises:
            RuntimeError: the others do not come within `patience`.
        """
        os.environ.setdefault(INTERFACE, "lo")
        import torch

        dist: Any = torch.distributed  # its names that are made in C++ have no types
        host, _, port = seat.address.rpartition(":")
        limit = timedelta(seconds=patience)
        own: dict[str, Any] = {} if meeting is None else {"master_listen_fd": meeting.hand_over()}
        self._store = dist.TCPStore(
            host, int(port), seat.size, meeting is not None, limit, wait_for_workers=False, **own
        )
        self._group = dist.ProcessGroupGloo(self._store, seat.rank, seat.size, limit)

    def begin(self, block: Tensor) -> Any:
        """Begin to send a block, or to fill it; `wait()` of what you get raises where that fails."""
        return self._group.broadcast(block, 0)


def passed_on(
    blocks: Iterable[Tensor], hears: Circle | None, tells: Circle | None
) -> Iterator[Tensor]:
    """Yield blocks as they are filled, and let the next circle have them meanwhile.

    Raises:
        ConnectionError: a member of either circle is gone.
    """
    under_way: Any = None
    try:
        for block in blocks:
            if hears is not None:
                hears.begin(block).wait()
            if under_way is not None:
                under_way.wait()
            under_way = None if tells is None else tells.begin(block)
            yield block
        if under_way is not None:
            under_way.wait()
    except RuntimeError as error:
        first, *_ = str(error).splitlines()
        raise ConnectionError(f"a broadcast broke off: {first}") from None


def read_blocks(path: Path) -> Iterator[Tensor]:
    """Yield the bytes of a file in blocks."""
    import torch

    with path.open("rb") as file:
        while data := file.read(BLOCK_BYTES):
            yield torch.frombuffer(bytearray(data), dtype=torch.uint8)


def new_blocks(num_bytes: int) -> Iterator[Tensor]:
    """Yield blocks to be filled with so many bytes."""
    import torch

    for offset in range(0, num_bytes, BLOCK_BYTES):
        yield torch.empty(min(BLOCK_BYTES, num_bytes - offset), dtype=torch.uint8)


def _own_address() -> str:
    """Return the address of the network that gloo uses here."""
    name = os.environ.get(INTERFACE, "lo")
    import psutil

    for found in psutil.net_if_addrs().get(name, []):
        if found.family == socket.AF_INET:
            return found.address
    raise ValueError(f"{INTERFACE}={name}: no network of that name with an address here")
