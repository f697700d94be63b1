"""What each step generates, and what of it is trained on: groups that teach nothing are passed over for others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from streamrl.runfile.config import Run
from streamrl.sim.batch_time import Finish, generate_batch
from streamrl.sim.costs.costs import Costs
from streamrl.sim.simulated_rewards import SimRewards
from streamrl.workload.workload import Draw, Workload


class StepEnds(NamedTuple):
    """When rollouts of a step are finished, the first first."""

    at_once: list[Finish]
    """All that are drawn, where none waits to be: what a step has to do where others are under way meanwhile."""
    in_turn: list[Finish]
    """Those that are trained on, where a group is drawn as the one whose place it takes is passed over.

    Each round of such groups takes what it takes alone, from there on; all together take no less than at once.
    """


@dataclass(frozen=True)
class StepBatch:
    """The groups that are drawn for one step."""

    drawn: list[Draw]
    """All of them, in their order: as many as the step trains on, then one for each that is passed over."""
    passed_over: frozenset[int] = frozenset()
    """Ids of those that the trainer leaves out."""

    @property
    def trained(self) -> list[Draw]:
        """The groups that the step is made of."""
        return [draw for draw in self.drawn if draw.drawn.group not in self.passed_over]

    def generate(self, run: Run, costs: Costs, most: int | None = None) -> StepEnds:
        """Return the ends of its rollouts where replicas do nothing else; for `most` and what is raised see `generate_batch`."""
        at_once = generate_batch(run, costs, self.drawn, most)
        if not self.passed_over:
            return StepEnds(at_once, at_once)
        ends: list[Finish] = []
        vacant = [0.0] * len(self.trained)
        for drawn in self._rounds():
            begins = dict(zip((draw.drawn.group for draw in drawn), vacant, strict=True))
            alone = generate_batch(run, costs, drawn, most)
            found = sorted(each._replace(time=each.time + begins[each.group]) for each in alone)
            complete = {each.group: each.time for each in found}
            vacant = sorted(complete[group] for group in complete if group in self.passed_over)
            ends += found
        slower = max(1.0, at_once[-1].time / max(each.time for each in ends))
        kept = (each for each in ends if each.group not in self.passed_over)
        in_turn = sorted(each._replace(time=each.time * slower) for each in kept)
        return StepEnds(at_once, in_turn)

    def _rounds(self) -> Iterator[list[Draw]]:
        """Yield the groups that are drawn first, those for the passed over among them, and so on."""
        left, num = iter(self.drawn), len(self.trained)
        while drawn := list(islice(left, num)):
            yield drawn
            num = sum(draw.drawn.group in self.passed_over for draw in drawn)


def step_batches(run: Run, workload: Workload) -> Iterator[StepBatch]:
    """Yield what every step of a run generates, the first first, as if groups were complete in the order of their ids."""
    algorithm, first = run.algorithm, 0
    while True:
        batch = StepBatch(workload.draw(first, algorithm.prompts_per_step))
        if algorithm.leaves_out_uniform:
            batch = _filled(run, workload, batch.drawn)
        yield batch
        first += len(batch.drawn)


def _filled(run: Run, workload: Workload, drawn: list[Draw]) -> StepBatch:
    """Draw a group for each that is passed over, until a step has cost as many as it may."""
    rewards, drawn = SimRewards(run), [*drawn]
    most = (run.algorithm.max_gen_batches - 1) * run.algorithm.prompts_per_step
    passed_over: set[int] = set()
    for draw in drawn:  # which grows meanwhile
        if len(passed_over) == most:
            break
        group = draw.drawn
        if len({rewards.of(rollout) for rollout in group.rollouts}) == 1:
            passed_over.add(group.group)
            drawn += workload.draw(drawn[-1].drawn.group + 1, 1)
    return StepBatch(drawn, frozenset(passed_over))
