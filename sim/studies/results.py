"""Define the results of studies: rows of a sweep, decode curves and efficiency series."""

from __future__ import annotations

from collections.abc import Mapping
from math import isnan, nan
from typing import Any, get_args

import msgspec

from streamrl.hardware.tiers import Provenance, Tier, datasheet_share
from streamrl.record.attribution import BUSY, IDLE
from streamrl.record.band import Band
from streamrl.record.metrics import RATIOS, Metrics
from streamrl.runfile.recorded_numbers import NotNegative, Number, Positive

ENDS = ("step_time_low", "step_time_high")
"""Figures that are NaN if there are too few steps for an interval."""
RANGES: dict[str, Any] = {**dict.fromkeys(ENDS, Number), "step_time": Positive}
"""Types of figures that are not `NotNegative`."""


class StudyRow(msgspec.Struct, frozen=True, kw_only=True):
    """One simulation."""

    place: tuple[int, ...]
    """Its index on every axis."""
    seed: int
    figures: dict[str, float]
    """Metrics, and the other columns of study.csv."""
    bands: dict[str, Band] = {}
    """Ranges in which figures may truly be, with sampling error and model error."""
    note: str = ""
    """Reason why they are less exact than requested; empty if there is none."""

    @classmethod
    def of(cls, place: tuple[int, ...], seed: int, metrics: Metrics) -> StudyRow:
        """Select the metrics that a study uses."""
        figures: dict[str, float] = {
            "num_steps": metrics.num_steps,
            "step_time_low": metrics.step_time_interval[0] if metrics.step_time_interval else nan,
            "step_time_high": metrics.step_time_interval[1] if metrics.step_time_interval else nan,
            "num_gpus": sum(metrics.num_gpus.values()),
            **{name: getattr(metrics, name) for name in RATIOS},
            "mean_staleness": metrics.mean_staleness,
            "dropped": sum(metrics.dropped.values()) / metrics.num_steps,
            "wasted": sum(metrics.wasted.values()),
            "idle": sum(metrics.idle.values()),
            **{f"idle.{cause}": metrics.idle.get(cause, 0.0) for cause in IDLE},
            **{f"busy.{activity}": metrics.busy.get(activity, 0.0) for activity in BUSY},
            **{f"tiers.{tier}": metrics.tiers.get(tier, 0.0) for tier in get_args(Tier)},
        }
        bands = {name: getattr(metrics, f"{name}_band", None) for name in RATIOS}
        known = {name: band for name, band in bands.items() if band is not None}
        return cls(place=place, seed=seed, figures=figures, bands=known, note=metrics.note)

    def spread(self, metric: str) -> float:
        """Return the relative half-width of a figure's 95 % interval; 0 if it is unknown."""
        low, high = (self.figures.get(f"step_time_{end}", nan) for end in ("low", "high"))
        if metric not in RATIOS or isnan(high - low):
            return 0.0
        return (high - low) / 2 / self.figures["step_time"]


def check_figures(figures: Mapping[str, object]) -> None:
    """Raise `ValueError` if recorded figures of a `StudyRow` lack a metric or are out of range."""
    for name in RATIOS:
        if name not in figures:
            raise ValueError(f"figures.{name} is missing")
    for name, value in figures.items():
        if name in ENDS and isinstance(value, float) and isnan(value):
            continue
        try:
            msgspec.convert(value, RANGES.get(name, NotNegative))
        except msgspec.ValidationError as error:
            raise ValueError(f"figures.{name} is {value}: {error}") from None


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a figure."""

    label: str
    places: list[float]
    values: list[float]
    is_unmeasured: bool = False
    """Whether most of its seconds come from a roofline."""

    @property
    def legend(self) -> str:
        """Return the name of the line, marked if it is not measured."""
        return f"{self.label} (unmeasured)" if self.is_unmeasured else self.label


UNMEASURED_SHARE = 0.5
"""Share of unmeasured seconds above which a whole figure counts as unmeasured."""


class GenerationPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One decode step of one replica."""

    num_running: int
    step_time: float
    roofline_time: float
    """Seconds at the datasheet's peak."""
    tokens_per_second: float
    """Tokens per second of one GPU."""
    tokens_per_dollar: float
    mbu: float
    """Share of the peak memory bandwidth."""
    mfu: float
    """Share of the peak FLOP/s."""
    is_compute_bound: bool
    """Whether computing takes longer than memory traffic according to the datasheet."""


class GenerationCurve(msgspec.Struct, frozen=True, kw_only=True):
    """One model on one kind of GPU, at one length of context."""

    model: str
    gpu: str
    tensor_parallel: int
    expert_parallel: int
    dtype: str
    context: int
    """Context of every rollout, in tokens."""
    most_running: int
    """Most rollouts of that context that fit in the KV cache."""
    price: float
    """Dollars per GPU-hour."""
    ridge: float
    """Batch, in rollouts, above which a step's matrix products take longer to compute than their
    weights take to read.
    """
    points: list[GenerationPoint]
    provenance: Provenance

    @property
    def label(self) -> str:
        """Return the name of the curve in a legend."""
        degree = f" TP{self.tensor_parallel}" if self.tensor_parallel > 1 else ""
        return f"{self.gpu}{degree}{' (unmeasured)' if self.is_unmeasured else ''}"

    @property
    def is_unmeasured(self) -> bool:
        """Whether most of its seconds are unmeasured."""
        return datasheet_share(self.provenance.shares) >= UNMEASURED_SHARE
