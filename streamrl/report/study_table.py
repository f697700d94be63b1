"""A study's rows, and the table of one metric over its grid: median, least and most over seeds."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import isnan, nan
from statistics import median
from typing import NamedTuple, get_args

import msgspec

from streamrl.hardware.tiers import Tier
from streamrl.record.attribution import BUSY, IDLE
from streamrl.record.metrics import Metrics
from streamrl.report.run_tables import (
    LABELS,
    RATIOS,
    format_figure,
    format_share,
    format_step_time,
)
from streamrl.runfile.grid import Axis

BETTER_LESS = (
    *("step_time", "cost_per_step", "cost_per_million_tokens", "dropped", "wasted"),
    "mean_staleness",
)
UNITS = {
    "step_time": "s",
    "throughput": "tokens/s",
    "goodput": "tokens/s",
    "samples_per_second": "1/s",
    "cost_per_step": "$",
    "cost_per_million_tokens": "$",
}
NAMES = {
    **LABELS,
    "mean_staleness": "mean staleness",
    "dropped": "rollouts a step never trained on",
    "wasted": "tokens never trained on",
    "idle": "GPU time idle",
}
SHARES = ("wasted", "idle", *(f"idle.{c}" for c in IDLE), *(f"busy.{a}" for a in BUSY))
METRICS = (*RATIOS, "mean_staleness", "dropped", *SHARES)
"""What a study can be about; `idle` is the sum of its causes."""


class StudyRow(msgspec.Struct, frozen=True, kw_only=True):
    """One simulation."""

    place: tuple[int, ...]
    """Its point on every axis."""
    seed: int
    figures: dict[str, float]
    """Metrics, and what else a row of study.csv has."""
    note: str = ""
    """What keeps them from being as exactly known as was asked for."""

    @classmethod
    def of(cls, place: tuple[int, ...], seed: int, metrics: Metrics) -> StudyRow:
        """Take from a run's metrics what a study is about."""
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
        return cls(place=place, seed=seed, figures=figures, note=metrics.note)

    def spread(self, metric: str) -> float:
        """Return by what share a figure may be off, as its 95 % interval has it; 0 where that is not known."""
        low, high = (self.figures.get(f"step_time_{end}", nan) for end in ("low", "high"))
        if metric not in RATIOS or isnan(high - low):
            return 0.0
        return (high - low) / 2 / self.figures["step_time"]


class Spread(msgspec.Struct, frozen=True):
    """A metric over the seeds of one combination."""

    median: float
    least: float
    """Of the 95 % intervals of all seeds, where there are intervals."""
    most: float

    @property
    def half(self) -> float:
        """Half the way from the least to the most."""
        return (self.most - self.least) / 2


class MetricSeries(NamedTuple):
    """One line of a figure: the points of the first axis at one point of each other."""

    rest: tuple[int, ...]
    label: str
    spreads: dict[int, Spread]
    """By point of the first axis; what was refused is missing."""


@dataclass(frozen=True)
class MetricTable:
    """One metric over a grid."""

    metric: str
    axes: tuple[Axis, ...]
    spreads: dict[tuple[int, ...], Spread]

    @property
    def name(self) -> str:
        """Name the metric for people."""
        return name_of(self.metric)

    @property
    def is_less_better(self) -> bool:
        """Whether the least value is the best."""
        return self.metric in BETTER_LESS or self.metric.startswith("idle")

    @property
    def points(self) -> tuple[str, ...]:
        """Name the points of the first axis."""
        return self.axes[0].point_labels

    def series(self) -> Iterator[MetricSeries]:
        """Yield a series for every combination of the other axes that has any value."""
        for rest in product(*(range(len(axis.points)) for axis in self.axes[1:])):
            spreads = {place[0]: each for place, each in self.spreads.items() if place[1:] == rest}
            if spreads:
                yield MetricSeries(rest, label_of(self.axes[1:], rest), spreads)

    @property
    def is_share(self) -> bool:
        """Whether values are shares, whose differences count and not their ratios."""
        return self.metric in SHARES

    @property
    def word(self) -> str:
        """Say which value is the best."""
        return "least" if self.is_less_better else "most"

    def is_near(self, value: float, best: float, tolerance: float) -> bool:
        """Whether a value is off by at most `tolerance`, of the best or, for shares, of all GPU-seconds."""
        return abs(value - best) <= tolerance * (1.0 if self.is_share else abs(best))

    def best(self, values: Iterable[float]) -> float:
        """Return the best of some values of the metric."""
        return min(values) if self.is_less_better else max(values)

    def format_spread(self, spread: Spread) -> str:
        """Write a value with half of what it may be, such as "164.7 s ± 1.2"."""
        if self.metric == "step_time" and spread.half:
            return format_step_time(spread.median, (spread.least, spread.most))
        if self.is_share or not spread.half or not spread.median:
            return self.format(spread.median)
        return f"{self.format(spread.median)} ± {spread.half / spread.median * 100:.2g} %"

    def format(self, value: float) -> str:
        """Write a value for people."""
        if self.is_share:
            return format_share(value)
        return format_figure(self.metric, value) if self.metric in RATIOS else f"{value:.3g}"


def make_table(metric: str, axes: Sequence[Axis], rows: Iterable[StudyRow]) -> MetricTable:
    """Put the rows of a study together for one metric."""
    found: dict[tuple[int, ...], list[StudyRow]] = {}
    for row in rows:
        found.setdefault(row.place, []).append(row)
    spreads = {place: _spread(metric, each) for place, each in sorted(found.items())}
    return MetricTable(metric, tuple(axes), spreads)


def _spread(metric: str, rows: Sequence[StudyRow]) -> Spread:
    """Put the seeds of a combination together."""
    values = [row.figures[metric] for row in rows]
    lows = [value * (1 - row.spread(metric)) for value, row in zip(values, rows, strict=True)]
    highs = [value * (1 + row.spread(metric)) for value, row in zip(values, rows, strict=True)]
    return Spread(median(values), min(lows), max(highs))


def label_of(axes: Sequence[Axis], place: Sequence[int]) -> str:
    """Name a combination by its points' labels."""
    return ", ".join(axis.point_labels[at] for axis, at in zip(axes, place, strict=True))


def name_of(metric: str) -> str:
    """Name a metric for people."""
    kind, dot, part = metric.partition(".")
    if dot:
        return f"GPU time {kind} {'for' if kind == 'idle' else 'with'} {part}"
    return NAMES.get(metric, metric)


def unit_of(metric: str) -> str:
    """Return the unit of a metric's values; nothing where they are numbers."""
    return "share of GPU-seconds" if metric in SHARES else UNITS.get(metric, "")


def check_metrics(metrics: Iterable[str]) -> None:
    """Raise `ValueError` where a study is asked for a metric that there is not."""
    for metric in metrics:
        if metric not in METRICS:
            close = difflib.get_close_matches(metric, METRICS, n=1, cutoff=0.5)
            hint = f"; did you mean {close[0]}?" if close else f" of {', '.join(METRICS)}"
            raise ValueError(f"--metric {metric!r} is none{hint}")
