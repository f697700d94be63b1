"""The uncertainty of a simulated figure: the spread of its seeds, and the model error of its seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import assert_never

from streamrl.hardware.tiers import Tier
from streamrl.report.words import percent
from streamrl.runfile.formatting import listing

TIERS: tuple[Tier, ...] = ("measured", "composed", "roofline")
MEASURED, ROOFLINE = (0.89, 1.11), (0.70, 3.00)
"""Lowest and highest ratio of true to simulated seconds."""
UNCHECKED = 0.32
"""Bound of nine in ten errors of composed seconds, if the run does not have it. It is the widest that
a profile states, for training mixtures (profiles/measured/training.toml).
"""
REASONS: dict[Tier, str] = {
    "measured": (
        "Runs on two CPU cores took 9 to 11 % more than their simulation from a profile of that machine "
        "(`make demo`)."
    ),
    "composed": (
        "Nine in ten published steps of models that no fit saw are predicted within {errors} "
        "(`streamrl validate serving`, `streamrl validate training`); the widest is taken for all."
    ),
    "roofline": (
        "No GPU beats its datasheet, and 0.7 is the efficiency that is assumed. Where seconds are known both ways, "
        "at least 91 % of those of dense operators lie within 0.7 and 3 rooflines, of mixtures of experts 61 % "
        "(`python benchmarks/bench_roofline.py`)."
    ),
}
METHOD = (
    "The band takes the least and the most of the simulated seeds, of one seed the 95 % interval of its mean step, and stretches both as if every second "
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
    """Lowest and highest of the simulated seeds, relative to the figure; for one seed the 95 % interval of its mean."""
    num_seeds: int = 1
    tiers: Mapping[str, float] | None = None
    """Share of busy seconds by tier; None if it was not recorded."""
    p90: Mapping[str, float] = field(default_factory=dict)
    """Bound of nine in ten errors of composed seconds, by operation, as its profiles state."""
    is_timed: bool = False
    """Whether the seconds were measured by a clock, so that there is no model error."""

    @property
    def factors(self) -> tuple[float, float]:
        """Return the lowest and highest value, relative to the figure; both 1 if unknown."""
        if not self.is_known:
            return 1.0, 1.0
        least, most = self.of_tiers
        return self.seeds[0] * least, self.seeds[1] * most

    @property
    def of_tiers(self) -> tuple[float, float]:
        """Return the factors from the tiers alone; both 1 if they are not recorded."""
        if self.is_timed or self.tiers is None:
            return 1.0, 1.0
        shares = [(self.may_be(tier), self.tiers.get(tier, 0.0)) for tier in TIERS]
        least, most = (sum(share * factors[end] for factors, share in shares) for end in (0, 1))
        return least, most

    def may_be(self, tier: Tier) -> tuple[float, float]:
        """Return the lowest and highest ratio of true to simulated seconds of a tier."""
        match tier:
            case "measured":
                return MEASURED
            case "roofline":
                return ROOFLINE
            case "composed":
                widest = max(self.p90.values(), default=UNCHECKED)
                return 1 / (1 + widest), 1 / (1 - widest)
            case _:
                assert_never(tier)

    def reason(self, tier: Tier) -> str:
        """Return the reason for a tier's range."""
        by_error: dict[float, list[str]] = {}
        for operation, error in self.p90.items():
            by_error.setdefault(error, []).append(operation)
        told = [f"{percent(error)} ({', '.join(names)})" for error, names in by_error.items()]
        unsaid = f"{percent(UNCHECKED)}, the widest of all: what was checked here is not recorded"
        return REASONS[tier].format(errors=listing(told) if told else unsaid)

    @property
    def unmeasured(self) -> float:
        """Return the share of busy seconds that come from a datasheet alone."""
        return (self.tiers or {}).get("roofline", 0.0)

    @property
    def is_known(self) -> bool:
        """Return whether the model error is known: seeds alone do not show it."""
        return self.is_timed or self.tiers is not None

    @property
    def is_wide(self) -> bool:
        """Return whether the range has a visible width."""
        least, most = self.factors
        return most > least
