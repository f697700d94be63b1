"""Refuse run files that the built-in back ends cannot execute, before anything is written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from streamrl.engine.presets import choose_system
from streamrl.engine.trainer_side import LEADER, check_reach
from streamrl.hardware.hugging_face import read_positions, why_not_executed
from streamrl.hardware.profiles import load_model
from streamrl.hardware.resolved import longest_sequence
from streamrl.runfile.algorithm_config import AlgorithmConfig
from streamrl.runfile.backend_choice import (
    ENGINES,
    SERVER_APIS,
    TRAINING_BACKENDS,
    EngineChoice,
    RolloutBackend,
    VllmServer,
    engine_named,
    server_api_named,
    training_backend_named,
)
from streamrl.runfile.choices import import_object
from streamrl.runfile.cluster_config import ModelConfig, PoolConfig
from streamrl.runfile.config import ExecuteConfig, Run
from streamrl.runfile.errors import RunError
from streamrl.runfile.gpu_pools import check_resizable, device_of, kind_key
from streamrl.runfile.keys import trainer_key
from streamrl.runfile.policies_config import PoliciesConfig, SyncConfig, SyncMode
from streamrl.runfile.roles_config import (
    LendingConfig,
    RolloutConfig,
    TrainerConfig,
    VerifierConfig,
)
from streamrl.runfile.simulation_config import FaultConfig
from streamrl.runfile.workload_config import WorkloadConfig


class Limit(NamedTuple):
    """A key with its value, whether it can be executed, and the allowed values."""

    key: str
    value: object
    is_met: bool
    must: str
    """Allowed values, such as "1 for backend torch"."""
    way_out: str = ""


WHOLE_SAMPLING = {"top_p": 1.0, "top_k": None, "min_p": 0.0, "stop": (), "seed_rollouts": False}
"""Keys of `[rollout]` that an engine may lack, with the values that need nothing of it."""
VLLM_PLACES = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM can allocate (0.32.0, config/lora.py). An adapter uses the next larger one."""


def check_back_ends(run: Run) -> None:
    """Raise `RunError` if the back ends cannot execute the run exactly as its run file says."""
    check_reach(run.policies, run.followers)
    rollout, kinds, execute, sync = run.rollout, run.rollout.kinds, run.execute, run.sync
    pools, policies, model = run.cluster.pools, run.policies, run.model
    has_relays = uses_relays(execute.launcher, sync)
    own_rank = sync.lora_rank if run.serves_adapters else None
    _refuse(_limits_of_scope(run.framework.name, run.verifier, run.faults, execute.launcher))
    _refuse(_limits_of_model(model))
    _refuse(_limits_of_servers(rollout, policies, execute.launcher))
    if run.lending is not None:
        where = "for [lending], or remove that section"
        _refuse(_limits_of_lending(rollout.backend, execute, sync.mode, where))
    if run.trainer.borrows:
        where = "for trainer.borrows, or remove that key"
        _refuse(_limits_of_lending(rollout.backend, execute, sync.mode, where))
    check_replicas(rollout, model, execute.device, pools)
    _refuse(_limits_of_engine(rollout, model, run.workload, policies.concurrency, own_rank))
    _refuse(_limits_of_attention(model, kinds, run.trainers))
    if run.algorithm.router_replay:
        _refuse(_limits_of_replay(kinds, run.trainers))
    _refuse(_limits_of_rollouts(rollout, policies.promote, has_relays=has_relays))
    for number in range(run.num_trainers):
        check_back_end_of(run, number)
    _refuse(
        _limits_of_sync(
            sync,
            model,
            kinds,
            has_relays=has_relays,
            own_rank=own_rank,
            shares_gpus=policies.shares_gpus,
        )
    )
    used = [own.pool for own in kinds] + [run.trainer.pool]
    devices = {device_of(execute.device, pools[name]) for name in used}
    _refuse(
        _limits_of_direct_sync(
            sync,
            kinds,
            run.trainer,
            devices,
            shares_gpus=policies.shares_gpus,
            lends_gpus=run.lending is not None or run.trainer.borrows,
        )
    )
    _refuse(_limits_of_formats(model, rollout, run.trainer.backend, run.framework.epochs))
    if execute.deterministic:
        _refuse(_limits_of_determinism(policies, kinds, run.trainers, execute, pools))


def refusal_of(run: Run) -> str:
    """Return the first setting that the back ends cannot execute, with what it must be; "" if there is none."""
    try:
        check_back_ends(run)
    except ValueError as error:
        return str(error)
    return ""


def check_resize(
    trainer: TrainerConfig, policies: PoliciesConfig, lending: LendingConfig | None, launcher: str
) -> None:
    """Raise `RunError` if the ranks of the primary trainer cannot change in an executed run."""
    check_resizable(trainer, policies, lending)
    _refuse(limits_of_resize(trainer_key(0), trainer, launcher))


def check_back_end_of(run: Run, trainer: int) -> None:
    """Raise `RunError` if the back end of one trainer cannot execute its settings."""
    check_reach(run.policies, run.followers)
    seen, key, execute = run.as_seen_by(trainer), trainer_key(trainer), run.execute
    own = seen.trainer
    takes_turns = seen.policies.shares_gpus or (trainer == 0 and run.lending is not None)
    device = device_of(execute.device, run.cluster.pools[own.pool])
    if own.resize:
        _refuse(limits_of_resize(key, own, execute.launcher))
    if own.borrows:
        _refuse(limits_of_resize(key, own, execute.launcher, "borrows"))
    _refuse(_limits_of_computation(key, own, seen.algorithm, run.model))
    _refuse(_limits_of_passes(key, own, seen.algorithm, run.framework.optimizer_steps, takes_turns))
    _refuse(_limits_of_layout(key, own, run.model, has_adapters=run.sync.adapter_rank is not None))
    _refuse(_limits_of_ranks(key, own, execute, takes_turns))
    _refuse(_limits_of_zero(key, own, run.model.dtype, device, takes_turns))
    _refuse(_limits_of_optimizer(key, own.backend, seen.algorithm.optimizer.name, device))


def check_replicas(
    rollout: RolloutConfig, model: ModelConfig, device: str, pools: dict[str, PoolConfig]
) -> None:
    """Raise `RunError` if the engine of the replicas cannot execute their layout."""
    _refuse(_limits_of_replicas(rollout.kinds, device, pools))
    _refuse(_limits_of_heads(rollout.kinds, model, device, pools))


def _refuse(limits: Iterable[Limit]) -> None:
    for limit in limits:
        if not limit.is_met:
            way_out = f": {limit.way_out}" if limit.way_out else ""
            text = f"{limit.key} must be {limit.must}, got {limit.value!r}{way_out}"
            raise RunError(limit.key, limit.value, text=text)


def _limits_of_model(model: ModelConfig) -> Iterator[Limit]:
    """Yield the limits on the type and the number format of a model directory."""
    reason = None if model.path is None else why_not_executed(Path(model.path))
    yield Limit("model.path", model.path, reason is None, str(reason))


def _limits_of_scope(
    framework: str | None, verifier: VerifierConfig, faults: tuple[FaultConfig, ...], launcher: str
) -> Iterator[Limit]:
    """Yield the limits of features that only a simulation or some launchers have."""
    yield Limit(
        "framework.name",
        framework,
        framework in (None, "streamrl"),
        "'streamrl', or left out, to be executed",
        "what starts another framework is written by `streamrl export`",
    )
    yield Limit(
        "verifier.pool",
        verifier.pool,
        not verifier.num_gpus or verifier.reward_model is not None,
        "left out for an executed run without a reward model: other rewards are computed on CPUs",
    )
    yield Limit(
        "verifier.gpus_per_worker",
        verifier.gpus_per_worker,
        verifier.gpus_per_worker <= 1,
        "1 to be executed: a replica of the reward model has one GPU",
    )
    yield Limit(
        "execute.launcher",
        launcher,
        not faults or launcher != "in-process",
        "'local' or 'ray' for planned faults, which strike processes",
    )


def _limits_of_replicas(
    kinds: tuple[RolloutConfig, ...], device: str, pools: dict[str, PoolConfig]
) -> Iterator[Limit]:
    """Yield the limits of each kind of replica: its parallelism, its device, and drafts."""
    for kind, own in enumerate(kinds):
        most = pools[own.pool].gpus_per_node
        yield Limit(
            f"{kind_key(kind)}.tensor_parallel",
            own.tensor_parallel,
            own.tensor_parallel <= most or not engine_named(own.backend).splits_model,
            f"at most {most} to be executed: the GPUs of a replica are in one node of pool {own.pool}",
        )
        yield Limit(
            f"{kind_key(kind)}.tensor_parallel",
            own.tensor_parallel,
            own.tensor_parallel == 1 or engine_named(own.backend).splits_model,
            f"1 for backend {kinds[0].backend}",
            "--set rollout.backend=vllm executes the run on several GPUs a replica",
        )
        yield Limit(
            "execute.device",
            device,
            own.tensor_parallel == 1 or ":" not in device,
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


def _limits_of_heads(
    kinds: tuple[RolloutConfig, ...], model: ModelConfig, device: str, pools: dict[str, PoolConfig]
) -> Iterator[Limit]:
    """Yield the limits of engines on CPUs, which compute only some sizes of attention heads."""
    for own in kinds:
        computed = engine_named(own.backend).head_dims_on_cpu
        if computed and device_of(device, pools[own.pool]) == "cpu":
            heads = load_model(model).head_dim
            yield Limit(
                "model.path",
                f"{model.path}, whose heads have {heads}",
                heads in computed,
                f"a model whose attention heads have {', '.join(map(str, computed))} values for backend {own.backend} on CPUs",
                "--set rollout.backend=transformers executes it",
            )


def _limits_of_engine(
    rollout: RolloutConfig,
    model: ModelConfig,
    workload: WorkloadConfig,
    concurrency: str,
    adapter_rank: int | None,
) -> Iterator[Limit]:
    """Yield the limits of the replicas' engine; `adapter_rank` is that of adapters that it serves beside its weights."""
    yield Limit(
        "rollout.chunked_prefill",
        rollout.chunked_prefill,
        rollout.chunked_prefill,
        "true for an executed run: engines go on decoding while they prefill new prompts",
    )
    engine = engine_named(rollout.backend)
    if engine.limits:
        further: Any = ENGINES.make(rollout.backend, partial(import_object, engine.limits))
        with ENGINES.blaming(rollout.backend):
            yield from further(rollout, model, workload, adapter_rank)
    yield from _limits_of_sampling(rollout, engine, model)
    yield Limit(
        "policies.concurrency",
        concurrency,
        concurrency == "fixed" or engine.follows_pressure,
        f"'fixed' for backend {rollout.backend}, which does not report how full its KV cache is",
    )


def _limits_of_sampling(
    rollout: RolloutConfig, engine: EngineChoice, model: ModelConfig
) -> Iterator[Limit]:
    """Yield the limits on how tokens are sampled, and on what ends a rollout."""
    for key, whole in WHOLE_SAMPLING.items():
        value = getattr(rollout, key)
        able = [name for name in ENGINES.own if key in engine_named(name).sampling_keys]
        yield Limit(
            f"rollout.{key}",
            value,
            value == whole or key in engine.sampling_keys,
            f"left out for backend {rollout.backend}, which cannot sample by it",
            f"--set rollout.backend={able[-1]} can",
        )
    size = load_model(model).vocab_size
    largest = max(rollout.stop_token_ids, default=0)
    yield Limit(
        "rollout.stop_token_ids",
        largest,
        largest < size,
        f"below {size}, the vocabulary of the model",
    )


def _limits_of_rollouts(
    rollout: RolloutConfig, promote: str | None, *, has_relays: bool
) -> Iterator[Limit]:
    """Yield the limits on how rollouts are admitted and moved, and on a trainer that replaces the primary one."""
    yield Limit(
        "rollout.admission",
        rollout.admission,
        rollout.admission == "on-demand",
        f"'on-demand' for backend {rollout.backend}, which {engine_named(rollout.backend).admits}",
        "--set rollout.admission=on-demand executes the run with rollout.max_running at once",
    )
    yield Limit(
        "rollout.migration_transfer",
        rollout.migration_transfer,
        rollout.migration_transfer == "recompute",
        f"'recompute' for backend {rollout.backend}, which cannot send a KV cache",
    )
    for kind in rollout.prefill_kinds:
        yield Limit(
            f"{kind_key(kind)}.disaggregation_mode",
            rollout.others[kind - 1].disaggregation_mode,
            False,
            f"left out for backend {rollout.backend}, which cannot send a KV cache",
        )
    yield Limit(
        "policies.promote",
        promote,
        promote is None or not has_relays,
        "left out when weights go over relays (launcher ray, sync.mode lora or delta): relays stay with the primary trainer",
    )


def _limits_of_sync(
    sync: SyncConfig,
    model: ModelConfig,
    kinds: tuple[RolloutConfig, ...],
    *,
    has_relays: bool,
    own_rank: int | None,
    shares_gpus: bool,
) -> Iterator[Limit]:
    """Yield the limits of the weight sync; `own_rank` is that of adapters that replicas serve beside their weights."""
    yield Limit(
        "sync.wire",
        sync.wire,
        sync.wire != "gloo" or has_relays,
        "'chunks' for weights in shared memory: sync.mode 'full' without launcher 'ray' has no relays",
    )
    yield Limit(
        "sync.mode",
        sync.mode,
        sync.mode != "lora" or load_model(model).experts is None,
        "'full' or 'delta' for an executed mixture of experts: its experts cannot have adapters",
    )
    yield Limit(
        "sync.mode",
        sync.mode,
        sync.mode != "lora" or not shares_gpus,
        "'full' for policies.system 'colocated'; adapters on shared GPUs are simulated",
    )
    others = [own.backend for own in kinds if not engine_named(own.backend).serves_adapters]
    yield Limit(
        "sync.merge_adapters",
        sync.merge_adapters,
        own_rank is None or not others,
        f"true, or left out, for backend {'/'.join(others)}, which cannot compute with adapters",
    )


def _limits_of_formats(
    model: ModelConfig, rollout: RolloutConfig, trainer_backend: str, epochs: int
) -> Iterator[Limit]:
    """Yield the limits on number formats, and on the epochs of a batch."""
    yield Limit("framework.epochs", epochs, epochs == 1, f"1 for backend {trainer_backend}")
    for key, dtype in (("dtype", rollout.dtype), ("kv_dtype", rollout.kv_dtype)):
        yield _one_format(model.dtype, f"rollout.{key}", dtype, rollout.backend)
    yield Limit(
        "model.dtype",
        model.dtype,
        model.dtype != "float16",
        f"'bfloat16' or 'float32' for backend {trainer_backend}",
    )


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


def _limits_of_replay(
    kinds: Iterable[RolloutConfig], trainers: Iterable[TrainerConfig]
) -> Iterator[Limit]:
    """Yield the limits of `algorithm.router_replay`: an engine that tells experts, and ranks that see whole tokens."""
    key, wanted = "algorithm.router_replay", "false for"
    for own in kinds:
        engine = engine_named(own.backend)
        yield Limit(
            key,
            True,
            engine.records_experts,
            f"{wanted} backend {own.backend}, which does not tell the experts of its tokens",
            "--set rollout.backend=vllm or transformers records them",
        )
        is_cached = not engine.caches_experts or own.shares_prefixes is not False
        yield Limit(
            "rollout.shares_prefixes",
            own.shares_prefixes,
            is_cached,
            f"true for {key} with backend {own.backend}, which keeps experts in its prefix cache",
        )
    for number, trainer in enumerate(trainers):
        for degree in ("context_parallel", "tensor_parallel"):
            value = getattr(trainer, degree)
            yield Limit(
                f"{trainer_key(number)}.{degree}",
                value,
                value == 1,
                f"1 for {key}, whose experts belong to whole tokens of a rank",
            )


def limits_of_vllm(
    rollout: RolloutConfig, model: ModelConfig, workload: WorkloadConfig, adapter_rank: int | None
) -> Iterator[Limit]:
    """Yield the limits of settings that vLLM would change silently, or with which it would not start."""
    yield from _limits_of_temperature(rollout.temperature, VllmServer.temperatures, "backend vllm")
    positions = None if model.path is None else read_positions(Path(model.path))
    longest = longest_sequence(rollout, workload)
    yield Limit(
        "workload.max_prompt_tokens + rollout.max_tokens",
        longest,
        positions is None or longest <= positions,
        f"at most the model's {positions} positions (max_position_embeddings) for backend vllm",
    )
    yield Limit(
        "sync.lora_rank",
        adapter_rank,
        adapter_rank is None or adapter_rank <= VLLM_PLACES[-1],
        f"at most {VLLM_PLACES[-1]} for backend vllm",
        "--set sync.merge_adapters=true executes it",
    )


def limits_of_external(
    rollout: RolloutConfig, model: ModelConfig, workload: WorkloadConfig, adapter_rank: int | None
) -> Iterator[Limit]:
    """Yield the limits of servers that someone else runs: their number, and how their API samples."""
    external = rollout.external
    assert external is not None, "the checks of a run file want the section"
    num_servers = len(external.endpoints)
    yield Limit(
        "rollout.replicas",
        rollout.num_replicas,
        rollout.num_replicas <= num_servers,
        f"at most {num_servers}, the number of rollout.external.endpoints: each replica has a server of its own",
    )
    api, whose = server_api_named(external.api), f"rollout.external.api {external.api}"
    yield Limit(
        "rollout.external.weights",
        external.weights,
        external.weights == "disk" or api.joins_groups,
        f"'disk' for {whose}, whose servers take other weights from GPUs only, over a communicator of their own",
    )
    yield from _limits_of_temperature(rollout.temperature, api.temperatures, whose)
    able = [name for name in SERVER_APIS.own if server_api_named(name).sampling_keys]
    for key, whole in WHOLE_SAMPLING.items():
        value = getattr(rollout, key)
        yield Limit(
            f"rollout.{key}",
            value,
            value == whole or key in api.sampling_keys,
            f"left out for {whose}, whose log-probabilities would be those of another distribution",
            f"a server of api {able[0]} can sample by it",
        )


def _limits_of_temperature(
    temperature: float, bounds: tuple[float, float] | None, whose: str
) -> Iterator[Limit]:
    if bounds is not None:
        least, most = bounds
        yield Limit(
            "rollout.temperature",
            temperature,
            least <= temperature <= most,
            f"from {least} to {most:g} for {whose}, which samples at no other",
        )


def _limits_of_lending(
    backend: RolloutBackend, execute: ExecuteConfig, sync_mode: SyncMode, where: str
) -> Iterator[Limit]:
    """Yield the limits of replicas whose GPUs train too; `where` says for which setting."""
    can_sleep = engine_named(backend).can_sleep
    yield Limit("rollout.backend", backend, can_sleep, f"'transformers' or 'vllm' {where}")
    launcher = execute.launcher
    yield Limit("execute.launcher", launcher, launcher != "ray", f"'local' {where}")
    yield Limit("sync.mode", sync_mode, sync_mode != "lora", f"'full' or 'delta' {where}")
    is_free = not execute.deterministic
    yield Limit("execute.deterministic", execute.deterministic, is_free, f"false {where}")


def _limits_of_servers(
    rollout: RolloutConfig, policies: PoliciesConfig, launcher: str
) -> Iterator[Limit]:
    """Yield the limits of policies and launchers if servers generate."""
    of_backend = f"for backend {rollout.backend}"
    yield Limit(
        "policies.system",
        policies.system,
        not policies.shares_gpus or engine_named(rollout.backend).can_sleep,
        f"another than 'colocated' {of_backend}: its servers keep their GPUs while the trainer computes",
    )
    if rollout.external is None:
        return
    num_servers = len(rollout.external.endpoints)
    yield Limit(
        "execute.launcher",
        launcher,
        launcher != "ray",
        f"'local' {of_backend}: the clients of its servers run on the controller's machine",
    )
    yield Limit(
        "policies.max_replicas",
        policies.max_replicas,
        policies.resize == "keep" or (policies.max_replicas or num_servers + 1) <= num_servers,
        f"at most {num_servers} {of_backend}, the number of rollout.external.endpoints",
    )


def uses_relays(launcher: str, sync: SyncConfig) -> bool:
    """Return whether weights go through relays: to other machines, or encoded as deltas or adapters."""
    return not sync.is_direct and (sync.mode != "full" or launcher == "ray")


def _limits_of_direct_sync(
    sync: SyncConfig,
    kinds: tuple[RolloutConfig, ...],
    trainer: TrainerConfig,
    devices: set[str],
    *,
    shares_gpus: bool,
    lends_gpus: bool,
) -> Iterator[Limit]:
    """Yield the limits of weights that go from process to process; `devices` are those of all roles."""
    if not sync.is_direct:
        return
    of_wire = f"for sync.wire {sync.wire!r}"
    yield Limit(
        "sync.mode", sync.mode, sync.mode == "full", f"'full' {of_wire}, which sends whole weights"
    )
    others = [own.backend for own in kinds if engine_named(own.backend).runs_elsewhere]
    yield Limit(
        "sync.wire",
        sync.wire,
        not others,
        f"'chunks' for backend {'/'.join(others)}, whose servers load files",
    )
    on_cpus = devices == {"cpu"}
    if sync.wire == "cuda-ipc":
        yield Limit(
            "sync.wire",
            sync.wire,
            not on_cpus,
            "'broadcast' or 'chunks' on CPUs, which have no CUDA IPC",
        )
        yield Limit(
            "sync.wire",
            sync.wire,
            shares_gpus and trainer.num_gpus == 1,
            "'broadcast' unless trainer and replicas share one GPU (policies.system 'colocated')",
        )
        return
    yield Limit(
        "sync.wire",
        sync.wire,
        len(devices) == 1,
        "'chunks' if some roles run on CPUs and others on GPUs",
    )
    yield Limit(
        "sync.wire",
        sync.wire,
        on_cpus or not (shares_gpus or lends_gpus),
        f"{'' if lends_gpus else repr('cuda-ipc') + ' or '}'chunks' if trainer and replicas share GPUs: NCCL allows "
        "one process a GPU",
    )


def _limits_of_computation(
    key: str, trainer: TrainerConfig, algorithm: AlgorithmConfig, model: ModelConfig
) -> Iterator[Limit]:
    """Yield the limits on what a trainer computes; `key` is that of its section."""
    of_backend = f"for backend {trainer.backend}"
    its = "algorithm" if key == trainer_key(LEADER) else f"{key}.algorithm"
    yield Limit(
        f"{its}.old_log_probs",
        algorithm.old_log_probs,
        algorithm.old_log_probs == "engine",
        "'engine' to be executed: log-probabilities come with the tokens",
    )
    yield _one_format(model.dtype, f"{key}.dtype", trainer.dtype, trainer.backend)
    for name, value, done in (
        ("kernels", trainer.kernels, "eager"),
        ("order", trainer.order, "sorted"),
    ):
        yield Limit(f"{key}.{name}", value, value == done, f"{done!r} {of_backend}")
    yield Limit(
        f"{key}.routing",
        trainer.routing,
        trainer.routing == "natural" or load_model(model).experts is None,
        f"'natural' {of_backend}, whose router chooses",
    )


PAGED = ("adamw-paged", "adamw-8bit-paged")
"""Optimizers whose pages move between a GPU and its host."""


def _limits_of_optimizer(key: str, backend: str, optimizer: str, device: str) -> Iterator[Limit]:
    """Yield the limits of back ends and devices on the optimizer."""
    its = "algorithm" if key == trainer_key(LEADER) else f"{key}.algorithm"
    able = training_backend_named(backend).optimizers
    yield Limit(
        f"{its}.optimizer.name",
        optimizer,
        optimizer in able,
        f"{' or '.join(map(repr, able))} for backend {backend}, which splits flat parameters over ranks",
        f"--set {key}.backend=torch can use it",
    )
    yield Limit(
        f"{its}.optimizer.name",
        optimizer,
        device != "cpu" or optimizer not in PAGED,
        "one without pages on a CPU, which has no other memory to move them to",
        f"--set {its}.optimizer.name={optimizer.removesuffix('-paged')}",
    )


def _limits_of_passes(
    key: str,
    trainer: TrainerConfig,
    algorithm: AlgorithmConfig,
    steps: int,
    takes_turns: bool,
) -> Iterator[Limit]:
    """Yield the limits on offload, optimizer steps and parallelism; `takes_turns` if it shares GPUs with replicas."""
    of_backend = f"for backend {trainer.backend}"
    backend = training_backend_named(trainer.backend)
    is_alone = not algorithm.has_critic and not algorithm.has_reference
    yield Limit(
        f"{key}.offload",
        trainer.offload,
        not trainer.offload or takes_turns or (backend.offloads_optimizer and is_alone),
        f"False {of_backend}, unless it shares GPUs with replicas",
        ""
        if backend.offloads_optimizer
        else f"--set {key}.backend=fsdp2 keeps the optimizer of a single model in host memory",
    )
    yield Limit(
        f"{key}.reshard_after_forward",
        trainer.reshard_after_forward,
        trainer.reshard_after_forward or backend.keeps_gathered,
        f"True {of_backend}, which gathers weights for each pass or never",
    )
    yield Limit(
        f"{key}.shard_ranks",
        trainer.shard_ranks,
        trainer.shard_ranks in (None, trainer.copies) or backend.shards_in_groups,
        f"absent {of_backend}, of which all ranks shard one copy of the weights",
        f"--set {key}.backend=fsdp2 shards within groups of ranks",
    )
    yield Limit(
        f"{key}.gradient_dtype",
        trainer.gradient_dtype,
        trainer.gradient_dtype == "float32",
        f"'float32' {of_backend}, which adds up gradients in it",
    )
    yield Limit(
        f"{key}.master_weights",
        trainer.master_weights,
        trainer.master_weights == "float32",
        f"'float32' {of_backend}, whose optimizer keeps all of their bits",
    )
    yield Limit(
        f"{key}.max_tokens_per_scoring_pass",
        trainer.max_tokens_per_scoring_pass,
        trainer.max_tokens_per_scoring_pass in (None, trainer.max_tokens_per_pass),
        f"absent or {key}.max_tokens_per_pass={trainer.max_tokens_per_pass}, which bounds all passes {of_backend}",
    )
    yield Limit(
        f"{key}.sharding",
        trainer.sharding,
        trainer.sharding in backend.shardings,
        f"{' or '.join(map(repr, backend.shardings))} {of_backend}",
    )
    yield Limit(
        f"{key}.offload_to",
        trainer.offload_to,
        not trainer.steps_on_nvme,
        "'host': optimizers on NVMe are planned and simulated only",
    )
    yield Limit(
        "framework.optimizer_steps",
        steps,
        steps == 1 or (backend.makes_several_steps and not algorithm.chosen.compares_pairs),
        f"1 {of_backend} and {algorithm.name}: several are made by torch alone, and by no dpo, whose pairs are weighed at "
        "the weights that they were scored at",
    )


def _limits_of_layout(
    key: str, trainer: TrainerConfig, model: ModelConfig, *, has_adapters: bool
) -> Iterator[Limit]:
    """Yield the limits on how the ranks of a trainer split a model."""
    of_backend = f"for backend {trainer.backend}"
    splits = ("pipeline_parallel", "expert_parallel", "expert_tensor_parallel")
    for name in splits:
        degree = getattr(trainer, name) or 1
        yield Limit(f"{key}.{name}", degree, degree == 1, f"1 {of_backend}")
    yield from _limits_of_context(key, trainer)
    tensor = trainer.tensor_parallel
    splits_layers = training_backend_named(trainer.backend).splits_layers
    yield Limit(
        f"{key}.tensor_parallel",
        tensor,
        tensor == 1 or splits_layers,
        f"1 {of_backend}",
        f"--set {key}.backend=fsdp2 splits the layers of dense models",
    )
    if tensor == 1:
        return
    shape = load_model(model)
    yield Limit(
        f"{key}.tensor_parallel",
        tensor,
        shape.experts is None and shape.latent is None and not has_adapters,
        f"1 {of_backend} where the model has experts, latent attention or adapters",
    )
    yield Limit(
        f"{key}.tensor_parallel",
        tensor,
        shape.num_heads % tensor == 0 and shape.num_kv_heads % tensor == 0,
        f"a divisor of the {shape.num_heads} heads and {shape.num_kv_heads} key/value heads of the model",
    )


def _limits_of_context(key: str, trainer: TrainerConfig) -> Iterator[Limit]:
    """Yield the limits on ranks that share the tokens of a pass."""
    degree, of_backend = trainer.context_parallel, f"for backend {trainer.backend}"
    yield Limit(
        f"{key}.context_parallel",
        degree,
        degree == 1 or training_backend_named(trainer.backend).splits_tokens,
        f"1 {of_backend}",
        f"--set {key}.backend=fsdp2 --set {key}.zero=3 --set {key}.context_exchange=all-gather shares the tokens of a pass",
    )
    yield Limit(
        f"{key}.context_exchange",
        trainer.context_exchange,
        degree == 1 or trainer.context_exchange == "all-gather",
        f"'all-gather' {of_backend}, which gathers keys and values in each layer",
        f"--set {key}.context_exchange=all-gather",
    )
    yield Limit(
        f"{key}.packing",
        trainer.packing,
        degree == 1 or trainer.packing == "packed",
        "'packed' with context ranks",
        f"--set {key}.context_parallel=1",
    )


def _limits_of_ranks(
    key: str, trainer: TrainerConfig, execute: ExecuteConfig, takes_turns: bool
) -> Iterator[Limit]:
    """Yield the limits of launchers and devices on the ranks of a trainer."""
    launcher, device = execute.launcher, execute.device
    always = training_backend_named(trainer.backend).always_has_ranks
    yield Limit(
        "execute.launcher",
        launcher,
        launcher != "in-process" or (trainer.num_gpus == 1 and not always),
        "'local' or 'ray' for a trainer with several ranks, or with deepspeed or fsdp2: each rank is a process",
    )
    yield Limit(
        "execute.launcher",
        launcher,
        launcher != "ray" or not takes_turns,
        "'local' when replicas and trainer share GPUs: Ray gives a GPU to one role",
    )
    yield Limit(
        "execute.device",
        device,
        launcher != "ray" or ":" not in device,
        "'auto', 'cpu' or 'cuda' for launcher ray, which chooses GPUs itself",
    )
    yield Limit(
        "execute.device",
        device,
        trainer.num_gpus == 1 or ":" not in device,
        f"'auto', 'cpu' or 'cuda' where {key} has {trainer.num_gpus} ranks: each rank has a GPU of its own",
    )


def limits_of_resize(
    key: str, trainer: TrainerConfig, launcher: str, setting: str = "resize"
) -> Iterator[Limit]:
    """Yield the limits of a trainer whose data-parallel ranks change during the run, because of a setting."""
    able = [name for name in TRAINING_BACKENDS.own if training_backend_named(name).changes_ranks]
    yield Limit(
        f"{key}.backend",
        trainer.backend,
        training_backend_named(trainer.backend).changes_ranks,
        f"{' or '.join(map(repr, able))} for a trainer whose ranks change, because each rank must have all weights and all of the optimizer",
        f"--set {key}.backend={able[0]} --set {key}.zero=0, or remove {key}.{setting}",
    )
    for name in ("tensor_parallel", "pipeline_parallel", "context_parallel"):
        degree = getattr(trainer, name)
        yield Limit(
            f"{key}.{name}",
            degree,
            degree == 1,
            "1 for an executed trainer whose ranks change",
            f"--set {key}.{name}=1, or remove {key}.{setting}",
        )
    yield Limit(
        "execute.launcher",
        launcher,
        launcher == "local",
        "'local' for a trainer whose ranks change",
        f"--set execute.launcher=local, or remove {key}.{setting}",
    )


def _limits_of_zero(
    key: str, trainer: TrainerConfig, model_dtype: str, device: str, takes_turns: bool
) -> Iterator[Limit]:
    """Yield the limits of a trainer whose back end splits its state over ranks, or cannot do so."""
    backend, of_backend = training_backend_named(trainer.backend), f"for backend {trainer.backend}"
    if backend.always_splits:
        yield Limit(
            f"{key}.zero",
            trainer.zero,
            trainer.zero == 3 or trainer.copies == 1,
            f"3 {of_backend}, which splits optimizer, gradients and weights over its ranks",
            f"--set {key}.backend=deepspeed has the other stages",
        )
        return
    if not backend.has_zero:
        other = "fsdp2" if trainer.zero == 3 else "deepspeed"
        yield Limit(
            f"{key}.zero",
            trainer.zero,
            trainer.zero == 0 or trainer.data_parallel == 1,
            f"0 {of_backend}, of which every rank has all weights and all of the optimizer",
            f"--set {key}.zero=0 does so, --set {key}.backend={other} splits them",
        )
        return
    yield Limit(
        f"{key}.zero",
        trainer.zero,
        trainer.zero > 1 or model_dtype == "float32",
        f"2 or 3 {of_backend} in {model_dtype}: below, gradients of many passes are added up in it",
    )
    yield Limit(
        f"{key}.logits",
        trainer.logits,
        trainer.logits in (None, "eager") or trainer.zero < 3 or trainer.data_parallel == 1,
        f"'eager' {of_backend} with zero 3 on several ranks: each chunk would gather the output layer, and ranks have other "
        "numbers of them",
    )
    yield Limit(
        f"{key}.backend",
        trainer.backend,
        device == "cpu" or backend.frees_memory or not takes_turns,
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


def _limits_of_determinism(
    policies: PoliciesConfig,
    kinds: tuple[RolloutConfig, ...],
    trainers: tuple[TrainerConfig, ...],
    execute: ExecuteConfig,
    pools: dict[str, PoolConfig],
) -> Iterator[Limit]:
    """Yield the limits for deterministic runs: the order and shape of sums must not depend on timing."""
    where = "where execute.deterministic is true"
    system = choose_system(policies)
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
    for kind, own in enumerate(kinds):
        name = kind_key(kind)
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
        on_cpu = device_of(execute.device, pools[own.pool]) == "cpu"
        yield Limit("execute.device", execute.device, on_cpu, f"'cpu' {where}")
    for trainer in trainers:
        on_cpu = device_of(execute.device, pools[trainer.pool]) == "cpu"
        yield Limit("execute.device", execute.device, on_cpu, f"'cpu' {where}")
    yield Limit("execute.threads", execute.threads, execute.threads in (None, 1), f"1 {where}")
