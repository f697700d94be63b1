"""Broadcast weights over gloo, NCCL or CUDA IPC: from one relay to several others, or from the trainer to replicas.

A broadcast between relays uses two groups. In the first one the trainer's relay sends to one other relay. In the second one that relay
sends to all the rest. So the weights leave the trainer's machine only once. The bytes do not pass through the
controller, which only tells the relays to join and to send.

If a member dies, the current broadcast fails for all members: at once for its neighbours, and after the patience of the
group for the others. Groups are also made anew when a relay joins or leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, assert_never

from streamrl.executor.libc import closed_afterwards, refuse_connections
from streamrl.executor.roles import BroadcastRank, Parcel, RelayRole
from streamrl.executor.transfer.shared_gpu import IpcGroup

if TYPE_CHECKING:
    from torch import Tensor

INTERFACE, NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
"""Environment variables with which a launcher names the network to use; default: the loopback interface."""
BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
"""Environment variable that is read when a group is made: `wait` blocks, and raises after the group's timeout."""
BLOCK_BYTES = 8 * 2**20


class Rendezvous:
    """The address where the members of a group find each other; the first member opens it."""

    def __init__(self) -> None:
        """Listen on gloo's network, and on no other."""
        self._listener = socket.create_server((_own_address(), 0))

    @property
    def address(self) -> str:
        """Return host and port."""
        host, port = self._listener.getsockname()[:2]
        return f"{host}:{port}"

    def hand_over(self) -> int:
        """Return the socket's descriptor; the caller owns it from now on."""
        return self._listener.detach()

    def close(self) -> None:
        """Close the socket, if no group is made."""
        self._listener.close()


class BroadcastGroup:
    """One member's connection to a broadcast group; the constructor waits for the other members."""

    def __init__(self, seat: BroadcastRank, rendezvous: Rendezvous | None = None) -> None:
        """Join a group; rank 0 passes the rendezvous that it opened.

        Raises:
            RuntimeError: the other members do not join within the seat's patience.
        """
        os.environ.setdefault(INTERFACE, "lo")
        os.environ.setdefault(NCCL_INTERFACE, os.environ[INTERFACE])
        import torch

        dist: Any = torch.distributed  # its C++ names have no types
        self._channel = seat.channel
        host, _, port = seat.address.rpartition(":")
        limit = timedelta(seconds=seat.patience)
        own: dict[str, Any] = {}
        if rendezvous is not None:
            own["master_listen_fd"] = rendezvous.hand_over()
        self._store = dist.TCPStore(
            host, int(port), seat.size, rendezvous is not None, limit, wait_for_workers=False, **own
        )
        with closed_afterwards(keep_port=int(port)):
            self._group = _connect(self._store, seat)
            _meet(self._store, seat)
        for descriptor in own.values() if seat.channel != "nccl" else ():  # NCCL connects again
            refuse_connections(descriptor)

    def begin(self, block: Tensor) -> Any:
        """Begin to send a block, or to receive one; `wait()` of the result raises if that fails."""
        if self._group is None:
            raise RuntimeError("the group was left")
        return self._group.broadcast(block, 0)

    def broadcast(self, data: Tensor) -> None:
        """Send bytes, or receive them.

        Raises:
            ConnectionError: a member of the group has died, or took longer than the group's patience.
        """
        size = BLOCK_BYTES if self._channel == "gloo" else max(1, data.numel())
        blocks = (data[first : first + size] for first in range(0, data.numel(), size))
        for _ in forward_blocks(blocks, None, self):
            pass

    def close(self) -> None:
        """Leave the group; waits of other threads and of other members for it end."""
        # gloo closes its connections with the last reference to the group
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(RuntimeError):  # the connection is gone already
                group.abort()


def _meet(store: Any, seat: BroadcastRank) -> None:
    """Wait until every member has connected to the store; its timeout bounds the wait."""
    if store.add("joined", 1) == seat.size:
        store.set("all", b"")
    store.get("all")


def _connect(store: Any, seat: BroadcastRank) -> Any:
    """Return this member's side of a group; every wait ends after the seat's patience."""
    import torch

    dist: Any = torch.distributed
    limit = timedelta(seconds=seat.patience)
    match seat.channel:
        case "gloo":
            return dist.ProcessGroupGloo(store, seat.rank, seat.size, limit)
        case "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            # Otherwise NCCL's own watchdog aborts the whole process when a member is lost.
            before = os.environ.get(BLOCKING_WAIT)
            os.environ[BLOCKING_WAIT] = "1"
            try:
                return dist.ProcessGroupNCCL(store, seat.rank, seat.size, options)
            finally:
                if before is None:
                    del os.environ[BLOCKING_WAIT]
                else:
                    os.environ[BLOCKING_WAIT] = before
        case "cuda-ipc":
            return IpcGroup(store, seat.rank, seat.size)
        case _:
            assert_never(seat.channel)


def forward_blocks(
    blocks: Iterable[Tensor], receives: BroadcastGroup | None, sends: BroadcastGroup | None
) -> Iterator[Tensor]:
    """Yield each block once it is received, and forward it to the next group meanwhile.

    Raises:
        ConnectionError: a member of either group has died.
    """
    under_way: Any = None
    try:
        for block in blocks:
            if receives is not None:
                receives.begin(block).wait()
            if under_way is not None:
                under_way.wait()
            under_way = None if sends is None else sends.begin(block)
            yield block
        if under_way is not None:
            under_way.wait()
    except RuntimeError as error:
        first, *_ = str(error).splitlines()
        raise ConnectionError(f"a broadcast of weights failed: {first}") from None


def read_blocks(path: Path) -> Iterator[Tensor]:
    """Yield the bytes of a file in blocks."""
    import torch

    with path.open("rb") as file:
        while data := file.read(BLOCK_BYTES):
            yield torch.frombuffer(bytearray(data), dtype=torch.uint8)


def new_blocks(num_bytes: int) -> Iterator[Tensor]:
    """Yield empty blocks for so many bytes."""
    import torch

    for offset in range(0, num_bytes, BLOCK_BYTES):
        yield torch.empty(min(BLOCK_BYTES, num_bytes - offset), dtype=torch.uint8)


def _own_address() -> str:
    """Return this machine's address in gloo's network."""
    name = os.environ.get(INTERFACE, "lo")
    import psutil

    for each in psutil.net_if_addrs().get(name, []):
        if each.family == socket.AF_INET:
            return each.address
    raise ValueError(
        f"{INTERFACE}={name}: this machine has no network interface of that name with an IPv4 address"
    )


class BroadcastPeer(NamedTuple):
    """A relay and its identity; a restarted relay at the same site has another identity."""

    identity: int
    relay: RelayRole


class FanOut:
    """The current broadcast groups, which are reused while their members stay the same."""

    def __init__(self) -> None:
        self._members: tuple[int, ...] = ()

    async def send(
        self, parcel: Parcel, first: BroadcastPeer, others: Sequence[BroadcastPeer]
    ) -> None:
        """Send the pieces of a parcel from the first relay to all others.

        Raises:
            Exception: it failed for one relay, and therefore for all; the error does not show which relay.
        """
        members = tuple(member.identity for member in (first, *others))
        try:
            if members != self._members:
                self._members = ()
                await _join_broadcast(first.relay, [member.relay for member in others])
            self._members = ()  # until all have received it
            await asyncio.gather(*(one.relay.broadcast(parcel) for one in (first, *others)))
            self._members = members
        except BaseException:
            self._members = ()
            raise


async def _join_broadcast(first: RelayRole, others: Sequence[RelayRole]) -> None:
    """Connect all relays in two groups: the first with the head of the others, and the head with the rest."""
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
