"""Choose the inference engine for `rollout.backend`."""

from __future__ import annotations

from typing import Any

from streamrl.executor.rollout.inference_engine import InferenceEngine, ReplicaSettings
from streamrl.runfile.backend_choice import engine_named
from streamrl.runfile.choices import import_object


def make_engine(settings: ReplicaSettings) -> InferenceEngine:
    """Return the engine of a replica; import only the libraries that it needs."""
    make: Any = import_object(engine_named(settings.backend).engine)
    engine: InferenceEngine = make(settings)
    return engine
