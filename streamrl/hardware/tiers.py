"""Define the tiers of a figure: measured, composed of measured operators, scaled from another GPU, or a roofline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import hypot
from typing import Literal, get_args

import msgspec

Tier = Literal["measured", "composed", "scaled", "roofline"]
"""measured: this model was timed on this hardware. composed: computed from measured operators. scaled: computed
from operators that were measured on other GPUs, in proportion to datasheets. roofline: computed from a datasheet's
peak and an assumed efficiency."""

TIERS: tuple[Tier, ...] = get_args(Tier)
"""Tiers, the most reliable first."""

DATASHEETS = "datasheets"
"""The entry of a trace's facts with what takes the seconds from datasheets, as "decode: attention of decode on A100"."""

PARTITION = "partition"
"""The entry of a trace's facts with the kind of model, the silicon, and whether the framework is named."""

SPREADS = "spreads"
"""The entry of a trace's facts with the spread of each operation from factors of which few sources are known."""


def datasheet_share(tiers: Mapping[Tier, float] | Mapping[str, float]) -> float:
    """Return the share of seconds that rest on a datasheet: scaled ones and rooflines."""
    return tiers.get("scaled", 0.0) + tiers.get("roofline", 0.0)


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """Where an operation's seconds come from."""

    shares: dict[Tier, float]
    """Share of the seconds by tier, together 1."""
    sources: tuple[str, ...] = ()
    error: float | None = None
    """Median relative error on shapes that were not used for a fit; None if unchecked."""
    p90: float | None = None
    """90th percentile of those errors."""
    datasheets: dict[str, float] = {}
    """Share of the seconds by what takes them, such as "attention of decode on A100", as far as datasheets are behind them
    and their parts are known.
    """
    spread: float = 0.0
    """By how much the seconds may be off as a share, because few sources are known of a factor in them."""

    @classmethod
    def of(
        cls,
        tier: Tier,
        sources: Iterable[str] = (),
        error: float | None = None,
        p90: float | None = None,
    ) -> Provenance:
        """Return the provenance of seconds that are all of one tier."""
        return cls(shares={tier: 1.0}, sources=tuple(sources), error=error, p90=p90)

    @classmethod
    def joined(cls, parts: Sequence[Provenance]) -> Provenance:
        """Return the provenance of seconds that come from all parts equally. The error is that of the worst part."""
        shares: dict[Tier, float] = {}
        for part in parts:
            for tier, share in part.shares.items():
                shares[tier] = shares.get(tier, 0.0) + share / len(parts)
        sources = dict.fromkeys(source for part in parts for source in part.sources)
        named: dict[str, float] = {}
        for part in parts:
            for name, share in part.datasheets.items():
                named[name] = named.get(name, 0.0) + share / len(parts)
        errors = [part.error for part in parts if part.error is not None]
        p90 = [part.p90 for part in parts if part.p90 is not None]
        return cls(
            shares=shares,
            sources=tuple(sources),
            error=max(errors) if len(errors) == len(parts) else None,
            p90=max(p90) if len(p90) == len(parts) else None,
            datasheets=named,
            spread=max((part.spread for part in parts), default=0.0),
        )

    def with_spread(self, more: float) -> Provenance:
        """Return the provenance with the spread of one more factor, which is independent of the others."""
        return msgspec.structs.replace(self, spread=hypot(self.spread, more)) if more else self

    def adjusted(self, source: str) -> Provenance:
        """Return the provenance of seconds after a factor of the run file: "measured" becomes "composed"."""
        shares: dict[Tier, float] = {}
        for tier, share in self.shares.items():
            known: Tier = "composed" if tier == "measured" else tier
            shares[known] = shares.get(known, 0.0) + share
        sources = (*self.sources, source)
        return Provenance(
            shares=shares, sources=sources, datasheets=self.datasheets, spread=self.spread
        )

    @property
    def tier(self) -> Tier:
        """The tier of most of the seconds; of two equal shares the less reliable tier."""
        return max(self.shares, key=lambda tier: (self.shares[tier], TIERS.index(tier)))
