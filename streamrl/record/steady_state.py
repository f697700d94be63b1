"""Find the steady state of a run and the mean step time over it, with its confidence interval.

How well the mean of a sequence that goes on alike is known, where its values depend on those before them.

Non-overlapping batch means (Law, Simulation Modeling and Analysis, 9.5): means of long batches hardly depend on each
other, so their spread tells that of the whole mean. What dependence is left, their lag-1 correlation r tells: as in
Skart (Tafazzoli and Wilson 2011) the variance grows by (1 + r) / (1 - r), that of an autoregressive sequence. Where
r is below 0 nothing is taken off.

The steady state of a run: which of its steps count, their mean time, and how well that is known.

    steps   1 … first      transient: replicas come up, nothing is generated ahead yet
            … last         the steady state: every figure of a run is taken over it
            … the end      what was under way when the record was cut, or winds down

The transient ends where the marginal standard error of what is left is least (MSER-5: White 1997, Franklin and White
2008), in the steps' seconds and in the rollouts generated meanwhile: whichever settles later. At least half of all
steps are kept; where the least lies there, the transient may go on. How well the mean is known, batch means say.

Where lengths drift there is no steady state: every step after the first counts, and the interval is that of the
scatter about the drift, which is linear.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import lcm, sqrt

import msgspec
import numpy as np

from streamrl.engine.messages import (
    CheckpointSaved,
    Command,
    Event,
    Generated,
    ReplicaLost,
    RunStarted,
    Stepped,
    TrainerLost,
)
from streamrl.engine.presets import choose_system
from streamrl.engine.trace import Trace
from streamrl.engine.trainer_side import LEADER
from streamrl.hardware.operator_tables import Floats
from streamrl.runfile.failure_rates import can_fail, expected_losses
from streamrl.runfile.policies_config import PoliciesConfig
from streamrl.runfile.simulation_config import FaultConfig

BATCHES = 20
"""Batch means: fewer make Student's t wide, and 10 to 30 are what is gained by (Schmeiser 1982)."""
LEAST_BATCHES = 10
"""Below which a lag-1 correlation says nothing, so that there is no interval."""
MOST_CORRELATION = 0.9
"""Past which the variance of an autoregressive sequence cannot be told from so few batches."""
LEAST_FREEDOM = 3.0
ROUNDING = 1e-9
"""Share of the largest mean by which means that are alike differ for the order of their sums."""
NORMAL = 1.959963984540054
"""The 97.5 % quantile of the normal distribution."""


def half_width(values: Sequence[float] | Floats) -> float | None:
    """Return half the 95 % interval of a mean; None of fewer than `LEAST_BATCHES` values.

    Args:
        values: in order of time, without the transient.
    """
    means = _batch_means(np.asarray(values, dtype=float))
    num = len(means)
    if num < LEAST_BATCHES:
        return None
    variance = float(means.var(ddof=1))
    if sqrt(variance) <= ROUNDING * float(np.abs(means).max()):
        return 0.0
    correlation = min(max(0.0, _correlation(means)), MOST_CORRELATION)
    grows = (1 + correlation) / (1 - correlation)
    freedom = max(LEAST_FREEDOM, (num - 1) / grows)
    return student(freedom) * sqrt(variance * grows / num)


def student(freedom: float) -> float:
    """Return the 97.5 % quantile of Student's t: Cornish and Fisher's expansion, within 0.1 % from 4 degrees on.

    Source: Abramowitz and Stegun 26.7.5.
    """
    z, v = NORMAL, freedom
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    )


def _batch_means(values: Floats) -> Floats:
    """Return the means of `BATCHES` batches or a few more; values at the start that fill none are left out."""
    size = max(1, len(values) // BATCHES)
    num = len(values) // size
    means: Floats = values[len(values) - num * size :].reshape(num, size).mean(axis=1)
    return means


def _correlation(means: Floats) -> float:
    """Return the lag-1 correlation, without the bias of so few: an estimate of r is low by (1 + 3 r) / n."""
    num, rest = len(means), means - means.mean()
    found = float(rest[1:] @ rest[:-1]) / float(rest @ rest)
    return (num * found + 1) / (num - 3)


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of seconds and dollars, which need only steps and rollouts."""

    step_time: float
    """Mean seconds of a step in the steady state, over which all these figures are taken."""
    step_time_interval: tuple[float, float] | None
    """95 % interval of that mean; None where too few steps count."""
    median_step_time: float
    """Median seconds of a step."""
    step_times: list[float]
    """Seconds of every step from the first on."""
    step_tokens: list[int] = []
    """Output tokens that each of them trained on."""
    counted_steps: tuple[int, int]
    """First and last of these steps that count."""
    steps_before: int = 0
    """Steps of the training before the first of these, made before a resume."""
    note: str
    """Why the figures are not those of a steady state with the requested precision; empty if they
    are.
    """
    unfinished: str = ""
    """After which step the run stopped early, and why; empty if it did not."""
    throughput: float
    """Output tokens generated per second: those of steps, and those lost in the meantime."""
    goodput: float
    """Output tokens trained on per second."""
    samples_per_second: float
    """Rollouts trained on per second."""
    cost_per_step: float
    """Dollars of a mean step: for all paid GPUs, and for link traffic."""
    egress_per_step: float = 0.0
    """Dollars of that for link traffic (`price_per_gb`)."""
    cost_per_million_tokens: float
    """Dollars for a million tokens trained on."""
    mean_staleness: float
    """Mean number of versions that a rollout was behind when the primary trainer trained on it."""

    @property
    def spread(self) -> tuple[float, float]:
        """Return the ends of the interval relative to the mean; 1 and 1 where there is none."""
        if self.step_time_interval is None:
            return 1.0, 1.0
        least, most = self.step_time_interval
        return least / self.step_time, most / self.step_time


MSER_SIZE = 5
"""Values per mean, as White recommends for truncation."""
NEGLIGIBLE = 1e-6
"""Standard error, as a share, below which steps are alike: what rounding leaves of equal ones is less."""
LEAST_STEPS = 20
"""Steps below which the end of a transient is not looked for: half of them must make up `LEAST_BATCHES` batches, and
of fewer than four means of five the least error is luck. `START` steps are left out then, at most half of them."""
START = 3
"""Steps left out at the start of a short run. Where generation runs ahead, the first step fills
replicas and the next ones are shorter than in the steady state. With these steps, runs of six
steps look 13 to 17 % faster than the steady state; without them, 1 %.
"""


@dataclass(frozen=True, kw_only=True)
class Steady:
    """The counted steps of a run, and their mean time."""

    first: int
    """Number of steps left out at the start."""
    last: int
    """Index of the last counted step."""
    step_time: float
    """Mean seconds of a step."""
    half_width: float | None
    """Half of its 95 % interval in seconds; None where too few steps count."""
    has_settled: bool = True
    """Whether the end of the transient was found."""

    @property
    def interval(self) -> tuple[float, float] | None:
        """Return the 95 % interval of the mean step time; None where too few steps count."""
        if self.half_width is None:
            return None
        return max(0.0, self.step_time - self.half_width), self.step_time + self.half_width

    def is_within(self, share: float) -> bool:
        """Whether the mean is known within a share of itself, and the transient is over."""
        is_known = self.half_width is not None and self.half_width <= share * self.step_time
        return is_known and self.has_settled


def find_steady(
    durations: Sequence[float] | Floats,
    generated: Sequence[float] = (),
    *,
    cycle: int = 1,
    left_out: int = 0,
    drifts: bool = False,
) -> Steady:
    """Find the steps that count.

    Args:
        durations: seconds of each step, at least one.
        generated: rollouts generated in each step's time.
        cycle: steps after which their make-up repeats; only whole cycles are compared.
        left_out: steps at the end that do not count where there are more of them.
        drifts: whether lengths drift over the whole run.
    """
    last = len(durations) - left_out if len(durations) > left_out + 1 else len(durations)
    first, has_settled = 0, True
    if drifts or last < max(LEAST_STEPS, 2 * MSER_SIZE * cycle):
        first = min(1 if drifts else START, last // 2)
    else:
        for values in (durations, generated):
            end, is_over = end_of_transient(_cycle_means(values[:last], cycle))
            first, has_settled = max(first, end * cycle), has_settled and is_over
    found = count_steps(durations, first, last, cycle=cycle, drifts=drifts)
    return replace(found, has_settled=has_settled)


def count_steps(
    durations: Sequence[float] | Floats,
    first: int,
    last: int,
    *,
    cycle: int = 1,
    drifts: bool = False,
) -> Steady:
    """Take the steps after `first` up to `last` for the steady state; see `find_steady` for the rest."""
    counted = np.asarray(durations[first:last], dtype=float)
    values = _without_trend(counted) if drifts else counted
    return Steady(
        first=first,
        last=last,
        step_time=float(counted.mean()),
        half_width=half_width(_cycle_means(values, cycle)),
    )


def end_of_transient(values: Sequence[float] | Floats) -> tuple[int, bool]:
    """Return how many values at the start belong to a transient, and whether it is over within their first half."""
    num = len(values) // MSER_SIZE
    if num < 2:
        return 0, True
    means = np.asarray(values[: num * MSER_SIZE], dtype=float).reshape(num, MSER_SIZE).mean(axis=1)
    left = np.arange(num, 0, -1)
    rest = means - means.mean()  # sums of squares keep their digits
    sums, squares = rest[::-1].cumsum()[::-1], (rest**2)[::-1].cumsum()[::-1]
    half = num // 2
    errors = (np.maximum(0.0, squares - sums**2 / left) / left**2)[: half + 1]
    place = int((errors <= errors.min() + (NEGLIGIBLE * values[-1]) ** 2).argmax())
    return place * MSER_SIZE, place < half


def _cycle_means(values: Sequence[float] | Floats, cycle: int) -> Floats:
    """Return the mean of each whole cycle."""
    num = len(values) // cycle
    means: Floats = np.asarray(values[: num * cycle], dtype=float).reshape(num, cycle).mean(axis=1)
    return means


def _without_trend(values: Floats) -> Floats:
    """Return values minus their linear trend."""
    if len(values) < LEAST_BATCHES:
        return values
    places = np.arange(len(values)) - (len(values) - 1) / 2
    slope = float(places @ values) / float(places @ places)
    rest: Floats = values - slope * places
    return rest


def read_steps(trace: Trace) -> LeaderSteps:
    """Read the steps of the primary trainer from a trace."""
    steps = LeaderSteps()
    for time, event, commands in trace.entries:
        steps.record(time, event, commands)
    return steps


OF_STEPS = {Generated, Stepped, CheckpointSaved, RunStarted, TrainerLost, ReplicaLost}
"""Events that say something of steps: most do not, and every one passes here."""


class LeaderSteps:
    """The primary trainer's steps so far, without those that were rolled back.

    The first step after a loss lasts from the end of the last step that was kept.
    """

    def __init__(self) -> None:
        self.ended_at = array("d")
        self.num_generated = array("q")
        """Rollouts that ended in each step's time."""
        self.num_made = 0
        """Steps that were made, taken back or not."""
        self.num_failures = 0
        """Replicas and trainers that were lost."""
        self.num_before = 0
        """Steps of the training before the first of these, which legs before this one made."""
        self._num_saved = 0
        self._generated = 0
        self._generated_before = 0

    def __len__(self) -> int:
        return len(self.ended_at)

    @property
    def version(self) -> int:
        """The newest version that stayed."""
        return self.num_before + len(self)

    def record(self, time: float, event: Event, commands: list[Command]) -> None:
        """Take one entry of a trace."""
        if type(event) not in OF_STEPS:
            return
        match event:
            case Generated():
                self._generated += event.finish != "aborted"
            case Stepped(_, trainer) if trainer == LEADER:
                self._end_step(time)
            case CheckpointSaved(version, trainer) if trainer == LEADER:
                self._num_saved = version - self.num_before
            case RunStarted(version):
                self.num_before = version
            case TrainerLost(trainer):
                self.num_failures += 1
                if trainer == LEADER:
                    del self.ended_at[self._num_saved :]
                    del self.num_generated[self._num_saved :]
            case ReplicaLost():
                self.num_failures += 1
            case _:
                pass  # says nothing of steps

    def durations(self) -> Floats:
        """Return the seconds of each step: those since the one before it."""
        return np.diff(np.array(self.ended_at), prepend=0.0)

    def _end_step(self, time: float) -> None:
        self.ended_at.append(time)
        self.num_made += 1
        self.num_generated.append(self._generated - self._generated_before)
        self._generated_before = self._generated


LEAST_FAILURES = 10
"""Failures whose number is known within a third, so that their share in a step's seconds is no luck."""


def find_steady_of(trace: Trace, steps: LeaderSteps) -> Steady:
    """Find which of a trace's steps count.

    An endless run leaves out the step that was under way when it was cut. A complete run leaves out
    the last steps, during which nothing more is generated, if enough other steps remain.
    """
    run, num_steps = trace.run, len(steps)
    left_out = 0
    if trace.is_endless:
        left_out = 1
    elif num_steps >= run.algorithm.steps:
        ahead = choose_system(run.policies).staleness_bound
        left_out = ahead if num_steps - ahead >= LEAST_STEPS else 0
    return find_steady_so_far(run.policies, run.faults, steps, left_out, drifts=_drifts(trace))


def find_steady_so_far(
    policies: PoliciesConfig,
    faults: tuple[FaultConfig, ...],
    steps: LeaderSteps,
    left_out: int,
    *,
    drifts: bool = False,
) -> Steady:
    """Find which of the steps that were made count, `left_out` at the end aside.

    Of the steps of a run with planned faults none stands for others, so that their mean has no interval.
    """
    found = find_steady(
        steps.durations(),
        steps.num_generated,
        cycle=lcm(
            policies.sync_every, 1 if policies.tail_batching == "none" else policies.tail_every
        ),
        left_out=left_out,
        drifts=drifts,
    )
    return replace(found, half_width=None) if faults else found


def describe_unfinished(steps: int, version: int, stopped_for: str) -> str:
    """Say after which step a run stopped before its last one, and why; nothing where it did not.

    Args:
        steps: steps of the whole run.
        version: the newest one that it made.
        stopped_for: why it stopped; empty where it did not. A simulation may go on past the last step.
    """
    if not stopped_for or version >= steps:
        return ""
    return f"stopped after step {version} of {steps}: {stopped_for}"


def steady_state_caveats(trace: Trace, steps: LeaderSteps, steady: Steady, unfinished: str) -> str:
    """Say what keeps the figures from being those of a steady state as exactly known as was asked for.

    Args:
        trace: what its header says; its entries are not looked at.
        steps: of its leader.
        steady: those that count.
        unfinished: what `describe_unfinished` gives.
    """
    doubts = [f"the run {unfinished}"] if unfinished else []
    if trace.is_cut:
        doubts.append("the trace ends inside a line, and what came after is not known")
    if trace.leg > 1:
        doubts.append(
            f"leg {trace.leg} alone of a run that was resumed, after its step {steps.num_before}; "
            "the whole run is reckoned at its pace"
        )
    if _drifts(trace):
        return "; ".join(
            [
                *doubts,
                _tell_drift(trace.run.algorithm.steps, trace.run.faults, steady),
                *_tell_late(trace.run.faults, steps),
            ]
        )
    if not steady.has_settled:
        doubts.append(f"no steady state was found in {steady.last} steps")
    if steady.half_width is None:
        num, verb = (
            steady.last - steady.first,
            "counts" if steady.last - steady.first == 1 else "count",
        )
        doubts.append(f"{num} step{'s' * (num != 1)} {verb}, too few for an interval")
    elif (
        trace.is_endless
        and steps.num_made > trace.run.simulate.max_steps
        and not steady.is_within(share := trace.run.simulate.interval)
    ):
        doubts.append(
            f"simulate.max_steps={trace.run.simulate.max_steps} came before the interval of "
            f"{share:.2g} that is wanted (simulate.interval)"
        )
    if can_fail(trace.run) and trace.is_endless:
        doubts += [*_tell_failures(steps), *_tell_restarts(trace, steady)]
    return "; ".join(doubts)


def _tell_drift(steps: int, faults: tuple[FaultConfig, ...], steady: Steady) -> str:
    counted = steady.last - steady.first
    why = "faults are planned" if faults else "lengths drift"
    told = f"{why}: figures are the mean over {counted} steps"
    if steady.last < steps:
        return f"{told}, which drift as far as the {steps} of the training"
    return told


def _tell_late(faults: tuple[FaultConfig, ...], steps: LeaderSteps) -> Iterator[str]:
    for number, fault in enumerate(faults):
        if fault.time is not None and fault.time > steps.ended_at[-1]:
            yield f"faults.{number} never struck: the run was over before its time"


def _tell_restarts(trace: Trace, steady: Steady) -> Iterator[str]:
    """Say that the run, as long as it is, will lose more than it replaces."""
    run = trace.run
    losses, most = expected_losses(run, steady.step_time), run.policies.max_restarts
    if losses.mean > most:
        yield (
            f"all {run.algorithm.steps:,} steps lose {losses.mean:,.3g} {losses.what} on average, and "
            f"policies.max_restarts={most} stops the run before its end"
        )


def _tell_failures(steps: LeaderSteps) -> list[str]:
    if steps.num_failures >= LEAST_FAILURES:
        return []
    seen = "1 failure was" if steps.num_failures == 1 else f"{steps.num_failures} failures were"
    return [f"{seen} seen, too few for their share to be in the interval"]


def _drifts(trace: Trace) -> bool:
    return trace.world == "simulated" and not trace.run.has_steady_state
