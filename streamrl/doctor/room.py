"""Ways to make a side fit its GPUs: other splits, less that is kept, more GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from streamrl.doctor.changes import changed
from streamrl.doctor.finding import Changes
from streamrl.doctor.fix import Fix
from streamrl.doctor.memory import GB, held, replica_side, trainer_side
from streamrl.hardware.memory import longest_sequence, num_models
from streamrl.hardware.profiles import load_model
from streamrl.runfile.config import Run
from streamrl.runfile.keys import pool_key
from streamrl.runfile.pools import powers_of_two

MOST_GROWTH = 6
"""Doublings of the trainer's GPUs that are tried where no split of those that are there fits."""

MOST_CONTEXT_RANKS, LEAST_PART = 16, 16384
"""Context ranks that are proposed, and tokens of a rollout that each has at least."""


# The rollout side ---------------------------------------------------------------------------------


def _wider_replicas(run: Run) -> Iterator[Changes]:
    """Yield replicas of more GPUs, as many GPUs in all, then more memory of each, then shorter outputs."""
    rollout = run.rollout
    domain = run.cluster.pools[rollout.pool].domain
    others = rollout.pipeline_parallel * rollout.data_parallel
    for degree in range(rollout.tensor_parallel + 1, domain + 1):
        replicas = max(1, rollout.num_gpus // degree // others)
        changes: dict[str, object] = {"rollout.tensor_parallel": degree}
        if replicas != rollout.replicas:
            changes["rollout.replicas"] = replicas
        if rollout.expert_parallel > 1:
            changes["rollout.expert_parallel"] = degree * rollout.data_parallel
        yield changes
        if load_model(run.model).experts is not None and rollout.expert_parallel == 1:
            yield {**changes, "rollout.expert_parallel": degree}
    yield from _longer_replicas(run)
    yield {"rollout.memory_utilization": 0.95}
    for tokens in (2**power for power in range(20, 7, -1)):
        if tokens < rollout.max_tokens:
            yield {"rollout.max_tokens": tokens}


def _longer_replicas(run: Run) -> Iterator[Changes]:
    """Yield replicas of several stages, each all of a domain, where no domain alone holds the model."""
    rollout, domain = run.rollout, run.cluster.pools[run.rollout.pool].domain
    for stages in powers_of_two(rollout.num_gpus // domain):
        if stages > rollout.pipeline_parallel and rollout.data_parallel == 1:
            yield {
                "rollout.tensor_parallel": domain,
                "rollout.pipeline_parallel": stages,
                "rollout.replicas": rollout.num_gpus // domain // stages,
                "rollout.expert_parallel": domain if rollout.expert_parallel > 1 else 1,
            }


# The training side --------------------------------------------------------------------------------


def _roomier_trainers(run: Run) -> Iterator[Changes]:
    """Yield what fits: on the fewest GPUs first, and of these what changes least."""
    switches: list[dict[str, object]] = [
        {},
        {"trainer.recompute": "full"},
        {"trainer.logits": "chunked"},
        {"trainer.max_tokens_per_pass": longest_sequence(run)},
        {"trainer.zero": 3},
        {"trainer.recompute": "full", "trainer.max_tokens_per_pass": longest_sequence(run)},
        {"trainer.recompute": "full", "trainer.logits": "chunked"},
    ]
    if num_models(run) > 1:
        switches += [{**each, "trainer.offload": True} for each in switches]
    for doublings in range(MOST_GROWTH + 1):
        layouts = [{}, *_layouts(run, run.trainer.num_gpus * 2**doublings)]
        found = [{**layout, **switch} for layout, switch in product(layouts, switches)]
        yield from sorted(filter(lambda changes: changes and _fits(run, changes), found), key=len)


def _layouts(run: Run, num_gpus: int) -> Iterator[dict[str, object]]:
    """Yield the ways to share the model out over `num_gpus`, with the nodes that they take."""
    trainer, pool = run.trainer, run.cluster.pools[run.trainer.pool]
    others = run.rollout.num_gpus if run.rollout.pool == trainer.pool and not run.shares_gpus else 0
    nodes = -(-(num_gpus + others) // pool.gpus_per_node)
    degrees = (powers_of_two(pool.gpus_per_node), powers_of_two(num_gpus))
    for tensor, pipeline, context in product(*degrees, _context_degrees(run)):
        if num_gpus % (tensor * pipeline * context):
            continue
        data = num_gpus // tensor // pipeline // context
        layout = {
            "trainer.data_parallel": (data, trainer.data_parallel),
            "trainer.context_parallel": (context, trainer.context_parallel),
            "trainer.tensor_parallel": (tensor, trainer.tensor_parallel),
            "trainer.pipeline_parallel": (pipeline, trainer.pipeline_parallel),
            pool_key(trainer.pool, "nodes"): (max(nodes, pool.nodes), pool.nodes),
        }
        yield {key: new for key, (new, old) in layout.items() if new != old}


def _context_degrees(run: Run) -> list[int]:
    """Return the run's own degree, and those that leave each rank of a long rollout a part of it."""
    usual = powers_of_two(min(MOST_CONTEXT_RANKS, longest_sequence(run) // LEAST_PART))
    return sorted({run.trainer.context_parallel, *usual})


def _fits(run: Run, changes: Changes) -> bool:
    try:
        side = trainer_side(changed(run, changes))
    except ValueError:
        return False
    return side.need <= side.capacity


# What may be said of it ---------------------------------------------------------------------------


def _replica_effect(run: Run) -> str:
    return f"{replica_side(run).parts['weights'] / GB:.1f} GB of weights a GPU, {held(run)}"


def _trainer_effect(run: Run) -> str:
    side = trainer_side(run)
    return f"{side.need / GB:.1f} of {side.capacity / GB:.0f} GB a GPU"


FIXES = {
    "rollout-memory": Fix(
        _wider_replicas,
        "no replica within a node of this pool holds the model: name a pool of GPUs with more memory",
        _replica_effect,
    ),
    "trainer-memory": Fix(
        _roomier_trainers,
        "no split of the model fits these GPUs: name GPUs with more memory",
        _trainer_effect,
    ),
    "trainer-tight": Fix(
        _roomier_trainers,
        "lower trainer.max_tokens_per_pass or split over more GPUs",
        _trainer_effect,
    ),
}
