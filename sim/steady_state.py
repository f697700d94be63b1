"""Simulate a run until its mean step time is known: its steady state, for a training of any length.

The engine has no last step here, so the run does not wind down, and the simulation stops in the
middle of it. One step more than those that count is simulated. By then, work that was under way at
the end of the counted steps has been reported.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

from streamrl.record.metrics import Metrics
from streamrl.record.steady_state import (
    LEAST_FAILURES,
    LEAST_STEPS,
    NEGLIGIBLE,
    Steady,
    describe_unfinished,
    find_steady_so_far,
)
from streamrl.runfile.config import Run
from streamrl.runfile.errors import Bounds, RunError
from streamrl.runfile.failure_rates import (
    replica_failures_per_day,
    replica_notices_per_day,
    trainer_gpu_failures_per_day,
)
from streamrl.runfile.units import SECONDS_PER_DAY
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.policy_estimates import fill_policies
from streamrl.sim.trace import MeasuredTrace, SpeedTrace, StepTrace
from streamrl.sim.world import SimWorld
from streamrl.workload.workload import SimulatedWorkload, Workload

GROWTH = 1.1
"""Factor by which the number of steps grows between two checks of the precision. Checks cost
little then, and few steps are wasted.
"""
MORE_STEPS = 1
"""Steps after those that count. By their end, work that was under way has been reported."""
LOOKS = 2
"""Consecutive checks that must succeed. With one check, runs stop too early if the first steps are
similar by chance: 95 % intervals then cover 80 to 90 %.
"""


class UnfinishedError(RuntimeError):
    """A run stopped by itself before its last step."""

    def __init__(self, unfinished: str) -> None:
        """Create the error.

        Args:
            unfinished: the last step and the reason, as in `Speed`.
        """
        super().__init__(f"not finished: the run {unfinished}")


def simulate_steady(
    run: Run,
    watch: Callable[[int], None] = lambda version: None,
    workload: Workload | None = None,
    costs: Costs | None = None,
    num_more: int = MORE_STEPS,
) -> StepTrace:
    """Simulate a run file until the precision of `[simulate]` is reached.

    If lengths drift or faults are planned, the whole training is simulated.

    Args:
        run: the run file.
        watch: called with each new policy version.
        workload: prompts and lengths; those of the run if None.
        costs: costs of the run; loaded if None.
        num_more: steps after `simulate.max_steps`. A `Speed` needs none.

    Raises:
        ValueError: the run file does not fit its profiles or the GPU memory.
        UnfinishedError: the run stops before its first step.
        RuntimeError: the run is stuck.
    """
    trace = _simulate(open_world(run, workload, costs), watch, num_more).trace
    assert isinstance(trace, StepTrace), "its world was opened with one"
    return trace


def measure_steady(
    run: Run,
    watch: Callable[[int], None] = lambda version: None,
    workload: Workload | None = None,
) -> Metrics:
    """Simulate like `simulate_steady`, but compute metrics on the way, so that memory hardly grows with the steps.

    Raises:
        ValueError: the run file does not fit its profiles or the GPU memory.
        UnfinishedError: the run stops before its first step.
        RuntimeError: the run is stuck.
    """
    world = open_world(run, workload, trace_type=MeasuredTrace)
    trace = _simulate(world, watch).trace
    assert isinstance(trace, MeasuredTrace), "its world was opened with one"
    return trace.measure()


def simulate_speed(world: SimWorld) -> SpeedTrace:
    """Simulate up to `simulate.max_steps` in a world that was opened with a `SpeedTrace`, and return that trace.

    Raises:
        UnfinishedError: the run stops before its first step.
        RuntimeError: the run is stuck.
    """
    trace = _simulate(world, lambda version: None, num_more=0).trace
    assert isinstance(trace, SpeedTrace), "its world was opened with one"
    return trace


def open_world(
    run: Run,
    workload: Workload | None = None,
    costs: Costs | None = None,
    trace_type: type[StepTrace] = StepTrace,
) -> SimWorld:
    """Return a run's world without a last step, before its first event; see `simulate_steady`."""
    if run.faults:
        _check_whole(run.simulate.max_steps, run.algorithm.steps)
    costs = costs or Costs.load(run)
    drawn = workload or SimulatedWorkload(run, num_steps=run.simulate.max_steps)
    filled = fill_policies(run, costs)
    trace = trace_type(filled, costs, is_endless=True)
    return SimWorld(filled, costs, drawn, is_endless=True, trace=trace)


def _check_whole(most: int, steps: int) -> None:
    """Reject planned faults if not all steps are simulated, because their rate in the other steps is unknown."""
    if steps > most:
        text = (
            f"simulate.max_steps must be at least {steps} where faults are planned, as all of algorithm.steps={steps} are "
            f"simulated then, got {most}"
        )
        raise RunError("simulate.max_steps", most, Bounds(steps), text, ("algorithm.steps",))


def _simulate(
    world: SimWorld, watch: Callable[[int], None], num_more: int = MORE_STEPS
) -> SimWorld:
    """Simulate until enough steps are known."""
    world.run(watch, Enough(world, num_more=num_more).is_there)
    if not world.steps:
        steps, reason = world.run_file.algorithm.steps, world.engine.stop_reason
        raise UnfinishedError(describe_unfinished(steps, 0, reason or "no step stays"))
    return world


class Enough:
    """Decides when enough steps were simulated."""

    def __init__(
        self,
        world: SimWorld,
        is_known: Callable[[Steady, float], bool] = Steady.is_within,
        num_more: int = MORE_STEPS,
    ) -> None:
        """Watch a world that has not begun, until the precision of its run file is reached.

        Args:
            world: the simulated run.
            is_known: whether these steps determine the wanted value within a relative error, such
                as the mean step time or the ratio of two.
            num_more: steps to simulate after the most that count.
        """
        run = world.run_file
        self._run = run
        self._steps = world.steps
        self._is_known = is_known
        self._num_found = 0
        """Consecutive checks that succeeded."""
        self._next_look = min(LEAST_STEPS, run.simulate.max_steps)
        self._is_whole = not run.has_steady_state
        most = run.simulate.max_steps
        self._last = num_more + (min(most, run.algorithm.steps) if self._is_whole else most)

    def is_there(self) -> bool:
        """Return whether no further step is needed; call it once after each step."""
        steps = self._steps
        # a run with planned faults repeats steps that it loses, and has later faults in later steps
        if (len(steps) if self._is_whole else steps.num_made) >= self._last:
            return True
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
        """Return whether too few failures occurred, in a run where enough are to be expected."""
        run, pools = self._run, self._run.cluster.pools
        per_day = replica_failures_per_day(run.failures, run.rollout.kinds, pools)
        per_day += replica_notices_per_day(run.rollout.kinds, pools)
        of_one = trainer_gpu_failures_per_day(run.failures, pools[run.trainer.pool])
        per_day += of_one * run.trainer.num_gpus
        expected = per_day * run.simulate.max_steps * step_time / SECONDS_PER_DAY
        return self._steps.num_failures < LEAST_FAILURES <= expected
