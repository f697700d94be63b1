"""AdamW, as every training backend has it."""

from __future__ import annotations

import torch

from streamrl.executor.trainer.trainer_settings import TrainerSettings

ADAM_BETAS = (0.9, 0.999)
"""AdamW's published values (arXiv 1711.05101)."""


def make_optimizer(settings: TrainerSettings, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return AdamW over those of a model's weights that are trained."""
    return torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=settings.learning_rate,
        betas=ADAM_BETAS,
        weight_decay=settings.weight_decay,
        fused=True,
    )
