"""Put the rows of a study into one table for each metric, and state in words what the table shows.

All sentences are derived from the rows:

    kind        finding
    best        the best point, and how much worse the worst one is
    knee        the range of points in which a metric stays near its best
    crossover   which series wins where, and where the winner changes
    ratio       the growth of a metric along the first axis, and each series relative to the first one
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise, product
from math import exp, isfinite, log
from statistics import median
from typing import Literal, NamedTuple, get_args

import msgspec

from streamrl.record.attribution import BUSY, IDLE
from streamrl.record.band import Band, ends_of, hull
from streamrl.record.metrics import RATIOS
from streamrl.report.run_tables import LABELS, format_figure
from streamrl.runfile.formatting import band_text, format_share, format_step_time
from streamrl.runfile.recorded_numbers import Number
from streamrl.runfile.sweep import Axis
from streamrl.sim.studies.results import StudyRow

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
"""Metrics that a study can have; `idle` is the sum of its causes."""


class Spread(msgspec.Struct, frozen=True):
    """A metric over the seeds of one combination."""

    median: Number
    least: Number
    """The lowest end of the 95 % intervals of all seeds, if there are intervals."""
    most: Number
    band: Band | None = None
    """The range in which it may truly be, with the model error, over all seeds; None if it is unknown."""

    @property
    def half(self) -> float:
        """Return half the distance from the lowest to the highest value."""
        return (self.most - self.least) / 2


class MetricSeries(NamedTuple):
    """One line of a figure: the points of the first axis at one point of each other."""

    rest: tuple[int, ...]
    label: str
    spreads: dict[int, Spread]
    """By point of the first axis; rejected combinations are missing."""


@dataclass(frozen=True)
class MetricTable:
    """One metric over a grid."""

    metric: str
    axes: tuple[Axis, ...]
    spreads: dict[tuple[int, ...], Spread]

    @property
    def name(self) -> str:
        """Return the metric's name for people."""
        return name_of(self.metric)

    @property
    def is_less_better(self) -> bool:
        """Return whether the lowest value is the best."""
        return self.metric in BETTER_LESS or self.metric.startswith("idle")

    @property
    def points(self) -> tuple[str, ...]:
        """Return the names of the first axis's points."""
        return self.axes[0].point_labels

    def series(self) -> Iterator[MetricSeries]:
        """Yield a series for every combination of the other axes that has any value."""
        for rest in product(*(range(len(axis.points)) for axis in self.axes[1:])):
            spreads = {place[0]: each for place, each in self.spreads.items() if place[1:] == rest}
            if spreads:
                yield MetricSeries(rest, label_of(self.axes[1:], rest), spreads)

    @property
    def is_share(self) -> bool:
        """Return whether values are shares, which are compared by difference, not by ratio."""
        return self.metric in SHARES

    @property
    def word(self) -> str:
        """Return the word for the best value."""
        return "least" if self.is_less_better else "most"

    def is_near(self, value: float, best: float, tolerance: float) -> bool:
        """Return whether a value is off by at most `tolerance`: relative to the best, or in GPU-time share for shares."""
        return abs(value - best) <= tolerance * (1.0 if self.is_share else abs(best))

    def best(self, values: Iterable[float]) -> float:
        """Return the best of some values of the metric."""
        return min(values) if self.is_less_better else max(values)

    def format_spread(self, spread: Spread, *, intervals: bool = False) -> str:
        """Return a value with its band, such as "164.7 s (132 to 223)".

        With `intervals` it also has half its 95 % interval: "164.7 s ± 1.2 (132 to 223)".
        """
        has_interval = intervals and spread.half > 0 and not self.is_share
        ends = ends_of(spread.band)
        if self.metric == "step_time":
            interval = (spread.least, spread.most) if has_interval else None
            return format_step_time(spread.median, interval, ends)
        text = self.format(spread.median)
        if has_interval and spread.median:
            text += f" ± {spread.half / spread.median * 100:.2g} %"
        return f"{text} {band_text(ends)}".rstrip()

    def format(self, value: float) -> str:
        """Return a value as text."""
        if self.is_share:
            return format_share(value)
        return format_figure(self.metric, value) if self.metric in RATIOS else f"{value:.3g}"


def make_table(metric: str, axes: Sequence[Axis], rows: Iterable[StudyRow]) -> MetricTable:
    """Return the table of one metric from the rows of a study."""
    found: dict[tuple[int, ...], list[StudyRow]] = {}
    for row in rows:
        found.setdefault(row.place, []).append(row)
    spreads = {place: _spread(metric, each) for place, each in sorted(found.items())}
    return MetricTable(metric, tuple(axes), spreads)


def _spread(metric: str, rows: Sequence[StudyRow]) -> Spread:
    """Return the spread over the seeds of a combination."""
    values = [row.figures[metric] for row in rows]
    lows = [value * (1 - row.spread(metric)) for value, row in zip(values, rows, strict=True)]
    highs = [value * (1 + row.spread(metric)) for value, row in zip(values, rows, strict=True)]
    bands = [row.bands[metric] for row in rows if metric in row.bands]
    return Spread(median(values), min(lows), max(highs), hull(bands) if bands else None)


def label_of(axes: Sequence[Axis], place: Sequence[int]) -> str:
    """Return the labels of a combination's points as one name."""
    return ", ".join(axis.point_labels[at] for axis, at in zip(axes, place, strict=True))


def name_of(metric: str) -> str:
    """Return the metric's name for people."""
    kind, dot, part = metric.partition(".")
    if dot:
        return f"GPU time {kind} {'for' if kind == 'idle' else 'with'} {part}"
    return NAMES.get(metric, metric)


def unit_of(metric: str) -> str:
    """Return the unit of a metric's values; empty for plain numbers."""
    return "share of GPU-seconds" if metric in SHARES else UNITS.get(metric, "")


def check_metrics(metrics: Iterable[str]) -> None:
    """Raise `ValueError` if a metric is unknown."""
    for metric in metrics:
        if metric not in METRICS:
            close = difflib.get_close_matches(metric, METRICS, n=1, cutoff=0.5)
            hint = f"; did you mean {close[0]}?" if close else f" of {', '.join(METRICS)}"
            raise ValueError(f"--metric {metric!r} is none{hint}")


Kind = Literal["best", "knee", "crossover", "ratio"]
NEAR = (
    0.02  # relative distance below which two medians count as equal: the effect of seeds on a run
)


class Question(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The question of a study."""

    kind: Kind = "best"
    tolerance: float = NEAR
    """Share by which a value may be worse than the best and still count as near it."""


def find(finding: Question, table: MetricTable) -> list[str]:
    """Return a few sentences on a table.

    Raises:
        ValueError: a crossover is asked for with only one axis.
    """
    return list(SENTENCES[finding.kind](table, finding.tolerance))


def _best(table: MetricTable, tolerance: float) -> Iterator[str]:
    tops = []
    for series in table.series():
        values = {at: spread.median for at, spread in series.spreads.items()}
        best = table.best(values.values())
        first, *others = sorted(values, key=lambda at: abs(values[at] - best))
        alike = [at for at in others if table.is_near(values[at], best, tolerance)]
        text = f"the {table.word} {table.name} is {table.format(best)}, at {table.points[first]}"
        if alike:
            text += f" ({_within(table, tolerance)}: {_names(table, sorted(alike))})"
        far = {at: value for at, value in values.items() if at not in (first, *alike)}
        tops.append((series.label, best))
        yield _say(series, f"{text}{_worst(table, far, best)}.")
    if len(tops) > 1:
        yield _rank(table, tops)


def _rank(table: MetricTable, tops: list[tuple[str, float]]) -> str:
    """Return the best of every series relative to the best of all."""
    best = table.best(value for _, value in tops)
    (top, _), *others = sorted(tops, key=lambda each: abs(each[1] - best))
    parts = [f"{label} comes to {table.format(v)}{_times(table, v, best)}" for label, v in others]
    return f"Best of all is {table.format(best)} with {top}; {'; '.join(parts)}."


def _knee(table: MetricTable, tolerance: float) -> Iterator[str]:
    """Yield where each series leaves its best; series that never do share a sentence."""
    flat = []
    for series in table.series():
        values = {at: spread.median for at, spread in series.spreads.items()}
        best = table.best(values.values())
        near = [at for at in values if table.is_near(values[at], best, tolerance)]
        far = {at: value for at, value in values.items() if at not in near}
        if not far:
            flat.append(f"{series.label} {table.format(best)}".strip())
            continue
        text = f"{table.name} is {_within(table, tolerance)} of its best ({table.format(best)}) "
        text += f"{_where(table, near, list(values))}{_worst(table, far, best)}."
        yield _say(series, text)
    if flat:
        text = f"{_capital(table.name)} stays {_within(table, tolerance)} of its best everywhere"
        yield f"{text}: {'; '.join(flat)}."


def _crossover(table: MetricTable, tolerance: float) -> Iterator[str]:
    """Compare the series of the second axis, for each combination of further axes."""
    if len(table.axes) < 2:
        raise ValueError(
            "finding 'crossover' needs two axes: the swept one, and the one to compare"
        )
    beyond = table.axes[2:]
    for rest, found in groupby(sorted(table.series(), key=_beyond), key=_beyond):
        rivals = list(found)
        head = f"{label_of(beyond, rest)}: " if beyond else ""
        names = {r.rest: table.axes[1].point_labels[r.rest[0]] for r in rivals}
        shared = [at for at in range(len(table.points)) if all(at in r.spreads for r in rivals)]
        if len(rivals) < 2 or not shared:
            yield f"{head}Nothing to compare."
            continue
        won = [(at, _winner(table, rivals, at)) for at in shared]
        text = f"{head}{_capital(table.name)} is {table.word} with "
        if len({winner.rest for _, winner in won}) == 1:
            yield f"{text}{names[won[0][1].rest]} throughout{_margins(table, rivals, shared)}."
            continue
        spans = []
        for winner, run in groupby(won, key=lambda pair: pair[1].rest):
            spans.append(f"{names[winner]} {_span(table, [at for at, _ in run], shared)}")
        crossings = [
            _crossing(table, (a, b), (before, after))
            for (a, before), (b, after) in pairwise(won)
            if before.rest != after.rest
        ]
        yield f"{text}{', with '.join(spans)}; they cross {' and '.join(crossings)}."


def _ratio(table: MetricTable, tolerance: float) -> Iterator[str]:
    found = list(table.series())
    for series in found:
        values = {at: spread.median for at, spread in series.spreads.items()}
        first, last = min(values), max(values)
        if table.axes[0].places and len(set(map(table.format, values.values()))) == 1:
            yield _say(series, f"{table.name} is {table.format(values[first])} throughout.")
        elif table.axes[0].places:
            text = f"from {table.points[first]} to {table.points[last]} {table.name} goes from "
            text += f"{table.format(values[first])} to {table.format(values[last])}"
            yield _say(series, f"{text}{_times(table, values[last], values[first])}.")
        elif len(found) == 1:
            yield from _against_first(table, values)
    for series in found[1:]:
        yield _against(table, series, found[0])


def _against_first(table: MetricTable, values: dict[int, float]) -> Iterator[str]:
    """Yield every point relative to the first."""
    base = values[min(values)]
    parts = []
    for at, value in values.items():
        times = _times(table, value, base) if at != min(values) else ""
        parts.append(f"{table.format(value)} at {table.points[at]}{times}")
    yield f"{_capital(table.name)}: {'; '.join(parts)}."


def _against(table: MetricTable, series: MetricSeries, base: MetricSeries) -> str:
    """Return a series relative to the first one, at its lowest and highest ratio."""
    pairs = {
        at: (spread.median, base.spreads[at].median)
        for at, spread in series.spreads.items()
        if at in base.spreads
    }
    sizes = {at: _size(table, *pair) for at, pair in pairs.items()}
    if not sizes:
        return f"{series.label} and {base.label}: nothing to compare."
    least, most = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
    ats = sorted({least, most})
    if table.is_share:
        parts = [
            f"{table.format(pairs[at][0])} where {base.label} has {table.format(pairs[at][1])}, "
            f"at {table.points[at]}"
            for at in ats
        ]
        return f"{_capital(table.name)}: {series.label} has {'; '.join(parts)}."
    text = f"{series.label} has {sizes[ats[0]]:.2f} times the {table.name} of {base.label}"
    if f"{sizes[least]:.2f}" == f"{sizes[most]:.2f}":
        return f"{text}{' throughout' if len(sizes) > 1 else ''}."
    return f"{text} at {table.points[ats[0]]}, {sizes[ats[1]]:.2f} times at {table.points[ats[1]]}."


def _size(table: MetricTable, value: float, base: float) -> float:
    """Return the ratio of two values, or for shares their difference."""
    if table.is_share:
        return value - base
    return value / base if base else 1.0


SENTENCES: dict[Kind, Callable[[MetricTable, float], Iterator[str]]] = {
    "best": _best,
    "knee": _knee,
    "crossover": _crossover,
    "ratio": _ratio,
}
assert set(SENTENCES) == set(get_args(Kind))


# Words --------------------------------------------------------------------------------------------


def _say(series: MetricSeries, text: str) -> str:
    """Return a sentence with the name of its series, if there are several."""
    return f"{series.label}: {text}" if series.label else _capital(text)


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _names(table: MetricTable, ats: list[int]) -> str:
    return ", ".join(table.points[at] for at in ats)


def _within(table: MetricTable, tolerance: float) -> str:
    return f"within {tolerance * 100:g} {'points' if table.is_share else '%'}"


def _worst(table: MetricTable, far: dict[int, float], best: float) -> str:
    """Return the value farthest from the best; empty if none is far."""
    if not far:
        return ""
    worst = max(far, key=lambda at: abs(far[at] - best))
    value = f"{table.format(far[worst])}{_times(table, far[worst], best)}"
    return f"; at {table.points[worst]} it is {value}"


def _times(table: MetricTable, value: float, base: float, of: str = "") -> str:
    """Return how many times one value is another; for shares or a zero base, another wording."""
    if table.is_share or not base or not isfinite(value / base):
        return ""
    return f", {value / base:.2f} times {of or 'as much'}"


def _where(table: MetricTable, near: list[int], places: list[int]) -> str:
    """Return which points form a group: from one on, up to one, or each by name."""
    if near == places[-len(near) :]:
        return (
            f"from {table.points[near[0]]} on" if len(near) > 1 else f"at {table.points[near[0]]}"
        )
    if near == places[: len(near)] and len(near) > 1:
        return f"up to {table.points[near[-1]]}"
    return f"at {_names(table, near)}"


def _span(table: MetricTable, ats: list[int], places: list[int]) -> str:
    """Return the range in which a series wins."""
    if ats[0] == places[0]:
        return f"up to {table.points[ats[-1]]}"
    if ats[-1] == places[-1]:
        return f"from {table.points[ats[0]]} on"
    first, last = table.points[ats[0]], table.points[ats[-1]]
    return f"at {first}" if first == last else f"from {first} to {last}"


# Comparing series ---------------------------------------------------------------------------------


def _beyond(series: MetricSeries) -> tuple[int, ...]:
    return series.rest[1:]


def _badness(table: MetricTable, spread: Spread) -> float:
    return spread.median if table.is_less_better else -spread.median


def _winner(table: MetricTable, rivals: list[MetricSeries], at: int) -> MetricSeries:
    return min(rivals, key=lambda rival: _badness(table, rival.spreads[at]))


def _margins(table: MetricTable, rivals: list[MetricSeries], ats: list[int]) -> str:
    """Return the values of the next best, where it is closest to the best and where it is farthest."""
    found = []
    for at in ats:
        best, second, *_ = sorted(_badness(table, rival.spreads[at]) for rival in rivals)
        found.append(_size(table, abs(second), abs(best)))
    found.sort(key=lambda size: abs(size - (0.0 if table.is_share else 1.0)))
    near, far = (
        f"{each * 100:+.1f} points" if table.is_share else f"{each:.2f}"
        for each in (found[0], found[-1])
    )
    text = near if near == far else f"{near} to {far}"
    return f", the next is {text} off" if table.is_share else f", the next has {text} times as much"


def _crossing(
    table: MetricTable, ats: tuple[int, int], rivals: tuple[MetricSeries, MetricSeries]
) -> str:
    """Return where two series cross, by linear interpolation between two points of the first axis."""
    axis = table.axes[0]
    before, after = (rivals[0].spreads[at].median - rivals[1].spreads[at].median for at in ats)
    between = f"between {table.points[ats[0]]} and {table.points[ats[1]]}"
    if not axis.places or before == after:
        return between
    share = before / (before - after)
    start, end = (axis.places[at] for at in ats)
    if axis.drawn_as == "log":
        place = exp(log(start) + share * (log(end) - log(start)))
    else:
        place = start + share * (end - start)
    return f"at about {place:.3g}" if axis.is_plain else between
