"""Refuse run files that the built-in back ends cannot execute, before anything is written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from streamrl.engine.presets import choose_system
from streamrl.engine.trainer_side import check_reach
from streamrl.executor.adapter_layers import VLLM_PLACES
from streamrl.executor.launchers.placement import device_of
from streamrl.hardware.hugging_face import read_positions
from streamrl.hardware.profiles import load_model
from streamrl.hardware.resolved import longest_sequence
from streamrl.runfile.backend_choice import engine_named, training_backend_named
from streamrl.runfile.choices import import_object
from streamrl.runfile.cluster_config import ModelConfig
from streamrl.runfile.config import Run
from streamrl.runfile.gpu_pools import kind_key
from streamrl.runfile.keys import trainer_key
from streamrl.runfile.policies_config import SyncMode
from streamrl.runfile.roles_config import RolloutConfig, TrainerConfig


class Limit(NamedTuple):
    """A key with its value, whether it can be executed, and the allowed values."""

    key: str
    value: object
    is_met: bool
    must: str
    """Allowed values, such as "1 for backend torch"."""
    way_out: str = ""


VLLM_TEMPERATURES = (0.01, 2.0)
"""Temperatures that vLLM supports (0.32.0, vllm/sampling_params.py). It silently raises lower ones to the minimum, and
rejects higher ones."""


def check_back_ends(run: Run) -> None:
    """Raise `ValueError` if the back ends cannot execute the run exactly as its run file says."""
    check_reach(run.policies, run.followers)
    _refuse(_limits(run))


def check_back_end_of(run: Run, trainer: int) -> None:
    """Raise `ValueError` if the back end of one trainer cannot execute its settings."""
    check_reach(run.policies, run.followers)
    _refuse(_limits_of_trainer(run.as_seen_by(trainer), trainer))


def _refuse(limits: Iterable[Limit]) -> None:
    for limit in limits:
        if not limit.is_met:
            way_out = f": {limit.way_out}" if limit.way_out else ""
            raise ValueError(f"{limit.key} must be {limit.must}, got {limit.value!r}{way_out}")


def _limits(run: Run) -> Iterator[Limit]:
    """Yield all limits of the back ends for a run."""
    rollout = run.rollout
    yield Limit(
        "framework.name",
        run.framework.name,
        run.framework.name in (None, "streamrl"),
        "'streamrl', or left out, to be executed",
        "what starts another framework is written by `streamrl export`",
    )
    yield Limit(
        "verifier.pool",
        run.verifier.pool,
        not run.verifier.num_gpus or run.verifier.reward_model is not None,
        "left out for an executed run without a reward model: other rewards are computed on CPUs",
    )
    yield Limit(
        "verifier.gpus_per_worker",
        run.verifier.gpus_per_worker,
        run.verifier.gpus_per_worker <= 1,
        "1 to be executed: a replica of the reward model has one GPU",
    )
    yield Limit(
        "execute.launcher",
        run.execute.launcher,
        not run.faults or run.execute.launcher != "in-process",
        "'local' or 'ray' for planned faults, which strike processes",
    )
    for kind, own in enumerate(rollout.kinds):
        yield Limit(
            f"{kind_key(kind)}.tensor_parallel",
            own.tensor_parallel,
            own.tensor_parallel == 1 or engine_named(own.backend).splits_model,
            f"1 for backend {rollout.backend}",
            "--set rollout.backend=vllm executes the run on several GPUs a replica",
        )
        yield Limit(
            "execute.device",
            run.execute.device,
            own.tensor_parallel == 1 or ":" not in run.execute.device,
            f"'auto' or 'cuda' where {kind_key(kind)}.tensor_parallel is {own.tensor_parallel}",
        )
        yield Limit(
            f"{kind_key(kind)}.speculative",
            "a draft",
            own.drafts is None,
            "left out to be executed: no back end drafts tokens here",
        )
        for name in ("pipeline_parallel", "data_parallel"):
            degree = getattr(own, name)
            yield Limit(f"{kind_key(kind)}.{name}", degree, degree == 1, "1 to be executed")
    for own in rollout.kinds:
        computed = engine_named(own.backend).head_dims_on_cpu
        if computed and device_of(run.execute.device, run.cluster.pools, own.pool) == "cpu":
            heads = load_model(run.model).head_dim
            yield Limit(
                "model.path",
                f"{run.model.path}, whose heads have {heads}",
                heads in computed,
                f"a model whose attention heads have {', '.join(map(str, computed))} values for backend {own.backend} on CPUs",
                "--set rollout.backend=transformers executes it",
            )
    yield Limit(
        "rollout.chunked_prefill",
        rollout.chunked_prefill,
        rollout.chunked_prefill,
        "true for an executed run: engines go on decoding while they prefill new prompts",
    )
    engine = engine_named(rollout.backend)
    if engine.limits:
        further: Any = import_object(engine.limits)
        yield from further(run)
    yield Limit(
        "policies.concurrency",
        run.policies.concurrency,
        run.policies.concurrency == "fixed" or engine.follows_pressure,
        f"'fixed' for backend {rollout.backend}, whose batch is full or at its end",
    )
    yield from _limits_of_attention(run.model, run.rollout.kinds, run.trainers)
    yield Limit(
        "rollout.admission",
        rollout.admission,
        rollout.admission == "on-demand",
        f"'on-demand' for backend {rollout.backend}, which {engine.admits}",
        "--set rollout.admission=on-demand executes the run with rollout.max_running at once",
    )
    yield Limit(
        "rollout.migration_transfer",
        rollout.migration_transfer,
        rollout.migration_transfer == "recompute",
        f"'recompute' for backend {rollout.backend}, which cannot send a KV cache",
    )
    yield Limit(
        "policies.promote",
        run.policies.promote,
        run.policies.promote is None or not uses_relays(run.execute.launcher, run.sync.mode),
        "left out when weights go over relays (launcher ray, sync.mode lora or delta): relays stay with the primary trainer",
    )
    for number in range(run.num_trainers):
        yield from _limits_of_trainer(run.as_seen_by(number), number)
    yield Limit(
        "sync.wire",
        run.sync.wire,
        run.sync.wire == "chunks" or uses_relays(run.execute.launcher, run.sync.mode),
        "'chunks' for weights in shared memory: sync.mode 'full' without launcher 'ray' has no relays",
    )
    yield Limit(
        "sync.mode",
        run.sync.mode,
        run.sync.mode != "lora" or load_model(run.model).experts is None,
        "'full' or 'delta' for an executed mixture of experts: its experts cannot have adapters",
    )
    others = [own.backend for own in rollout.kinds if not engine_named(own.backend).serves_adapters]
    yield Limit(
        "sync.merge_adapters",
        run.sync.merge_adapters,
        not (run.serves_adapters and others),
        f"true, or left out, for backend {'/'.join(others)}, which cannot compute with adapters",
    )
    times = run.framework.epochs
    yield Limit("framework.epochs", times, times == 1, f"1 for backend {run.trainer.backend}")
    for key, dtype in (("dtype", rollout.dtype), ("kv_dtype", rollout.kv_dtype)):
        yield _one_format(run.model.dtype, f"rollout.{key}", dtype, rollout.backend)
    yield Limit(
        "model.dtype",
        run.model.dtype,
        run.model.dtype != "float16",
        f"'bfloat16' or 'float32' for backend {run.trainer.backend}",
    )
    if run.execute.deterministic:
        yield from _limits_of_determinism(run)


def _limits_of_attention(
    model: ModelConfig, kinds: tuple[RolloutConfig, ...], trainers: tuple[TrainerConfig, ...]
) -> Iterator[Limit]:
    """Yield the limits of engines on attention: latent attention, and learned sinks.

    transformers would fail later. It rejects sinks (gpt_oss) when it loads the model, because torch's attention (`sdpa`)
    lacks them (5.23, models/gpt_oss: `_supports_sdpa = False`). It fails on the keys of latent attention at the first
    write to its paged cache.
    """
    shape = load_model(model)
    sinks = f"for {model.path}, whose attention has sinks (gpt_oss), which torch's (sdpa) does not compute"
    latent = "'vllm' or 'static' for latent attention, whose keys have no room in the paged cache of transformers"
    for kind, own in enumerate(kinds):
        key, backend = f"{kind_key(kind)}.backend", own.backend
        engine = engine_named(backend)
        is_met = shape.latent is None or engine.computes_latent_attention
        yield Limit(key, backend, is_met, latent)
        is_met = not shape.has_sinks or engine.computes_sinks
        yield Limit(key, backend, is_met, f"'vllm' {sinks}")
    for number, trainer in enumerate(trainers):
        key, is_met = f"{trainer_key(number)}.packing", trainer.packing == "padded"
        yield Limit(key, trainer.packing, not shape.has_sinks or is_met, f"'padded' {sinks}")


def limits_of_vllm(run: Run) -> Iterator[Limit]:
    """Yield the limits of settings that vLLM would change silently, or with which it would not start."""
    temperature, (least, most) = run.rollout.temperature, VLLM_TEMPERATURES
    yield Limit(
        "rollout.temperature",
        temperature,
        least <= temperature <= most,
        f"from {least} to {most:g} for backend vllm, which samples at no other",
    )
    positions = None if run.model.path is None else read_positions(Path(run.model.path))
    longest = longest_sequence(run.rollout, run.workload)
    yield Limit(
        "workload.max_prompt_tokens + rollout.max_tokens",
        longest,
        positions is None or longest <= positions,
        f"at most the model's {positions} positions (max_position_embeddings) for backend vllm",
    )

    yield Limit(
        "sync.lora_rank",
        run.sync.lora_rank,
        not run.serves_adapters or run.sync.lora_rank <= VLLM_PLACES[-1],
        f"at most {VLLM_PLACES[-1]} for backend vllm",
        "--set sync.merge_adapters=true executes it",
    )


def uses_relays(launcher: str, mode: SyncMode) -> bool:
    """Return whether weights go through relays: to other machines, or encoded as deltas or adapters."""
    return mode != "full" or launcher == "ray"


def _limits_of_trainer(run: Run, number: int) -> Iterator[Limit]:
    """Yield the limits of a trainer's computation and parallelism; `run` is the run as this trainer sees it."""
    trainer, launcher, algorithm = run.trainer, run.execute.launcher, run.algorithm
    key, of_backend = trainer_key(number), f"for backend {trainer.backend}"
    its = f"{key}.algorithm" if number else "algorithm"
    backend = training_backend_named(trainer.backend)
    yield Limit(
        f"{its}.old_log_probs",
        algorithm.old_log_probs,
        algorithm.old_log_probs == "engine",
        "'engine' to be executed: log-probabilities come with the tokens",
    )
    yield _one_format(run.model.dtype, f"{key}.dtype", trainer.dtype, trainer.backend)
    for name, value, done in (
        ("kernels", trainer.kernels, "eager"),
        ("order", trainer.order, "sorted"),
    ):
        yield Limit(f"{key}.{name}", value, value == done, f"{done!r} {of_backend}")
    yield Limit(
        f"{key}.routing",
        trainer.routing,
        trainer.routing == "natural" or load_model(run.model).experts is None,
        f"'natural' {of_backend}, whose router chooses",
    )
    yield Limit(
        f"{key}.offload",
        trainer.offload,
        not trainer.offload or run.policies.shares_gpus,
        f"False {of_backend}, unless it shares GPUs with replicas",
    )
    steps = run.framework.optimizer_steps
    yield Limit(
        "framework.optimizer_steps",
        steps,
        steps == 1 or (backend.makes_several_steps and not algorithm.chosen.compares_pairs),
        f"1 {of_backend} and {algorithm.name}: several are made by torch alone, and by no dpo, whose pairs are weighed at "
        "the weights that they were scored at",
    )
    splits = ("tensor_parallel", "pipeline_parallel", "expert_parallel", "context_parallel")
    for name in (*splits, "expert_tensor_parallel"):
        degree = getattr(trainer, name) or 1
        yield Limit(f"{key}.{name}", degree, degree == 1, f"1 {of_backend}")
    has_group = trainer.data_parallel > 1 or backend.always_has_ranks
    yield Limit(
        "execute.launcher",
        launcher,
        launcher != "in-process" or not has_group,
        "'local' or 'ray' for a trainer with several ranks, or with deepspeed: each rank is a process",
    )
    yield Limit(
        "execute.launcher",
        launcher,
        launcher != "ray" or not run.policies.shares_gpus,
        "'local' when replicas and trainer share GPUs: Ray gives a GPU to one role",
    )
    yield Limit(
        "execute.device",
        run.execute.device,
        launcher != "ray" or ":" not in run.execute.device,
        "'auto', 'cpu' or 'cuda' for launcher ray, which chooses GPUs itself",
    )
    yield Limit(
        "execute.device",
        run.execute.device,
        trainer.data_parallel == 1 or ":" not in run.execute.device,
        f"'auto', 'cpu' or 'cuda' where {key}.data_parallel is {trainer.data_parallel}: each rank has a GPU of its own",
    )
    if not backend.has_zero:
        yield Limit(
            f"{key}.zero",
            trainer.zero,
            trainer.zero == 0 or trainer.data_parallel == 1,
            f"0 {of_backend}, of which every rank has all weights and all of the optimizer",
            f"--set {key}.zero=0 does so, --set {key}.backend=deepspeed splits them",
        )
        return
    yield Limit(
        f"{key}.zero",
        trainer.zero,
        trainer.zero > 1 or run.model.dtype == "float32",
        f"2 or 3 {of_backend} in {run.model.dtype}: below, gradients of many passes are added up in it",
    )
    yield Limit(
        f"{key}.logits",
        trainer.logits,
        trainer.logits in (None, "eager") or trainer.zero < 3 or trainer.data_parallel == 1,
        f"'eager' {of_backend} with zero 3 on several ranks: each chunk would gather the output layer, and ranks have other "
        "numbers of them",
    )
    on_cpu = device_of(run.execute.device, run.cluster.pools, trainer.pool) == "cpu"
    yield Limit(
        f"{key}.backend",
        trainer.backend,
        on_cpu or backend.frees_memory or not run.policies.shares_gpus,
        f"'torch' where replicas and trainer share GPUs: {trainer.backend} does not release its memory",
    )


def _one_format(model_dtype: str, key: str, dtype: str | None, backend: str) -> Limit:
    """Return the limit that replicas or trainer use the format of `model.dtype`."""
    return Limit(
        key,
        dtype,
        dtype in (None, model_dtype),
        f"left out or model.dtype {model_dtype!r} for backend {backend}, which has one format",
        f"simulate and plan know what {key} would do",
    )


def _limits_of_determinism(run: Run) -> Iterator[Limit]:
    """Yield the limits for deterministic runs: the order and shape of sums must not depend on timing."""
    where = "where execute.deterministic is true"
    system, policies = choose_system(run.policies), run.policies
    key = "policies.system" if policies.max_staleness is None else "policies.max_staleness"
    yield Limit(
        key,
        policies.system if policies.max_staleness is None else policies.max_staleness,
        system.max_staleness == 0,
        f"one that trains only on fresh rollouts {where}",
    )
    yield Limit("policies.sync_every", system.sync_every, system.sync_every == 1, f"1 {where}")
    yield Limit(
        "policies.consumption",
        system.consumption,
        system.consumption == "strict-fifo",
        f"'strict-fifo' {where}",
    )
    yield Limit(
        "policies.migration",
        policies.migration,
        policies.migration == "none",
        f"'none' {where}: a moved rollout is computed again with another shape",
    )
    for kind, own in enumerate(run.rollout.kinds):
        name, device = kind_key(kind), device_of(run.execute.device, run.cluster.pools, own.pool)
        yield Limit(
            f"{name}.backend",
            own.backend,
            engine_named(own.backend).is_deterministic,
            f"'static' {where}, which samples each rollout from its own seed",
        )
        yield Limit(
            f"{name}.max_running",
            own.max_running,
            own.max_running == 1,
            f"1 {where}: other rollouts in a batch change the last bits of the logits",
        )
        yield Limit("execute.device", run.execute.device, device == "cpu", f"'cpu' {where}")
    for trainer in run.trainers:
        device = device_of(run.execute.device, run.cluster.pools, trainer.pool)
        yield Limit("execute.device", run.execute.device, device == "cpu", f"'cpu' {where}")
    yield Limit(
        "execute.threads", run.execute.threads, run.execute.threads in (None, 1), f"1 {where}"
    )
