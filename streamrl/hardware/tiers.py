"""How well a figure is known: measured, composed of measured operators, or a datasheet's roofline."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

import msgspec

Tier = Literal["measured", "composed", "roofline"]
"""measured: this model on this hardware was timed; composed: put together from measured operators;
roofline: a datasheet's peak and an assumed efficiency, unmeasured."""

_ORDER: tuple[Tier, ...] = get_args(Tier)


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """Where an operation's seconds come from."""

    shares: dict[Tier, float]
    """Share of the seconds by tier, together 1."""
    sources: tuple[str, ...] = ()
    error: float | None = None
    """Median relative error of such seconds on shapes that nothing was fitted to; None where nobody checked."""
    p90: float | None = None
    """What nine in ten of those errors are within."""

    @classmethod
    def of(
        cls,
        tier: Tier,
        sources: Iterable[str] = (),
        error: float | None = None,
        p90: float | None = None,
    ) -> Provenance:
        """All seconds are of one tier."""
        return cls(shares={tier: 1.0}, sources=tuple(sources), error=error, p90=p90)

    def adjusted(self, source: str) -> Provenance:
        """Return what it is after a factor of the run file: what was measured is then composed."""
        shares: dict[Tier, float] = {}
        for tier, share in self.shares.items():
            known: Tier = "composed" if tier == "measured" else tier
            shares[known] = shares.get(known, 0.0) + share
        return Provenance(shares=shares, sources=(*self.sources, source))

    @property
    def tier(self) -> Tier:
        """The tier of most of the seconds; of two alike the less known one."""
        return max(self.shares, key=lambda tier: (self.shares[tier], _ORDER.index(tier)))
