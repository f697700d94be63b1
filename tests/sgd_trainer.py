"""A trainer whose weights move by its gradient alone, so that a test sees the gradient in them."""

from __future__ import annotations

import importlib
import sys

import torch

from streamrl.executor.trainer.trainer_settings import TrainerSettings
from streamrl.executor.trainer.trainer_worker import TrainerWorker

ROLE = "tests.sgd_trainer:SgdTrainer"


class SgdTrainer(TrainerWorker):
    """Plain descent in place of AdamW; for processes of its own, in which nothing else trains."""

    def __init__(self, config: TrainerSettings) -> None:
        super().__init__(config)
        backend = importlib.import_module(f"streamrl.executor.trainer.{config.backend}_backend")
        vars(sys.modules[backend.__name__])["make_optimizer"] = _make_optimizer


def _make_optimizer(settings: TrainerSettings, model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=settings.learning_rate)
