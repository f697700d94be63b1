"""Compute the bytes on a GPU of each side and in the memory of hosts, and check whether a run fits.

A replica's GPU has weights, workspace and KV cache. As in vLLM, the workspace is the maximum memory of one
forward pass of `PREFILL_CHUNK` tokens, or of sampling for `max_running` rollouts, and memory outside PyTorch
(`streamrl.hardware.engine_memory`). The KV cache gets the rest of `memory_utilization`. CUDA graphs are
captured later, outside this share. SGLang's share has weights and KV cache alone.

| on a GPU of the trainer | without `trainer.offload`       | with `trainer.offload`                      |
|-------------------------|---------------------------------|---------------------------------------------|
| weights                 | of actor, critic and reference* | of one model                                |
| gradients               | of actor and critic             | of one model                                |
| optimizer               | of actor and critic             | of one model, during its optimizer step     |
| activations, logits     | of one pass                     | of one pass, without the optimizer          |

(*) With `trainer.offload_reference` it takes the place of the actor's weights for its pass.

With `trainer.offload_to` nvme, the optimizer is never on a GPU (`streamrl.hardware.nvme`). If an actor trains adapters, its gradients and optimizer states are those of the adapters alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from math import inf
from operator import add
from typing import NamedTuple, assert_never

from msgspec import Struct
from msgspec.structs import replace

from streamrl.hardware.activations import (
    activation_bytes,
    logit_bytes,
    scored_logit_bytes,
    tokens_in_pass,
)
from streamrl.hardware.engine_memory import DEFAULT_LOGIT, load_engine_memory
from streamrl.hardware.model_shape import BYTES, ModelShape, lora_parameters
from streamrl.hardware.parallelism import (
    check_split,
    replica_shards,
    split_over_stages,
    stage_layers,
)
from streamrl.hardware.precision import kept_bytes, shard_weight_bytes
from streamrl.hardware.profiles import Gpu, load_gpu, load_model
from streamrl.hardware.resolved import (
    ReplicaHardware,
    ResolvedRun,
    RewardHardware,
    TrainerHardware,
)
from streamrl.runfile.cluster_config import ModelConfig, PoolConfig
from streamrl.runfile.errors import Bounds, RunError
from streamrl.runfile.keys import pool_key
from streamrl.runfile.policies_config import SyncConfig
from streamrl.runfile.roles_config import (
    KEEPS_ONE_COPY,
    Logits,
    Recompute,
    SpeculativeConfig,
    TrainerConfig,
)

PREFILL_CHUNK = 8192
"""Tokens of one forward pass: vLLM's default of max_num_batched_tokens for throughput."""


def workspace_bytes(
    model: ModelShape,
    dtype: str,
    max_running: int,
    tensor_parallel: int = 1,
    expert_parallel: int = 1,
    logit_bytes: float = DEFAULT_LOGIT,
) -> float:
    """Return the bytes on one GPU for a pass of `PREFILL_CHUNK` tokens or for sampling, whichever is larger.

    A pass needs the residual stream, its norm and the widest of its blocks: gate, up and their product. The
    logits of every rollout are complete on each GPU.
    """
    width = max(2, BYTES.get(dtype, 2))
    products = float(model.num_mlp_products)
    mlp = products * model.intermediate_size / tensor_parallel if model.num_dense_layers else 0.0
    routed = 0.0
    if model.experts is not None:
        split = max(tensor_parallel, expert_parallel)
        chosen = model.experts.experts_per_token
        channels = products * model.experts.intermediate_size + model.expert_input_size
        routed = chosen * channels / split
    attention = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim / tensor_parallel
    a_pass = PREFILL_CHUNK * (2 * model.hidden_size + max(mlp, routed, attention)) * width
    return max(a_pass, float(max_running) * model.vocab_size * logit_bytes)


def expert_buffer_bytes(
    model: ModelShape, dtype: str, tensor_parallel: int, expert_parallel: int
) -> float:
    """Return the bytes of grouped experts in a pass: gate and up projections of each copy, and its output."""
    if model.experts is None:
        return 0.0
    split = max(tensor_parallel, expert_parallel)
    projections = (model.num_mlp_products - 1) * model.experts.intermediate_size / split
    channels = model.experts.experts_per_token * (projections + model.expert_input_size)
    return PREFILL_CHUNK * channels * max(2, BYTES.get(dtype, 2))


def draft_of(model: ModelShape, config: SpeculativeConfig) -> ModelShape:
    """Return the shape of the draft model. The default is a module of the model: one layer with full attention.

    Next to layers that attend to compressed tokens, it attends to the window alone (DeepSeek-V4). Such a module
    for multi-token prediction also has a projection from two hidden sizes to one (DeepSeek-V3, arXiv 2412.19437,
    section 2.2). It is not counted.
    """
    if config.model is not None:
        return load_model(ModelConfig(name=config.model))
    experts = model.experts and replace(model.experts, num_dense_layers=0)
    if model.compressed is not None:
        return replace(
            model, num_layers=1, num_window_layers=1, compressed=model.compressed.without_entries
        )
    window = {"sliding_window": None, "num_window_layers": None, "window_heads": None}
    single = {"num_unmixed_layers": 0, "num_bare_layers": 0, "layer_inputs": None}
    single |= {"num_shared_full": 0, "num_shared_windowed": 0}
    indexer = model.indexer and replace(model.indexer, num_layers=None)
    return replace(
        model,
        num_layers=1,
        experts=experts,
        linear=None,
        indexer=indexer,
        num_vision_parameters=0,
        **window,
        **single,
    )


def draft_bytes(replica: ReplicaHardware) -> tuple[float, float]:
    """Return the bytes of a draft model's weights on a GPU of a replica, and of one token in its KV cache.

    The draft uses the number formats of the replica. A draft module shares embedding and head with its model.
    """
    rollout, own = replica.config, replica.precision
    if rollout.drafts is None:
        return 0.0, 0.0
    draft, degree = draft_of(replica.longest_model, rollout.drafts), rollout.tensor_parallel
    experts = rollout.expert_parallel if draft.experts is not None else 1
    weights = shard_weight_bytes(draft, own.weights, own.wide, degree, experts)
    if rollout.drafts.model is None:
        weights -= _table_parameters(draft) / degree * BYTES[own.wide]
    return weights, draft.shard_kv_bytes_per_token(own.cache, degree)


def draft_parameters(model: ModelShape) -> int:
    """Return the parameters of a model's own draft layer, without the tables that it shares with the model."""
    draft = draft_of(model, SpeculativeConfig())
    return draft.num_parameters - _table_parameters(draft)


def _table_parameters(draft: ModelShape) -> int:
    """Return the parameters of embedding and head, which a draft layer shares with its model."""
    return (1 if draft.has_tied_embeddings else 2) * draft.num_embedding_parameters


class StageBytes(NamedTuple):
    """Bytes on a GPU of one pipeline stage."""

    weights: float
    """Weights of the model in `rollout.dtype`, including scales."""
    draft: float
    """Weights of the draft model."""
    token: float
    """Keys and values of one token in `rollout.kv_dtype`, of model and draft."""

    @property
    def held(self) -> float:
        """Bytes of all weights."""
        return self.weights + self.draft


def stage_bytes(replica: ReplicaHardware) -> list[StageBytes]:
    """Return the bytes on a GPU of each pipeline stage, in order.

    Raises:
        RunError: as `replica_shards`.
    """
    own, rollout, model = replica.precision, replica.config, replica.longest_model
    per_layer = model.shard_kv_bytes_per_token(own.cache, rollout.tensor_parallel)
    per_layer /= model.num_layers
    draft, drafted = draft_bytes(replica)
    stages = []
    for stage, shard in enumerate(replica_shards(model, rollout)):
        sizes = (shard.parameters, shard.linear_parameters)
        weights = kept_bytes(*sizes, own.weights, own.wide, model.hidden_size)
        if stage == 0:  # which has the embedding that the tower writes to
            weights += vision_bytes(model, own.wide) / rollout.tensor_parallel
        stages.append(StageBytes(weights, draft, per_layer * shard.num_layers + drafted))
    return stages


OPTIMIZER_BYTES = 12
"""Bytes per parameter: float32 master copy and two Adam moments (Rajbhandari et al. 2020, ZeRO)."""
SHARED_BYTES = 2
"""Bytes of them that bfloat16 weights have too, if the optimizer keeps only the remainders."""
FLAT_SHARE = 1 / 0.93 - 1
"""Peak memory of PyTorch's FSDP1 beyond FSDP2's, which has 7 % less: Llama 7B on 8 H100 (torchtitan docs/fsdp.md,
commit 00293cb). FSDP1 keeps freed blocks until other streams are done with them.
"""
SWAPPED_BYTES = 16
"""Bytes per parameter that a step of ZeRO-Infinity reads from NVMe, and writes: float32 weights, gradients
and two moments (Rajbhandari et al. 2021, arXiv 2104.07857, section 4.1).
"""
SUB_GROUP = 1e9
"""Parameters that a rank has in host memory at once while it steps from NVMe: DeepSpeed's `sub_group_size`,
with its 4 pinned buffers (`buffer_count`).
"""
ROOMY = 0.9
"""Share of GPU memory above which a trainer counts as tight. Buffers of collectives and allocator
fragmentation are not counted. vLLM leaves the same share for them (gpu_memory_utilization 0.9).
"""
LARGE_LOGITS = 0.1
"""Share of a trainer's bytes above which an error suggests chunked logits."""
GATHERED_LAYERS = 2
"""Layers whose full weights ZeRO 3 gathers: the one that computes, and the prefetched next one."""


# The rollout side ---------------------------------------------------------------------------------


def weight_bytes(replica: ReplicaHardware) -> int:
    """Return the bytes of all weights in the format of the replica, each parameter once."""
    own = replica.precision
    language = shard_weight_bytes(replica.model, own.weights, own.wide)
    return round(language + vision_bytes(replica.model, own.wide))


def vision_bytes(model: ModelShape, wide: str) -> int:
    """Return the bytes of a vision tower, whose weights are never in a narrow format."""
    return model.num_vision_parameters * BYTES[wide]


def kv_capacity(replica: ReplicaHardware) -> int:
    """Return the number of tokens whose keys and values fit in the memory of a replica.

    Raises:
        RunError: the weights do not fit, or one rollout of maximum length does not.
    """
    rollout, gpu = replica.config, replica.gpu
    usable = gpu.usable_memory * rollout.memory_utilization
    workspace = replica_workspace(replica)
    capacity, weights = _least_room(replica, usable - workspace)
    longest, gpus = replica.longest_sequence, rollout.gpus_per_replica
    if capacity < longest:
        others = {
            "pipeline_parallel": rollout.pipeline_parallel,
            "data_parallel": rollout.data_parallel,
        }
        more = "".join(f" x {key}={degree}" for key, degree in others.items() if degree > 1)
        raise RunError(
            "rollout.tensor_parallel",
            rollout.tensor_parallel,
            None,
            f"rollout.tensor_parallel={rollout.tensor_parallel}{more}: {replica.model.name} needs "
            f"{gpus * weights / 1e9:.1f} GB of "
            f"weights, {gpus * workspace / 1e9:.1f} GB of workspace and {longest} tokens of KV cache. "
            f"But {gpus} x {gpu.name} at memory_utilization {rollout.memory_utilization} hold "
            f"{gpus * usable / 1e9:.1f} GB, which leaves {capacity} tokens",
            ("rollout.memory_utilization", "rollout.max_tokens"),
        )
    return capacity * rollout.data_parallel


def _least_room(replica: ReplicaHardware, usable: float) -> tuple[int, float]:
    """Return the KV cache tokens of the pipeline stage with the least space, and the bytes of its weights."""
    return min(
        (int(max(0.0, usable - stage.held) // stage.token), stage.held)
        for stage in stage_bytes(replica)
    )


def fullest_stage(replica: ReplicaHardware) -> StageBytes:
    """Return the bytes on a GPU of the pipeline stage with the most weights.

    Raises:
        RunError: the model cannot be split as the run file says.
    """
    return max(stage_bytes(replica))


def replica_workspace(replica: ReplicaHardware) -> float:
    """Return the bytes on one GPU of a replica besides weights and KV cache.

    These are the workspace of a pass, memory outside PyTorch, adapters, and the states of rollouts that do
    not grow with length.
    """
    rollout, model, wide = replica.config, replica.longest_model, replica.precision.wide
    most, degree = -(-rollout.max_running // rollout.data_parallel), rollout.tensor_parallel
    states = most * model.shard_state_bytes(wide, degree)
    work = _engine_bytes(replica, most)
    if replica.adapter_rank is not None:  # unmerged adapters
        adapters = lora_parameters(model, replica.adapter_rank)
        work += adapters * BYTES[replica.adapter_dtype] / degree
    return work + states / rollout.pipeline_parallel


def _engine_bytes(replica: ReplicaHardware, most: int) -> float:
    """Return the bytes of a pass with up to `most` rollouts, and those outside PyTorch.

    On a CPU the engine is a process of its own, and its logs are not published.
    """
    rollout, model, wide = replica.config, replica.longest_model, replica.precision.wide
    degree = rollout.tensor_parallel
    experts = min(rollout.expert_parallel, degree)
    if replica.gpu.name == "cpu":
        return workspace_bytes(model, wide, most, degree, experts)
    engine = load_engine_memory(replica.engine)
    outside = engine.outside_torch(rollout.gpus_per_replica)
    if not engine.counts_activations:
        return outside * rollout.memory_utilization
    a_pass = workspace_bytes(model, wide, most, degree, experts, engine.logit)
    kept = expert_buffer_bytes(model, wide, degree, experts) if engine.keeps_experts else 0.0
    return max(a_pass, kept + most * model.vocab_size * engine.logit) + engine.fixed + outside


def most_running(replica: ReplicaHardware) -> int:
    """Return the maximum number of rollouts that a replica decodes at once. No simulated batch is larger.

    If admission reserves memory for the longest output, it is the number of longest outputs that fit. Each
    group's prompt counts once. Prompts from a recorded run, whose lengths are not in the run file, do not count.

    Raises:
        RunError: as `kv_capacity`, if admission reserves memory.
    """
    rollout = replica.config
    match rollout.admission:
        case "on-demand":
            return rollout.max_running
        case "reserve":
            return min(rollout.max_running, _num_reserved(replica))
        case _:
            assert_never(rollout.admission)


def _num_reserved(replica: ReplicaHardware) -> int:
    capacity, longest = kv_capacity(replica), replica.config.max_tokens
    prompt, sharing = replica.prompt_tokens, replica.rollouts_per_prompt
    groups, rest = divmod(capacity, prompt + sharing * longest)
    return groups * sharing + max(0, rest - prompt) // longest


def replica_memory(replica: ReplicaHardware) -> dict[str, float]:
    """Return the bytes on one GPU of a replica: weights, workspace, the largest KV cache that fits, and unused bytes.

    Raises:
        ValueError: as `kv_capacity`.
    """
    gpu, fullest = replica.gpu, fullest_stage(replica)
    weights, workspace = fullest.held, replica_workspace(replica)
    cache = kv_capacity(replica) / replica.config.data_parallel * fullest.token
    unused = gpu.usable_memory - weights - workspace - cache
    return {
        "weights": weights,
        "workspace": workspace,
        "kv_cache": cache,
        "unused": unused,
        "reserve": gpu.reserve,
    }


# The training side --------------------------------------------------------------------------------


class ModelState(Struct, frozen=True, kw_only=True):
    """The bytes of one model on each GPU of the trainer, without activations."""

    weights: float
    gradients: float
    optimizer: float
    stepped: float = 0.0
    """Parameters whose optimizer states this GPU has."""


def model_states(model: ModelShape, trainer: TrainerConfig, dtype: str) -> list[ModelState]:
    """Return the bytes of one model on a GPU of each pipeline stage.

    Tensor and pipeline ranks split weights and gradients. Data-parallel ranks, each of which may be
    several context ranks, split by ZeRO stage: nothing (0), the optimizer (1), gradients too (2),
    weights too (3). With stage 3 they gather the float32 weights in `dtype` when they need them. So
    there is no 16-bit copy in addition to the optimizer's (PyTorch's FSDP), except DeepSpeed's.
    Without `reshard_after_forward`, all weights of the stage are gathered at once. With `shard_ranks`
    only so many ranks share a copy. Experts that are sharded
    over ranks have fewer copies to split over. The first stage also has the frozen vision tower.

    Raises:
        ValueError: the model has fewer layers than there are pipeline stages, or cannot be split.
    """
    shards, experts = stage_parameters(model, trainer), shared_out_parameters(model, trainer)
    layers = stage_layers(model.num_layers, trainer.pipeline_parallel)
    states = []
    for stage, (parameters, num_layers) in enumerate(zip(shards, layers, strict=True)):
        tower = 0.0 if stage else vision_bytes(model, dtype) / trainer.tensor_parallel
        split = (parameters - experts) / trainer.shards + experts / trainer.expert_copies
        copied = _copied_parameters(trainer, parameters, split, num_layers)
        has_one_copy = trainer.zero == 3 and trainer.sharding in KEEPS_ONE_COPY
        second_copy = BYTES[dtype] if has_one_copy else 0
        states.append(
            ModelState(
                weights=copied * BYTES[dtype]
                + (tower / trainer.shards if trainer.zero == 3 else tower),
                gradients=(split if trainer.zero >= 2 else parameters)
                * BYTES[trainer.gradient_dtype],
                optimizer=(split if trainer.zero else parameters)
                * (optimizer_bytes(trainer) - second_copy),
                stepped=split if trainer.zero else parameters,
            )
        )
    return states


def optimizer_bytes(trainer: TrainerConfig) -> int:
    """Return the bytes of optimizer states per parameter."""
    return OPTIMIZER_BYTES - SHARED_BYTES * (trainer.master_weights == "remainders")


def _copied_parameters(
    trainer: TrainerConfig, parameters: float, split: float, num_layers: int
) -> float:
    """Return the parameters of which a GPU has `dtype` values: its own, and those that ZeRO 3 gathers."""
    if trainer.zero < 3:
        return parameters
    if not trainer.reshard_after_forward:
        return split + parameters
    return min(parameters, split + parameters * GATHERED_LAYERS / num_layers)


def model_state(model: ModelShape, trainer: TrainerConfig, dtype: str) -> ModelState:
    """Return the bytes of one model on the fullest GPU; raises as `model_states`."""
    return max(
        model_states(model, trainer, dtype),
        key=lambda state: state.weights + state.gradients + state.optimizer,
    )


def stage_parameters(model: ModelShape, trainer: TrainerConfig) -> list[float]:
    """Return the parameters on a GPU of each pipeline stage. The first has the embedding, the last the head.

    With two or more stages, a tied embedding table is on both.

    Raises:
        RunError: the model has fewer layers than there are pipeline stages, or cannot be split.
    """
    check_split(model, trainer)
    degrees = (trainer.tensor_parallel, trainer.expert_parallel, trainer.expert_slices)
    return list(_stage_parameters(model, trainer.pipeline_parallel, *degrees))


@lru_cache(maxsize=256)
def _stage_parameters(
    model: ModelShape,
    stages: int,
    tensor_parallel: int,
    expert_parallel: int,
    expert_slices: int,
) -> tuple[float, ...]:
    """Return `stage_parameters` of a valid split. The planner asks for it at every number of GPUs."""
    shard = model.shard_parameters(tensor_parallel, expert_parallel, expert_slices)
    return tuple(split_over_stages(model, shard, stages, tensor_parallel))


def shared_out_parameters(model: ModelShape, trainer: TrainerConfig) -> float:
    """Return the parameters of experts on one GPU if ranks shard them, as a mean over pipeline stages; else 0."""
    if model.experts is None or not trainer.shards_experts:
        return 0.0
    routed = model.num_expert_layers * model.experts.num_experts * model.expert_parameters
    return routed / trainer.expert_ranks / trainer.pipeline_parallel


def shard_parameters(model: ModelShape, trainer: TrainerConfig) -> float:
    """Return the parameters with which one GPU of the trainer computes, as a mean over pipeline stages.

    Raises:
        RunError: the model has fewer layers than there are pipeline stages, or cannot be split.
    """
    check_split(model, trainer)
    shard = model.shard_parameters(
        trainer.tensor_parallel, trainer.expert_parallel, trainer.expert_slices
    )
    return shard / trainer.pipeline_parallel


def trainer_memory(trainer: TrainerHardware) -> dict[str, float]:
    """Return the peak bytes on the fullest GPU of the trainer, by what uses them.

    Raises:
        RunError: the model cannot be split as the run file says.
    """
    models, passes = _model_bytes(_split_of(trainer)), _pass_bytes(trainer, trainer.config)
    totals = _totals(models, passes)
    peak = max(totals)
    stage = totals.index(peak)
    items = {**models.in_passes[stage], "activations": passes.activations[stage], "logits": 0.0}
    if stage == len(totals) - 1:
        items |= {"logits": passes.logits} | models.on_last
    if models.step_bytes > peak:
        peak, items = models.step_bytes, dict(models.in_step)
    if share := _flat_share(trainer.config):
        items["flat parameters"] = share * peak
    return items


class PassMemory(NamedTuple):
    """How the passes of a trainer save memory."""

    recompute: Recompute
    logits: Logits | None


def bytes_in_ways(trainer: TrainerHardware, ways: Iterable[PassMemory]) -> Iterator[float]:
    """Yield the sum of `trainer_memory` for each of several ways to save memory.

    Raises:
        RunError: as `trainer_memory`.
    """
    models, share = _model_bytes(_split_of(trainer)), _flat_share(trainer.config)
    for recompute, logits in ways:
        config = replace(trainer.config, recompute=recompute, logits=logits)
        peak = max(models.step_bytes, *_totals(models, _pass_bytes(trainer, config)))
        yield peak + share * peak


def _flat_share(config: TrainerConfig) -> float:
    """Return the bytes of blocks that FSDP1 keeps, as a share of all others."""
    return FLAT_SHARE if config.zero == 3 and config.sharding == "fsdp" else 0.0


class _ModelBytes(NamedTuple):
    """Bytes of the trainer's models, by what uses them."""

    in_passes: list[dict[str, float]]
    """On a GPU of each stage, during passes."""
    on_last: dict[str, float]
    """On a GPU of the last stage besides `in_passes`."""
    in_step: dict[str, float]
    """On a GPU of the fullest stage, during an optimizer step that loads its states; else empty."""
    in_host: float
    """In host memory, for each GPU of the stage with most of them."""
    pass_bytes: list[float]
    """Sums of `in_passes`."""
    step_bytes: float
    """Sum of `in_step`."""


class _PassBytes(NamedTuple):
    """Bytes of passes."""

    activations: list[float]
    """On a GPU of each stage."""
    logits: float
    """On a GPU of the last stage."""


def _totals(models: _ModelBytes, passes: _PassBytes) -> list[float]:
    """Return the bytes on a GPU of each stage during passes."""
    totals = list(map(add, models.pass_bytes, passes.activations))
    totals[-1] = sum(models.on_last.values(), totals[-1] + passes.logits)
    return totals


def _split_of(trainer: TrainerHardware) -> TrainerHardware:
    """Return a trainer without the settings of its passes, which do not change the bytes of its models."""
    alike = replace(trainer.config, micro_batch=1, recompute="full", logits=None)
    return replace(trainer, config=alike)


@lru_cache(maxsize=64)
def _model_bytes(trainer: TrainerHardware) -> _ModelBytes:
    """Return the bytes of models. The planner asks for those of a split with many settings of passes."""
    states = model_states(trainer.model, trainer.config, trainer.dtype)
    if trainer.config.offload:
        in_passes, in_steps, in_host = _taking_turns(trainer, states)
    else:
        in_passes, in_steps, in_host = _resident(trainer, states), [], 0.0
        if trainer.swaps_reference:
            in_host = max(state.weights for state in states)
    in_step = max(in_steps, key=lambda items: sum(items.values()), default={})
    return _ModelBytes(
        in_passes=in_passes,
        on_last={"draft layer": trained_draft_bytes(trainer)} if trainer.trains_drafts else {},
        in_step=in_step,
        in_host=in_host,
        pass_bytes=[sum(items.values()) for items in in_passes],
        step_bytes=sum(in_step.values()),
    )


def _resident(trainer: TrainerHardware, states: Sequence[ModelState]) -> list[dict[str, float]]:
    """Return the bytes on a GPU of each stage if all models stay there."""
    num_models, trained = trainer.num_resident_models, trainer.trained_models
    return [
        {
            "weights": state.weights * num_models,
            "gradients": state.gradients * trained,
            "optimizer": state.optimizer * trained,
        }
        for state in states
    ]


def _taking_turns(
    trainer: TrainerHardware, states: Sequence[ModelState]
) -> tuple[list[dict[str, float]], list[dict[str, float]], float]:
    """Return the bytes on a GPU of each stage in passes and in an optimizer step, and those in host memory.

    With the optimizer on NVMe, nothing is loaded for its step.
    """
    most = max(trainer.trained_share, float(trainer.algorithm.has_critic))
    others = trainer.num_models - 1
    in_host = max(others * state.weights + _optimizer_in_host(trainer, state) for state in states)
    in_passes = [{"weights": each.weights, "gradients": each.gradients * most} for each in states]
    if trainer.config.steps_on_nvme:
        return in_passes, [], in_host
    in_steps = [
        {**items, "optimizer": state.optimizer * most}
        for items, state in zip(in_passes, states, strict=True)
    ]
    return in_passes, in_steps, in_host


def _pass_bytes(trainer: TrainerHardware, config: TrainerConfig) -> _PassBytes:
    """Return the bytes of passes with the settings in `config`."""
    longest, model = trainer.longest_sequence, trainer.model
    num_tokens, num_scored = (tokens_in_pass(one, longest) for one in (config, config.scorer))
    alike = replace(config, pool="", data_parallel=1, zero=1, micro_batch=1, offload=False)
    found = _bytes_of_tokens(model, alike, trainer.dtype, num_tokens)
    if num_scored <= num_tokens or not trainer.algorithm.num_scored:
        return found
    return found._replace(logits=max(found.logits, scored_logit_bytes(model, config, num_scored)))


@lru_cache(maxsize=4096)
def _bytes_of_tokens(
    model: ModelShape, trainer: TrainerConfig, dtype: str, num_tokens: int
) -> _PassBytes:
    """Return the bytes of passes, which the number of data-parallel ranks does not change."""
    activations = activation_bytes(model, trainer, dtype, num_tokens)
    return _PassBytes(activations, logit_bytes(model, trainer, num_tokens))


def trained_draft_bytes(trainer: TrainerHardware) -> float:
    """Return the bytes of weights, gradients and optimizer of the draft layer on a GPU of the last stage."""
    draft = draft_of(trainer.model, SpeculativeConfig())
    alone = replace(trainer.config, pipeline_parallel=1, virtual_stages=1)
    (state,) = model_states(draft, alone, trainer.dtype)
    own_share = draft_parameters(trainer.model) / draft.num_parameters
    return own_share * (state.weights + state.gradients + state.optimizer)


def check_memory(resolved: ResolvedRun) -> None:
    """Raise `RunError` with the bytes if replicas or the primary trainer do not fit their GPUs."""
    kv_capacity(resolved.replica)
    check_trainer_memory(resolved.trainer)


def check_trainer_memory(trainer: TrainerHardware) -> None:
    """Raise `RunError` with the bytes if a trainer does not fit its GPUs."""
    config, key, gpu = trainer.config, trainer.key, trainer.gpu
    check_split(trainer.model, config, key)
    items = trainer_memory(trainer)
    need = sum(items.values())
    if need > gpu.usable_memory:
        context = (
            f"context_parallel={config.context_parallel}, " if config.context_parallel > 1 else ""
        )
        listed = " + ".join(f"{size / 1e9:.1f} of {name}" for name, size in items.items())
        raise RunError(
            f"{key}.tensor_parallel",
            config.tensor_parallel,
            None,
            f"{key}: {need / 1e9:.1f} GB a GPU ({listed}) with data_parallel="
            f"{config.data_parallel}, {context}tensor_parallel={config.tensor_parallel}, "
            f"pipeline_parallel={config.pipeline_parallel}. But {gpu.name} has "
            f"{gpu.usable_memory / 1e9:.1f} GB for tensors{_suggest_fixes(trainer, items)}",
            (f"{key}.pipeline_parallel", f"{key}.data_parallel"),
        )


def _suggest_fixes(trainer: TrainerHardware, items: dict[str, float]) -> str:
    """Return the settings that would reduce the memory of a trainer, as the end of an error text."""
    config, key, fixes = trainer.config, trainer.key, []
    if not config.offload and trainer.num_resident_models > 1:
        fixes.append(f"{key}.offload=true moves idle models to host memory")
    elif not config.offload and _steps_alone(trainer.gpu, items):
        fixes.append(f"{key}.offload=true moves the idle optimizer to host memory")
    if config.recompute != "full":
        fixes.append(f'{key}.recompute="full" keeps fewer activations')
    if config.logits != "chunked" and items.get("logits", 0.0) > LARGE_LOGITS * sum(items.values()):
        fixes.append(f'{key}.logits="chunked" keeps few logits at once')
    return f"; {', '.join(fixes)}" if fixes else ""


def _steps_alone(gpu: Gpu, items: dict[str, float]) -> bool:
    """Return whether a GPU has the memory for an optimizer step after the memory of passes is freed."""
    taken = items["weights"] + items["gradients"] + items["optimizer"]
    return taken <= gpu.usable_memory


def check_host_memory(trainer: TrainerHardware) -> None:
    """Raise `RunError` if the models that `trainer.offload` moves out do not fit the host memory of a node."""
    need, held, key = offloaded_bytes(trainer), host_memory(trainer.pool), trainer.key
    if need > held:
        pool = trainer.config.pool
        raise RunError(
            f"{key}.offload",
            True,
            None,
            f"{key}.offload moves {need / 1e9:.0f} GB to the host memory of a node, but "
            f"{pool_key(pool, 'host_memory')} is {held / 1e9:.0f} GB",
            (f"{key}.data_parallel", pool_key(pool, "host_memory")),
        )


def host_memory(pool: PoolConfig) -> float:
    """Return the bytes of host memory of a node of a pool; infinite if no limit is known."""
    if pool.host_memory is not None:
        return pool.host_memory
    share = load_gpu(pool.gpu).host_memory
    return inf if share is None else share * pool.gpus_per_node


def offloaded_bytes(trainer: TrainerHardware) -> float:
    """Return the maximum bytes that a node's GPUs of the trainer offload: all but the model in use."""
    return gpus_of_a_node(trainer) * _model_bytes(_split_of(trainer)).in_host


def _optimizer_in_host(trainer: TrainerHardware, state: ModelState) -> float:
    """Return the bytes of optimizers that a GPU of an offloading trainer has in host memory."""
    if trainer.config.steps_on_nvme:
        return min(state.stepped * trainer.trained_models, SUB_GROUP) * SWAPPED_BYTES
    return trainer.trained_models * state.optimizer


def gpus_of_a_node(trainer: TrainerHardware) -> int:
    """Return the GPUs of the trainer in its fullest node."""
    return min(trainer.pool.gpus_per_node, trainer.config.num_gpus)


def check_sync_buffer(replica: ReplicaHardware, sync: SyncConfig) -> None:
    """Raise `RunError` if a replica's GPU has no space for a bucket of received weights.

    The bucket needs memory outside `rollout.memory_utilization`, if whole weights are sent (`sync.mode`
    "full"). Do not call this for GPUs that also train: they exchange weights directly, without a bucket.
    """
    if sync.mode != "full":
        return
    gpu, share = replica.gpu, replica.config.memory_utilization
    room = gpu.usable_memory * (1 - share)
    bucket = min(sync.bucket_size, weight_bytes(replica))
    if bucket > room:
        raise RunError(
            "sync.bucket_size",
            sync.bucket_size,
            Bounds(0, room),
            f"sync.bucket_size must fit beside rollout.memory_utilization "
            f"{share:g} of {gpu.name}, which leaves {room / 1e9:.2f} GB, "
            f"got {bucket / 1e9:.2f} GB",
            ("rollout.memory_utilization",),
        )


def reward_model_bytes(reward: RewardHardware) -> dict[str, float]:
    """Return the bytes on a GPU with the reward model, by what uses them; empty if its shape is unknown.

    The head of a reward model has one output, not one for each token, so its bytes are negligible.
    """
    shape = reward.shape
    if shape is None:
        return {}
    verifier, dtype = reward.config, reward.dtype
    degree = max(1, verifier.gpus_per_worker)
    parameters = shape.num_parameters
    if not shape.has_tied_embeddings:
        parameters -= shape.vocab_size * shape.hidden_size
    chunks = max(verifier.max_tokens_per_pass, reward.longest_sequence) / PREFILL_CHUNK
    return {
        "weights": parameters * BYTES[dtype] / degree,
        "workspace": workspace_bytes(shape, dtype, 0, degree) * chunks,
    }


def check_reward_memory(reward: RewardHardware) -> None:
    """Raise `RunError` with the bytes if the reward model does not fit a GPU of the verifier's pool."""
    items, pool = reward_model_bytes(reward), reward.pool
    if not items or pool is None:
        return
    gpu = load_gpu(pool.gpu)
    need = sum(items.values())
    if need > gpu.usable_memory:
        listed = " + ".join(f"{size / 1e9:.1f} of {name}" for name, size in items.items())
        degree = reward.config.gpus_per_worker
        raise RunError(
            "verifier.gpus_per_worker",
            degree,
            None,
            f"verifier: {need / 1e9:.1f} GB a GPU ({listed}) of the reward model with gpus_per_worker={degree}, but "
            f"{gpu.name} has {gpu.usable_memory / 1e9:.1f} GB for tensors",
            ("verifier.pool", "verifier.max_tokens_per_pass"),
        )
