"""The uncertainty of a simulated figure: the spread of its seeds, and the model error of its seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from streamrl.hardware.tiers import Tier, datasheet_share
from streamrl.record.band import UNCHECKED, bounds_of, factors_of, model_error_of
from streamrl.report.words import percent
from streamrl.runfile.formatting import listing

REASONS: dict[Tier, str] = {
    "measured": (
        "Runs on two CPU cores took 9 to 11 % more than their simulation from a profile of that machine "
        "(`make demo`)."
    ),
    "composed": (
        "Nine in ten published steps of models that no fit saw are predicted within {errors} "
        "(`streamrl validate serving`, `streamrl validate training`); the widest is taken for all."
    ),
    "scaled": (
        "Measured GPUs whose tables were hidden are predicted within this range from GPUs of other generations, in "
        "nine of ten steps (`python benchmarks/derive_efficiency.py`)."
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
    unchecked: Sequence[str] = ()
    """Operations with composed seconds whose error was never checked."""
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
        error = model_error_of(self.tiers, self.p90.values(), self.unchecked)
        return error.low, error.high

    def may_be(self, tier: Tier) -> tuple[float, float]:
        """Return the lowest and highest ratio of true to simulated seconds of a tier."""
        return factors_of(tier, bounds_of(self.p90.values(), self.unchecked))

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
        return datasheet_share(self.tiers or {})

    @property
    def is_known(self) -> bool:
        """Return whether the model error is known: seeds alone do not show it."""
        return self.is_timed or self.tiers is not None

    @property
    def is_wide(self) -> bool:
        """Return whether the range has a visible width."""
        least, most = self.factors
        return most > least
