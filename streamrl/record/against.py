"""What two runs of the same work, A against B, take and cost, and how well their difference is known."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from streamrl.record.whole_run import WholeRun

Outcome: TypeAlias = Literal[
    "no difference",
    "may be chance",
    "within the error of costs",
    "worth it",
    "not worth it",
    "faster but dearer",
    "cheaper but slower",
]
"""Whether A is worth it over B: what a token costs decides, and then the time of a step."""


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """A figure with its 95 % interval."""

    value: float
    interval: tuple[float, float] | None
    """None where too few steps count."""

    def differs_from(self, value: float) -> bool:
        """Whether the figure is beyond chance another than `value`."""
        return self.interval is not None and not self.interval[0] <= value <= self.interval[1]


class GpuUse(msgspec.Struct, frozen=True, kw_only=True):
    """What GPUs do that generate, or train; where a run takes turns they are the same ones."""

    num_gpus: float
    idle: float
    """Share of their GPU-seconds."""
    underfilled: float | None
    """Share in which they decode what full batches would not have needed; None where that is not known."""


class PairedRun(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two runs, over the steps that count in both."""

    step_time: float
    """Mean seconds of a step."""
    step_time_interval: tuple[float, float] | None
    """95 % interval of that mean, on prompts of its own."""
    dollars_per_hour: float
    cost_per_step: float
    """Dollars of a mean step."""
    cost_per_million_tokens: float
    """Dollars for a million output tokens trained on."""
    throughput: float
    """Output tokens generated a second."""
    goodput: float
    """Output tokens trained on a second."""
    shares_gpus: bool
    """Whether generation and training take turns on the same GPUs."""
    generation: GpuUse
    training: GpuUse
    """Of the trainer that leads."""
    staleness: float
    """Versions that rollouts were behind when trained on, on average."""
    idle_gpu_seconds: float
    """GPU-seconds of a step in which GPUs of any side wait."""
    idle_cost: float
    """Dollars of those."""
    whole_run: WholeRun
    """All training steps, as `simulate` has them."""
    note: str
    """What keeps its figures from being those of a steady state."""


class BreakEvenPrice(msgspec.Struct, frozen=True, kw_only=True):
    """What GPUs that A rents and B does not may cost, for a token to cost as much with A as with B."""

    pool: str
    gpu: str
    num_gpus: float
    """GPUs of the pool that A rents beyond those of B."""
    price: float
    """Dollars that one of them costs an hour."""
    break_even: Known | None
    """Dollars that it may cost; None where a token costs more with A even if they are free."""


class BreakEvenBandwidth(msgspec.Struct, frozen=True, kw_only=True):
    """What a link of A's must carry, for a token to cost as much with A as with B."""

    between: tuple[str, str]
    bandwidth: float
    """Bytes a second that it carries."""
    break_even: float | None
    """Bytes a second that it must carry; None where no bandwidth makes them cost the same."""
    is_cheaper: bool
    """Where there is none: whether A costs less at any bandwidth that was tried, rather than at none."""
    least: float
    """The least bandwidth that may have been tried."""


class Against(msgspec.Struct, frozen=True, kw_only=True):
    """Two runs of the same work, and what A has over B; differences are A - B."""

    a: PairedRun
    b: PairedRun
    counted_steps: tuple[int, int]
    """First and last step that count, in both."""
    outcome: Outcome
    step_time_ratio: Known
    """Seconds of a step of A for one of B's."""
    cost_ratio: Known
    """Dollars of a token of A for one of B's."""
    step_time: Known
    """Seconds a step."""
    cost_per_step: Known
    """Dollars a step."""
    idle_gpu_seconds: Known
    """Idle GPU-seconds a step."""
    idle_cost: Known
    """Dollars a step for GPUs that wait."""
    steps_ratio: float = 1.0
    """Steps that A needs for one of B's, as `plan.staleness_cost` charges both for what they lag behind; it is in both ratios."""
    training_steps: int
    """Steps of the whole training."""
    training_time: Known
    """Seconds of all of them."""
    training_cost: Known
    """Dollars of all of them."""
    unshared_error: float | None
    """How far costs of what A and B do not do alike were off on models that no fit saw: 0 where they share all; None
    where some was never checked."""
    prices: list[BreakEvenPrice]
    bandwidths: list[BreakEvenBandwidth] = []
    note: str = ""
    """What keeps the difference from being as exactly known as was asked for; empty where nothing does."""
