"""What fits: bytes on one GPU of each side, item by item, and how many tokens of KV cache a replica holds.

| on a GPU of the trainer | none of it waits in host memory | with `trainer.offload`              |
|-------------------------|---------------------------------|-------------------------------------|
| weights                 | of actor, critic and reference  | of one model                        |
| gradients               | of actor and critic             | of one model                        |
| optimizer               | of actor and critic             | of one model, while it steps        |
| activations, logits     | of one pass                     | of one pass, while no optimizer is there |
"""

from __future__ import annotations

from dataclasses import dataclass

from streamrl.hardware.model_shape import BYTES, ModelShape
from streamrl.hardware.profiles import load_gpu, load_model
from streamrl.hardware.workspace import workspace_bytes
from streamrl.runfile.config import Run
from streamrl.runfile.errors import Bounds, OneOf, RunError
from streamrl.runfile.sides_config import TrainerConfig

OPTIMIZER_BYTES = 12
"""Bytes a parameter: float32 master copy and two Adam moments (Rajbhandari et al. 2020, ZeRO)."""
GRADIENT_BYTES = 4
"""Bytes a parameter: gradients accumulate in float32 over micro-batches."""
LOGIT_BYTES = 4
"""Bytes a logit: the loss takes its softmax in float32."""
GATHERED_LAYERS = 2
"""Layers whose weights ZeRO 3 holds whole: the one that computes and the one that is fetched meanwhile."""


# The rollout side ---------------------------------------------------------------------------------


def weight_bytes(run: Run) -> int:
    """Bytes of the weights as they are sent: every parameter once."""
    return load_model(run.model).num_parameters * BYTES[run.model.dtype]


def kv_capacity(run: Run) -> int:
    """Tokens whose keys and values a replica can hold.

    Raises:
        RunError: the weights alone, or one rollout of the longest kind, do not fit.
    """
    model, gpu = load_model(run.model), load_gpu(run.cluster.pools[run.rollout.pool].gpu)
    gpus, dtype = run.rollout.tensor_parallel, run.model.dtype
    usable = gpu.usable_memory * run.rollout.memory_utilization
    weights = model.shard_parameters(gpus, run.rollout.expert_parallel) * BYTES[dtype]
    workspace = replica_workspace(run)
    room = max(0.0, usable - weights - workspace)
    capacity = int(room // model.shard_kv_bytes_per_token(dtype, gpus))
    longest = longest_sequence(run)
    if capacity < longest:
        raise RunError(
            "rollout.tensor_parallel",
            gpus,
            None,
            f"rollout.tensor_parallel={gpus}: {model.name} needs {gpus * weights / 1e9:.1f} GB of "
            f"weights, {gpus * workspace / 1e9:.1f} GB of workspace and {longest} tokens of KV cache, "
            f"but {gpus} x {gpu.name} at memory_utilization {run.rollout.memory_utilization} hold "
            f"{gpus * usable / 1e9:.1f} GB, which leaves {capacity} tokens",
            ("rollout.memory_utilization", "rollout.max_tokens"),
        )
    return capacity


def replica_workspace(run: Run) -> float:
    """Bytes on one GPU of a replica beside weights and KV cache."""
    rollout = run.rollout
    return workspace_bytes(
        load_model(run.model),
        run.model.dtype,
        rollout.max_running,
        rollout.tensor_parallel,
        rollout.expert_parallel,
    )


def replica_memory(run: Run) -> dict[str, float]:
    """Bytes on one GPU of a replica: weights, workspace, KV cache of as many tokens as fit, what stays unused.

    Raises:
        ValueError: as `kv_capacity`.
    """
    model, gpu = load_model(run.model), load_gpu(run.cluster.pools[run.rollout.pool].gpu)
    gpus, dtype = run.rollout.tensor_parallel, run.model.dtype
    weights = model.shard_parameters(gpus, run.rollout.expert_parallel) * BYTES[dtype]
    workspace = replica_workspace(run)
    cache = kv_capacity(run) * model.shard_kv_bytes_per_token(dtype, gpus)
    unused = gpu.usable_memory - weights - workspace - cache
    return {
        "weights": weights,
        "workspace": workspace,
        "kv_cache": cache,
        "unused": unused,
        "reserve": gpu.reserve,
    }


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


def num_models(run: Run) -> int:
    """Models that the trainer computes with."""
    return num_trained_models(run) + run.algorithm.has_reference


def model_state(model: ModelShape, trainer: TrainerConfig, dtype: str) -> ModelState:
    """Return the bytes of one model on each GPU of the trainer.

    Tensor and pipeline ranks split weights and gradients, all ranks the optimizer (ZeRO 1); with ZeRO 3
    data-parallel ranks split weights and gradients too.

    Raises:
        ValueError: the model has fewer layers than there are pipeline stages, or cannot be split.
    """
    parameters = shard_parameters(model, trainer)
    split = trainer.data_parallel if trainer.zero == 3 else 1
    gathered = GATHERED_LAYERS / model.num_layers if trainer.zero == 3 else 0.0
    return ModelState(
        weights=parameters * BYTES[dtype] * (1 / split + gathered),
        gradients=parameters * GRADIENT_BYTES / split,
        optimizer=model.num_parameters * OPTIMIZER_BYTES / trainer.num_gpus,
    )


def shard_parameters(model: ModelShape, trainer: TrainerConfig) -> float:
    """Parameters that one GPU of the trainer computes with, on average over pipeline stages.

    Raises:
        RunError: the model has fewer layers than there are pipeline stages, or cannot be split.
    """
    if trainer.pipeline_parallel > model.num_layers:
        raise RunError(
            "trainer.pipeline_parallel",
            trainer.pipeline_parallel,
            Bounds(1, model.num_layers),
            f"trainer.pipeline_parallel must be at most the {model.num_layers} layers of "
            f"{model.name}, got {trainer.pipeline_parallel}",
        )
    if trainer.expert_parallel > 1 and model.experts is None:
        raise RunError(
            "trainer.expert_parallel",
            trainer.expert_parallel,
            OneOf([1]),
            f"trainer.expert_parallel must be 1: {model.name} has no experts, "
            f"got {trainer.expert_parallel}",
        )
    shard = model.shard_parameters(trainer.tensor_parallel, trainer.expert_parallel)
    return shard / trainer.pipeline_parallel


def layer_activation_bytes(model: ModelShape, dtype: str) -> float:
    """Bytes that one layer's forward pass keeps of a token for its backward pass, averaged over layers.

    Counted as Korthikanti et al. 2022 (Reducing Activation Recomputation, section 4.1) do, without
    dropout and without attention scores, which flash attention computes again: inputs of two norms and
    of two blocks (4h), queries and attention output (2q), keys and values (2k), and of a gated MLP both
    projections and their product (3i). With i = 8h/3, as many parameters as a plain MLP of width 4h, that
    is 32 bytes a channel, where the paper has 34 with its two dropout masks.
    """
    hidden = model.hidden_size
    attention = 4 * hidden + 2 * (model.num_heads + model.num_kv_heads) * model.head_dim
    dense = 3.0 * model.intermediate_size
    routed = 0.0
    if model.experts is not None:
        chosen = model.experts.experts_per_token
        width = 3.0 * model.experts.intermediate_size
        routed = chosen * (width + 2 * hidden) + model.experts.num_shared_experts * width
    mlps = model.num_dense_layers * dense + model.num_expert_layers * routed
    return (attention + mlps / model.num_layers) * BYTES[dtype]


def activation_bytes(
    model: ModelShape, trainer: TrainerConfig, dtype: str, num_tokens: int
) -> float:
    """Bytes of activations on the fullest GPU of the trainer for passes of `num_tokens`.

    The first of p pipeline stages has p micro-batches under way in its share of 1/p of the layers
    (one forward, one backward in turn), so p cancels. Tensor ranks split every activation (sequence
    parallelism, Korthikanti et al. 2022, section 4.2). Full recomputation keeps the input of every layer,
    and the one layer that it computes again.
    """
    one_layer = layer_activation_bytes(model, dtype)
    if trainer.recompute == "full":
        per_token = model.num_layers * model.hidden_size * BYTES[dtype] + one_layer
    else:
        per_token = model.num_layers * one_layer
    return num_tokens * per_token / trainer.tensor_parallel


def logit_bytes(model: ModelShape, trainer: TrainerConfig, num_tokens: int) -> float:
    """Bytes of the logits of `num_tokens` on one GPU; tensor ranks split the vocabulary."""
    return num_tokens * model.vocab_size * LOGIT_BYTES / trainer.tensor_parallel


def tokens_in_pass(trainer: TrainerConfig, longest: int) -> int:
    """Tokens of the largest pass: a micro-batch of the longest, cut to `max_tokens_per_pass`."""
    return min(trainer.micro_batch * longest, max(longest, trainer.max_tokens_per_pass))


def trainer_memory(run: Run) -> dict[str, float]:
    """Bytes on the fullest GPU of the trainer, by what takes them, at its fullest moment.

    Raises:
        RunError: the model cannot be split as the run file says.
    """
    model, trainer, dtype = load_model(run.model), run.trainer, run.model.dtype
    state = model_state(model, trainer, dtype)
    num_tokens = tokens_in_pass(trainer, longest_sequence(run))
    passes = {
        "activations": activation_bytes(model, trainer, dtype, num_tokens),
        "logits": logit_bytes(model, trainer, num_tokens),
    }
    if not trainer.offload:
        trained = num_trained_models(run)
        return {
            "weights": state.weights * num_models(run),
            "gradients": state.gradients * trained,
            "optimizer": state.optimizer * trained,
            **passes,
        }
    alone = {"weights": state.weights, "gradients": state.gradients}
    turns = [{**alone, **passes}, {**alone, "optimizer": state.optimizer}]
    return max(turns, key=lambda items: sum(items.values()))


def check_memory(run: Run) -> None:
    """Raise `RunError` where a side does not fit its GPUs, with the numbers."""
    kv_capacity(run)
    check_trainer_memory(run, "trainer")


def check_trainer_memory(run: Run, key: str) -> None:
    """Raise `RunError` where the trainer of `run`, whose section is `key`, does not fit its GPUs."""
    gpu = load_gpu(run.cluster.pools[run.trainer.pool].gpu)
    items = trainer_memory(run)
    need = sum(items.values())
    if need > gpu.usable_memory:
        trainer = run.trainer
        listed = " + ".join(f"{size / 1e9:.1f} of {name}" for name, size in items.items())
        raise RunError(
            f"{key}.tensor_parallel",
            trainer.tensor_parallel,
            None,
            f"{key}: {need / 1e9:.1f} GB a GPU ({listed}) with data_parallel="
            f"{trainer.data_parallel}, tensor_parallel={trainer.tensor_parallel}, "
            f"pipeline_parallel={trainer.pipeline_parallel}, but {gpu.name} has "
            f"{gpu.usable_memory / 1e9:.1f} GB for tensors{_way_out(run, key)}",
            (f"{key}.pipeline_parallel", f"{key}.data_parallel"),
        )


def _way_out(run: Run, key: str) -> str:
    """Name the switches that are still open."""
    ways = []
    if not run.trainer.offload and num_models(run) > 1:
        ways.append(f"{key}.offload=true lets models wait in host memory")
    if run.trainer.recompute != "full":
        ways.append(f'{key}.recompute="full" keeps fewer activations')
    return f"; {' and '.join(ways)}" if ways else ""
