"""Simulate as many steps as were measured, each with output lengths of the measured mean."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import ceil
from statistics import fmean

from msgspec.structs import replace

from streamrl.engine.messages import ExpectationsChanged, Generated
from streamrl.logs.measured_steps import MeasuredStep, StepLengths, read_run_steps
from streamrl.runfile.config import Run
from streamrl.sim.batch_generation import generate_batch, step_batches
from streamrl.sim.calibration.disagreement import takes_turns
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.policy_estimates import fill_policies
from streamrl.sim.world import SimWorld
from streamrl.workload.workload import Draw, SimulatedWorkload

LEAST_STEPS = 8
"""Least number of simulated steps. With fewer, one long rollout can dominate the mean of a stage.
"""
WARM_UP = 2
"""Steps before the counted ones. The first step has no earlier generation or weight load."""
ROUNDS = 20
"""Limit on rounds of the search for a scale at which capped outputs have the measured mean."""


class StepwiseWorkload:
    """The groups of a run. The lengths of each step are scaled to its measured mean."""

    def __init__(self, run: Run, steps: Sequence[StepLengths]) -> None:
        """Read the measured means.

        Args:
            run: the run file.
            steps: the simulated steps, in order; later steps are like the last one.
        """
        self._inner = SimulatedWorkload(run)
        self._steps = steps
        self._size = run.algorithm.prompts_per_step
        self._batches = step_batches(run, self._inner)
        self._ends: list[int] = []
        """For each step, the group after its last one, for the steps drawn so far."""
        self._most = run.rollout.max_tokens
        self._scales: dict[int, float] = {}

    def draw(self, first_group: int, num_groups: int) -> list[Draw]:
        """Return `num_groups` groups from `first_group` on, with the lengths of their steps."""
        draws = self._inner.draw(first_group, num_groups)
        return [self._scaled(draw, self._step_of(draw.drawn.group)) for draw in draws]

    def learn(self, event: Generated) -> ExpectationsChanged | None:
        """See `Workload`."""
        return self._inner.learn(event)

    def forget(self, group: int) -> None:
        """See `Workload`."""
        self._inner.forget(group)

    def _step_of(self, group: int) -> int:
        """Return the step, counted from 0, for which a group is drawn."""
        while not self._ends or self._ends[-1] <= group:
            self._ends.append(next(self._batches).drawn[-1].drawn.group + 1)
        return bisect_right(self._ends, group)

    def _measured(self, step: int) -> StepLengths:
        return self._steps[min(step, len(self._steps) - 1)]

    def _scaled(self, draw: Draw, step: int) -> Draw:
        if step not in self._scales:
            self._scales[step] = self._scale(step)
        scale, most = self._scales[step], self._cap(step)
        lengths = tuple(max(1, min(most, round(length * scale))) for length in draw.lengths)
        return draw._replace(lengths=lengths)

    def _cap(self, step: int) -> int:
        longest = self._measured(step).longest_output
        return self._most if not longest else min(self._most, ceil(longest))

    def _scale(self, step: int) -> float:
        """Return the scale at which a step's batch has the measured mean, with capped outputs."""
        wanted, most = self._measured(step).output_tokens, self._cap(step)
        if wanted is None:
            return 1.0
        first = self._ends[step - 1] if step else 0
        draws = self._inner.draw(first, self._size)
        lengths = [length for draw in draws for length in draw.lengths]
        scale = wanted / fmean(lengths)
        for _ in range(ROUNDS):
            mean = fmean(min(most, length * scale) for length in lengths)
            if abs(mean / wanted - 1) < 1e-3:
                break
            scale *= wanted / mean
        return scale


@dataclass(frozen=True)
class SimulatedSteps:
    """The predictions of a run file for each measured step, in order."""

    steps: list[MeasuredStep]
    overhead: float
    """Seconds of a step outside its stages."""


def simulate_steps(run: Run, measured: Sequence[StepLengths]) -> SimulatedSteps:
    """Simulate as many steps as were measured, each with its own lengths.

    If few steps were measured, each is simulated several times.

    Raises:
        ValueError: the run file does not fit its profiles or the GPU memory.
        RuntimeError: the run is stuck.
    """
    run = without_failures(run)
    repeats = ceil(LEAST_STEPS / len(measured))
    wanted = [*[measured[0]] * WARM_UP, *list(measured) * repeats]
    costs = Costs.load(run)
    filled = fill_policies(run, costs)
    workload = StepwiseWorkload(run, wanted)
    world = SimWorld(filled, costs, workload, is_endless=True)
    trace = world.run(is_enough=lambda: len(world.steps) >= len(wanted))
    overhead, turns = costs.training.overhead_time, takes_turns(run.policies)
    made = read_run_steps(trace, overhead, takes_turns=turns)[WARM_UP : len(wanted)]
    if len(made) < len(wanted) - WARM_UP:
        reason = world.engine.stop_reason or "it stops"
        raise RuntimeError(f"the simulated run stopped after step {len(made) + WARM_UP}: {reason}")
    if (
        not turns
    ):  # training overlaps with generation and hides its seconds: generate each batch alone
        alone = StepwiseWorkload(filled, [step.lengths for step in made])
        batches = islice(step_batches(filled, alone), len(made))
        generate = partial(generate_batch, filled, costs)
        ends = [batch.generate(generate).in_turn[-1] for batch in batches]
        made = [replace(step, generation=end.time) for step, end in zip(made, ends, strict=True)]
    return SimulatedSteps(
        [_mean(made[place :: len(measured)]) for place in range(len(measured))], overhead
    )


def without_failures(run: Run) -> Run:
    """Return a run without planned faults and random losses of trainers. No step with a restart is measured."""
    return replace(run, faults=(), failures=replace(run.failures, trainers=False))


def _mean(steps: Sequence[MeasuredStep]) -> MeasuredStep:
    """Return the mean of several simulations of the same step, column by column."""
    found: dict[str, float] = {}
    for column in MeasuredStep.__struct_fields__[1:]:
        values = [getattr(step, column) for step in steps]
        known = [value for value in values if value is not None]
        if known:
            found[column] = fmean(known)
    return MeasuredStep(step=steps[0].step, **found)
