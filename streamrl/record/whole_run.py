"""Compute the totals of a whole run: seconds, GPU-hours, dollars, tokens and kWh of all training steps.

    seconds    =  steps before the steady state  +  all other steps x mean step  +  checkpoints  +  evaluations
    wall time  =  set-up  +  seconds  +  failed attempts
    dollars    =  the bill of these seconds (`billing.py`)

Every time of a whole run that is shown or compared is its wall time.

The mean step is that of the steady state. The 95 % interval of the total comes from the interval of this mean
alone. The band also includes the model error. Neither includes an unforeseen drift of lengths.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from math import ceil
from typing import Literal, NamedTuple, TypeAlias, TypeVar

import msgspec
from msgspec.structs import replace

from streamrl.engine.trace import Trace
from streamrl.hardware.operator_tables import Floats
from streamrl.hardware.profiles import load_gpu
from streamrl.record.assumed import Assumed, assumed_of, assumed_of_failures, assumed_of_model
from streamrl.record.attribution import SHARED, Attribution, SidesAttribution
from streamrl.record.band import Band, ModelError, band_of
from streamrl.record.billing import (
    SANDBOXES,
    Bill,
    Seconds,
    adds_nothing,
    bill_of,
    billed_time,
    billing_ratio,
    rented_time,
    uncounted,
)
from streamrl.record.charges import PaidGpus, PaidSide
from streamrl.record.steady_state import Speed
from streamrl.runfile.cluster_config import ClusterConfig
from streamrl.runfile.config import Run
from streamrl.runfile.environment_config import EnvironmentConfig
from streamrl.runfile.failure_rates import can_fail
from streamrl.runfile.plan_config import PlanConfig
from streamrl.runfile.recorded_numbers import Count, Interval, NotNegative, Number
from streamrl.runfile.units import SECONDS_PER_HOUR

Work: TypeAlias = Literal["generating", "training", "idle"]
WORK_OF: dict[str, Work] = {
    "prefill": "generating",
    "recomputed-prefix": "generating",
    "decode": "generating",
    "underfilled": "generating",
    "verify": "generating",
    "score": "training",
    "train": "training",
    "evaluate": "generating",
}
"""By activity: the kind of work whose power is used. A reward model reads rollouts as prefill does, and scores are
forward passes of the trainer."""


class Energy(NamedTuple):
    """The electrical power of all paid GPUs."""

    watts: dict[str, float | None]
    """Mean watts by pool; None if there is no power data."""
    unknown: list[str]
    """GPUs without power data for a kind of work that they do."""


def read_energy(paid: PaidGpus, shares: SidesAttribution) -> Energy:
    """Return the mean watts of every pool that is paid for.

    Args:
        paid: paid GPUs of each pool; GPUs that no side uses are idle.
        shares: by side, its activities as shares of its own GPU-seconds.
    """
    watts: dict[str, float | None] = {}
    unknown: dict[str, None] = {}
    for pool, count in paid.by_pool.items():
        gpu = paid.pools[pool].gpu
        works = list(_works(paid.sides, shares, pool, count))
        power = load_gpu(gpu).power
        needed = {work: power.watts(work) if power is not None else None for work, _ in works}
        if None in needed.values():
            unknown[gpu] = None
            watts[pool] = None
        else:
            watts[pool] = sum((needed[work] or 0.0) * gpus for work, gpus in works)
    return Energy(watts, list(unknown))


def _works(
    sides: Sequence[PaidSide], shares: SidesAttribution, pool: str, paid: float
) -> Iterator[tuple[Work, float]]:
    """Yield each kind of work in a pool with the mean number of GPUs that do it."""
    unused, shares_gpus = paid, any(side.kind == "shared" for side, _ in sides)
    for side, count in sides:
        if side.pool == pool:
            unused -= count
            takes_turns = shares_gpus and side.kind != "verifier" and not side.trainer
            yield from _of_side(shares.sides[SHARED if takes_turns else side.name], count)
    if unused > 0:
        yield "idle", unused


def _of_side(shares: Attribution, count: float) -> Iterator[tuple[Work, float]]:
    for activity, share in shares.busy.items():
        if share:
            yield WORK_OF[activity], share * count
    if idle := sum(shares.idle.values()):
        yield "idle", idle * count


Lag = TypeVar("Lag", float, Floats)
"""Mean staleness in versions, of one run or of many."""
NEGLIGIBLE = 6
"""Decimal places to which a number of steps is rounded before it is rounded up. So 10 % more than 100 steps are
110 steps, not 111."""


class PoolTotal(msgspec.Struct, frozen=True, kw_only=True):
    """The GPU-hours, dollars and kWh of the whole run in one pool."""

    gpu: str
    num_gpus: NotNegative
    """Mean number of paid GPUs."""
    is_owned: bool
    gpu_hours: NotNegative
    """GPU-hours that are billed."""
    dollars: NotNegative
    kwh: NotNegative | None
    """Energy of the GPUs alone; None if there is no power data."""


class SandboxTotal(msgspec.Struct, frozen=True, kw_only=True):
    """The CPU sandboxes of the whole run."""

    sandboxes: Count
    hours: NotNegative
    """Sandbox-hours that are billed."""
    dollars: NotNegative


class WholeRun(msgspec.Struct, frozen=True, kw_only=True):
    """The time and cost of all training steps."""

    steps: Count
    """`algorithm.steps` plus the steps that staleness adds (`plan.staleness_cost`)."""
    seconds: NotNegative
    seconds_interval: Interval | None
    """95 % interval (sampling error), from the interval of the mean step; None if too few steps count."""
    seconds_band: Band | None = None
    """Range in which they may truly be, with sampling error and model error; None if an earlier version wrote the
    file."""
    dollars: NotNegative
    dollars_interval: Interval | None
    dollars_band: Band | None = None
    gpu_hours: NotNegative
    pools: dict[str, PoolTotal]
    """Totals of each paid pool, by name."""
    sandboxes: SandboxTotal | None = None
    """Sandboxes of episodes; None if their number is not limited, or without an environment."""
    egress: Number
    """Dollars for the weights that cross links."""
    storage: Number = 0.0
    """Dollars for storage."""
    setup_time: NotNegative = 0.0
    """Seconds for which GPUs are rented before the first step. They are not part of `seconds`."""
    failed_time: NotNegative = 0.0
    """Seconds of failed attempts that are repeated. They are not part of `seconds`."""
    uncounted: list[str] = []
    """Parts of the bill that are zero, because the run file does not set their keys."""
    assumed: list[Assumed] = []
    """Prices, links and lengths that a profile or a default supplied."""
    start_time: NotNegative
    """Extra seconds of the first steps, compared with mean steps, up to the first step that is not longer. Replicas
    start then, and no rollouts are ready. Later steps before the steady state count only in `seconds`."""
    start_time_interval: Interval | None = None
    """95 % interval of `start_time`, from the interval of the mean step."""
    checkpoint_time: NotNegative
    """Seconds of all checkpoints."""
    num_evaluations: Count = 0
    """Evaluations for which training waits."""
    evaluation_time: NotNegative = 0.0
    """Seconds of all of them. They are part of `seconds`."""
    evaluation_dollars: NotNegative = 0.0
    """Dollars of the GPUs in these seconds, at the prices of a mean step. They are part of `dollars`."""
    tokens: NotNegative
    """Output tokens trained on."""
    rollouts: Count
    """Rollouts trained on."""
    kwh: NotNegative | None
    """Energy of all paid GPUs, without the rest of their nodes; None if one has no power data."""
    unknown_power: list[str]
    """GPUs without power data for a kind of work that they do."""

    def wall_time_of(self, seconds: Seconds) -> Seconds:
        """Return the wall time of a run that takes some seconds, with set-up and failed attempts."""
        failed = self.failed_time / self.seconds if self.seconds else 0.0
        return self.setup_time + seconds * (1 + failed)

    @property
    def wall_time(self) -> float:
        """Seconds that the user waits for the end of the run: `seconds`, set-up and failed attempts."""
        return self.wall_time_of(self.seconds)

    @property
    def wall_time_interval(self) -> tuple[float, float] | None:
        """95 % interval of `wall_time`."""
        if self.seconds_interval is None:
            return None
        least, most = self.seconds_interval
        return self.wall_time_of(least), self.wall_time_of(most)

    @property
    def wall_time_band(self) -> Band | None:
        """Range in which `wall_time` may truly be."""
        if (band := self.seconds_band) is None:
            return None
        return Band(low=self.wall_time_of(band.low), high=self.wall_time_of(band.high))


class WholeTime(NamedTuple):
    """The steps and seconds of a whole run."""

    steps: int
    num_before: int
    """Number of steps at the start that count with their own seconds, not with the mean."""
    seconds: float
    interval: tuple[float, float] | None
    """95 % interval; None if too few steps count."""
    sampled: tuple[float, float]
    """Range by sampling error alone; see `Speed.sampled`."""
    start_time: float
    start_interval: tuple[float, float] | None
    checkpoint_time: float
    rented: float
    """Seconds for which GPUs are rented: `seconds`, set-up and failed attempts."""
    num_evaluations: int
    evaluation_time: float
    """Number and seconds of the evaluations for which training waits."""
    exact_steps: float
    """Number of steps before it is rounded up."""


def whole_time(run: Run, speed: Speed, *, is_recorded: bool = False) -> WholeTime:
    """Return the steps and seconds of a whole run.

    Args:
        run: the run file.
        speed: its steps, and the mean of the steady state.
        is_recorded: whether these are steps of a real run. Then every step counts with its own
            seconds, and checkpoints are part of them.
    """
    steps = _num_steps(run.algorithm.steps, run.plan, speed.mean_staleness)
    as_they_were = len(speed.step_times) if is_recorded else speed.counted_steps[0] - 1
    num_before = min(as_they_were, steps)
    before, rest = sum(speed.step_times[:num_before]), steps - num_before
    checkpoints = -(-steps // run.execute.checkpoint_every)
    saving = 0.0 if is_recorded else checkpoints * run.framework.checkpoint_time
    num_evaluations = 0
    if run.evaluation is not None and speed.evaluation_time:
        due = run.evaluation.versions(steps)
        num_evaluations = speed.num_evaluations if is_recorded else len(due)
    evaluating = num_evaluations * speed.evaluation_time
    known = before + saving + evaluating
    start, (least, most) = speed.step_times[:num_before], speed.sampled
    sampled = (known + rest * least, known + rest * most)
    has_interval = speed.step_time_interval is not None
    start_interval = (_start_delay(start, most), _start_delay(start, least))
    seconds = known + rest * speed.step_time
    return WholeTime(
        steps,
        num_before,
        seconds,
        sampled if has_interval else None,
        sampled,
        _start_delay(start, speed.step_time),
        start_interval if has_interval else None,
        saving,
        rented_time(run.cluster.billing, seconds),
        num_evaluations,
        evaluating,
        run.algorithm.steps * steps_for_one(run.plan, speed.mean_staleness),
    )


def _start_delay(step_times: Sequence[float], step_time: float) -> float:
    """Return the extra seconds of the first steps, up to the first step that is not longer than the mean.

    Later steps are not part of the start. They are shorter if they train on rollouts that were generated
    in the meantime, and otherwise they differ from the mean by chance.
    """
    longer = takewhile(lambda seconds: seconds > step_time, step_times)
    return sum((seconds - step_time for seconds in longer), 0.0)


def whole_dollars(speed: Speed, time: WholeTime) -> float:
    """Return the dollars of a whole run: GPUs are paid by time, egress by step, and both as they are billed."""
    rent = (speed.cost_per_step - speed.egress_per_step) / speed.step_time
    return (time.seconds * rent + time.steps * speed.egress_per_step) * speed.billing_ratio


def with_bill(cluster: ClusterConfig, speed: Speed, time: WholeTime, paid: PaidGpus) -> Speed:
    """Return figures with the ratios of the whole run's bill and of its time."""
    egress, steady = speed.egress_per_step, time.exact_steps * speed.step_time
    if adds_nothing(cluster):
        return speed
    steady_egress = time.exact_steps * egress
    found: Speed = replace(
        speed,
        billing_ratio=billing_ratio(cluster, paid.rents, time.steps * egress, time.seconds),
        steady_billing_ratio=billing_ratio(cluster, paid.rents, steady_egress, steady),
        rented_ratio=rented_time(cluster.billing, steady) / steady,
    )
    return found


def make_whole_run(
    trace: Trace,
    speed: Speed,
    shares: SidesAttribution,
    paid: PaidGpus,
    error: ModelError | None,
) -> WholeRun:
    """Return the totals of the whole run.

    Args:
        trace: the trace of the run.
        speed: its figures in the steady state.
        shares: its activities in the steady state.
        paid: the GPUs that it pays for in the steady state.
        error: the model error of its seconds; None for a real run.
    """
    run, billing = trace.run, trace.run.cluster.billing
    time = whole_time(run, speed, is_recorded=trace.world == "real")
    rents, egress = paid.rents, time.steps * speed.egress_per_step

    def bill(seconds: float) -> Bill:
        return bill_of(run.cluster, rents, egress, seconds)

    is_real = trace.world == "real"
    lengths = None if is_real else run.workload.lengths
    modelled = [] if is_real else assumed_of_model(run.model, run.rollout.dtype)
    failing = []
    if not is_real and can_fail(run):
        restart = run.trainer.start_time if run.failures.trainers else None
        failing = assumed_of_failures(run.rollout.start_time, restart)
    billed, band = bill(time.seconds), band_of(time.seconds, time.sampled, error)
    energy = read_energy(paid, shares)
    pools = dict(_pool_totals(paid, billed, time.rented, energy.watts))
    known = [pool.kwh for pool in pools.values() if pool.kwh is not None]
    trained = speed.step_tokens[: time.num_before]
    usual = speed.step_time * speed.goodput
    least, most = time.interval or (time.seconds, time.seconds)
    return WholeRun(
        steps=time.steps,
        seconds=time.seconds,
        seconds_interval=time.interval,
        seconds_band=band,
        dollars=billed.total,
        dollars_interval=None if time.interval is None else (bill(least).total, bill(most).total),
        dollars_band=Band(low=bill(band.low).total, high=bill(band.high).total),
        gpu_hours=sum(pool.gpu_hours for pool in pools.values()),
        pools=pools,
        sandboxes=_sandbox_total(run.environment, billed, time.rented),
        egress=billed.egress,
        storage=billed.storage,
        setup_time=float(billing.setup_time),
        failed_time=time.seconds * billing.failed_share,
        uncounted=uncounted(run.cluster),
        assumed=assumed_of(run.cluster, lengths, paid.used) + modelled + failing,
        start_time=time.start_time,
        start_time_interval=time.start_interval,
        checkpoint_time=time.checkpoint_time,
        num_evaluations=time.num_evaluations,
        evaluation_time=time.evaluation_time,
        evaluation_dollars=time.evaluation_time * paid.dollars_per_second,
        tokens=sum(trained) + (time.steps - len(trained)) * usual,
        rollouts=round(time.steps * speed.step_time * speed.samples_per_second),
        kwh=sum(known) if len(known) == len(pools) else None,
        unknown_power=energy.unknown,
    )


def _sandbox_total(
    config: EnvironmentConfig | None, bill: Bill, rented: float
) -> SandboxTotal | None:
    if config is None or config.sandboxes is None:
        return None
    return SandboxTotal(
        sandboxes=config.sandboxes,
        hours=config.sandboxes * rented / SECONDS_PER_HOUR,
        dollars=bill.pools.get(SANDBOXES, 0.0),
    )


def _pool_totals(
    paid: PaidGpus, bill: Bill, rented: float, watts: Mapping[str, float | None]
) -> Iterator[tuple[str, PoolTotal]]:
    """Yield the totals of each paid pool. GPUs use power while they are rented."""
    for name, count in paid.by_pool.items():
        pool, of_pool = paid.pools[name], watts[name]
        yield (
            name,
            PoolTotal(
                gpu=pool.gpu,
                num_gpus=count,
                is_owned=pool.owned,
                gpu_hours=count * billed_time(pool, rented) / SECONDS_PER_HOUR,
                dollars=bill.pools[name],
                kwh=None if of_pool is None else of_pool * rented / SECONDS_PER_HOUR / 1e3,
            ),
        )


def steps_for_one(plan: PlanConfig, lag: Lag) -> Lag:
    """Return the steps that stale training needs for one step without staleness.

    The formula is 1 + staleness_cost / 100 x lag, with `plan.staleness_cost` in percent for each version.

    Args:
        plan: the section `[plan]`.
        lag: mean staleness in versions, of one run or of many.
    """
    return 1 + plan.staleness_cost / 100 * lag


def _num_steps(steps: int, plan: PlanConfig, mean_staleness: float) -> int:
    """Return the steps of the training with the steps that its staleness adds."""
    longer = steps_for_one(plan, mean_staleness)
    return ceil(round(steps * longer, NEGLIGIBLE))
