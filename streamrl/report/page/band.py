"""How far a simulated figure may be from the truth: the spread of its seeds, and what its seconds are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from streamrl.hardware.tiers import Tier

SECONDS_MAY_BE: dict[Tier, tuple[float, float]] = {
    "measured": (0.89, 1.11),
    "composed": (0.86, 1.14),
    "roofline": (0.70, 3.00),
}
"""By what factor true seconds may differ from simulated ones, least and most."""
REASONS: dict[Tier, str] = {
    "measured": (
        "Runs on two CPU cores took 9 to 11 % more than their simulation from a profile of that machine "
        "(`make demo`)."
    ),
    "composed": (
        "Nine in ten held-out rows of the operator tables lie within 14 %, and of published training runs "
        "within 13 % (`make bench-costs`)."
    ),
    "roofline": (
        "No GPU beats its datasheet, and 0.7 is the efficiency that is assumed. Where seconds are known both ways, "
        "at least 91 % of those of dense operators lie within 0.7 and 3 rooflines, of mixtures of experts 61 % "
        "(`python benchmarks/bench_roofline.py`)."
    ),
}
METHOD = (
    "The band takes the least and the most of the simulated seeds, and stretches both as if every second "
    "of a tier were wrong by as much as that tier may be, all in the same direction."
)
SHARED = (
    "Two plans on the same GPUs share most of these errors, so which of them is cheaper is surer than what "
    "either costs."
)


@dataclass(frozen=True, kw_only=True)
class Band:
    """Factors on a figure that grows with seconds; a figure in tokens per second takes their inverses."""

    seeds: tuple[float, float] = (1.0, 1.0)
    """Least and most over the simulated seeds, relative to the figure itself."""
    num_seeds: int = 1
    tiers: Mapping[str, float] | None = None
    """Share of busy seconds by tier; None where nobody recorded it."""
    is_timed: bool = False
    """Whether the seconds were taken from a clock, so that no model of them can be wrong."""

    @property
    def factors(self) -> tuple[float, float]:
        """Return the least and the most of the figure, relative to it; no width where that is not known."""
        if not self.is_known:
            return 1.0, 1.0
        least, most = self.of_tiers
        return self.seeds[0] * least, self.seeds[1] * most

    @property
    def of_tiers(self) -> tuple[float, float]:
        """Return what the tiers alone allow; nothing where they are not recorded."""
        if self.is_timed or self.tiers is None:
            return 1.0, 1.0
        shares = [(tier, self.tiers.get(tier, 0.0)) for tier in SECONDS_MAY_BE]
        least, most = (
            sum(share * SECONDS_MAY_BE[tier][end] for tier, share in shares) for end in (0, 1)
        )
        return least, most

    @property
    def unmeasured(self) -> float:
        """Share of the busy seconds that come from a datasheet alone."""
        return (self.tiers or {}).get("roofline", 0.0)

    @property
    def is_known(self) -> bool:
        """Whether it says how far the figure may be from the truth: seeds alone do not."""
        return self.is_timed or self.tiers is not None

    @property
    def is_wide(self) -> bool:
        """Whether there is any width to show."""
        least, most = self.factors
        return most > least
