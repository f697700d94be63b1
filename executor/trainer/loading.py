"""A learner as its role begins: models of their directories, prepared for its passes, or of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from executor.pretrained import load_pretrained
from executor.trainer.adapters import add_adapters, load_adapters
from executor.trainer.backends import make_backend
from executor.trainer.critic import Critic
from executor.trainer.half_experts import follow_autocast
from executor.trainer.learner import Learner
from executor.trainer.outputs import check_chunks
from executor.trainer.passes import attend_apart
from executor.trainer.rank_group import RankGroup
from executor.trainer.recomputation import recompute
from executor.trainer.trainer_settings import TrainerSettings


def load_learner(config: TrainerSettings, checkpoint: str | None) -> Learner:
    """Join the other ranks, and load the initial weights (version 0) or a checkpoint."""
    ranks = RankGroup(config)
    torch.manual_seed(config.seed)
    model = _load_model(config.model if config.adapter_rank else checkpoint or config.model, config)
    recompute(model, config.recompute)
    if config.logits_chunk is not None:
        check_chunks(model)
    if config.adapter_rank is not None:
        add_adapters(model, config.adapter_rank)
        if checkpoint is not None:
            load_adapters(model, Path(checkpoint), config.adapter_rank)
    is_second = config.has_reference and config.adapter_rank is None
    reference = _load_model(config.model, config) if is_second else None
    critic = None if config.critic_learning_rate is None else Critic(config, ranks, checkpoint)
    backend = make_backend(config, model, ranks)
    version = 0 if checkpoint is None else backend.load(Path(checkpoint))
    return Learner(config, ranks, backend, reference, critic, version)


def _load_model(directory: str, config: TrainerSettings) -> Any:
    if not Path(directory, "config.json").is_file():
        raise ValueError(f"no Hugging Face model directory (config.json) at {directory!r}")
    model = load_pretrained(
        directory, is_aligned=config.deterministic, dtype=torch.float32, local_files_only=True
    )
    # eval, so without dropout: a ratio must say how the weights differ, not which units are off.
    model = model.to(config.device).eval()
    follow_autocast(model)
    if config.packing == "packed":
        attend_apart(model)
    return model
