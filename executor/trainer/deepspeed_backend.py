"""Train with DeepSpeed: ZeRO splits optimizer state (1), gradients (2) and weights (3) over the ranks.

The number of passes in a step is known only when all rollouts have arrived. So this backend controls accumulation:
DeepSpeed adds up the gradients of `backward` and updates in `step` (`managed_gradient_accumulation` off). DeepSpeed
averages gradients over ranks, but the batch's mean needs another divisor, known only at the step. It is passed as the
loss scale of mixed precision, by which DeepSpeed divides gradients before it clips them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from streamrl.executor.roles import RoleLostError
from streamrl.executor.trainer.adapters import save_model
from streamrl.executor.trainer.losses import average_gradients
from streamrl.executor.trainer.optimizer_state import (
    MASTER,
    MOMENTS,
    STATE_FILE,
    STEP,
    States,
    has_states,
    no_state,
    read_states,
    states_by_name,
    write_states,
)
from streamrl.executor.trainer.optimizers import make_optimizer, restate, set_rate
from streamrl.executor.trainer.rank_group import RankGroup
from streamrl.executor.trainer.trainer_settings import DTYPES, TrainerSettings
from streamrl.executor.trainer.training_backend import broadcast_buffers, state_of

GATHER_BYTES = 512 * 2**20
"""Bytes of weights that are gathered at once for writing; gathering one tensor at a time takes twenty times as long."""


class DeepSpeedBackend:
    """A training backend around a DeepSpeed engine."""

    in_step = True

    def __init__(self, settings: TrainerSettings, model: Any, ranks: RankGroup) -> None:
        self._settings = settings
        self._ranks = ranks
        self._engine = _start(settings, model)
        self.model = self._engine
        module = self._engine.module
        self._trained = {n: each for n, each in module.named_parameters() if each.requires_grad}

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of a loss."""
        self._engine.backward(loss, scale_wrt_gas=False)

    def step(self, count: float) -> float:
        """Turn the gradient into the batch's mean, clip it, and update the weights.

        Raises `FloatingPointError` if the norm is not finite and the weights are unchanged; `RoleLostError` if they have
        changed already.
        """
        if self._settings.zero == 0:
            module = self._engine.module
            trained = [each for each in module.parameters() if each.requires_grad]
            self._ranks.sum_tensors([parameter.grad for parameter in trained])
            norm = average_gradients(module, count, self._settings.max_grad_norm)
            self._engine.step()
            return norm
        optimizer = self._engine.optimizer
        optimizer.loss_scale = (
            count / self._ranks.size
        )  # DeepSpeed divides sums by the number of ranks
        try:
            self._engine.step()
        finally:
            optimizer.loss_scale = 1.0
        norm = float(self._engine.get_global_grad_norm())
        if not math.isfinite(norm):
            raise RoleLostError(
                f"the gradient's norm was {norm} and the weights were updated with it; restart from a checkpoint"
            )
        return norm

    def set_rate(self, rate: float) -> None:
        """Use a learning rate from the next step on."""
        set_rate(self._engine.optimizer, rate)

    def weights(
        self, *, learned: bool = False, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the model's tensors on the first rank; with ZeRO 3 gather a part of them at a time."""
        state = state_of(self._engine.module, learned=learned)
        if self._settings.zero < 3:
            yield from ((name, tensor.detach()) for name, tensor in state.items())
            return
        from deepspeed.runtime.zero import GatheredParameters

        names: dict[int, list[str]] = {}  # tied weights are one tensor under two names
        for name, tensor in state.items():
            names.setdefault(id(tensor), []).append(name)
        for some in _by_bytes(state):
            copies: dict[int, torch.Tensor] = {}
            with GatheredParameters([tensor for tensor in some if hasattr(tensor, "ds_id")]):
                if self._ranks.is_first:
                    copies = {id(tensor): tensor.detach().to("cpu", copy=True) for tensor in some}
            for identity, copy in copies.items():
                yield from ((name, copy) for name in names[identity])

    def save(self, path: Path, version: int) -> None:
        """Write whole weights and optimizer states on the first rank, for any layout and back end."""
        states: States = {}
        weights = dict(self.weights())
        tied: dict[int, list[str]] = {}
        for name, tensor in state_of(self._engine.module, learned=True).items():
            tied.setdefault(id(tensor), []).append(name)
        for name, parameter in self._trained.items():
            for field, tensor in self._states_of(parameter):
                if self._ranks.is_first:
                    states.setdefault(name, {})[field] = tensor.to("cpu", copy=True)
            if MASTER in states.get(name, {}) and self._settings.adapter_rank is None:
                weights.update(dict.fromkeys(tied[id(parameter)], states[name][MASTER]))
        if self._ranks.is_first:
            save_model(self._engine.module, weights.items(), path)
        self._ranks.wait()
        write_states(path, states, version)

    def load(self, path: Path) -> int:
        """Load the optimizer's state, written by any back end on any number of ranks.

        Weights that back end torch or fsdp2 wrote are rounded to `trainer.dtype` once.
        """
        if has_states(path):
            for name in self._trained:  # one at a time, because each rank reads whole tensors
                blank = partial(_blank_of, name)
                states, version = read_states(path, blank, alone=True, with_masters=True)
                self._set_states(states)
        elif (path / STATE_FILE).is_file():
            saved = torch.load(path / STATE_FILE, "cpu", weights_only=True, mmap=True)
            self._set_states(dict(states_by_name(saved["optimizer"], list(self._trained))))
            version = saved["version"]
        else:
            raise ValueError(no_state(path))
        restate(self._engine.optimizer, self._settings)
        return version

    @property
    def _flat(self) -> list[torch.Tensor]:
        """Return the tensors that the optimizer updates: this rank's parts of all weights, or the weights themselves."""
        groups = self._engine.basic_optimizer.param_groups
        own = [parameter for group in groups for parameter in group["params"]]
        return list(getattr(self._engine.optimizer, "fp32_partitioned_groups_flat", own))

    def _states_of(self, parameter: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the optimizer's states of a weight, whole, with the float32 copy of a weight in half precision."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        states = self._engine.basic_optimizer.state
        if parameter in states:
            yield from states[parameter].items()
            return
        if not states:  # before the first step
            return
        yield STEP, states[self._flat[0]][STEP]
        for field in MOMENTS:
            yield field, safe_get_full_optimizer_state(parameter, field)
        if self._settings.dtype != "float32":
            yield MASTER, safe_get_full_fp32_param(parameter)

    def _set_states(self, states: States) -> None:
        held = self._engine.basic_optimizer.state
        for flat in self._flat:
            if not held[flat]:
                moments = {field: torch.zeros_like(flat) for field in MOMENTS}
                held[flat] = {STEP: torch.tensor(0.0), **moments}
        if hasattr(self._engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()
        for name, fields in states.items():
            parameter = self._trained[name]
            for flat in [parameter] if parameter in held else self._flat:
                held[flat][STEP].copy_(fields[STEP])
            for field in fields.keys() - {STEP}:
                self._set_state(parameter, field, fields[field].to(self._settings.device))

    def _set_state(self, parameter: Any, field: str, value: torch.Tensor) -> None:
        """Replace a state of a weight, or its float32 copy, by this rank's part of a whole tensor."""
        from deepspeed import utils

        held = self._engine.basic_optimizer.state
        if parameter in held:
            held[parameter][field].copy_(value)
            return
        if self._settings.zero == 3:
            size = parameter.ds_tensor.numel()
            padded = torch.nn.functional.pad(value.flatten(), (0, size * self._ranks.size))
            value = padded.narrow(0, size * self._ranks.rank, size)
        where = "local" if self._settings.zero == 3 else "full"
        if field == MASTER:
            getattr(utils, f"safe_set_{where}_fp32_param")(parameter, value)
        else:
            getattr(utils, f"safe_set_{where}_optimizer_state")(parameter, value, field)

    def move(self, device: str) -> None:
        """Do nothing: `streamrl.targets.execute_limits` rejects GPUs shared with replicas."""


def make_split(settings: TrainerSettings, model: Any) -> Any:
    """Return DeepSpeed's engine around a frozen model, whose weights are split over the ranks."""
    deepspeed = _join(settings)
    model.requires_grad_(False)
    _split(settings, model)
    engine, *_ = deepspeed.initialize(model=model, config=make_config(settings))
    engine.eval()
    return engine


def _start(settings: TrainerSettings, model: Any) -> Any:
    """Return DeepSpeed's engine around a model that is trained."""
    deepspeed = _join(settings)
    if settings.zero == 3:
        _split(settings, model)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=make_optimizer(settings, model), config=make_config(settings)
    )
    engine.enable_backward_allreduce = (
        settings.zero > 0
    )  # with stage 0 `step` sums gradients itself
    return engine


def _split(settings: TrainerSettings, model: Any) -> None:
    """Split a model's weights over the ranks, tensor by tensor, so that no GPU needs room for all of them."""
    from deepspeed.runtime.zero import Init

    dtype, config = DTYPES[settings.dtype], make_config(settings)
    for parameter in model.parameters():  # including the blank ones of other ranks
        parameter.data = parameter.data.to(dtype)
    Init(module=model, config_dict_or_path=config)
    model.to(settings.device)  # moves the remaining tensors: positions, masks
    broadcast_buffers(model)


def _join(settings: TrainerSettings) -> Any:
    """Connect DeepSpeed to the other ranks, and return its module."""
    on_cpu = settings.device == "cpu"
    os.environ.setdefault("LOCAL_RANK", "0")  # every rank sees only its own GPU
    if on_cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from deepspeed import ops

    if on_cpu:
        # Otherwise DeepSpeed compiles for minutes, for sums that gloo can do.
        ops.__compatible_ops__["deepspeed_shm_comm"] = False
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
        # By default it sums gradients in the weights' dtype: bfloat16 loses half of a sum of 1,000 equal values.
        **({} if settings.dtype == "float32" else {"data_types": {"grad_accum_dtype": "fp32"}}),
        "steps_per_print": None,
    }


def _blank_of(wanted: str, name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor | None:
    """Return a whole tensor for a saved state of one weight; None for those of others."""
    return torch.zeros(shape, dtype=dtype) if name == wanted else None


def _by_bytes(state: dict[str, Any]) -> Iterator[list[Any]]:
    """Yield each tensor of a model once, in lists of at most `GATHER_BYTES` of whole tensors."""
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
