"""Make the optimizer of a trainer, and compute the learning rate of each step.

| `algorithm.optimizer.name` | state for each weight                     | from                                      |
|----------------------------|-------------------------------------------|-------------------------------------------|
| adamw                      | two moments in float32                    | torch.optim.AdamW (arXiv 1711.05101)      |
| adamw-8bit                 | two moments in 8 bits                     | bitsandbytes (arXiv 2110.02861)           |
| adamw-paged                | two moments in float32, in paged memory   | bitsandbytes (arXiv 2305.14314)           |
| adamw-8bit-paged           | two moments in 8 bits, in paged memory    | bitsandbytes                              |
| muon                       | one momentum in float32                   | torch.optim.Muon (Jordan et al. 2024)     |

Muon orthogonalizes the updates of matrices in layers. Embeddings, heads, norms and biases keep AdamW, as Muon's authors
advise. Both have the same learning rate: updates of matrices are scaled to the size of AdamW's (arXiv 2502.16982).
8-bit optimizers keep moments of embeddings in 32 bits, as bitsandbytes advises.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from streamrl.executor.trainer.trainer_settings import TrainerSettings
from streamrl.runfile.algorithm_config import ScheduleName


def make_optimizer(settings: TrainerSettings, model: torch.nn.Module) -> Any:
    """Return the optimizer of the settings, over the trained weights of a model."""
    make = _bitsandbytes_adamw if settings.optimizer in BITSANDBYTES else OWN[settings.optimizer]
    return make(settings, model)


def restate(optimizer: Any, settings: TrainerSettings) -> None:
    """Replace the options that a checkpoint saved by those of the settings."""
    options: dict[str, Any] = {
        "lr": settings.learning_rate,
        "weight_decay": settings.weight_decay,
        "betas": settings.betas,
        "momentum": settings.momentum,
    }
    for group in optimizer.param_groups:
        has_epsilon = "betas" in group  # Muon's is another one
        group.update({key: value for key, value in options.items() if key in group})
        if has_epsilon:
            group["eps"] = settings.epsilon


def set_rate(optimizer: Any, rate: float) -> None:
    """Use a learning rate from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def rate_of(settings: TrainerSettings, peak: float, step: int) -> float:
    """Return the learning rate of a step, from 0, whose largest one is `peak`.

    During warm-up it rises as (step + 1) / (warmup_steps + 1), so that no step has rate 0 (as in torchtitan). After it,
    `linear` and `cosine` fall to the final share of `peak`, which the step after the last one would have (as in
    transformers' schedules).
    """
    if step < settings.warmup_steps:
        return peak * (step + 1) / (settings.warmup_steps + 1)
    falling = max(1, settings.num_steps - settings.warmup_steps)
    progress = min(1.0, (step - settings.warmup_steps) / falling)
    least = settings.final_rate_share
    return peak * (least + (1 - least) * _left(settings.schedule, progress))


def _left(schedule: ScheduleName, progress: float) -> float:
    """Return the share of the decay that is left, 1 to 0, at a progress of 0 to 1."""
    match schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1 - progress
        case "cosine":
            return (1 + math.cos(math.pi * progress)) / 2


def _adamw(settings: TrainerSettings, model: torch.nn.Module) -> torch.optim.Optimizer:
    return _adamw_over(settings, list(_trained(model)))


def _adamw_over(
    settings: TrainerSettings, parameters: list[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        parameters,
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
        fused=True,
    )


BITSANDBYTES = {
    "adamw-8bit": "AdamW8bit",
    "adamw-paged": "PagedAdamW",
    "adamw-8bit-paged": "PagedAdamW8bit",
}
"""Classes of bitsandbytes."""


def _bitsandbytes_adamw(settings: TrainerSettings, model: torch.nn.Module) -> Any:
    import bitsandbytes

    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": 32})
    make = getattr(bitsandbytes.optim, BITSANDBYTES[settings.optimizer])
    return make(
        list(_trained(model)),
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
    )


class MuonWithAdamW:
    """Muon over the matrices of layers and AdamW over other weights, as one optimizer."""

    def __init__(self, settings: TrainerSettings, model: torch.nn.Module) -> None:
        matrices = list(_layer_matrices(model))
        ids = {id(parameter) for parameter in matrices}
        others = [parameter for parameter in _trained(model) if id(parameter) not in ids]
        muon = torch.optim.Muon(
            matrices,
            lr=settings.learning_rate,
            weight_decay=settings.weight_decay,
            momentum=settings.momentum,
            adjust_lr_fn="match_rms_adamw",
        )
        self._parts: dict[str, torch.optim.Optimizer] = {"muon": muon}
        if others:  # adapters are matrices alone
            self._parts["adamw"] = _adamw_over(settings, others)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the groups of both."""
        return [group for part in self._parts.values() for group in part.param_groups]

    @property
    def state(self) -> dict[Any, dict[str, Any]]:
        """Return the state of each weight."""
        return {key: held for part in self._parts.values() for key, held in part.state.items()}

    def step(self) -> None:
        """Update all weights."""
        for part in self._parts.values():
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients."""
        for part in self._parts.values():
            part.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of both, by name."""
        return {name: part.state_dict() for name, part in self._parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        for name, part in self._parts.items():
            part.load_state_dict(state[name])


def _trained(model: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    return (parameter for parameter in model.parameters() if parameter.requires_grad)


def _layer_matrices(model: Any) -> Iterator[torch.nn.Parameter]:
    """Yield the trained matrices below the output layer that are no embeddings."""
    for module in model.base_model.modules():
        if isinstance(module, torch.nn.Embedding):
            continue
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad and parameter.ndim == 2:
                yield parameter


OWN: dict[str, Any] = {"adamw": _adamw, "muon": MuonWithAdamW}
"""Optimizers of torch."""
