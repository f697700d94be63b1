"""A broadcast of parcels to several relays at once, whose bytes do not pass the process that decides.

The relay beside the trainer tells one other, which tells the rest. Circles last until somebody comes, goes or fails: each such
change makes new ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from streamrl.executor.roles import RelayRole
from streamrl.executor.samples import Parcel, Seat


class Hearer(NamedTuple):
    """A relay, and who it is: another one at the same place is somebody else."""

    identity: int
    relay: RelayRole


class FanOut:
    """The circles that there are."""

    def __init__(self) -> None:
        self._seated: tuple[int, ...] = ()

    async def send(self, parcel: Parcel, first: Hearer, others: Sequence[Hearer]) -> None:
        """Bring the pieces of a parcel from the first to all others.

        Raises:
            Exception: it failed for somebody, and so did it for all; whose fault it was is not known.
        """
        seated = tuple(member.identity for member in (first, *others))
        try:
            if seated != self._seated:
                self._seated = ()
                await _sit_down(first.relay, [member.relay for member in others])
            self._seated = ()  # until all have heard
            await asyncio.gather(*(one.relay.broadcast(parcel) for one in (first, *others)))
            self._seated = seated
        except BaseException:
            self._seated = ()
            raise


async def _sit_down(first: RelayRole, others: Sequence[RelayRole]) -> None:
    """Seat all in two circles: the first and the head of the others, the head and the rest."""
    head, *rest = others
    outer, inner = await first.listen(), await head.listen() if rest else ""

    def seat(address: str, rank: int, size: int) -> Seat:
        return Seat(address=address, rank=rank, size=size)

    size = len(others)
    await asyncio.gather(
        first.sit_down(None, seat(outer, 0, 2)),
        head.sit_down(seat(outer, 1, 2), seat(inner, 0, size) if rest else None),
        *(one.sit_down(seat(inner, rank, size), None) for rank, one in enumerate(rest, start=1)),
    )
