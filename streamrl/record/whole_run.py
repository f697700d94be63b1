"""Compute the totals of a whole run: seconds, GPU-hours, dollars, tokens and kWh of all training steps.

The whole run: all training steps with their start and checkpoints, in seconds, GPU-hours, dollars, tokens and kWh.

    seconds  =  steps before the steady state, as they were  +  all others x mean step  +  checkpoints

The mean step is that of the steady state, and its 95 % interval is where the total's comes from: neither lengths that
drift unforeseen nor an error of the costs is in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from math import ceil
from typing import Literal, NamedTuple, TypeAlias, TypeVar

import msgspec

from streamrl.engine.trace import Trace
from streamrl.hardware.operator_tables import Floats
from streamrl.hardware.profiles import load_gpu, price_of
from streamrl.record.attribution import SHARED, Attribution, SidesAttribution
from streamrl.record.charges import PaidGpus, PaidSide
from streamrl.record.steady_state import Speed
from streamrl.runfile.config import Run
from streamrl.runfile.plan_config import PlanConfig
from streamrl.runfile.units import SECONDS_PER_HOUR

Work: TypeAlias = Literal["generating", "training", "idle"]
WORK_OF: dict[str, Work] = {
    "prefill": "generating",
    "decode": "generating",
    "underfilled": "generating",
    "verify": "generating",
    "score": "training",
    "train": "training",
}
"""Whose watts stand for an activity: a reward model reads rollouts as prefill does, and scores are passes of the trainer."""


class Energy(NamedTuple):
    """Watts of all GPUs that are paid for."""

    watts: dict[str, float | None]
    """By pool; None where they are not known."""
    unknown: list[str]
    """GPUs whose watts are not known for what they do."""


def read_energy(paid: PaidGpus, shares: SidesAttribution) -> Energy:
    """Return the mean watts of every pool that is paid for.

    Args:
        paid: GPUs of each pool; those that no side uses are idle.
        shares: what each side does, of its own GPU-seconds.
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
    """Yield what how many GPUs of a pool do on average."""
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
"""Versions that rollouts are behind, of one run or of many."""
NEGLIGIBLE = 6
"""Digits behind the point beyond which a step is rounding: 10 % more of 100 steps are 110."""


class PoolTotal(msgspec.Struct, frozen=True, kw_only=True):
    """What the whole run takes of one pool."""

    gpu: str
    num_gpus: float
    """GPUs that are paid for, on average."""
    is_owned: bool
    gpu_hours: float
    dollars: float
    kwh: float | None
    """Of its GPUs alone; None where no watts of theirs are known."""


class WholeRun(msgspec.Struct, frozen=True, kw_only=True):
    """What all training steps take and cost."""

    steps: int
    """`algorithm.steps`, and those that staleness adds (`plan.staleness_cost`)."""
    seconds: float
    seconds_interval: tuple[float, float] | None
    """95 % interval, from that of the mean step; None where too few steps count."""
    dollars: float
    dollars_interval: tuple[float, float] | None
    gpu_hours: float
    pools: dict[str, PoolTotal]
    """By name, those that are paid for."""
    egress: float
    """Dollars of weights that cross links."""
    start_time: float
    """Seconds by which the steps at the start are longer than mean ones, up to the first that is not: replicas come up,
    and nothing is generated yet. What later steps before the steady state take more or less is in `seconds` alone."""
    start_time_interval: tuple[float, float] | None = None
    """95 % interval of that, from that of the mean step."""
    checkpoint_time: float
    """Seconds of all checkpoints."""
    tokens: float
    """Output tokens trained on."""
    rollouts: int
    """Rollouts trained on."""
    kwh: float | None
    """Of all GPUs that are paid for, nothing else of their nodes; None where watts of one are not known."""
    unknown_power: list[str]
    """GPUs whose watts are not known for what they do."""


class WholeTime(NamedTuple):
    """The steps and seconds of a whole run."""

    steps: int
    num_before: int
    """Of them, those at the start that count as they were."""
    seconds: float
    interval: tuple[float, float] | None
    start_time: float
    start_interval: tuple[float, float] | None
    checkpoint_time: float


def whole_time(run: Run, speed: Speed, *, is_recorded: bool = False) -> WholeTime:
    """Return what all steps of a run take.

    Args:
        run: the run file.
        speed: its steps, and what is known of a steady one.
        is_recorded: whether its steps are those of a real run, each of which took what it took.
    """
    steps = _num_steps(run.algorithm.steps, run.plan, speed.mean_staleness)
    as_they_were = len(speed.step_times) if is_recorded else speed.counted_steps[0] - 1
    num_before = min(as_they_were, steps)
    before, rest = sum(speed.step_times[:num_before]), steps - num_before
    checkpoints = -(-steps // run.execute.checkpoint_every)
    saving = 0.0 if is_recorded else checkpoints * run.framework.checkpoint_time
    known = before + saving
    start, interval, start_interval = speed.step_times[:num_before], None, None
    if speed.step_time_interval is not None:
        least, most = speed.step_time_interval
        interval = (known + rest * least, known + rest * most)
        start_interval = (_held_up(start, most), _held_up(start, least))
    return WholeTime(
        steps,
        num_before,
        known + rest * speed.step_time,
        interval,
        _held_up(start, speed.step_time),
        start_interval,
        saving,
    )


def _held_up(step_times: Sequence[float], step_time: float) -> float:
    """Return the seconds by which the first steps are longer than a mean one, up to the first that is not.

    Steps that follow are shorter than mean ones where they train on what was generated meanwhile, and as long as they
    were by chance: neither is the start's.
    """
    longer = takewhile(lambda seconds: seconds > step_time, step_times)
    return sum((seconds - step_time for seconds in longer), 0.0)


def whole_dollars(speed: Speed, time: WholeTime, seconds: float) -> float:
    """Return the dollars of a whole run that takes `seconds`: GPUs by the second, egress by the step."""
    rent = (speed.cost_per_step - speed.egress_per_step) / speed.step_time
    return seconds * rent + time.steps * speed.egress_per_step


def make_whole_run(
    trace: Trace, speed: Speed, shares: SidesAttribution, num_replicas: float
) -> WholeRun:
    """Return what the whole run takes, whose steady state has these figures, shares of sides and replicas."""
    run = trace.run
    time = whole_time(run, speed, is_recorded=trace.world == "real")
    hours = time.seconds / SECONDS_PER_HOUR
    paid = PaidGpus.of(run, num_replicas)
    energy = read_energy(paid, shares)
    pools = {}
    for name, count in paid.by_pool.items():
        pool, watts = run.cluster.pools[name], energy.watts[name]
        pools[name] = PoolTotal(
            gpu=pool.gpu,
            num_gpus=count,
            is_owned=pool.owned,
            gpu_hours=count * hours,
            dollars=count * hours * price_of(pool),
            kwh=None if watts is None else watts * hours / 1e3,
        )
    known = [pool.kwh for pool in pools.values() if pool.kwh is not None]
    trained = speed.step_tokens[: time.num_before]
    usual = speed.step_time * speed.goodput
    return WholeRun(
        steps=time.steps,
        seconds=time.seconds,
        seconds_interval=time.interval,
        dollars=whole_dollars(speed, time, time.seconds),
        dollars_interval=None
        if time.interval is None
        else (
            whole_dollars(speed, time, time.interval[0]),
            whole_dollars(speed, time, time.interval[1]),
        ),
        gpu_hours=sum(pool.gpu_hours for pool in pools.values()),
        pools=pools,
        egress=time.steps * speed.egress_per_step,
        start_time=time.start_time,
        start_time_interval=time.start_interval,
        checkpoint_time=time.checkpoint_time,
        tokens=sum(trained) + (time.steps - len(trained)) * usual,
        rollouts=round(time.steps * speed.step_time * speed.samples_per_second),
        kwh=sum(known) if len(known) == len(pools) else None,
        unknown_power=energy.unknown,
    )


def steps_for_one(plan: PlanConfig, lag: Lag) -> Lag:
    """Return the steps that a training needs for one whose rollouts are not behind: `staleness_cost` more a version.

    Args:
        plan: the section `[plan]`.
        lag: mean staleness, of one run or of many.
    """
    return 1 + plan.staleness_cost / 100 * lag


def _num_steps(steps: int, plan: PlanConfig, mean_staleness: float) -> int:
    """Return the steps of the training, with those that its staleness adds."""
    longer = steps_for_one(plan, mean_staleness)
    return ceil(round(steps * longer, NEGLIGIBLE))
