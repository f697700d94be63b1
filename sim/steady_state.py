"""Simulate a run until its mean step time is known: its steady state, whatever the length of its training.

The engine knows of no last step, so that nothing winds down, and the world is left while things are under way. A
step more than those that count is simulated: what was under way at the end of them has told of itself by then.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import TypeVar

from msgspec.structs import replace

from streamrl.engine.trace import Trace
from streamrl.engine.trainer_side import LEADER
from streamrl.record.metrics import Metrics
from streamrl.record.steady_state import (
    LEAST_FAILURES,
    LEAST_STEPS,
    NEGLIGIBLE,
    LeaderSteps,
    Steady,
    describe_unfinished,
    find_steady_so_far,
)
from streamrl.runfile.config import Run
from streamrl.runfile.errors import Bounds, RunError
from streamrl.runfile.failure_rates import failures_per_gpu_day, replica_failures_per_day
from streamrl.runfile.units import SECONDS_PER_DAY
from streamrl.runfile.workload_config import LengthsConfig
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.policy_estimates import fill_policies
from streamrl.sim.trace import MeasuredTrace, StepTrace
from streamrl.sim.world import SimWorld
from streamrl.workload.workload import SimulatedWorkload, Workload

GROWTH = 1.1
"""How many times as many steps there are when it is looked again whether they are enough: looking costs little for
each step then, and few are simulated in vain."""
LOOKS = 2
"""Looks in a row that must find enough: one alone finds it too early where the first steps are alike by luck, which
makes 95 % intervals hold 80 to 90 % of the time."""

T = TypeVar("T", bound=StepTrace)


class UnfinishedError(RuntimeError):
    """A run stopped by itself before its last step."""

    def __init__(self, unfinished: str) -> None:
        """Say so.

        Args:
            unfinished: after which step and why, as `Speed` has it.
        """
        super().__init__(f"not finished: the run {unfinished}")


def simulate_steady(
    run: Run,
    watch: Callable[[int], None] = lambda version: None,
    workload: Workload | None = None,
    costs: Costs | None = None,
) -> Trace:
    """Simulate a run file until `[simulate]` is satisfied; where lengths drift or faults are planned, the whole training.

    Args:
        run: the run file.
        watch: told each policy version as it is made.
        workload: what is generated; that of the run where absent.
        costs: seconds of what is done; those of the run where absent.

    Raises:
        ValueError: the run file asks for what its profiles or memory do not allow.
        UnfinishedError: it stops before it has a step.
        RuntimeError: nothing is left that could happen.
    """
    return _simulate(run, StepTrace, watch, workload, costs)


def measure_steady(
    run: Run,
    watch: Callable[[int], None] = lambda version: None,
    workload: Workload | None = None,
) -> Metrics:
    """Simulate as `simulate_steady` does and measure as it goes, in memory that hardly grows with the steps.

    Raises:
        ValueError: the run file asks for what its profiles or memory do not allow.
        UnfinishedError: it stops before it has a step.
        RuntimeError: nothing is left that could happen.
    """
    return _simulate(run, MeasuredTrace, watch, workload).measure()


def _simulate(
    run: Run,
    kind: type[T],
    watch: Callable[[int], None],
    workload: Workload | None,
    costs: Costs | None = None,
) -> T:
    world, trace = _open(run, kind, workload, costs)
    world.run(watch, Enough(run, trace.steps).is_there)
    if not trace.steps:
        raise UnfinishedError(
            describe_unfinished(run.algorithm.steps, 0, world.engine.stop_reason or "no step stays")
        )
    return trace


def _open(
    run: Run, kind: type[T], workload: Workload | None, costs: Costs | None = None
) -> tuple[SimWorld, T]:
    _check_whole(run)
    costs = costs or Costs.load(run)
    drawn = SimulatedWorkload(sampled(run)) if workload is None else workload
    filled = fill_policies(run, costs)
    trace = kind(filled, costs, is_endless=True)
    return SimWorld(filled, costs, drawn, is_endless=True, trace=trace), trace


def _check_whole(run: Run) -> None:
    """Refuse faults of which it is not known how often they strike in steps beyond those that are simulated."""
    most, steps = run.simulate.max_steps, run.algorithm.steps
    if run.faults and steps > most:
        text = (
            f"simulate.max_steps must be at least {steps} where faults are planned, as all of algorithm.steps={steps} are "
            f"simulated then, got {most}"
        )
        raise RunError("simulate.max_steps", most, Bounds(steps), text, ("algorithm.steps",))


def open_world(run: Run, workload: Workload | None = None) -> SimWorld:
    """Return a run's world before its first event, which knows of no last step; see `simulate_steady`."""
    return _open(run, StepTrace, workload)[0]


def sampled(run: Run) -> Run:
    """Return a run whose lengths drift as far in `simulate.max_steps` steps as in its whole training, if that is longer."""
    lengths, steps, most = run.workload.lengths, run.algorithm.steps, run.simulate.max_steps
    if lengths is None or not lengths.drifts or steps <= most:
        return run
    drifted: LengthsConfig = replace(
        lengths, drift_steps=max(2, round((lengths.drift_steps or steps) * most / steps))
    )
    return replace(run, workload=replace(run.workload, lengths=drifted))


class Enough:
    """Whether the steps that were simulated are enough."""

    def __init__(
        self,
        run: Run,
        steps: LeaderSteps,
        is_known: Callable[[Steady, float], bool] = Steady.is_within,
    ) -> None:
        """Take note of what is asked for.

        Args:
            run: the run file.
            steps: those that were made, as they are made.
            is_known: whether, with these steps, what is wanted is known within a share: the mean step time, or the
                ratio of two.
        """
        self._run = run
        self._steps = steps
        self._is_known = is_known
        self._num_found = 0
        """Looks in a row that found enough."""
        self._next_look = min(LEAST_STEPS, run.simulate.max_steps)
        self._most = run.simulate.max_steps
        self._is_whole = not run.has_steady_state
        if self._is_whole:
            self._most = min(self._most, run.algorithm.steps)

    def is_there(self) -> bool:
        """Return whether no further step is needed; to be asked once after each."""
        steps = self._steps
        if steps.num_made > self._most:
            return True  # the one more has been made
        if self._is_whole or self._num_found == LOOKS or len(steps) < self._next_look:
            return self._num_found == LOOKS
        self._next_look = ceil(GROWTH * len(steps))
        found = find_steady_so_far(self._run.policies, self._run.faults, steps, 0)
        share = self._run.simulate.interval
        if not self._is_known(found, share) or self._lacks_failures(found.step_time):
            self._num_found = 0
        elif self._is_known(found, NEGLIGIBLE):
            self._num_found = LOOKS
        else:
            self._num_found += 1
        return False

    def _lacks_failures(self, step_time: float) -> bool:
        """Return whether too few failures were seen, though there will be enough."""
        run = self._run
        per_day = replica_failures_per_day(run)
        per_day += failures_per_gpu_day(run, LEADER) * run.trainer.num_gpus
        expected = per_day * run.simulate.max_steps * step_time / SECONDS_PER_DAY
        return self._steps.num_failures < LEAST_FAILURES <= expected
