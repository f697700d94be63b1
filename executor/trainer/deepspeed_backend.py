"""Training with DeepSpeed: ZeRO splits optimizer (1), gradients (2) and weights (3) over the ranks.

How many passes a step has is known only once its rollouts are there, so that accumulation is ours: DeepSpeed adds up
what `backward` brings and updates where `step` says so (`managed_gradient_accumulation` off). It averages gradients over
ranks; the divisor that makes the batch's mean of that is known at the step alone, and goes in where mixed precision has
its loss scale, by which DeepSpeed divides gradients before it clips them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from streamrl.executor.roles import RoleLostError
from streamrl.executor.trainer.adapters import save_model
from streamrl.executor.trainer.losses import average_gradients
from streamrl.executor.trainer.rank_group import RankGroup
from streamrl.executor.trainer.trainer_settings import DTYPES, TrainerSettings
from streamrl.executor.trainer.training_backend import make_optimizer, state_of

GATHER_BYTES = 512 * 2**20
"""Of weights that are whole at once while they are written: one by one they would take twenty times as long."""


class DeepSpeedBackend:
    """A DeepSpeed engine."""

    in_step = True

    def __init__(self, settings: TrainerSettings, model: Any, ranks: RankGroup) -> None:
        self._settings = settings
        self._ranks = ranks
        self._engine = _start(settings, model)
        self.model = self._engine

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of a loss."""
        self._engine.backward(loss, scale_wrt_gas=False)

    def step(self, count: float) -> float:
        """Make the gradient the batch's mean, clip it, and update the weights.

        Raises `FloatingPointError` of weights that are as they were; `RoleLostError` where they took harm.
        """
        if self._settings.zero == 0:
            module = self._engine.module
            trained = [each for each in module.parameters() if each.requires_grad]
            self._ranks.sum_tensors([parameter.grad for parameter in trained])
            norm = average_gradients(module, count, self._settings.max_grad_norm)
            self._engine.step()
            return norm
        optimizer = self._engine.optimizer
        optimizer.loss_scale = count / self._ranks.size  # it divides sums by the ranks itself
        try:
            self._engine.step()
        finally:
            optimizer.loss_scale = 1.0
        norm = float(self._engine.get_global_grad_norm())
        if not math.isfinite(norm):
            raise RoleLostError(f"the gradient's norm was {norm}, and the weights have it")
        return norm

    def weights(self, *, learned: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the model's tensors, on the first rank; those that ZeRO 3 has split are gathered some at a time."""
        state = state_of(self._engine.module, learned=learned)
        if self._settings.zero < 3:
            yield from ((name, tensor.detach()) for name, tensor in state.items())
            return
        from deepspeed.runtime.zero import GatheredParameters

        copies: dict[int, torch.Tensor] = {}  # tied weights are one tensor under two names
        for some in _by_bytes(state):
            with GatheredParameters([tensor for tensor in some if hasattr(tensor, "ds_id")]):
                if self._ranks.is_first:
                    copies |= {id(tensor): tensor.detach().to("cpu", copy=True) for tensor in some}
        if self._ranks.is_first:
            yield from ((name, copies[id(tensor)]) for name, tensor in state.items())

    def save(self, path: Path, version: int) -> None:
        """Write whole weights on the first rank, and what DeepSpeed needs of each."""
        weights = dict(self.weights())
        if self._ranks.is_first:
            save_model(self._engine.module, weights.items(), path)
        client_state = {"version": version}
        self._engine.save_checkpoint(str(path), self._tag, client_state, save_latest=False)

    def load(self, path: Path) -> int:
        """Take weights and optimizer from what as many ranks wrote."""
        if not (path / self._tag).is_dir():
            found = ", ".join(entry.name for entry in path.glob("zero-*")) or "nothing of DeepSpeed"
            raise ValueError(f"{path}: no checkpoint of {self._tag}: it has {found}")
        _, client_state = self._engine.load_checkpoint(str(path), self._tag)
        version: int = client_state["version"]
        for group in self._engine.optimizer.param_groups:
            group.update(lr=self._settings.learning_rate, weight_decay=self._settings.weight_decay)
        return version

    def move(self, device: str) -> None:
        """Stay where it is: on GPUs `streamrl.executor.backend_limits` refuses it to share them."""

    @property
    def _tag(self) -> str:
        """Name of the directory with what DeepSpeed needs: it fits the stage and the number of ranks alone."""
        return f"zero-{self._settings.zero}-ranks-{self._ranks.size}"


def make_split(settings: TrainerSettings, model: Any) -> Any:
    """Return DeepSpeed's engine around a model that is not trained, of whose weights each rank has a share."""
    deepspeed = _join(settings)
    model.requires_grad_(False)
    _split(settings, model)
    engine, *_ = deepspeed.initialize(model=model, config=make_config(settings))
    engine.eval()
    return engine


def _start(settings: TrainerSettings, model: Any) -> Any:
    """Return DeepSpeed's engine around a model."""
    deepspeed = _join(settings)
    if settings.zero == 3:
        _split(settings, model)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=make_optimizer(settings, model), config=make_config(settings)
    )
    engine.enable_backward_allreduce = settings.zero > 0  # stage 0: `step` has done it
    return engine


def _split(settings: TrainerSettings, model: Any) -> None:
    """Leave each rank its share of a model's weights, which the first one has: tensor by tensor, so that no GPU has all."""
    from deepspeed.runtime.zero import Init

    dtype, config = DTYPES[settings.dtype], make_config(settings)
    for parameter in model.parameters():  # those of other ranks are in it, and stay untouched
        parameter.data = parameter.data.to(dtype)
    Init(module=model, config_dict_or_path=config)
    model.to(settings.device)  # what is no weight: positions, masks
    kept = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        if name in kept:  # read from files, such as what balances experts; the others are computed
            if buffer.is_floating_point():
                buffer.data = buffer.data.float()
            dist.broadcast(buffer.data, 0)


def _join(settings: TrainerSettings) -> Any:
    """Let DeepSpeed find the other ranks, and return its module."""
    on_cpu = settings.device == "cpu"
    os.environ.setdefault("LOCAL_RANK", "0")  # every rank sees its own GPU alone
    if on_cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from deepspeed import ops

    if on_cpu:
        ops.__compatible_ops__["deepspeed_shm_comm"] = (
            False  # compiles for minutes, for sums that gloo has
        )
    deepspeed.init_distributed(
        "gloo" if on_cpu else "nccl", auto_mpi_discovery=False, verbose=False
    )
    return deepspeed


def make_config(settings: TrainerSettings) -> dict[str, Any]:
    """Return DeepSpeed's configuration."""
    clips_itself = settings.zero > 0
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": settings.max_grad_norm if clips_itself else 0.0,
        "zero_optimization": {"stage": settings.zero, "overlap_comm": False},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": settings.dtype == "bfloat16"},
        # By itself it adds up passes in the weights' format: of a thousand alike, bfloat16 keeps a half.
        **({} if settings.dtype == "float32" else {"data_types": {"grad_accum_dtype": "fp32"}}),
        "steps_per_print": None,
    }


def _by_bytes(state: dict[str, Any]) -> Iterator[list[Any]]:
    """Yield the tensors of a model, each once, as many at a time as fill `GATHER_BYTES` when they are whole."""
    some: list[Any] = []
    filled = 0
    for tensor in {id(tensor): tensor for tensor in state.values()}.values():
        num_bytes = getattr(tensor, "ds_numel", tensor.numel()) * tensor.element_size()
        if some and filled + num_bytes > GATHER_BYTES:
            yield some
            some, filled = [], 0
        some.append(tensor)
        filled += num_bytes
    if some:
        yield some
