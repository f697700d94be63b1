"""The critic of PPO: a copy of the model whose output layer predicts the expected reward at each token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from streamrl.executor.trainer.backends import make_backend
from streamrl.executor.trainer.model_loading import load_model, recompute
from streamrl.executor.trainer.passes import output_logits
from streamrl.executor.trainer.rank_group import RankGroup
from streamrl.executor.trainer.sequences import TokenSequence
from streamrl.executor.trainer.trainer_settings import DTYPES, TrainerSettings

DIRECTORY = "critic"
"""Subdirectory of a checkpoint that has the critic."""


class Critic:
    """Predicts values and learns from returns; every rank calls the same methods in the same order."""

    def __init__(
        self,
        settings: TrainerSettings,
        ranks: RankGroup,
        checkpoint: str | None,
        *,
        is_blank: bool = False,
    ) -> None:
        """Load the initial model with an output layer of zeros, the critic of a checkpoint, or a blank model."""
        assert settings.critic_learning_rate is not None, "a critic needs critic_learning_rate"
        self._settings = replace(settings, learning_rate=settings.critic_learning_rate)
        model = self._load_model(checkpoint, ranks, is_blank=is_blank)
        self.backend = make_backend(self._settings, model, ranks)
        if checkpoint is not None:
            self.backend.load(Path(checkpoint, DIRECTORY))

    def _load_model(self, checkpoint: str | None, ranks: RankGroup, *, is_blank: bool) -> Any:
        settings = self._settings
        directory = settings.model if checkpoint is None else str(Path(checkpoint, DIRECTORY))
        options: dict[str, Any] = {"has_values": True, "num_labels": 1}
        model = load_model(directory, settings, ranks, is_blank=is_blank, **options)
        recompute(model, settings.recompute)
        if checkpoint is None:
            for parameter in model.score.parameters():
                torch.nn.init.zeros_(parameter)
        return model

    def values(self, sequences: list[TokenSequence]) -> torch.Tensor:
        """Return the expected reward before each token that the policy sampled, [n] float32."""
        model, settings = self.backend.model, self._settings
        outputs = output_logits(
            model, model.score, sequences, settings.packing, DTYPES[settings.dtype]
        )
        return outputs[:, 0].float()

    def backward(self, sequences: list[TokenSequence], returns: torch.Tensor) -> None:
        """Add the gradient of half the squared error, summed over tokens."""
        self.backend.backward((self.values(sequences) - returns).square().sum() / 2)

    def take_part(self, sequences: list[TokenSequence]) -> None:
        """Run a pass with zero gradient, because other ranks wait for it."""
        self.backend.backward(0 * self.values(sequences).sum())

    def save(self, path: Path, version: int, *, is_first: bool) -> None:
        """Write the critic to a checkpoint."""
        directory = path / DIRECTORY
        if is_first:
            directory.mkdir(exist_ok=True)
        self.backend.save(directory, version)
