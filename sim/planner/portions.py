"""A portion of a huge plan: one of every so many replicas, data-parallel ranks and prompts, at the costs of the whole plan.

What a search has to know of thousands of GPUs, a part of them tells in a part of the time: each replica and each rank has
as much to do as in the whole plan, and sends and receives what it does there. Only chance is larger, and the longest
of fewer rollouts shorter; so finalists are simulated whole.
"""

from __future__ import annotations

from dataclasses import replace as replace_fields

from msgspec.structs import replace

from streamrl.record.rent import dollars_per_second
from streamrl.record.speed import Speed
from streamrl.runfile.config import Run
from streamrl.runfile.failure_rates import can_fail
from streamrl.sim.costs.costs import Costs
from streamrl.sim.costs.training.training import TrainingCosts

ROLLOUTS, REPLICAS = 2048, 8
"""Rollouts of a step, and replicas, that a portion has at least."""


def portions_of(run: Run) -> int:
    """Return how many portions a plan has: a power of two, 1 where nothing but all of it will do.

    Failures are too rare in a portion for what they cost to be seen in a few steps.
    """
    is_plain = run.num_trainers == 1 and run.policies.resize == "keep" and not can_fail(run)
    if not is_plain or run.costs.profile is not None:
        return 1
    counts = [kind.replicas for kind in run.rollout.kinds]
    counts += [run.trainer.data_parallel, run.algorithm.prompts_per_step]
    portions = 1
    while (
        all(count % (2 * portions) == 0 for count in counts)
        and run.algorithm.rollouts_per_step >= 2 * portions * ROLLOUTS
        and run.rollout.num_replicas >= 2 * portions * REPLICAS
    ):
        portions *= 2
    return portions


def portion_of(run: Run, portions: int) -> Run:
    """Return a plan with one of `portions` of its replicas, ranks and prompts."""
    rollout = replace(
        run.rollout,
        replicas=run.rollout.replicas // portions,
        others=tuple(
            replace(kind, replicas=kind.replicas // portions) for kind in run.rollout.others
        ),
    )
    trainer = replace(run.trainer, data_parallel=run.trainer.data_parallel // portions)
    return replace(with_fewer_prompts(run, portions), rollout=rollout, trainer=trainer)


def with_fewer_prompts(run: Run, portions: int) -> Run:
    """Return a run file, or an offer, with one of `portions` of its prompts."""
    algorithm = run.algorithm
    fewer = replace(algorithm, prompts_per_step=algorithm.prompts_per_step // portions)
    found: Run = replace(run, algorithm=fewer)
    return found


def costs_of_portion(costs: Costs, portions: int) -> Costs:
    """Return the costs of a plan for one of its portions: a pass is shared out among fewer ranks."""
    training = costs.training
    assert isinstance(training, TrainingCosts), "portions are of composed costs"
    trainer = replace(training.trainer, data_parallel=training.trainer.data_parallel // portions)
    fewer = replace_fields(training, trainer=trainer, mini_batch=training.mini_batch / portions)
    return replace_fields(costs, training=fewer)


def speed_of_all(speed: Speed, run: Run, portions: int) -> Speed:
    """Return what all portions of a plan make beside each other, for the dollars of its GPUs, of what one makes."""
    goodput = speed.goodput * portions
    dollars = dollars_per_second(run) * speed.step_time + speed.egress_per_step
    tokens = goodput * speed.step_time
    return replace(
        speed,
        step_tokens=[tokens * portions for tokens in speed.step_tokens],
        throughput=speed.throughput * portions,
        goodput=goodput,
        samples_per_second=speed.samples_per_second * portions,
        cost_per_step=dollars,
        cost_per_million_tokens=dollars / tokens * 1e6 if tokens else 0.0,
    )
