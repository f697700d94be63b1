"""Compare two runs of the same work step by step: differences with intervals, and break-even prices and bandwidths.

A is the candidate, and B is the present run. In each step both have the same prompts and lengths. So the
difference of a step compares equal work, and long rollouts, which make the step long for both, do not
widen its interval. Dollars per second are the mean over the counted steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec
import numpy as np
from msgspec.structs import replace

from streamrl.engine.trace import Trace
from streamrl.hardware.operator_tables import Floats
from streamrl.hardware.profiles import price_of
from streamrl.record.attribution import SHARED, UNDERFILLED
from streamrl.record.band import Band, ModelError
from streamrl.record.charges import PaidGpus
from streamrl.record.metrics import RATIOS, Metrics, measure, measure_read, read_run
from streamrl.record.steady_state import (
    LeaderSteps,
    Speed,
    find_steady_so_far,
    half_width,
    read_steps,
)
from streamrl.record.uncertainty import unshared_error
from streamrl.record.whole_run import WholeRun, steps_for_one
from streamrl.runfile.config import Run
from streamrl.runfile.gpu_pools import SideKind, sides_of
from streamrl.runfile.notebook import frame_of, html_table
from streamrl.runfile.recorded_numbers import Count, Interval, NotNegative, Number, Positive
from streamrl.runfile.roles_config import RolloutConfig, TrainerConfig
from streamrl.runfile.units import SECONDS_PER_HOUR

if TYPE_CHECKING:
    from pandas import DataFrame

Outcome: TypeAlias = Literal[
    "no difference",
    "may be chance",
    "within the error of costs",
    "worth it",
    "not worth it",
    "faster but dearer",
    "cheaper but slower",
]
"""Whether A is worth it compared with B. The cost of a token decides first, and then the time of a step."""


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """A figure with its 95 % interval."""

    value: Number
    interval: Interval | None
    """None if too few steps count."""

    def differs_from(self, value: float) -> bool:
        """Return whether the interval exists and excludes `value`."""
        return self.interval is not None and not self.interval[0] <= value <= self.interval[1]


class GpuUse(msgspec.Struct, frozen=True, kw_only=True):
    """The use of the GPUs that generate, train or compute rewards. Shared GPUs generate and train."""

    num_gpus: NotNegative
    idle: NotNegative
    """Idle share of their GPU-seconds."""
    underfilled: NotNegative | None
    """Share of decoding that full batches would not need; None if it is unknown."""


class PairedRun(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two runs, over the steps that count in both."""

    step_time: Positive
    """Mean seconds of a step."""
    step_time_interval: Interval | None
    """95 % interval of that mean for this run alone, without pairing."""
    dollars_per_hour: NotNegative
    cost_per_step: NotNegative
    """Dollars of a mean step."""
    cost_per_million_tokens: NotNegative
    """Dollars for a million output tokens trained on."""
    throughput: NotNegative
    """Output tokens generated per second."""
    goodput: NotNegative
    """Output tokens trained on per second."""
    shares_gpus: bool
    """Whether generation and training take turns on the same GPUs."""
    generation: GpuUse
    training: GpuUse
    """Of the primary trainer."""
    rewards: GpuUse | None = None
    """Of the GPUs that compute rewards, if there are any."""
    staleness: NotNegative
    """Mean versions that rollouts were behind when they were trained on."""
    idle_gpu_seconds: NotNegative
    """Mean idle GPU-seconds of a step, over all sides."""
    idle_cost: NotNegative
    """Dollars for these GPU-seconds."""
    model_error: ModelError | None = None
    """Range of true to simulated seconds; None if an earlier version wrote the file, as for all bands."""
    step_time_band: Band | None = None
    """Range in which `step_time` may truly be, with sampling error and model error."""
    cost_per_step_band: Band | None = None
    cost_per_million_tokens_band: Band | None = None
    whole_run: WholeRun
    """Totals of all training steps, as in `simulate`."""
    note: str
    """Why its figures are not those of a steady state; empty if they are."""


class BreakEvenPrice(msgspec.Struct, frozen=True, kw_only=True):
    """The price of the GPUs that only A rents at which a token costs the same with A and B."""

    pool: str
    gpu: str
    num_gpus: NotNegative
    """GPUs of the pool that A rents beyond those of B."""
    price: NotNegative
    """Present price of one of them, in dollars per hour."""
    break_even: Known | None
    """Break-even price in dollars per hour; None if a token costs more with A even if they are free."""


class BreakEvenBandwidth(msgspec.Struct, frozen=True, kw_only=True):
    """The bandwidth of a link of A at which a token costs the same with A and B."""

    between: tuple[str, str]
    bandwidth: NotNegative
    """Present bandwidth in bytes per second."""
    break_even: Number | None
    """Break-even bandwidth in bytes per second; None if there is none."""
    is_cheaper: bool
    """If there is no break-even: whether A costs less at all tried bandwidths (true) or at none."""
    least: Number
    """The lowest bandwidth that may have been tried, in bytes per second."""


class Against(msgspec.Struct, frozen=True, kw_only=True):
    """Two runs of the same work, and their differences A - B."""

    a: PairedRun
    b: PairedRun
    counted_steps: tuple[Count, Count]
    """First and last step that count in both."""
    outcome: Outcome
    step_time_ratio: Known
    """Seconds of a step, A divided by B."""
    cost_ratio: Known
    """Dollars of a token, A divided by B."""
    step_time: Known
    """Difference in seconds per step."""
    cost_per_step: Known
    """Difference in dollars per step."""
    idle_gpu_seconds: Known
    """Difference in idle GPU-seconds per step."""
    idle_cost: Known
    """Difference in dollars per step for idle GPUs."""
    steps_ratio: NotNegative = 1.0
    """Steps that A needs for one step of B, because staleness adds steps (`plan.staleness_cost`). Both ratios include
    it."""
    training_steps: Count
    """Steps of the whole training."""
    training_time: Known
    """Difference in the wall time of the whole training."""
    training_cost: Known
    """Difference in dollars of the whole training."""
    unshared_error: Number | None
    """Model error, on held-out models, of the costs that A and B do not share; 0 if they share all, None if some error
    is unknown."""
    prices: list[BreakEvenPrice]
    bandwidths: list[BreakEvenBandwidth] = []
    note: str = ""
    """Why the difference is not known with the requested precision; empty if it is."""

    def __repr__(self) -> str:
        step, cost = (_change(ratio.value) for ratio in (self.step_time_ratio, self.cost_ratio))
        return f"<A against B: step time {step}, cost of a token {cost}; {self.outcome}>"

    def _repr_html_(self) -> str:
        """Return the figures of both runs and their differences as a table for a notebook."""
        rows = [
            [row["figure"], *(_shown(row[key]) for key in COLUMNS), _ends(row)]
            for row in self._rows()
        ]
        head = ("", "A", "B", "A - B", "95 % interval")
        return html_table(f"A against B: {self.outcome}", rows, head, [self.note])

    def to_frame(self) -> DataFrame:
        """Return a row for each figure: of A, of B, their difference, and its 95 % interval where it is known."""
        return frame_of(self._rows(), ("figure", *COLUMNS, "low", "high"))

    def _rows(self) -> Iterator[dict[str, Any]]:
        known = {key: getattr(self, key) for key in KNOWN}
        for key in (*KNOWN, *UNKNOWN):
            a, b = getattr(self.a, key), getattr(self.b, key)
            yield _figure_row(key, a, b, known.get(key))
        whole_a, whole_b = self.a.whole_run, self.b.whole_run
        yield _figure_row("run_seconds", whole_a.wall_time, whole_b.wall_time, self.training_time)
        yield _figure_row("run_dollars", whole_a.dollars, whole_b.dollars, self.training_cost)


COLUMNS = ("a", "b", "difference")
KNOWN = ("step_time", "cost_per_step", "idle_gpu_seconds", "idle_cost")
"""Figures of both runs whose difference has an interval."""
UNKNOWN = ("cost_per_million_tokens", "throughput", "goodput", "staleness", "dollars_per_hour")


def _figure_row(key: str, a: float, b: float, known: Known | None) -> dict[str, Any]:
    difference = a - b if known is None else known.value
    low, high = (known and known.interval) or (None, None)
    return {"figure": key, "a": a, "b": b, "difference": difference, "low": low, "high": high}


def _change(ratio: float) -> str:
    """Return a relative change with its sign: "+12.0 %"."""
    return f"{(ratio - 1) * 100:+.1f} %"


def _shown(value: float) -> str:
    return f"{value:,.4g}" if abs(value) < 10_000 else f"{value:,.0f}"


def _ends(row: Mapping[str, Any]) -> str:
    return "" if row["low"] is None else f"{_shown(row['low'])} to {_shown(row['high'])}"


def ratio_half_width(one: Speed, other: Speed) -> float | None:
    """Return half the 95 % interval of the logarithm of the ratio of two step times.

    Return None if too few steps count in both runs.
    """
    first = max(one.counted_steps[0], other.counted_steps[0])
    last = min(one.counted_steps[1], other.counted_steps[1])
    if last <= first:
        return None
    return half_width(
        relative(one.step_times[first - 1 : last]) - relative(other.step_times[first - 1 : last])
    )


def relative(values: Sequence[float] | Floats) -> Floats:
    """Return each value divided by the mean of all values."""
    array = np.asarray(values, dtype=float)
    multiples: Floats = array / array.mean()
    return multiples


def is_beyond_chance(one: Speed, other: Speed, ratio: float) -> bool | None:
    """Return whether a ratio of two runs' figures differs from 1 by more than its interval; None without an interval."""
    width = ratio_half_width(one, other)
    return None if width is None else not ratio or abs(log(ratio)) > width


@dataclass(frozen=True, kw_only=True)
class PairedSteps:
    """The steps that count in both of two paired runs, and the precision of the ratio of their step times."""

    first: int
    """First step that counts in both."""
    last: int
    half_width: float | None
    """Half the 95 % interval of the logarithm of the ratio of their step times; None if too few steps count."""
    has_settled: bool
    """Whether the end of both transients was found."""

    def is_within(self, share: float) -> bool:
        """Return whether the half-width of the ratio is at most `share` and both transients are over."""
        is_known = self.half_width is not None and self.half_width <= share
        return is_known and self.has_settled


def find_paired_steps(
    runs: Sequence[Run], made: Sequence[LeaderSteps], left_out: int, *, drifts: bool
) -> PairedSteps:
    """Return the steps that count in each of two runs; see `find_steady`."""
    steady = [
        find_steady_so_far(run.policies, run.faults, steps, left_out, drifts=drifts)
        for run, steps in zip(runs, made, strict=True)
    ]
    first, last = max(each.first for each in steady), min(each.last for each in steady)
    width = None
    if last > first:
        one, other = (relative(steps.durations()[first:last]) for steps in made)
        width = half_width(one - other)
    return PairedSteps(
        first=min(first, last - 1) + 1,
        last=last,
        half_width=width,
        has_settled=all(each.has_settled for each in steady),
    )


DIGITS = 9
"""Decimal places of a mean number of replicas. More digits are rounding errors of the seconds."""


class MeasuredRun:
    """The figures of one run over the counted steps, as means and step by step."""

    def __init__(self, trace: Trace, counted_steps: tuple[int, int]) -> None:
        first, last = counted_steps
        self.run = trace.run
        reader, steps = read_run(trace), read_steps(trace)
        self.metrics = measure_read(reader, steps, counted_steps)
        self.seconds: Floats = np.array(self.metrics.step_times[first - 1 : last])
        self.tokens: Floats = np.array(self.metrics.step_tokens[first - 1 : last], dtype=float)
        self.longer = steps_for_one(self.run.plan, self.metrics.mean_staleness)
        """Steps that the run needs for one step without staleness."""
        self.dollars_per_second = self.metrics.cost_per_step / self.metrics.step_time
        window = reader.flow.leader.window(first, last)
        num_replicas = round(reader.replicas.mean(*window), DIGITS)
        away, num_ranks = reader.replicas.mean_away(*window), reader.ranks.mean(*window)
        self._paid = PaidGpus.of(self.run, num_replicas, away, round(num_ranks, DIGITS))
        idle = reader.attribution.idle_of_steps(steps.ended_at)
        # idle time of shared GPUs includes those that only one side uses
        names = [side.name for side in sides_of(self.run) if side.name in idle]
        sides = {name: idle[name][first - 1 : last] for name in names}
        self.idle: Floats = np.sum(list(sides.values()), axis=0)
        """Idle GPU-seconds of each step."""
        prices = {
            side.name: self.price(side.pool) / SECONDS_PER_HOUR for side in sides_of(self.run)
        }
        self.idle_dollars: Floats = np.sum(
            [idle_of * prices[name] for name, idle_of in sides.items()], axis=0
        )

    def price(self, pool: str) -> float:
        """Return the price of one GPU of a pool, in dollars per hour."""
        return price_of(self.run.cluster.pools[pool])

    def gpu(self, pool: str) -> str:
        """Return the GPU type of a pool."""
        return self.run.cluster.pools[pool].gpu

    @property
    def gpus(self) -> Mapping[str, float]:
        """Mean number of paid GPUs by pool."""
        return self._paid.by_pool

    @property
    def whole_run(self) -> WholeRun:
        """The totals of all its steps."""
        assert self.metrics.whole_run is not None, "only finished runs are compared"
        return self.metrics.whole_run

    def describe(self) -> PairedRun:
        """Return the run's own figures."""
        metrics, run = self.metrics, self.run
        return PairedRun(
            step_time=metrics.step_time,
            step_time_interval=metrics.step_time_interval,
            dollars_per_hour=self.dollars_per_second * SECONDS_PER_HOUR,
            cost_per_step=metrics.cost_per_step,
            cost_per_million_tokens=metrics.cost_per_million_tokens,
            throughput=metrics.throughput,
            goodput=metrics.goodput,
            shares_gpus=run.policies.shares_gpus,
            generation=self._use("rollout"),
            training=self._use("trainer"),
            rewards=self._use("verifier") if run.verifier.num_gpus else None,
            staleness=metrics.mean_staleness,
            idle_gpu_seconds=float(self.idle.mean()),
            idle_cost=float(self.idle_dollars.mean()),
            model_error=metrics.model_error,
            step_time_band=metrics.step_time_band,
            cost_per_step_band=metrics.cost_per_step_band,
            cost_per_million_tokens_band=metrics.cost_per_million_tokens_band,
            whole_run=self.whole_run,
            note=metrics.note,
        )

    def _use(self, kind: SideKind) -> GpuUse:
        """Return the use of the GPUs of all replicas, of the primary trainer, or of rewards.

        Shared GPUs count as those of replicas and of the trainer.
        """
        if self.run.policies.shares_gpus and kind != "verifier":
            counts = {SHARED: float(self.run.num_gpus)}
        else:
            sides = self._paid.sides
            counts = {s.name: count for s, count in sides if s.kind == kind and not s.trainer}
        num_gpus, of_sides = sum(counts.values()), self.metrics.sides
        idle = sum(count * sum(of_sides[n].idle.values()) for n, count in counts.items())
        lost = sum(count * of_sides[n].busy.get(UNDERFILLED, 0.0) for n, count in counts.items())
        is_known = kind == "trainer" or self.metrics.underfilled_from != "unknown"
        return GpuUse(
            num_gpus=num_gpus,
            idle=idle / num_gpus,
            underfilled=lost / num_gpus if is_known else None,
        )


ROUNDING = 1e-9
"""GPUs, averaged over time, below which two counts are equal."""
EQUAL = 0.002
"""Relative difference below which figures count as equal: no decision rests on less."""


def compare_traces(
    traces: tuple[Trace, Trace], counted_steps: tuple[int, int], note: str
) -> Against:
    """Measure the traces of A and B over the same steps and return their differences.

    Args:
        traces: the traces of A and B.
        counted_steps: first and last step to count.
        note: why the difference is not known with the requested precision; empty if it is.
    """
    a, b = (MeasuredRun(trace, counted_steps) for trace in traces)
    ours, theirs, steps = a.metrics, b.metrics, a.run.algorithm.steps
    seconds = _known(a.seconds - b.seconds)
    dollars = _known(a.seconds * a.dollars_per_second - b.seconds * b.dollars_per_second)
    spread = relative(a.seconds) - relative(b.seconds)
    more_tokens = relative(a.tokens) - relative(b.tokens)
    longer = a.longer / b.longer
    step_time_ratio = _ratio(longer * ours.step_time / theirs.step_time, spread)
    cost_ratio = _ratio(
        longer * ours.cost_per_million_tokens / theirs.cost_per_million_tokens, spread - more_tokens
    )
    whole, other = a.whole_run, b.whole_run
    all_seconds = whole.wall_time_of(whole.steps * a.seconds) - other.wall_time_of(
        other.steps * b.seconds
    )
    all_dollars = (
        whole.steps * a.seconds * a.dollars_per_second
        - other.steps * b.seconds * b.dollars_per_second
    )
    error = _error_of_difference(a, b)
    return Against(
        a=a.describe(),
        b=b.describe(),
        counted_steps=counted_steps,
        outcome=decide(cost_ratio, step_time_ratio, error),
        step_time_ratio=step_time_ratio,
        cost_ratio=cost_ratio,
        step_time=seconds,
        cost_per_step=dollars,
        idle_gpu_seconds=_known(a.idle - b.idle),
        idle_cost=_known(a.idle_dollars - b.idle_dollars),
        training_steps=steps,
        steps_ratio=longer,
        training_time=_about(whole.wall_time - other.wall_time, _known(all_seconds)),
        training_cost=_about(whole.dollars - other.dollars, _known(all_dollars)),
        unshared_error=error,
        prices=list(_break_even_prices(a, b, cost_ratio)),
        note=note,
    )


def decide(cost_ratio: Known, step_time_ratio: Known, error: float | None) -> Outcome:
    """Return whether A is worth it compared with B.

    Args:
        cost_ratio: dollars per token, A divided by B.
        step_time_ratio: seconds per step, A divided by B.
        error: model error of the costs that A and B do not share. None if unknown; it then counts as 0.
    """
    is_equal = max(abs(log(ratio.value)) for ratio in (cost_ratio, step_time_ratio)) < EQUAL
    if is_equal and cost_ratio.interval is not None:
        return "no difference"
    if not cost_ratio.differs_from(1.0):
        return "may be chance"
    if not is_significant(cost_ratio, error):
        return "within the error of costs"
    is_other_time = is_significant(step_time_ratio, error)
    if cost_ratio.value < 1:
        is_slower = is_other_time and step_time_ratio.value > 1
        return "cheaper but slower" if is_slower else "worth it"
    is_faster = is_other_time and step_time_ratio.value < 1
    return "faster but dearer" if is_faster else "not worth it"


def is_significant(ratio: Known, error: float | None) -> bool:
    """Return whether a ratio of A to B differs from 1 by more than its interval and the unshared model error."""
    return ratio.differs_from(1.0) and abs(log(ratio.value)) >= (error or 0.0)


# Figures ------------------------------------------------------------------------------------------


def _known(differences: Floats) -> Known:
    """Return the mean of the differences of each step, with its interval."""
    mean, width = float(differences.mean()), half_width(differences)
    return Known(value=mean, interval=None if width is None else (mean - width, mean + width))


def _ratio(value: float, spread: Floats) -> Known:
    """Return a ratio of two means with its interval.

    Its logarithm scatters like `spread`, the differences of the relative steps.
    """
    width = half_width(spread)
    return Known(
        value=value, interval=None if width is None else (value * exp(-width), value * exp(width))
    )


def _about(value: float, known: Known) -> Known:
    """Return a figure with the width of another's interval. Start and checkpoints do not widen the interval."""
    more = value - known.value
    return Known(
        value=value,
        interval=known.interval and (known.interval[0] + more, known.interval[1] + more),
    )


def _error_of_difference(a: MeasuredRun, b: MeasuredRun) -> float | None:
    """Return the model error of the costs that the runs do not share; None if it is unknown."""
    errors = []
    for each in (a, b):
        known = each.metrics.uncertainty
        errors.append(unshared_error({} if known is None else known.stages, _shared_stages(a, b)))
    checked = [error for error in errors if error is not None]
    return max(checked) if len(checked) == len(errors) else None


def _shared_stages(a: MeasuredRun, b: MeasuredRun) -> set[str]:
    """Return the operations that both runs do on the same number and type of GPUs with the same settings."""
    if a.run.costs != b.run.costs:
        return set()
    (rollout, trainer), theirs = ((each.run.rollout, each.run.trainer) for each in (a, b))
    shared = set()
    if _is_alike(a, rollout, b, theirs[0]):
        shared.add("decode")
    if _is_alike(a, trainer, b, theirs[1]):
        shared.add("train")
    return shared


def _is_alike(
    a: MeasuredRun,
    ours: RolloutConfig | TrainerConfig,
    b: MeasuredRun,
    theirs: RolloutConfig | TrainerConfig,
) -> bool:
    """Return whether two sides have the same GPU type and the same section, except for the name of the pool."""
    return a.gpu(ours.pool) == b.gpu(theirs.pool) and ours == replace(theirs, pool=ours.pool)


def _break_even_prices(
    a: MeasuredRun, b: MeasuredRun, cost_ratio: Known
) -> Iterator[BreakEvenPrice]:
    """Yield for each pool the break-even price of the GPUs that A rents beyond B.

    The cost of a token is linear in this price.
    """
    for pool, num_gpus in a.gpus.items():
        has = b.gpus.get(pool, 0.0) if pool in b.gpus and a.gpu(pool) == b.gpu(pool) else 0.0
        if num_gpus - has > ROUNDING:
            yield _break_even_price(a, pool, num_gpus - has, cost_ratio)


def _break_even_price(
    a: MeasuredRun, pool: str, num_gpus: float, cost_ratio: Known
) -> BreakEvenPrice:
    price = a.price(pool)
    slope = a.dollars_per_second * SECONDS_PER_HOUR / num_gpus
    wanted, interval = price + slope * (1 / cost_ratio.value - 1), None
    if cost_ratio.interval is not None:
        least, most = cost_ratio.interval
        interval = price + slope * (1 / most - 1), price + slope * (1 / least - 1)
    return BreakEvenPrice(
        pool=pool,
        gpu=a.gpu(pool),
        num_gpus=num_gpus,
        price=price,
        break_even=Known(value=wanted, interval=interval) if wanted >= 0 else None,
    )


class Rerun(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded run, its simulation, and a simulation with changes, over the same steps with the same lengths."""

    changes: list[str]
    """The changes as `key=value`."""
    recorded: Metrics
    as_it_was: Metrics
    """The recorded run, simulated without changes."""
    changed: Metrics
    step_time_ratio: Known
    """Simulated seconds of a step: with the changes, divided by without."""
    prediction_error: float
    """Relative error of the simulated step time without changes: simulated / recorded - 1."""

    def __repr__(self) -> str:
        change = _change(self.step_time_ratio.value)
        return f"<Rerun with {', '.join(self.changes) or 'no change'}: step time {change}>"

    def _repr_html_(self) -> str:
        """Return the figures of all three runs as a table for a notebook."""
        rows = [[key, *map(_shown, figures)] for key, *figures in self._rows()]
        error = f"error of the simulated step as it was: {_change(1 + self.prediction_error)}"
        title = f"Rerun with {', '.join(self.changes) or 'no change'}"
        return html_table(title, rows, ("", "recorded", "simulated", "changed"), [error])

    def to_frame(self) -> DataFrame:
        """Return a row for each figure: recorded, simulated as it was, and simulated with the changes."""
        names = ("figure", "recorded", "as_it_was", "changed")
        return frame_of((dict(zip(names, row, strict=True)) for row in self._rows()), names)

    def _rows(self) -> Iterator[tuple[Any, ...]]:
        for key in RATIOS:
            yield key, *(getattr(r, key) for r in (self.recorded, self.as_it_was, self.changed))


def compare_rerun(traces: tuple[Trace, Trace, Trace], changes: list[str]) -> Rerun:
    """Measure a recorded run, its simulation and the changed simulation over the steps that count in all three.

    Raises:
        ValueError: one of them has no finished step.
        RuntimeError: a simulation stops before the last recorded step.
    """
    counted = [measure(trace).counted_steps for trace in traces]
    last = min(last for _, last in counted)
    first = min(max(first for first, _ in counted), last)
    recorded, as_it_was, changed = (measure(trace, (first, last)) for trace in traces)
    for simulated in (as_it_was, changed):
        if simulated.unfinished and simulated.num_steps < recorded.num_steps:
            raise RuntimeError(f"the simulation of the run {simulated.unfinished}")
    ratio = changed.step_time / as_it_was.step_time
    width = ratio_half_width(changed, as_it_was)
    interval = None if width is None else (ratio * exp(-width), ratio * exp(width))
    return Rerun(
        changes=changes,
        recorded=recorded,
        as_it_was=as_it_was,
        changed=changed,
        step_time_ratio=Known(value=ratio, interval=interval),
        prediction_error=as_it_was.step_time / recorded.step_time - 1,
    )
