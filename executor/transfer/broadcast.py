"""Broadcast weights from one relay to several others over gloo.

A circle of relays that hear one broadcast of bytes from the first of them, over torch's gloo.

Whoever hears in one circle may tell in another: the relay beside the trainer tells one far relay, which tells all others, so
that a payload leaves the trainer's machine once. A circle is as good as its members: where one dies, what is under way fails
for all, at once for its neighbours and after `PATIENCE` for the others, and another circle is made without it.

A broadcast of parcels to several relays at once, whose bytes do not pass the process that decides.

The relay beside the trainer tells one other, which tells the rest. Circles last until somebody comes, goes or fails: each such
change makes new ones.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from streamrl.executor.roles import BroadcastRank, Parcel, RelayRole

if TYPE_CHECKING:
    from torch import Tensor

INTERFACE = "GLOO_SOCKET_IFNAME"
"""Where a launcher says over which network processes talk; this machine's own where it says nothing."""
BLOCK_BYTES = 8 * 2**20
PATIENCE = 60.0
"""Seconds for one block, which is a second of a slow link."""


class Rendezvous:
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

    def __init__(
        self, seat: BroadcastRank, meeting: Rendezvous | None = None, patience: float = PATIENCE
    ):
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


def forward_blocks(
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


class BroadcastPeer(NamedTuple):
    """A relay, and who it is: another one at the same place is somebody else."""

    identity: int
    relay: RelayRole


class FanOut:
    """The circles that there are."""

    def __init__(self) -> None:
        self._seated: tuple[int, ...] = ()

    async def send(
        self, parcel: Parcel, first: BroadcastPeer, others: Sequence[BroadcastPeer]
    ) -> None:
        """Bring the pieces of a parcel from the first to all others.

        Raises:
            Exception: it failed for somebody, and so did it for all; whose fault it was is not known.
        """
        seated = tuple(member.identity for member in (first, *others))
        try:
            if seated != self._seated:
                self._seated = ()
                await _join_broadcast(first.relay, [member.relay for member in others])
            self._seated = ()  # until all have heard
            await asyncio.gather(*(one.relay.broadcast(parcel) for one in (first, *others)))
            self._seated = seated
        except BaseException:
            self._seated = ()
            raise


async def _join_broadcast(first: RelayRole, others: Sequence[RelayRole]) -> None:
    """BroadcastRank all in two circles: the first and the head of the others, the head and the rest."""
    head, *rest = others
    outer, inner = await first.listen(), await head.listen() if rest else ""

    def seat(address: str, rank: int, size: int) -> BroadcastRank:
        return BroadcastRank(address=address, rank=rank, size=size)

    size = len(others)
    await asyncio.gather(
        first.join_broadcast(None, seat(outer, 0, 2)),
        head.join_broadcast(seat(outer, 1, 2), seat(inner, 0, size) if rest else None),
        *(
            one.join_broadcast(seat(inner, rank, size), None)
            for rank, one in enumerate(rest, start=1)
        ),
    )
