"""The uncertainty of a simulated figure: the spread of its seeds, and the model error of its seconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from streamrl.hardware.step_errors import checked_text
from streamrl.hardware.tiers import datasheet_share
from streamrl.record.band import ModelError

METHOD = (
    "The band takes the least and the most of the simulated seeds, of one seed the 95 % interval of its mean step, and stretches both by "
    "the error of the step. It was made so that eight of ten published steps are within it. If the source of a step was left out, fewer are: "
    f"{checked_text('', False)} (`streamrl validate steps`)."
)
SHARED = (
    "Two plans on the same GPUs share most of these errors, so which of them is cheaper is surer than what "
    "either costs."
)
OF_STEP = "the whole step"


@dataclass(frozen=True, kw_only=True)
class Band:
    """Factors on a figure that grows with seconds; a figure in tokens per second takes their inverses."""

    seeds: tuple[float, float] = (1.0, 1.0)
    """Lowest and highest of the simulated seeds, relative to the figure; for one seed the 95 % interval of its mean."""
    num_seeds: int = 1
    tiers: Mapping[str, float] | None = None
    """Share of busy seconds by tier; None if it was not recorded."""
    error: ModelError | None = None
    """The model error of the step; None if it was not recorded."""
    is_timed: bool = False
    """Whether the seconds were measured by a clock, so that there is no model error."""

    @property
    def factors(self) -> tuple[float, float]:
        """Return the lowest and highest value, relative to the figure; both 1 if unknown."""
        if not self.is_known:
            return 1.0, 1.0
        least, most = self.of_model
        return self.seeds[0] * least, self.seeds[1] * most

    @property
    def of_model(self) -> tuple[float, float]:
        """Return the factors of the model error alone; both 1 if it is not recorded."""
        return (1.0, 1.0) if self.error is None else (self.error.low, self.error.high)

    def rows(self) -> Iterator[tuple[str, float | None, float, float]]:
        """Yield the parts of the model error: name, share of the step, and lowest and highest true seconds of 1."""
        if self.error is None:
            return
        for stage, part in self.error.stages.items():
            yield stage, part.share, part.low, part.high
        yield OF_STEP, None, self.error.low, self.error.high

    @property
    def unmeasured(self) -> float:
        """Return the share of busy seconds that come from a datasheet alone."""
        return datasheet_share(self.tiers or {})

    @property
    def is_known(self) -> bool:
        """Return whether the model error is known: seeds alone do not show it."""
        return self.is_timed or self.error is not None

    @property
    def is_wide(self) -> bool:
        """Return whether the range has a visible width."""
        least, most = self.factors
        return most > least
