"""What fits: bytes on one GPU of each side, item by item, and how many tokens of KV cache a replica holds.

| on a GPU of the trainer | none of it waits in host memory | with `trainer.offload`              |
|-------------------------|---------------------------------|-------------------------------------|
| weights                 | of actor, critic and reference  | of one model                        |
| gradients               | of actor and critic             | of one model                        |
| optimizer               | of actor and critic             | of one model, while it steps        |
| activations, logits     | of one pass                     | of one pass, while no optimizer is there |

Of an actor that learns adapters, gradients and optimizer are of these alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from streamrl.hardware.activations import activation_bytes, logit_bytes, tokens_in_pass
from streamrl.hardware.formats import shard_weight_bytes
from streamrl.hardware.linear_layers import lora_parameters
from streamrl.hardware.model_shape import BYTES, ModelShape
from streamrl.hardware.precision import (
    rollout_precision,
    trained_dtype,
)
from streamrl.hardware.profiles import load_gpu, load_model
from streamrl.hardware.replica_shards import over_stages
from streamrl.hardware.slices import stage_layers
from streamrl.hardware.split import check_split
from streamrl.hardware.stage_bytes import StageBytes, stage_bytes
from streamrl.hardware.workspace import workspace_bytes
from streamrl.runfile.config import Run
from streamrl.runfile.errors import RunError
from streamrl.runfile.sides_config import TrainerConfig

OPTIMIZER_BYTES = 12
"""Bytes a parameter: float32 master copy and two Adam moments (Rajbhandari et al. 2020, ZeRO)."""
GRADIENT_BYTES = 4
"""Bytes a parameter: gradients accumulate in float32 over micro-batches."""
ROOMY = 0.9
"""Share of a GPU past which a trainer is tight: buffers of collectives and what the allocator cannot use are not
counted, and vLLM leaves as much to them (gpu_memory_utilization 0.9)."""
LARGE = 0.1
"""Share of a trainer's bytes past which logits are worth a word."""
GATHERED_LAYERS = 2
"""Layers whose weights ZeRO 3 holds whole: the one that computes and the one that is fetched meanwhile."""


# The rollout side ---------------------------------------------------------------------------------


def weight_bytes(run: Run) -> int:
    """Bytes of the weights as replicas keep them: every parameter once."""
    own = rollout_precision(run)
    return round(shard_weight_bytes(load_model(run.model), own.weights, own.wide))


def kv_capacity(run: Run) -> int:
    """Tokens whose keys and values a replica can hold.

    Raises:
        RunError: the weights alone, or one rollout of the longest kind, do not fit.
    """
    model, gpu = load_model(run.model), load_gpu(run.cluster.pools[run.rollout.pool].gpu)
    rollout = run.rollout
    usable = gpu.usable_memory * rollout.memory_utilization
    workspace = replica_workspace(run)
    capacity, weights = _least_room(run, usable - workspace)
    longest, gpus = longest_sequence(run), rollout.gpus_per_replica
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
            f"rollout.tensor_parallel={rollout.tensor_parallel}{more}: {model.name} needs {gpus * weights / 1e9:.1f} GB of "
            f"weights, {gpus * workspace / 1e9:.1f} GB of workspace and {longest} tokens of KV cache, "
            f"but {gpus} x {gpu.name} at memory_utilization {run.rollout.memory_utilization} hold "
            f"{gpus * usable / 1e9:.1f} GB, which leaves {capacity} tokens",
            ("rollout.memory_utilization", "rollout.max_tokens"),
        )
    return capacity * rollout.data_parallel


def _least_room(run: Run, usable: float) -> tuple[int, float]:
    """Return the tokens that fit beside the weights of the stage with least room for them, and its bytes of weights."""
    return min(
        (int(max(0.0, usable - stage.held) // stage.token), stage.held)
        for stage in stage_bytes(run, replica_model(run))
    )


def fullest_stage(run: Run) -> StageBytes:
    """Return what a GPU holds of the pipeline stage that has most weights.

    Raises:
        RunError: the model cannot be split as the run file says.
    """
    return max(stage_bytes(run, replica_model(run)))


def replica_workspace(run: Run) -> float:
    """Bytes on one GPU of a replica beside weights and KV cache: of a pass, and what rollouts keep whatever their length."""
    rollout, model, wide = run.rollout, replica_model(run), rollout_precision(run).wide
    most, degree = -(-rollout.max_running // rollout.data_parallel), rollout.tensor_parallel
    states = most * model.shard_state_bytes(wide, degree)
    work = workspace_bytes(model, wide, most, degree, min(rollout.expert_parallel, degree))
    if run.serves_adapters:  # their place, beside weights
        work += lora_parameters(model, run.sync.lora_rank) * BYTES[run.model.dtype] / degree
    return work + states / rollout.pipeline_parallel


def most_running(run: Run) -> int:
    """Return the most rollouts that a replica ever decodes at once, so that no simulated batch is larger.

    Where admission reserves the longest output of each, memory holds that many of them, whole groups beside each
    other sharing a prompt; prompts whose lengths only a recorded run tells are not counted.

    Raises:
        RunError: as `kv_capacity`, where admission reserves memory.
    """
    rollout = run.rollout
    match rollout.admission:
        case "on-demand":
            return rollout.max_running
        case "reserve":
            return min(rollout.max_running, _num_reserved(run))
        case _:
            assert_never(rollout.admission)


def _num_reserved(run: Run) -> int:
    capacity, longest = kv_capacity(run), run.rollout.max_tokens
    lengths = run.workload.lengths
    prompt = lengths.prompt_tokens if lengths is not None and lengths.kind != "trace" else 0
    sharing = run.algorithm.group_size if run.shares_prefixes else 1
    groups, rest = divmod(capacity, prompt + sharing * longest)
    return groups * sharing + max(0, rest - prompt) // longest


def replica_memory(run: Run) -> dict[str, float]:
    """Bytes on one GPU of a replica: weights, workspace, KV cache of as many tokens as fit, what stays unused.

    Raises:
        ValueError: as `kv_capacity`.
    """
    gpu, fullest = load_gpu(run.cluster.pools[run.rollout.pool].gpu), fullest_stage(run)
    weights, workspace = fullest.held, replica_workspace(run)
    cache = kv_capacity(run) / run.rollout.data_parallel * fullest.token
    unused = gpu.usable_memory - weights - workspace - cache
    return {
        "weights": weights,
        "workspace": workspace,
        "kv_cache": cache,
        "unused": unused,
        "reserve": gpu.reserve,
    }


def replica_model(run: Run) -> ModelShape:
    """Return the model as the longest rollouts see it."""
    return load_model(run.model).seen_by(longest_sequence(run))


def longest_sequence(run: Run) -> int:
    """Tokens of the longest prompt with the longest output that the run file allows."""
    return run.rollout.max_tokens + run.workload.max_prompt_tokens


# The training side --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ModelState:
    """Bytes that one model takes on each GPU of the trainer, besides activations."""

    weights: float
    gradients: float
    optimizer: float


def num_trained_models(run: Run) -> int:
    """Models that the trainer updates: the actor, and the critic where there is one."""
    return 1 + run.algorithm.has_critic


def trained_share(run: Run) -> float:
    """Return the parameters of the actor that learn over those of the model: all, or adapters beside them."""
    if run.adapter_rank is None:
        return 1.0
    model = load_model(run.model)
    return lora_parameters(model, run.adapter_rank) / model.num_parameters


def trained_models(run: Run) -> float:
    """Return the parameters that the trainer updates over those of one model; a critic learns all of its own."""
    return trained_share(run) + run.algorithm.has_critic


def num_models(run: Run) -> int:
    """Models that the trainer holds; of a policy with adapters the reference is what is beside them."""
    return num_trained_models(run) + (run.algorithm.has_reference and run.sync.mode != "lora")


def model_states(model: ModelShape, trainer: TrainerConfig, dtype: str) -> list[ModelState]:
    """Return the bytes of one model on a GPU of each pipeline stage.

    Tensor and pipeline ranks split weights and gradients; data-parallel ranks, each of which may be several context
    ranks, split nothing (ZeRO 0), the optimizer (1), gradients too (2), and weights as well (3), and gather the float32 weights in `dtype` when they need them, so
    that there is no copy in 16 bits beside the optimizer's (PyTorch's FSDP2). Experts that ranks share out have fewer
    copies to split over.

    Raises:
        ValueError: the model has fewer layers than there are pipeline stages, or cannot be split.
    """
    shards, experts = stage_parameters(model, trainer), shared_out_parameters(model, trainer)
    layers = stage_layers(model.num_layers, trainer.pipeline_parallel)
    states = []
    for parameters, num_layers in zip(shards, layers, strict=True):
        split = (parameters - experts) / trainer.copies + experts / trainer.expert_copies
        held = split if trainer.zero == 3 else parameters
        gathered = parameters * GATHERED_LAYERS / num_layers if trainer.zero == 3 else 0.0
        second_copy = BYTES[dtype] if trainer.zero == 3 else 0
        states.append(
            ModelState(
                weights=min(parameters, held + gathered) * BYTES[dtype],
                gradients=(split if trainer.zero >= 2 else parameters) * GRADIENT_BYTES,
                optimizer=(split if trainer.zero else parameters) * (OPTIMIZER_BYTES - second_copy),
            )
        )
    return states


def model_state(model: ModelShape, trainer: TrainerConfig, dtype: str) -> ModelState:
    """Return the bytes of one model on the GPU that has most of it; raises as `model_states`."""
    return max(
        model_states(model, trainer, dtype),
        key=lambda state: state.weights + state.gradients + state.optimizer,
    )


def stage_parameters(model: ModelShape, trainer: TrainerConfig) -> list[float]:
    """Return the parameters on a GPU of each pipeline stage: the first has the embedding, the last the head.

    A tied table is on both, where they are two.

    Raises:
        RunError: the model has fewer layers than there are pipeline stages, or cannot be split.
    """
    shard = shard_parameters(model, trainer) * trainer.pipeline_parallel
    return over_stages(model, shard, trainer.pipeline_parallel, trainer.tensor_parallel)


def shared_out_parameters(model: ModelShape, trainer: TrainerConfig) -> float:
    """Parameters of experts on one GPU, where ranks share them out, on average over pipeline stages."""
    if model.experts is None or not trainer.deals_experts:
        return 0.0
    routed = model.num_expert_layers * model.experts.num_experts * model.expert_parameters
    return routed / trainer.expert_ranks / trainer.pipeline_parallel


def shard_parameters(model: ModelShape, trainer: TrainerConfig) -> float:
    """Parameters that one GPU of the trainer computes with, on average over pipeline stages.

    Raises:
        RunError: the model has fewer layers than there are pipeline stages, or cannot be split.
    """
    check_split(model, trainer)
    shard = model.shard_parameters(
        trainer.tensor_parallel, trainer.expert_parallel, trainer.expert_slices
    )
    return shard / trainer.pipeline_parallel


def trainer_memory(run: Run) -> dict[str, float]:
    """Bytes on the fullest GPU of the trainer, by what takes them, at its fullest moment: of all pipeline stages.

    Raises:
        RunError: the model cannot be split as the run file says.
    """
    model, trainer, dtype = load_model(run.model), run.trainer, trained_dtype(run)
    states = model_states(model, trainer, dtype)
    num_tokens = tokens_in_pass(trainer, longest_sequence(run))
    activations = activation_bytes(model, trainer, dtype, num_tokens)
    moments = []
    for stage, state in enumerate(states):
        is_last = stage == len(states) - 1
        passes = {
            "activations": activations[stage],
            "logits": logit_bytes(model, trainer, num_tokens) if is_last else 0.0,
        }
        moments += _moments(run, state, passes)
    return max(moments, key=lambda items: sum(items.values()))


def _moments(run: Run, state: ModelState, passes: dict[str, float]) -> list[dict[str, float]]:
    """Return what a GPU of one stage holds, at each moment that may be its fullest."""
    if not run.trainer.offload:
        trained = trained_models(run)
        held = {
            "weights": state.weights * num_models(run),
            "gradients": state.gradients * trained,
            "optimizer": state.optimizer * trained,
        }
        return [{**held, **passes}]
    most = max(trained_share(run), float(run.algorithm.has_critic))
    alone = {"weights": state.weights, "gradients": state.gradients * most}
    return [{**alone, **passes}, {**alone, "optimizer": state.optimizer * most}]


def check_memory(run: Run) -> None:
    """Raise `RunError` where a side does not fit its GPUs, with the numbers."""
    kv_capacity(run)
    check_trainer_memory(run, "trainer")


def check_trainer_memory(run: Run, key: str) -> None:
    """Raise `RunError` where the trainer of `run`, whose section is `key`, does not fit its GPUs."""
    check_split(load_model(run.model), run.trainer, key)
    gpu = load_gpu(run.cluster.pools[run.trainer.pool].gpu)
    items = trainer_memory(run)
    need = sum(items.values())
    if need > gpu.usable_memory:
        trainer = run.trainer
        context = (
            f"context_parallel={trainer.context_parallel}, " if trainer.context_parallel > 1 else ""
        )
        listed = " + ".join(f"{size / 1e9:.1f} of {name}" for name, size in items.items())
        raise RunError(
            f"{key}.tensor_parallel",
            trainer.tensor_parallel,
            None,
            f"{key}: {need / 1e9:.1f} GB a GPU ({listed}) with data_parallel="
            f"{trainer.data_parallel}, {context}tensor_parallel={trainer.tensor_parallel}, "
            f"pipeline_parallel={trainer.pipeline_parallel}, but {gpu.name} has "
            f"{gpu.usable_memory / 1e9:.1f} GB for tensors{_way_out(run, key, items)}",
            (f"{key}.pipeline_parallel", f"{key}.data_parallel"),
        )


def _way_out(run: Run, key: str, items: dict[str, float]) -> str:
    """Name the switches that are still open."""
    ways = []
    if not run.trainer.offload and num_models(run) > 1:
        ways.append(f"{key}.offload=true lets models wait in host memory")
    elif not run.trainer.offload and _steps_alone(run, items):
        ways.append(f"{key}.offload=true lets the optimizer wait in host memory")
    if run.trainer.recompute != "full":
        ways.append(f'{key}.recompute="full" keeps fewer activations')
    if run.trainer.logits != "chunked" and items.get("logits", 0.0) > LARGE * sum(items.values()):
        ways.append(f'{key}.logits="chunked" holds few logits at once')
    return f"; {', '.join(ways)}" if ways else ""


def _steps_alone(run: Run, items: dict[str, float]) -> bool:
    """Whether a GPU holds what a step of the optimizer takes, once passes have left it."""
    taken = items["weights"] + items["gradients"] + items["optimizer"]
    return taken <= load_gpu(run.cluster.pools[run.trainer.pool].gpu).usable_memory
