"""Check whether each side fits its GPUs, and find splits or sizes that fit."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from msgspec.structs import replace

from streamrl.hardware.memory import (
    ROOMY,
    kv_capacity,
    most_running,
)
from streamrl.hardware.resolved import (
    ReplicaHardware,
    ResolvedRun,
    RewardHardware,
    TrainerHardware,
    resolve,
)
from streamrl.hardware.side_memory import SideMemory, replica_side, reward_side, trainer_side
from streamrl.runfile.findings import Changes, Finding, Fix, Level
from streamrl.runfile.gpu_pools import powers_of_two
from streamrl.runfile.keys import pool_key
from streamrl.runfile.policies_config import PoliciesConfig
from streamrl.runfile.roles_config import AdmissionName, RolloutConfig, TrainerConfig
from streamrl.workload.replica_batch import (
    MeanLengths,
    ReplicaBatch,
    mean_lengths,
    replica_batch,
)

GB = 1e9


def find(resolved: ResolvedRun) -> Iterator[Finding]:
    """Find sides that do not fit, and replicas that cannot hold their rollouts."""
    replica = resolved.replica
    yield find_replica(replica, mean_lengths(resolved.run))
    side = replica_side(replica)
    if side.need <= side.usable:
        yield from _find_room(replica.config.admission, replica_batch(resolved))
    yield from find_trainer(resolved.trainer)
    yield from _find_verifier(resolved.reward)


def _listed(side: SideMemory) -> str:
    return " + ".join(
        f"{size / GB:.1f} of {name.replace('_', ' ')}" for name, size in side.parts.items()
    )


# Rollout side
# --------------------------------------------------------------------------------------


def find_replica(replica: ReplicaHardware, mean: MeanLengths | None) -> Finding:
    """Report whether a replica holds its weights and one rollout of the maximum length."""
    side = replica_side(replica)
    if side.need > side.usable:
        text = (
            f"rollout: {side.need / GB:.1f} GB a GPU ({_listed(side)}, for one rollout of "
            f"{replica.longest_sequence:,} tokens), but {side.gpu} at memory_utilization "
            f"{replica.config.memory_utilization:g} gives {side.usable / GB:.1f} GB"
        )
        return Finding(level="error", topic="memory", name="rollout-memory", text=text)
    text = (
        f"rollout: {side.need / GB:.1f} of {side.capacity / GB:.0f} GB a GPU ({_listed(side)}); "
        f"{_held(replica, mean)}"
    )
    return Finding(level="ok", topic="memory", name="rollout-fits", text=text)


def _held(replica: ReplicaHardware, mean: MeanLengths | None) -> str:
    """Return how many rollouts fit the KV cache, of maximum and of mean length, without prefix sharing."""
    rollout, longest = replica.config, replica.longest_sequence
    tokens = kv_capacity(replica)
    held = (
        f"{tokens:,} tokens of a replica are {tokens // longest:,} rollouts of {longest:,} tokens"
    )
    if mean is not None:
        held += f", {int(tokens // mean.context):,} with a running one's mean context of {mean.context:,.0f}"
    if rollout.admission == "reserve":
        held += f"; admission reserves {rollout.max_tokens:,} of each, so {most_running(replica):,} run at once"
    return f"{held} (max_running {rollout.max_running})"


def _find_room(admission: AdmissionName, batch: ReplicaBatch | None) -> Iterator[Finding]:
    """Report that a replica's memory limits its batch. Only a simulation shows the cost."""
    if admission == "on-demand" and batch is not None and batch.limit == "memory":
        text = (
            f"KV memory limits a replica's batch: to {batch.held:,.0f} rollouts on average, fewer than "
            f"rollout.max_running={batch.max_running} and its share of {batch.share:,.6g}"
        )
        yield Finding(level="ok", topic="memory", name="batch-limit", text=text)


# Training side
# -------------------------------------------------------------------------------------


def find_trainer(trainer: TrainerHardware) -> Iterator[Finding]:
    """Find a trainer that does not fit, or nearly fills its GPUs."""
    side = trainer_side(trainer)
    share = side.need / side.capacity
    text = (
        f"trainer: {side.need / GB:.1f} of {side.capacity / GB:.0f} GB a GPU, {share:.0%} of {side.gpu} "
        f"({_listed(side)})"
    )
    if share > 1:
        yield Finding(level="error", topic="memory", name="trainer-memory", text=text)
    elif share > ROOMY:
        text += "; buffers of collectives come on top"
        yield Finding(level="warning", topic="memory", name="trainer-tight", text=text)
    else:
        yield Finding(level="ok", topic="memory", name="trainer-fits", text=text)


# Verifier side
# -------------------------------------------------------------------------------------


def _find_verifier(reward: RewardHardware | None) -> Iterator[Finding]:
    """Find a reward model that does not fit its GPU, or whose size is unknown."""
    if reward is None:
        return
    if reward.shape is None:
        text = f"verifier: there is no model profile of {reward.name}, so its memory on a GPU is unknown"
        yield Finding(level="ok", topic="memory", name="verifier-unknown", text=text)
    side = reward_side(reward)
    if side is not None:
        yield _verifier_finding(side)


def _verifier_finding(side: SideMemory) -> Finding:
    text = (
        f"verifier: {side.need / GB:.1f} of {side.capacity / GB:.0f} GB a GPU of the reward model "
        f"({_listed(side)}) on {side.gpu}"
    )
    fits = side.need <= side.capacity
    level: Level = "ok" if fits else "error"
    name = "verifier-fits" if fits else "verifier-memory"
    fix = "" if fits else "a smaller verifier.max_tokens_per_pass, or a pool of larger GPUs"
    return Finding(level=level, topic="memory", name=name, text=text, fix=fix)


MOST_GROWTH = 6
"""Doublings of the trainer's GPUs that are tried if no split fits the configured ones."""

MOST_CONTEXT_RANKS, LEAST_PART = 16, 16384
"""Largest proposed number of context ranks, and fewest tokens of a rollout for each."""


# Fixes of the rollout side
# -------------------------------------------------------------------------


def _wider_replicas(replica: ReplicaHardware) -> Iterator[Changes]:
    """Yield wider replicas on the same number of GPUs, then more memory share, then shorter outputs."""
    rollout, domain = replica.config, replica.pool.domain
    others = rollout.pipeline_parallel * rollout.data_parallel
    for degree in range(rollout.tensor_parallel + 1, domain + 1):
        replicas = max(1, rollout.num_gpus // degree // others)
        changes: dict[str, object] = {"rollout.tensor_parallel": degree}
        if replicas != rollout.replicas:
            changes["rollout.replicas"] = replicas
        if rollout.expert_parallel > 1:
            changes["rollout.expert_parallel"] = degree * rollout.data_parallel
        yield changes
        if replica.model.experts is not None and rollout.expert_parallel == 1:
            yield {**changes, "rollout.expert_parallel": degree}
    yield from _longer_replicas(rollout, domain)
    yield {"rollout.memory_utilization": 0.95}
    for tokens in (2**power for power in range(20, 7, -1)):
        if tokens < rollout.max_tokens:
            yield {"rollout.max_tokens": tokens}


def _longer_replicas(rollout: RolloutConfig, domain: int) -> Iterator[Changes]:
    """Yield replicas of several stages, one domain each, if no single domain holds the model."""
    for stages in powers_of_two(rollout.num_gpus // domain):
        if stages > rollout.pipeline_parallel and rollout.data_parallel == 1:
            yield {
                "rollout.tensor_parallel": domain,
                "rollout.pipeline_parallel": stages,
                "rollout.replicas": rollout.num_gpus // domain // stages,
                "rollout.expert_parallel": domain if rollout.expert_parallel > 1 else 1,
            }


# Fixes of the training side
# ------------------------------------------------------------------------


def _roomier_trainers(trainer: TrainerHardware, others: int) -> Iterator[Changes]:
    """Yield layouts that fit, on the fewest GPUs first; among these, the one that changes least.

    Args:
        trainer: as it is.
        others: GPUs of its pool that something else uses.
    """
    switches: list[dict[str, object]] = [
        {},
        {"trainer.recompute": "full"},
        {"trainer.logits": "chunked"},
        {"trainer.max_tokens_per_pass": trainer.longest_sequence},
        {"trainer.zero": 3},
        {"trainer.recompute": "full", "trainer.max_tokens_per_pass": trainer.longest_sequence},
        {"trainer.recompute": "full", "trainer.logits": "chunked"},
    ]
    if trainer.num_models > 1:
        switches += [{**each, "trainer.offload": True} for each in switches]
    for doublings in range(MOST_GROWTH + 1):
        layouts = [{}, *_layouts(trainer, trainer.config.num_gpus * 2**doublings, others)]
        found = [{**layout, **switch} for layout, switch in product(layouts, switches)]
        fitting = (changes for changes in found if changes and _fits(trainer, changes))
        yield from sorted(fitting, key=len)


def _gpus_beside(rollout: RolloutConfig, trainer: TrainerConfig, policies: PoliciesConfig) -> int:
    """Return the GPUs of the trainer's pool that replicas use alone."""
    is_beside = rollout.pool == trainer.pool and not policies.shares_gpus
    return rollout.num_gpus if is_beside else 0


def _layouts(hardware: TrainerHardware, num_gpus: int, others: int) -> Iterator[dict[str, object]]:
    """Yield the layouts of the model on `num_gpus`, with the nodes for these and `others` of the pool."""
    trainer, pool = hardware.config, hardware.pool
    nodes = -(-(num_gpus + others) // pool.gpus_per_node)
    degrees = (powers_of_two(pool.gpus_per_node), powers_of_two(num_gpus))
    contexts = _context_degrees(trainer.context_parallel, hardware.longest_sequence)
    for tensor, pipeline, context in product(*degrees, contexts):
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


def _context_degrees(own: int, longest: int) -> list[int]:
    """Return the trainer's own degree, and those that leave each rank enough tokens of a long rollout."""
    usual = powers_of_two(min(MOST_CONTEXT_RANKS, longest // LEAST_PART))
    return sorted({own, *usual})


def _fits(trainer: TrainerHardware, changes: Changes) -> bool:
    """Return whether a trainer fits its GPUs with other values of its keys."""
    own = {
        key.removeprefix("trainer."): value
        for key, value in changes.items()
        if key.startswith("trainer.")
    }
    try:
        side = trainer_side(replace(trainer, config=replace(trainer.config, **own)))
    except ValueError:
        return False
    return side.need <= side.capacity


# Effects of a fix
# ----------------------------------------------------------------------------------


def _replica_effect(replica: ReplicaHardware, mean: MeanLengths | None) -> str:
    weights = replica_side(replica).parts["weights"]
    return f"{weights / GB:.1f} GB of weights a GPU, {_held(replica, mean)}"


def _trainer_effect(trainer: TrainerHardware) -> str:
    side = trainer_side(trainer)
    return f"{side.need / GB:.1f} of {side.capacity / GB:.0f} GB a GPU"


MEMORY_FIXES = {
    "rollout-memory": Fix(
        lambda run: _wider_replicas(resolve(run).replica),
        "no replica within a node of this pool holds the model: name a pool of GPUs with more memory",
        lambda run: _replica_effect(resolve(run).replica, mean_lengths(run)),
    ),
    "trainer-memory": Fix(
        lambda run: _roomier_trainers(
            resolve(run).trainer, _gpus_beside(run.rollout, run.trainer, run.policies)
        ),
        "no split of the model fits these GPUs: name GPUs with more memory",
        lambda run: _trainer_effect(resolve(run).trainer),
    ),
    "trainer-tight": Fix(
        lambda run: _roomier_trainers(
            resolve(run).trainer, _gpus_beside(run.rollout, run.trainer, run.policies)
        ),
        "lower trainer.max_tokens_per_pass or split over more GPUs",
        lambda run: _trainer_effect(resolve(run).trainer),
    ),
}
