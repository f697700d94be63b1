"""Values and facts of a plan, under the names that the options of frameworks refer to.

A value is None if the plan has no whole number for it, such as an uneven number of rollouts in a
mini-batch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import accumulate
from math import ceil
from typing import NamedTuple

import msgspec
from msgspec.structs import asdict

from streamrl.engine.presets import choose_system
from streamrl.export.placement import (
    place_in_parts,
    place_on_whole_nodes,
    why_replicas_are_split,
)
from streamrl.hardware.parallelism import end_stage_layers
from streamrl.hardware.profiles import load_model
from streamrl.hardware.resolved import longest_sequence
from streamrl.runfile.algorithm_config import AlgorithmConfig, OptimizerConfig
from streamrl.runfile.cluster_config import ModelConfig, PoolConfig
from streamrl.runfile.config import Run, num_extra
from streamrl.runfile.frameworks import Layout, Value, settings_of
from streamrl.runfile.policies_config import PoliciesConfig, SyncConfig
from streamrl.runfile.roles_config import RolloutConfig, TrainerConfig, VerifierConfig
from streamrl.runfile.section import Section, fields_of
from streamrl.runfile.simulation_config import FrameworkConfig
from streamrl.runfile.workload_config import WorkloadConfig

MEGABYTE = 1e6
KEY = re.compile(r"[a-z_]+(?:\.[a-z_0-9]+)+")
SECTIONS = (
    *("algorithm", "rollout", "trainer", "sync", "policies", "workload", "verifier", "evaluation"),
    *("execute.checkpoint_every", "execute.checkpoints"),
)
"""Sections and keys that change what is trained, how, and what is kept of it."""
ASSUMED = (
    *("rollout.backend", "rollout.external", "rollout.pool", "rollout.start_time"),
    *("trainer.backend", "trainer.efficiency", "trainer.pool", "trainer.rank_start_time"),
    *("trainer.routing", "trainer.start_time", "policies.context_time", "policies.latency"),
    *("sync.changed_share", "verifier.start_time", "verifier.time", "workload.group_rewards"),
    *("workload.informative_share", "workload.lengths"),
)
"""Keys of these sections that only `streamrl` itself reads: its own back ends, and what a simulation assumes."""
IN_FLIGHT = ("load-in-flight", "abort-and-resume")
"""Weight-sync modes that leave rollouts running."""
ALWAYS: tuple[Value | None, ...] = ()
"""For a value that must always be mentioned if no option takes it."""


class PlannedValue(NamedTuple):
    """One value of a plan."""

    name: str
    key: str
    """Key of the run file, or the expression that it is computed from."""
    value: Value | None
    plain: tuple[Value | None, ...] | None = None
    """Values that need no mention if no option takes them; None means never."""
    refusal: str = ""
    """Why the plan has no place for both sides, if an option needs one."""
    gap: str = "is no whole number"
    """What is wrong with the key if it has no value, and an option needs one."""


def planned_values(run: Run) -> dict[str, PlannedValue]:
    """Return all values of a plan by name."""
    parts = (
        _batch(run.algorithm, run.framework, run.model, run.rollout, run.workload),
        _generation(run.rollout, run.costs.engine, run.model.dtype, run.trainer.dtype),
        _training(run.trainer, longest_sequence(run.rollout, run.workload, run.environment)),
        _stages(run.trainer, load_model(run.model).num_layers),
        planned_machines(
            run.rollout, run.trainer, run.cluster.pools, shares_gpus=run.policies.shares_gpus
        ),
    )
    found = [value for part in parts for value in part]
    found += [
        _sequence_multiple(run.trainer),
        *_algorithm(run.algorithm),
        *_policies(run.policies, run.algorithm, run.framework.optimizer_steps),
        *_sync(run.sync),
        *_rewards(run.verifier),
        *_lending(run.lent),
        *_resizes(run.trainer),
    ]
    return {value.name: value for value in found}


def other_settings(run: Run, told: Iterable[PlannedValue]) -> Iterator[PlannedValue]:
    """Yield the keys of no told value that differ from their defaults, and from what the framework fills in."""
    keys = [key for value in told for key in KEY.findall(value.key)]
    named = {whole for key in keys for whole in accumulate(key.split("."), "{}.{}".format)}
    filled = {setting.key for setting, value in settings_of(run) if value == setting.value}
    left_out = {*named, *filled, *ASSUMED}
    for name in SECTIONS:
        section, _, only = name.partition(".")
        for key, value, default in _fields(getattr(run, section), section, only):
            if key not in left_out and value != default:
                yield PlannedValue(key, key, _shown(value), ALWAYS)


def _fields(section: object, name: str, only: str) -> Iterator[tuple[str, object, object]]:
    """Yield the keys of a section, or one of them, with their values and defaults; nothing if the section is absent."""
    for field in fields_of(type(section)) if isinstance(section, Section) else ():
        if only in ("", field.encode_name):
            yield f"{name}.{field.encode_name}", getattr(section, field.name), _default_of(field)


def _default_of(field: msgspec.structs.FieldInfo) -> object:
    has_factory = field.default_factory is not msgspec.NODEFAULT
    return field.default_factory() if has_factory else field.default


def _shown(value: object) -> Value:
    """Return a value as text of TOML's kind; tables are shown as JSON."""
    if isinstance(value, (bool, int, float, str)):
        return value
    return msgspec.json.encode(value, enc_hook=str).decode()


def planned_facts(run: Run, layout: Layout) -> set[str]:
    """Return the facts of a plan whose trainer is a training back end of a framework."""
    named = {
        run.trainer.packing,
        f"algorithm:{run.algorithm.name}",
        f"correction:{run.algorithm.corrected_by}",
        f"dtype:{run.model.dtype}",
        f"layout:{layout.name}",
        f"recompute:{run.trainer.recompute}",
        f"sends:{run.sync.backend}",
        f"serves:{run.costs.engine.partition('-')[0]}",
        f"sync:{run.sync.mode}",
        f"system:{run.policies.system}",
        f"zero:{run.trainer.zero}",
    }
    found = conditions(run.policies, run.algorithm, run.model, run.rollout, run.trainer)
    return named | {fact for fact, holds in found.items() if holds}


def conditions(
    policies: PoliciesConfig,
    algorithm: AlgorithmConfig,
    model: ModelConfig,
    rollout: RolloutConfig,
    trainer: TrainerConfig,
) -> dict[str, bool]:
    """Return whether each fact holds for a plan, independent of the framework."""
    system, shape = choose_system(policies), load_model(model)
    return {
        "colocated": policies.shares_gpus,
        "async": system.staleness_bound > 0,
        "drops-stale": system.over_staleness == "drop",
        "syncs-seldom": system.sync_every > 1,
        "oversamples": policies.oversampling > 1,
        "keeps-left-over": policies.oversampling > 1 and policies.left_over == "keep",
        "streams": system.streaming == "stream",
        "in-flight": system.weight_sync in IN_FLIGHT,
        "critic": algorithm.has_critic,
        "reference": algorithm.has_reference,
        "engine-log-probs": not algorithm.recomputes_log_probs,
        "corrected": algorithm.corrected_by in ("token-tis", "seq-tis", "icepop", "decoupled"),
        "weighs-tokens": algorithm.corrected_by in ("token-tis", "decoupled"),
        "dynamic-sampling": algorithm.dynamic_sampling,
        "group": algorithm.group_size > 1,
        "offload": trainer.offload,
        "shard-groups": trainer.shard_ranks is not None,
        "tensor": trainer.tensor_parallel > 1,
        "sequence-parallel": trainer.sequence_parallel,
        "mixture": shape.experts is not None,
        "virtual": trainer.virtual_stages > 1,
        "uneven-stages": shape.num_layers % trainer.pipeline_parallel > 0,
        "deals-experts": rollout.expert_parallel > 1,
        "context": trainer.context_parallel > 1,
        "stages": rollout.pipeline_parallel > 1,
        "attention-ranks": rollout.data_parallel > 1,
        "two-pools": rollout.pool != trainer.pool,
        "drafts": rollout.drafts is not None and rollout.drafts.model is None,
        "trains-drafts": rollout.drafts is not None and rollout.drafts.trained,
    }


def _batch(
    algorithm: AlgorithmConfig,
    framework: FrameworkConfig,
    model: ModelConfig,
    rollout: RolloutConfig,
    workload: WorkloadConfig,
) -> Iterator[PlannedValue]:
    steps = framework.optimizer_steps
    split = f"algorithm.prompts_per_step={algorithm.prompts_per_step} / framework.optimizer_steps={steps}"
    yield PlannedValue("model", "model", model.name or model.path, ALWAYS)
    yield PlannedValue("steps", "algorithm.steps", algorithm.steps, ALWAYS)
    yield PlannedValue("prompts_per_step", "algorithm.prompts_per_step", algorithm.prompts_per_step)
    yield PlannedValue("group_size", "algorithm.group_size", algorithm.group_size)
    yield PlannedValue("optimizer_steps", "framework.optimizer_steps", steps, (1,))
    yield PlannedValue("epochs", "framework.epochs", framework.epochs, (1,))
    yield PlannedValue("mini_batch_prompts", split, _whole(algorithm.prompts_per_step, steps))
    rollouts = _whole(algorithm.rollouts_per_step, steps)
    yield PlannedValue(
        "mini_batch_rollouts", f"{split} x algorithm.group_size={algorithm.group_size}", rollouts
    )
    most = workload.max_prompt_tokens
    yield PlannedValue("max_prompt_tokens", "workload.max_prompt_tokens", most, ALWAYS)
    yield PlannedValue("max_tokens", "rollout.max_tokens", rollout.max_tokens)
    total = "rollout.max_tokens + workload.max_prompt_tokens"
    yield PlannedValue("total_tokens", total, longest_sequence(rollout, workload))


def _generation(
    rollout: RolloutConfig, engine: str, model_dtype: str, trainer_dtype: str | None
) -> Iterator[PlannedValue]:
    yield PlannedValue("serving_engine", "costs.engine", engine.partition("-")[0])
    yield PlannedValue("replicas", "rollout.replicas", rollout.replicas, ALWAYS)
    yield PlannedValue(
        "rollout_tensor_parallel", "rollout.tensor_parallel", rollout.tensor_parallel
    )
    experts = rollout.expert_parallel
    yield PlannedValue("rollout_expert_parallel", "rollout.expert_parallel", experts, (1,))
    for name in ("pipeline_parallel", "data_parallel"):
        degree = getattr(rollout, name)
        yield PlannedValue(f"rollout_{name}", f"rollout.{name}", degree, (1,))
    yield PlannedValue("replica_gpus", "GPUs of a replica", rollout.gpus_per_replica)
    yield from _formats(model_dtype, rollout, trainer_dtype)
    drafted = None if rollout.drafts is None else rollout.drafts.tokens
    yield PlannedValue("drafted_tokens", "rollout.speculative.tokens", drafted, (None,))
    checked = None if drafted is None else drafted + 1
    yield PlannedValue("checked_tokens", "rollout.speculative.tokens + 1", checked)
    trained = rollout.drafts is not None and rollout.drafts.trained
    yield PlannedValue("trained_drafts", "rollout.speculative.trained", trained, (False,))
    yield PlannedValue("max_running", "rollout.max_running", rollout.max_running, ALWAYS)
    share = rollout.memory_utilization
    yield PlannedValue("memory_utilization", "rollout.memory_utilization", share, ALWAYS)
    yield PlannedValue("temperature", "rollout.temperature", rollout.temperature, (1.0,))
    yield PlannedValue("top_p", "rollout.top_p", rollout.top_p, (1.0,))
    yield PlannedValue("top_k", "rollout.top_k", rollout.top_k, (None,))
    yield PlannedValue("min_p", "rollout.min_p", rollout.min_p, (0.0,))
    ends = bool(rollout.stop or rollout.stop_token_ids)
    yield PlannedValue("stop", "rollout.stop, rollout.stop_token_ids", ends, (False,))
    for place, other in enumerate(rollout.others):
        shown = f"{other.replicas} x TP{other.tensor_parallel} in pool {other.pool}"
        yield PlannedValue(f"others_{place}", f"rollout.others.{place}", shown, ALWAYS)


def _formats(
    model_dtype: str, rollout: RolloutConfig, trainer_dtype: str | None
) -> Iterator[PlannedValue]:
    """Yield the model's format, and formats of storage and computation that differ from it."""
    yield PlannedValue("model_dtype", "model.dtype", model_dtype, ("bfloat16",))
    plain = (None, model_dtype)
    yield PlannedValue("rollout_dtype", "rollout.dtype", rollout.dtype, plain)
    yield PlannedValue("rollout_kv_dtype", "rollout.kv_dtype", rollout.kv_dtype, plain)
    yield PlannedValue("trainer_dtype", "trainer.dtype", trainer_dtype, plain)
    only = rollout.weight_only
    yield PlannedValue("weight_only", "rollout.weight_only", only, (False,))


def _training(trainer: TrainerConfig, longest: int) -> Iterator[PlannedValue]:
    for name, plain in (
        *(("tensor_parallel", (1,)), ("pipeline_parallel", (1,)), ("expert_parallel", (1,))),
        *(
            ("virtual_stages", (1,)),
            ("data_parallel", (1,)),
            ("context_parallel", (1,)),
            ("zero", ALWAYS),
        ),
        *(("micro_batch", ALWAYS), ("recompute", ("none",)), ("offload", (False,))),
        *(("packing", ALWAYS), ("logits", (None, "eager", "fused"))),
        *(("reshard_after_forward", (True,)), ("shard_ranks", (None,))),
    ):
        yield PlannedValue(name, f"trainer.{name}", getattr(trainer, name), plain)
    splits = trainer.copies_of_norms == 1
    yield PlannedValue("sequence_parallel", "trainer.sequence_parallel", splits, (True,))
    told = ("fsdp2",) if trainer.zero == 3 else None
    yield PlannedValue("sharding", "trainer.sharding", trainer.sharding, told)
    slices = trainer.expert_slices
    plain = (1, trainer.tensor_parallel)
    key = "trainer.expert_tensor_parallel, or what it is where absent"
    yield PlannedValue("expert_tensor_parallel", key, slices, plain)
    tokens = trainer.max_tokens_per_pass
    yield PlannedValue("tokens_per_pass", "trainer.max_tokens_per_pass", tokens, ALWAYS)
    yield PlannedValue(
        "tokens_per_pass_and_longest",
        f"trainer.max_tokens_per_pass={tokens}, and the longest rollout must fit",
        max(tokens, longest),
    )
    scored, key = trainer.max_tokens_per_scoring_pass, "trainer.max_tokens_per_scoring_pass"
    yield PlannedValue("scored_tokens_per_pass", key, scored, (None,))
    if scored is None:
        scored, key = tokens, "trainer.max_tokens_per_pass"
    yield PlannedValue(
        "scored_tokens_per_pass_and_longest",
        f"{key}={scored}, and the longest rollout must fit",
        max(scored, longest),
    )
    yield PlannedValue("is_packed", "trainer.packing", trainer.packing == "packed")
    yield PlannedValue("recomputes", "trainer.recompute", trainer.recompute != "none")


def _sequence_multiple(trainer: TrainerConfig) -> PlannedValue:
    """Return the number by which padded sequences must divide: each context rank has two parts of one."""
    parts = 1 if trainer.context_parallel == 1 else 2 * trainer.context_parallel
    key = "trainer.tensor_parallel, x 2 x trainer.context_parallel above 1"
    return PlannedValue("sequence_multiple", key, trainer.tensor_parallel * parts)


def _stages(trainer: TrainerConfig, num_layers: int) -> Iterator[PlannedValue]:
    """Yield the layers of the first and last stage, for stages that do not divide the layers."""
    stages = trainer.pipeline_parallel
    first, last = end_stage_layers(num_layers, stages) or (None, None)
    key = f"{num_layers} layers over trainer.pipeline_parallel={stages}"
    yield PlannedValue("first_stage_layers", key, first)
    yield PlannedValue("last_stage_layers", key, last)


def planned_machines(
    rollout: RolloutConfig,
    trainer: TrainerConfig,
    pools: dict[str, PoolConfig],
    *,
    shares_gpus: bool,
) -> Iterator[PlannedValue]:
    """Yield the nodes and GPUs of both sides, in the terms of each framework; None where it has no placement."""
    parts = place_in_parts(rollout, trainer, pools, shares_gpus=shares_gpus)
    yield PlannedValue("rollout_gpus", "GPUs of all replicas", rollout.num_gpus)
    for side, found in (("rollout", parts.rollout), ("trainer", parts.trainer)):
        whose = "the replicas" if side == "rollout" else "the trainer"
        count, gpus = found or (None, None)
        key = f"parts of nodes for {whose}"
        yield PlannedValue(f"{side}_nodes", key, count, refusal=parts.refusal)
        key = f"GPUs of {whose} in each part of a node"
        yield PlannedValue(f"{side}_gpus_per_node", key, gpus, refusal=parts.refusal)
    yield from _whole_nodes(rollout, trainer, pools, shares_gpus=shares_gpus)
    split = why_replicas_are_split(rollout, trainer, pools, shares_gpus=shares_gpus)
    per_node = None if split else pools[rollout.pool].gpus_per_node
    key = "gpus_per_node of the replicas' pool"
    yield PlannedValue("node_gpus", key, per_node, refusal=split)
    yield PlannedValue("is_colocated", "policies.system", shares_gpus)


def _whole_nodes(
    rollout: RolloutConfig,
    trainer: TrainerConfig,
    pools: dict[str, PoolConfig],
    *,
    shares_gpus: bool,
) -> Iterator[PlannedValue]:
    """Yield the nodes of a cluster whose sides have whole nodes of their own."""
    found = place_on_whole_nodes(rollout, trainer, pools, shares_gpus=shares_gpus)
    count, gpus = found.rollout or (None, None)
    for name, key, value in (
        ("all_nodes", "nodes of both sides", found.nodes),
        ("gpus_per_node", "GPUs on each node, alike on both sides", found.gpus),
        ("own_rollout_nodes", "nodes of the replicas", count),
        ("own_rollout_gpus_per_node", "GPUs of the replicas on each node", gpus),
    ):
        yield PlannedValue(name, key, value, refusal=found.refusal)


def _algorithm(algorithm: AlgorithmConfig) -> Iterator[PlannedValue]:
    yield PlannedValue("algorithm", "algorithm.name", algorithm.name, ALWAYS)
    for name, plain in (
        *(("learning_rate", ALWAYS), ("gae_lambda", (1.0,)), ("clip", ALWAYS)),
        *(("clip_high", (None,)), ("max_grad_norm", (1.0,)), ("dynamic_sampling", (False,))),
        *(("old_log_probs", ("trainer",)), ("loss_mean", ("token",)), ("router_replay", (False,))),
    ):
        yield PlannedValue(name, f"algorithm.{name}", getattr(algorithm, name), plain)
    above = algorithm.clip if algorithm.clip_high is None else algorithm.clip_high
    yield PlannedValue("clip_above", "algorithm.clip_high, or clip", above)
    most = algorithm.max_gen_batches
    yield PlannedValue("max_gen_batches", "algorithm.max_gen_batches", most)
    by = algorithm.corrected_by
    yield PlannedValue("correction", "algorithm.correction", by, (None, "none"))
    yield PlannedValue("correction_cap", "algorithm.correction_cap", algorithm.correction_cap)
    weight = algorithm.kl_coefficient
    yield PlannedValue("kl_coefficient", "algorithm.kl_coefficient", weight, (0.0,))
    kind = algorithm.kl_estimator if algorithm.has_reference else None
    yield PlannedValue("kl_estimator", "algorithm.kl_estimator", kind, (None,))
    rate = algorithm.critic_rate if algorithm.has_critic else None
    yield PlannedValue("critic_rate", "algorithm.critic_learning_rate", rate, (None,))
    yield PlannedValue("has_reference", "algorithm.kl_coefficient", algorithm.has_reference)
    is_token_mean = {"token": True, "rollout": False}.get(algorithm.loss_mean)
    gap = f"{algorithm.loss_mean!r} is neither 'token' nor 'rollout'"
    yield PlannedValue("is_token_mean", "algorithm.loss_mean", is_token_mean, gap=gap)
    masks = algorithm.mask_truncated
    yield PlannedValue("mask_truncated", "algorithm.mask_truncated", masks, (False,))
    yield PlannedValue("clip_dual", "algorithm.clip_dual", algorithm.clip_dual, (None,))
    for key, default in asdict(OptimizerConfig()).items():
        value = getattr(algorithm.optimizer, key)
        shown, usual = (str(list(v)) if isinstance(v, tuple) else v for v in (value, default))
        yield PlannedValue(f"optimizer_{key}", f"algorithm.optimizer.{key}", shown, (usual,))
    takes = not algorithm.recomputes_log_probs
    yield PlannedValue("takes_engine_log_probs", "algorithm.old_log_probs", takes)


def _policies(
    policies: PoliciesConfig, algorithm: AlgorithmConfig, optimizer_steps: int
) -> Iterator[PlannedValue]:
    system = choose_system(policies)
    yield PlannedValue("system", "policies.system", policies.system, ALWAYS)
    bound, every = system.staleness_bound, system.sync_every
    key = "policies.max_staleness"
    also = "" if every == 1 else " and policies.sync_every, in versions"
    yield PlannedValue("max_staleness", key + also, bound, (0,))
    yield PlannedValue("batches_ahead", f"{key}, at least 1", max(1, ceil(system.max_staleness)))
    yield from _late_groups(policies, algorithm, optimizer_steps)
    yield PlannedValue("weight_sync", "policies.weight_sync", system.weight_sync)
    flies = system.weight_sync in IN_FLIGHT
    yield PlannedValue("loads_in_flight", "policies.weight_sync", flies)
    yield PlannedValue("dispatch", "policies.dispatch", system.dispatch, ("least-loaded",))
    yield PlannedValue("order", "policies.order", system.order, ("fifo",))
    yield PlannedValue("consumption", "policies.consumption", system.consumption, ("strict-fifo",))
    for name, plain in (
        *(("tail_batching", "none"), ("migration", "none"), ("group_placement", "split")),
        *(("learns_from_siblings", False), ("resize", "keep"), ("concurrency", "fixed")),
    ):
        yield PlannedValue(name, f"policies.{name}", getattr(policies, name), (plain,))


def _late_groups(
    policies: PoliciesConfig, algorithm: AlgorithmConfig, optimizer_steps: int
) -> Iterator[PlannedValue]:
    """Yield the interval of weight pushes, and the treatment of late groups."""
    every, prompts = policies.sync_every, algorithm.prompts_per_step
    times = "" if every == 1 else f" x policies.sync_every={every}"
    key = f"algorithm.prompts_per_step{times}"
    yield PlannedValue("prompts_per_sync", key, every * prompts)
    key = f"framework.optimizer_steps{times}"
    yield PlannedValue("updates_per_sync", key, every * optimizer_steps)
    key = "algorithm.steps" if every == 1 else f"algorithm.steps / policies.sync_every={every}"
    yield PlannedValue("num_syncs", key, ceil(algorithm.steps / every))
    yield PlannedValue("sync_every", "policies.sync_every", every, (1,))
    late = policies.over_staleness
    yield PlannedValue("over_staleness", "policies.over_staleness", late, ("wait",))
    share, drawn = (
        policies.oversampling,
        prompts + num_extra(policies.oversampling, algorithm.prompts_per_step),
    )
    yield PlannedValue("oversampling", "policies.oversampling", share, (1,))
    key = f"algorithm.prompts_per_step x policies.oversampling={share}"
    yield PlannedValue("prompts_drawn", key, drawn)
    left = policies.left_over if share > 1 else None
    yield PlannedValue("left_over", "policies.left_over", left, (None, "drop"))


def _rewards(verifier: VerifierConfig) -> Iterator[PlannedValue]:
    """Yield the GPUs that compute rewards, if there are any, and the model on them."""
    if verifier.pool is None:
        return
    gpus = "verifier.workers x gpus_per_worker"
    yield PlannedValue("reward_pool", "verifier.pool", verifier.pool, ALWAYS)
    yield PlannedValue("reward_gpus", gpus, verifier.num_gpus, ALWAYS)
    for place, reward in enumerate(verifier.reward):
        if reward.model is not None:
            yield PlannedValue(
                "reward_model", f"verifier.reward.{place}.model", reward.model, ALWAYS
            )


def _lending(lent: RolloutConfig | None) -> Iterator[PlannedValue]:
    """Yield the replicas on the trainer's GPUs, if it lends them."""
    if lent is not None:
        shown = f"{lent.replicas} x TP{lent.tensor_parallel} on the trainer's GPUs"
        yield PlannedValue("lending", "[lending]", shown, ALWAYS)


def _resizes(trainer: TrainerConfig) -> Iterator[PlannedValue]:
    """Yield the changes of the trainer's ranks, if there are any."""
    if trainer.borrows:
        yield PlannedValue("borrows", "trainer.borrows", "GPUs of idle replicas train", ALWAYS)
    if trainer.resize:
        changes = (f"{each.data_parallel} from step {each.step}" for each in trainer.resize)
        shown = f"data_parallel {', '.join(changes)}"
        yield PlannedValue("resize", "trainer.resize", shown, ALWAYS)


def _sync(sync: SyncConfig) -> Iterator[PlannedValue]:
    yield PlannedValue("sync_mode", "sync.mode", sync.mode, ("full",))
    yield PlannedValue("sync_backend", "sync.backend", sync.backend, ("broadcast-tree",))
    yield PlannedValue("bucket_bytes", "sync.bucket_size", round(sync.bucket_size))
    yield PlannedValue("bucket_megabytes", "sync.bucket_size", ceil(sync.bucket_size / MEGABYTE))
    yield PlannedValue("lora_rank", "sync.lora_rank", sync.lora_rank)
    alpha = sync.adapter_alpha
    shown = int(alpha) if alpha.is_integer() else alpha
    yield PlannedValue("lora_alpha", "sync.lora_alpha", shown)


def _whole(number: int, parts: int) -> int | None:
    return None if number % parts else number // parts
