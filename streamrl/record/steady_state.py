"""Find the steady state of a run and the mean step time over it, with its confidence interval.

    steps   1 … first      transient: replicas start, and nothing is generated ahead yet
            … last         steady state: every figure of a run is computed over these steps
            … the end      the run winds down, or its record was cut here

The transient ends where the marginal standard error of the remaining steps is smallest (MSER-5: White
1997, Franklin and White 2008). This is computed for the seconds of the steps and for the rollouts
generated in them. The later end counts. At least half of all steps are kept. If the minimum is at the
half, the transient may not be over.

Steps depend on the steps before them. So the interval of the mean comes from non-overlapping batch means
(Law, Simulation Modeling and Analysis, 9.5): means of long batches hardly depend on each other. Their
lag-1 correlation r corrects for the remaining dependence. As in Skart (Tafazzoli and Wilson 2011), the
variance grows by (1 + r) / (1 - r), the factor of an autoregressive sequence. A negative r counts as 0.

If lengths drift, there is no steady state. Then every step after the first counts, and the interval
comes from the deviations from a linear trend.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import lcm, sqrt

import msgspec
import numpy as np

from streamrl.engine.messages import (
    HELD_OUT,
    UNFINISHED,
    CheckpointSaved,
    Command,
    EndEvaluation,
    Evaluated,
    EvaluationDrawn,
    Event,
    Failed,
    Generated,
    ReplicaLeaving,
    ReplicaLost,
    RunStarted,
    Stepped,
    TrainerLost,
    Verified,
)
from streamrl.engine.presets import choose_system
from streamrl.engine.trace import Trace
from streamrl.engine.trainer_side import LEADER
from streamrl.hardware.operator_tables import Floats
from streamrl.runfile.evaluation_config import EvaluationConfig
from streamrl.runfile.failure_rates import can_fail, expected_losses
from streamrl.runfile.policies_config import PoliciesConfig
from streamrl.runfile.simulation_config import FaultConfig

BATCHES = 20
"""Number of batches. With fewer, Student's t is wide; 10 to 30 are enough (Schmeiser 1982)."""
LEAST_BATCHES = 10
"""With fewer batches, the lag-1 correlation means nothing, and there is no interval."""
MOST_CORRELATION = 0.9
"""Upper limit of the correlation. Above it, so few batches do not determine the variance."""
LEAST_FREEDOM = 3.0
"""Least degrees of freedom of Student's t."""
ROUNDING = 1e-9
"""Difference between equal means that comes from the order of summation, as a share of the largest mean."""
FEW_STEPS = 0.15
"""Least relative error of a mean of too few steps for an interval. Means of few steps and closed forms differ by at most this
much from a whole simulation (`make bench-first-answer`).
"""
NORMAL = 1.959963984540054
"""The 97.5 % quantile of the normal distribution."""


def half_width(values: Sequence[float] | Floats) -> float | None:
    """Return half the 95 % interval of a mean; None for fewer than `LEAST_BATCHES` values.

    Args:
        values: the values in order of time, without the transient.
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


def error_of_few(values: Sequence[float]) -> float:
    """Return the relative 95 % error of a mean where steps have no interval: at least `FEW_STEPS` for few steps.

    Few values count as independent. Steps of planned faults may be many, but are no sample of equal steps.
    """
    num, found = len(values), np.asarray(values, dtype=float)
    if (width := half_width(found)) is not None:
        return width / float(found.mean())
    if num < 2:
        return FEW_STEPS
    width = student(max(LEAST_FREEDOM, num - 1)) * float(found.std(ddof=1)) / sqrt(num)
    return max(FEW_STEPS, width / float(found.mean()))


def student(freedom: float, normal: float = NORMAL) -> float:
    """Return a quantile of Student's t distribution, given the same quantile of the normal distribution.

    This is the Cornish-Fisher expansion (Abramowitz and Stegun 26.7.5). Its error is at most 0.1 % from 4
    degrees of freedom on.
    """
    z, v = normal, freedom
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    )


def _batch_means(values: Floats) -> Floats:
    """Return the means of `BATCHES` or slightly more batches, without the first values if they fill no batch."""
    size = max(1, len(values) // BATCHES)
    num = len(values) // size
    means: Floats = values[len(values) - num * size :].reshape(num, size).mean(axis=1)
    return means


def _correlation(means: Floats) -> float:
    """Return the lag-1 correlation r of n means, corrected for its bias of -(1 + 3 r) / n.

    Half its standard error is added. A simulation ends when its interval is narrow, so often where
    the estimate is too low by chance: without it, 95 % intervals cover 88 % instead of 91 %.
    """
    num, rest = len(means), means - means.mean()
    biased = float(rest[1:] @ rest[:-1]) / float(rest @ rest)
    return (num * biased + 1) / (num - 3) + 0.5 / sqrt(num)


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """The figures in seconds and dollars. They need only steps and rollouts, and are means of the steady state."""

    step_time: float
    """Mean seconds of a step."""
    step_time_interval: tuple[float, float] | None
    """95 % interval (sampling error) of that mean; None if too few steps count."""
    median_step_time: float
    """Median seconds of a step."""
    step_times: list[float]
    """Seconds of every step, also of those outside the steady state."""
    step_tokens: list[int] = []
    """Output tokens that each of these steps trained on."""
    counted_steps: tuple[int, int]
    """First and last of these steps that count."""
    steps_before: int = 0
    """Number of earlier steps, made before the run was resumed."""
    note: str
    """Why the figures are not those of a steady state with the requested precision; empty if they
    are.
    """
    unfinished: str = ""
    """The step after which the run stopped early, and why; empty if it did not."""
    throughput: float
    """Output tokens generated per second, both trained on and lost."""
    goodput: float
    """Output tokens trained on per second."""
    samples_per_second: float
    """Rollouts trained on per second."""
    cost_per_step: float
    """Dollars of a mean step for all paid GPUs and link traffic."""
    egress_per_step: float = 0.0
    """The part of it for link traffic (`price_per_gb`)."""
    cost_per_million_tokens: float
    """Dollars per million output tokens trained on."""
    billing_ratio: float = 1.0
    """Bill of the whole run, relative to the dollars that its steps cost at the figures above. It is 1 without keys of
    `cluster.billing`, `billing_unit` and `minimum_term`."""
    steady_billing_ratio: float = 1.0
    """The same for a run whose steps all take `step_time`, without its start and checkpoints. The objective of a plan
    has it."""
    rented_ratio: float = 1.0
    """Time until the end of such a run, with set-up and failed attempts, relative to the time of its steps."""
    mean_staleness: float
    """Mean number of versions that a rollout was behind when the primary trainer trained on it."""
    evaluation_time: float = 0.0
    """Mean seconds of an evaluation for which training waits. They are part of no step."""
    num_evaluations: int = 0
    """Evaluations that have ended."""

    @property
    def sampled(self) -> tuple[float, float]:
        """Return the seconds in which the mean step may be by sampling error: its interval, or that of few steps."""
        if self.step_time_interval is not None:
            return self.step_time_interval
        first, last = self.counted_steps
        error = error_of_few(self.step_times[first - 1 : last])
        return self.step_time / (1 + error), self.step_time * (1 + error)

    @property
    def spread(self) -> tuple[float, float]:
        """Return the ends of the sampling error relative to the mean step."""
        least, most = self.sampled
        return least / self.step_time, most / self.step_time


def over_steps(speed: Speed, first: int, last: int) -> Speed:
    """Return the figures of a simulation over some of its steps."""
    seconds = speed.step_times[first - 1 : last]
    tokens = sum(speed.step_tokens[first - 1 : last]) / len(seconds)
    step_time = sum(seconds) / len(seconds)
    rent = (speed.cost_per_step - speed.egress_per_step) / speed.step_time
    fewer = msgspec.structs.replace(
        speed, step_time=step_time, step_time_interval=None, counted_steps=(first, last)
    )
    return with_costs(fewer, rent * step_time, tokens)


def with_step_time(speed: Speed, seconds: float) -> Speed:
    """Return the figures for another mean step, with the same tokens."""
    tokens = speed.cost_per_step / (speed.cost_per_million_tokens or 1.0) * 1e6
    rent = (speed.cost_per_step - speed.egress_per_step) / speed.step_time
    changed = msgspec.structs.replace(speed, step_time=seconds, step_time_interval=None)
    return with_costs(changed, rent * seconds, tokens)


def with_costs(speed: Speed, rent: float, tokens: float) -> Speed:
    """Return the figures for other dollars of GPUs and other tokens of a step."""
    dollars = rent + speed.egress_per_step
    per_million = dollars / tokens * 1e6 if tokens else 0.0
    changed: Speed = msgspec.structs.replace(
        speed, cost_per_step=dollars, cost_per_million_tokens=per_million
    )
    return changed


MSER_SIZE = 5
"""Values per mean, as White recommends for truncation."""
NEGLIGIBLE = 1e-6
"""Relative standard error below which steps count as equal. Rounding of equal steps leaves less than this."""
LEAST_STEPS = 20
"""Minimum steps for a search of the transient's end. Half of them must be enough for `LEAST_BATCHES` batches, and with
fewer than four means of five steps the minimum is random. In shorter runs, `START` steps are left out, at most half."""
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
    """Half of its 95 % interval in seconds; None if too few steps count."""
    has_settled: bool = True
    """Whether the end of the transient was found."""

    @property
    def interval(self) -> tuple[float, float] | None:
        """Return the 95 % interval of the mean step time; None if too few steps count."""
        if self.half_width is None:
            return None
        return max(0.0, self.step_time - self.half_width), self.step_time + self.half_width

    def is_within(self, share: float) -> bool:
        """Return whether the relative half-width is at most `share` and the transient is over."""
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
    """Return the steps that count.

    Args:
        durations: seconds of each step, at least one.
        generated: rollouts generated during each step.
        cycle: number of steps after which the kind of step repeats; only whole cycles are compared.
        left_out: steps at the end that do not count, if there are more steps than that.
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
    steady = count_steps(durations, first, last, cycle=cycle, drifts=drifts)
    return replace(steady, has_settled=has_settled)


def count_steps(
    durations: Sequence[float] | Floats,
    first: int,
    last: int,
    *,
    cycle: int = 1,
    drifts: bool = False,
) -> Steady:
    """Return the steady state that consists of the steps after `first` up to `last`; see `find_steady`."""
    counted = np.asarray(durations[first:last], dtype=float)
    values = _without_trend(counted) if drifts else counted
    return Steady(
        first=first,
        last=last,
        step_time=float(counted.mean()),
        half_width=half_width(_cycle_means(values, cycle)),
    )


def end_of_transient(values: Sequence[float] | Floats) -> tuple[int, bool]:
    """Return the number of values in the transient, and whether it ends within the first half."""
    num = len(values) // MSER_SIZE
    if num < 2:
        return 0, True
    means = np.asarray(values[: num * MSER_SIZE], dtype=float).reshape(num, MSER_SIZE).mean(axis=1)
    left = np.arange(num, 0, -1)
    rest = means - means.mean()  # sums of squares of small numbers lose fewer digits
    sums, squares = rest[::-1].cumsum()[::-1], (rest**2)[::-1].cumsum()[::-1]
    half = num // 2
    errors = (np.maximum(0.0, squares - sums**2 / left) / left**2)[: half + 1]
    index = int((errors <= errors.min() + (NEGLIGIBLE * values[-1]) ** 2).argmax())
    return index * MSER_SIZE, index < half


def _cycle_means(values: Sequence[float] | Floats, cycle: int) -> Floats:
    """Return the mean of each whole cycle."""
    num = len(values) // cycle
    means: Floats = np.asarray(values[: num * cycle], dtype=float).reshape(num, cycle).mean(axis=1)
    return means


def _without_trend(values: Floats) -> Floats:
    """Return values minus their linear trend."""
    if len(values) < LEAST_BATCHES:
        return values
    positions = np.arange(len(values)) - (len(values) - 1) / 2
    slope = float(positions @ values) / float(positions @ positions)
    rest: Floats = values - slope * positions
    return rest


def read_steps(trace: Trace) -> LeaderSteps:
    """Read the steps of the primary trainer from a trace."""
    steps = LeaderSteps(trace.run.environment is not None, trace.run.evaluation)
    for time, event, commands in trace.entries:
        steps.record(time, event, commands)
    return steps


OF_STEPS: set[type[Event]] = {
    Stepped,
    CheckpointSaved,
    RunStarted,
    TrainerLost,
    ReplicaLeaving,
    ReplicaLost,
}
"""Events that `LeaderSteps` uses besides the one that ends a rollout."""
OF_EVALUATIONS: set[type[Event]] = {EvaluationDrawn, Evaluated, Failed}
"""Further events that it uses in a run with evaluations."""


class LeaderSteps:
    """The primary trainer's steps, without those that were rolled back.

    The first step after a loss lasts from the end of the last step that was kept, and has all rollouts
    that finished in this time. The seconds of evaluations for which training waits belong to no step, also if that step was rolled back.
    """

    def __init__(self, has_turns: bool = False, evaluation: EvaluationConfig | None = None) -> None:
        """Start without steps; with `has_turns` a rollout is finished when its reward is known, not when a turn ends."""
        self.reads = OF_STEPS | {Verified if has_turns else Generated}
        if evaluation is not None:
            self.reads |= OF_EVALUATIONS
        self._waits = evaluation is not None and not evaluation.beside
        """Events that `record` uses. It returns early for all others, because it may be called for every event."""
        self.ended_at = array("d")
        self.num_generated = array("q")
        """Rollouts that finished during each step."""
        self.num_made = 0
        """Number of steps that were made, also those that were rolled back."""
        self.num_failures = 0
        """Number of lost replicas and trainers, and of notices to replicas."""
        self.held = array("d")
        """Seconds of evaluations between each step and the one before, for which training waited; empty if it never waits."""
        self.evaluation_times: list[float] = []
        """Seconds of each evaluation that has ended."""
        self._held_since_step = 0.0
        self._evaluating_since = 0.0
        self.num_before = 0
        """Number of earlier steps, made before the run was resumed."""
        self._num_saved = 0
        self._generated = 0
        self._generated_before = 0

    def __len__(self) -> int:
        return len(self.ended_at)

    @property
    def version(self) -> int:
        """The newest version that was not rolled back."""
        return self.num_before + len(self)

    def record(self, time: float, event: Event, commands: list[Command]) -> None:
        """Read one entry of a trace."""
        if type(event) not in self.reads:
            return
        if type(event) is Generated:
            self._generated += event.finish not in UNFINISHED
            return
        match event:
            case Verified(rollout):
                self._generated += rollout < HELD_OUT
                if rollout >= HELD_OUT:
                    self._see_end_of_evaluation(commands, time)
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
                    self._generated_before -= sum(self.num_generated[self._num_saved :])
                    del self.num_generated[self._num_saved :]
                    self._held_since_step += sum(self.held[self._num_saved :])
                    del self.held[self._num_saved :]
            case ReplicaLost() | ReplicaLeaving():
                self.num_failures += 1
            case EvaluationDrawn():
                self._evaluating_since = time
            case Evaluated() | Failed():
                self._see_end_of_evaluation(commands, time)
            case _:
                pass  # concerns a secondary trainer

    def _see_end_of_evaluation(self, commands: list[Command], time: float) -> None:
        if any(isinstance(command, EndEvaluation) for command in commands):
            self._end_evaluation(time - self._evaluating_since)

    def durations(self) -> Floats:
        """Return the seconds of each step since the end of the step before it."""
        lasted = np.diff(np.array(self.ended_at), prepend=0.0)
        return lasted - np.array(self.held) if self._waits else lasted

    @property
    def evaluation_time(self) -> float:
        """Mean seconds of an evaluation; 0 if there was none, or if training does not wait."""
        times = self.evaluation_times
        return sum(times) / len(times) if times and self._waits else 0.0

    def _end_evaluation(self, seconds: float) -> None:
        self.evaluation_times.append(seconds)
        if self._waits:
            self._held_since_step += seconds

    def _end_step(self, time: float) -> None:
        self.ended_at.append(time)
        self.num_made += 1
        self.num_generated.append(self._generated - self._generated_before)
        self._generated_before = self._generated
        if self._waits:
            self.held.append(self._held_since_step)
            self._held_since_step = 0.0


LEAST_FAILURES = 10
"""Minimum failures for an interval that includes them. The relative error of this number is about a third."""


def find_steady_of(trace: Trace, steps: LeaderSteps) -> Steady:
    """Return the steps of a trace that count.

    An endless run leaves out the step that was in progress when it was cut. A complete run leaves out
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
    """Return the steps that count among those made so far, without the last `left_out`.

    With planned faults, steps are not a sample of equal steps, so their mean has no interval.
    """
    steady = find_steady(
        steps.durations(),
        steps.num_generated,
        cycle=lcm(
            policies.sync_every, 1 if policies.tail_batching == "none" else policies.tail_every
        ),
        left_out=left_out,
        drifts=drifts,
    )
    return replace(steady, half_width=None) if faults else steady


def describe_unfinished(steps: int, version: int, stopped_for: str) -> str:
    """Return after which step a run stopped early, and why; empty if it did not.

    Args:
        steps: steps of the whole run.
        version: the newest version that it made. A simulation may make more than `steps`.
        stopped_for: why it stopped; empty if it did not.
    """
    if not stopped_for or version >= steps:
        return ""
    return f"stopped after step {version} of {steps}: {stopped_for}"


def steady_state_caveats(trace: Trace, steps: LeaderSteps, steady: Steady, unfinished: str) -> str:
    """Return why the figures are not those of a steady state with the requested precision; empty if they are.

    Args:
        trace: the trace; only its header is read.
        steps: the steps of its primary trainer.
        steady: the steps that count.
        unfinished: the text of `describe_unfinished`.
    """
    doubts = [f"the run {unfinished}"] if unfinished else []
    if trace.is_cut:
        doubts.append("the trace ends inside a line, and what came after is not known")
    if trace.leg > 1:
        doubts.append(
            f"leg {trace.leg} alone of a run that was resumed, after its step {steps.num_before}; "
            "the whole run is reckoned at its pace"
        )
    num_steps = trace.run.algorithm.steps
    if trace.world == "real" and not unfinished and steps.version < num_steps:
        doubts.append(
            f"the record has no end after step {steps.version} of {num_steps}: the run goes on, or was killed; figures are "
            "those of the finished steps"
        )
    if _drifts(trace):
        return "; ".join(
            [
                *doubts,
                _drift_note(trace.run.algorithm.steps, trace.run.faults, steady),
                *_late_fault_notes(trace.run.faults, steps),
            ]
        )
    if not steady.has_settled:
        key = "simulate.max_steps" if trace.is_endless else "algorithm.steps"
        doubts.append(
            f"no steady state was found in {steady.last} steps: step times may still change, and all figures are means "
            f"over the later steps; more steps make them surer ({key})"
        )
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
        doubts += [*_failure_notes(steps), *_restart_notes(trace, steady)]
    return "; ".join(doubts)


def _drift_note(steps: int, faults: tuple[FaultConfig, ...], steady: Steady) -> str:
    counted = steady.last - steady.first
    why = "faults are planned" if faults else "lengths drift"
    note = f"{why}: figures are the mean over {counted} steps"
    if steady.last < steps:
        return f"{note}, which drift as far as the {steps} of the training"
    return note


def _late_fault_notes(faults: tuple[FaultConfig, ...], steps: LeaderSteps) -> Iterator[str]:
    for number, fault in enumerate(faults):
        if fault.time is not None and fault.time > steps.ended_at[-1]:
            yield f"faults.{number} never struck: the run was over before its time"


def _restart_notes(trace: Trace, steady: Steady) -> Iterator[str]:
    """Yield a note if the whole run is expected to need more restarts than `policies.max_restarts`."""
    run = trace.run
    losses, most = expected_losses(run, steady.step_time), run.policies.max_restarts
    if losses.mean > most:
        yield (
            f"all {run.algorithm.steps:,} steps lose {losses.mean:,.3g} {losses.what} on average, and "
            f"policies.max_restarts={most} stops the run before its end"
        )


def _failure_notes(steps: LeaderSteps) -> list[str]:
    if steps.num_failures >= LEAST_FAILURES:
        return []
    seen = "1 failure was" if steps.num_failures == 1 else f"{steps.num_failures} failures were"
    return [f"{seen} seen, too few for their share to be in the interval"]


def _drifts(trace: Trace) -> bool:
    return trace.world == "simulated" and not trace.run.has_steady_state
