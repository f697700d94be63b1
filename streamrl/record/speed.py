"""The seconds and dollars of a steady step, as steps and rollouts tell them by themselves."""

from __future__ import annotations

import msgspec


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """What a trace says of seconds and dollars, which takes no look at every GPU's every second."""

    step_time: float
    """Mean seconds of a step of the steady state, over which all these figures are."""
    step_time_interval: tuple[float, float] | None
    """95 % interval of that mean; None where too few steps count."""
    median_step_time: float
    """Median seconds of a step."""
    step_times: list[float]
    """Seconds of every step from the first on."""
    step_tokens: list[int] = []
    """Output tokens that each of them trained on."""
    counted_steps: tuple[int, int]
    """First and last step that count, of these."""
    steps_before: int = 0
    """Steps of the training before the first of these: they are of legs before one that was resumed."""
    note: str
    """What keeps the figures from being those of a steady state as exactly known as was asked for; empty where
    nothing does."""
    unfinished: str = ""
    """After which step the run stopped before its last one, and why; empty where it did not."""
    throughput: float
    """Output tokens generated a second: those that the steps were made of, and those that were lost meanwhile."""
    goodput: float
    """Output tokens trained on a second."""
    samples_per_second: float
    """Rollouts trained on a second."""
    cost_per_step: float
    """Dollars of a mean step: of all GPUs that are paid for, and of what crosses links."""
    egress_per_step: float = 0.0
    """Dollars of that for what crosses links (`price_per_gb`)."""
    cost_per_million_tokens: float
    """Dollars for a million tokens trained on."""
    mean_staleness: float
    """Versions that a rollout was behind when the leader trained on it, on average."""

    @property
    def spread(self) -> tuple[float, float]:
        """Return the ends of the interval relative to the mean; 1 and 1 where there is none."""
        if self.step_time_interval is None:
            return 1.0, 1.0
        least, most = self.step_time_interval
        return least / self.step_time, most / self.step_time
