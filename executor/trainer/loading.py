"""A learner as its role begins: models of their directories, prepared for its passes, or of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch

from streamrl.executor.trainer.adapters import add_adapters, load_adapters
from streamrl.executor.trainer.backends import make_backend, make_frozen
from streamrl.executor.trainer.critic import Critic
from streamrl.executor.trainer.learner import Learner
from streamrl.executor.trainer.model_loading import load_model
from streamrl.executor.trainer.outputs import check_chunks
from streamrl.executor.trainer.rank_group import RankGroup
from streamrl.executor.trainer.recomputation import recompute
from streamrl.executor.trainer.trainer_settings import TrainerSettings


def load_learner(config: TrainerSettings, checkpoint: str | None) -> Learner:
    """Join the other ranks, and load the initial weights (version 0) or a checkpoint."""
    ranks = RankGroup(config)
    torch.manual_seed(config.seed)
    has_adapters = config.adapter_rank is not None
    directory = config.model if has_adapters else checkpoint or config.model
    if not Path(directory, "config.json").is_file():
        raise ValueError(f"no Hugging Face model directory (config.json) at {directory!r}")
    model = load_model(directory, config, ranks, learns=not has_adapters)
    recompute(model, config.recompute)
    if config.logits_chunk is not None:
        check_chunks(model)
    if config.adapter_rank is not None:
        add_adapters(model, config.adapter_rank)
        if checkpoint is not None:
            load_adapters(model, Path(checkpoint), config.adapter_rank)
    backend = make_backend(config, model, ranks)
    reference = None
    if (
        config.has_reference and not has_adapters
    ):  # the actor's weights are split by now, if any are
        own = load_model(config.model, config, ranks, learns=not config.splits_weights)
        reference = make_frozen(config, own)
    critic = None if config.critic_learning_rate is None else Critic(config, ranks, checkpoint)
    version = 0 if checkpoint is None else backend.load(Path(checkpoint))
    return Learner(config, ranks, backend, reference, critic, version)
