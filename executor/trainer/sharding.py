"""Split a model over ranks with torch: FSDP2 over data-parallel ranks, and tensor parallelism within their groups.

Ranks form a mesh. The tensor-parallel rank varies fastest, as in `streamrl.executor.launchers.placement`:

    rank = (data * context_parallel + context) * tensor_parallel + tensor

With `shard_ranks`, the data-parallel ranks form groups of so many adjacent ones. Each group has a copy of the weights, and
after each pass the groups sum their gradients.

Context ranks share the tokens of each pass (`streamrl.executor.trainer.context`). They split the weights as data-parallel
ranks do, so "data-parallel" in the table means both.

| tensors                         | over tensor-parallel ranks | over data-parallel ranks              |
|---------------------------------|----------------------------|---------------------------------------|
| matrices of attention and MLPs  | by rows or columns         | by rows, gathered layer by layer      |
| embedding, output layer         | by vocabulary              | by rows, gathered once in a pass      |
| norms, other small weights      | whole                      | by rows                               |

Sources: PyTorch's `fully_shard` and `parallelize_module`, in the order of torchtitan (models/llama3/infra/parallelize.py):
tensor parallelism, recomputation, FSDP. The columns and rows are those of transformers' plan for the model (`tp_plan`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from streamrl.executor.trainer.context import ContextRanks
from streamrl.executor.trainer.trainer_settings import DTYPES, TrainerSettings
from streamrl.executor.trainer.training_backend import broadcast_buffers

COPY, DATA, CONTEXT, TENSOR = "copy", "data", "context", "tensor"
"""Names of the dimensions of a mesh."""
OF_HEADS = "replicated_with_grad_allreduce"
"""transformers' name for norms of queries and keys: each rank normalizes its own heads with the same weights."""
STYLES: dict[str, ParallelStyle] = {
    "colwise": ColwiseParallel(),
    "rowwise": RowwiseParallel(),
    "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": ColwiseParallel(output_layouts=Replicate()),
    OF_HEADS: SequenceParallel(sequence_dim=2, use_local_output=True),
}
"""torch's style for each style of transformers that needs no code of the model."""
EMBEDDING, OUTPUT = RowwiseParallel(input_layouts=Replicate()), STYLES["colwise_gather_output"]


def shard(settings: TrainerSettings, model: Any, *, learns: bool) -> list[Any]:
    """Split a model's weights over the ranks, layer by layer, so that no rank needs room for all of them.

    Every rank must call this; the first one has the weights. Return the units that are gathered at once: the layers,
    and last the whole model, which has the remaining weights.

    Raises:
        ValueError: the model cannot be split over tensor-parallel ranks.
    """
    mesh = mesh_of(settings)
    styles = dict(_styles(model)) if settings.tensor_parallel > 1 else {}
    dtype = DTYPES[settings.dtype]
    policy = MixedPrecisionPolicy()
    if settings.dtype != "float32":
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    units = [*_layers(model), ("", model)]
    tied = _tied(model)
    for name, unit in units:
        for parameter in unit.parameters():
            if not isinstance(parameter, DTensor):
                _receive(parameter, settings, learns=learns and parameter.requires_grad)
        within = {own: style for own, style in styles.items() if not name or own.startswith(name)}
        for own, style in within.items():
            parallelize_module(model.get_submodule(own), mesh[TENSOR], style)
            del styles[own]
        if not name and settings.tensor_parallel > 1 and tied:
            model.get_output_embeddings().weight = model.get_input_embeddings().weight
        whole_again = settings.reshard_after_forward and bool(name)
        over = mesh[COPY, DATA] if COPY in (mesh.mesh_dim_names or ()) else mesh[DATA]
        fully_shard(unit, mesh=over, mp_policy=policy, reshard_after_forward=whole_again)
        _add_up(unit)
    model.to(settings.device)  # the remaining tensors: positions, masks
    broadcast_buffers(model)
    model.context_ranks = context_ranks_of(settings)
    return [unit for _, unit in units]


def context_ranks_of(settings: TrainerSettings) -> ContextRanks | None:
    """Return this rank's group of context ranks; None without them. Every rank must call this."""
    if settings.context_parallel == 1:
        return None
    context, tensor = settings.context_parallel, settings.tensor_parallel
    shape = (settings.num_ranks // context // tensor, context, tensor)
    mesh = init_device_mesh(settings.device, shape, mesh_dim_names=(DATA, CONTEXT, TENSOR))[CONTEXT]
    return ContextRanks(mesh.get_group(), mesh.get_local_rank(), context)


def mesh_of(settings: TrainerSettings) -> DeviceMesh:
    """Return the mesh of all ranks, with context ranks among the data-parallel ones.

    A dimension of copies comes first if groups of ranks have a copy each.
    """
    tensor = settings.tensor_parallel
    ranks = settings.num_ranks // tensor
    shards = settings.shard_ranks or ranks
    if shards == ranks:
        return init_device_mesh(settings.device, (ranks, tensor), mesh_dim_names=(DATA, TENSOR))
    shape = (ranks // shards, shards, tensor)
    return init_device_mesh(settings.device, shape, mesh_dim_names=(COPY, DATA, TENSOR))


def whole(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a whole tensor from its shards, cast to `dtype` before they travel; every rank must call this."""
    tensor = tensor.detach()
    if dtype is not None and tensor.is_floating_point():
        tensor = tensor.to(dtype)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def num_copies(tensor: torch.Tensor, num_ranks: int) -> float:
    """Return how many ranks have the same shard of a tensor."""
    if not isinstance(tensor, DTensor):
        return num_ranks
    mesh = tensor.device_mesh
    sizes = zip(tensor.placements, mesh.shape, strict=True)
    shards = 1
    for placement, size in sizes:
        # Not `is_shard`: rows that FSDP splits once more have a placement of another class.
        shards *= 1 if placement.is_replicate() else size
    return num_ranks / shards


def like(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is split as `tensor` is, from its local shard."""
    if not isinstance(tensor, DTensor):
        return local
    return DTensor.from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, in the same memory."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        part: torch.Tensor = tensor.to_local()
    return part.detach()


def own_part(tensor: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return the part of a whole tensor that this rank has of `tensor`."""
    if not isinstance(tensor, DTensor):
        return whole
    shape, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return whole[
        tuple(slice(first, first + size) for first, size in zip(offsets, shape, strict=True))
    ]


def _layers(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the layers of a model with a dot after their names, nested ones first."""
    layers = [
        (f"{name}.", module)
        for name, module in model.named_modules()
        if isinstance(module, GradientCheckpointingLayer)
    ]
    yield from reversed(layers)


def _receive(parameter: Any, settings: TrainerSettings, *, learns: bool) -> None:
    """Put a weight of the first rank on the device of every rank."""
    dtype = torch.float32 if learns else DTYPES[settings.dtype]
    if settings.rank == 0:
        parameter.data = parameter.data.to(settings.device, dtype).contiguous()
    else:
        parameter.data = torch.empty(parameter.shape, dtype=dtype, device=settings.device)
    dist.broadcast(parameter.data, 0)


def _add_up(unit: Any) -> None:
    """Sum gradients over ranks; the step divides them by the count of the whole batch."""
    unit.set_gradient_divide_factor(1.0)
    unit.set_force_sum_reduction_for_comms(True)
    if hasattr(
        unit, "set_reduce_scatter_unused_params"
    ):  # torch 2.13: experts that a rank did not use
        unit.set_reduce_scatter_unused_params(True, recurse=False)


def _tied(model: Any) -> bool:
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def _styles(model: Any) -> Iterator[tuple[str, ParallelStyle]]:
    """Yield how each module of a model is split over tensor-parallel ranks.

    Raises:
        ValueError: transformers has no plan for the model, or one that torch's styles do not cover.
    """
    remedy = "trainer.tensor_parallel must be 1 for this model"
    plan: dict[str, str] = dict(getattr(model, "tp_plan", None) or {})
    ends: dict[int, ParallelStyle] = {id(model.get_input_embeddings()): EMBEDDING}
    if model.get_output_embeddings() is not None:
        ends[id(model.get_output_embeddings())] = OUTPUT
    if not any("layers" in name for name in plan):
        raise ValueError(f"{remedy}: transformers has no plan for splitting its layers")
    for name, module in model.named_modules():
        style = plan.get(re.sub(r"\.\d+(?=\.)", ".*", name))
        if id(module) in ends:
            yield name, ends[id(module)]
        elif style is not None:
            if style not in STYLES:
                raise ValueError(f"{remedy}: {name} is split by {style!r}, which torch cannot do")
            if style != OF_HEADS and not isinstance(module, torch.nn.Linear):
                raise ValueError(f"{remedy}: {name} is no plain linear layer")
            if style == OF_HEADS and module.weight.numel() != _head_dim(model):
                raise ValueError(f"{remedy}: {name} normalizes all heads together")
            yield name, STYLES[style]


def _head_dim(model: Any) -> int:
    config = model.config
    known: int | None = getattr(config, "head_dim", None)
    return known or config.hidden_size // config.num_attention_heads
