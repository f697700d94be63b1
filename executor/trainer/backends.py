"""Choose the training backend for `trainer.backend`."""

from __future__ import annotations

from typing import Any, assert_never

from streamrl.executor.trainer.rank_group import RankGroup
from streamrl.executor.trainer.trainer_settings import TrainerSettings
from streamrl.executor.trainer.training_backend import TrainingBackend


def make_backend(settings: TrainerSettings, model: Any, ranks: RankGroup) -> TrainingBackend:
    """Return the backend for a model; import only the libraries that it needs."""
    match settings.backend:
        case "torch":
            from streamrl.executor.trainer.torch_backend import TorchBackend

            return TorchBackend(settings, model, ranks)
        case "deepspeed":
            from streamrl.executor.trainer.deepspeed_backend import DeepSpeedBackend

            return DeepSpeedBackend(settings, model, ranks)
        case _:
            assert_never(settings.backend)


def make_frozen(settings: TrainerSettings, model: Any) -> Any:
    """Return a frozen model in the form that the backend needs: with ZeRO 3, its weights are split over ranks."""
    if not settings.splits_weights:
        return model
    from streamrl.executor.trainer.deepspeed_backend import make_split

    return make_split(settings, model)
