"""Choose the training backend for `trainer.backend`."""

from __future__ import annotations

from typing import Any

from streamrl.executor.trainer.rank_group import RankGroup
from streamrl.executor.trainer.trainer_settings import TrainerSettings
from streamrl.executor.trainer.training_backend import TrainingBackend
from streamrl.runfile.backend_choice import training_backend_named
from streamrl.runfile.choices import import_object


def make_backend(settings: TrainerSettings, model: Any, ranks: RankGroup) -> TrainingBackend:
    """Return the backend for a model; import only the libraries that it needs."""
    make: Any = import_object(training_backend_named(settings.backend).backend)
    backend: TrainingBackend = make(settings, model, ranks)
    return backend


def make_frozen(settings: TrainerSettings, model: Any) -> Any:
    """Return a frozen model in the form that the backend needs: with ZeRO 3, its weights are split over ranks."""
    if not settings.splits_weights:
        return model
    split: Any = import_object(training_backend_named(settings.backend).split)
    return split(settings, model)
