"""Compute the bytes and seconds of recording the experts of each token, and of replaying them in the trainer.

A token has `layers x experts per token x 2` bytes. GPUs of replicas copy them to host memory in each pass, and each
rank of the trainer copies those of its rollouts back. Both are counted at the host link of the GPU, as if nothing ran
beside them. Files are written and read meanwhile. Only bytes and a bandwidth are known: no run was compared.
"""

from __future__ import annotations

from streamrl.hardware.model_shape import ModelShape
from streamrl.hardware.profiles import gpu_of
from streamrl.hardware.resolved import ResolvedRun
from streamrl.runfile.errors import OneOf, RunError

CHOICE_BYTES = 2
"""Bytes of the number of an expert, as `executor.expert_choices` stores it."""


def token_bytes(model: ModelShape) -> int:
    """Return the bytes of the experts of one token; 0 for a model without experts."""
    if model.experts is None:
        return 0
    return model.num_expert_layers * model.experts.experts_per_token * CHOICE_BYTES


def check_replay(resolved: ResolvedRun) -> None:
    """Raise `RunError` if a model without experts is to replay them."""
    key = "algorithm.router_replay"
    if resolved.run.algorithm.router_replay and not token_bytes(resolved.model):
        text = f"{key} must be false: model {resolved.model.name} has no experts"
        raise RunError(key, True, OneOf([False]), text, ("model",))


def recording_time(resolved: ResolvedRun) -> float:
    """Return the seconds in which a replica copies the experts of one token to host memory; 0 without replay."""
    return _time_of(resolved, resolved.replica.gpu.host_link)


def replay_time(resolved: ResolvedRun) -> float:
    """Return the seconds in which the trainer's data-parallel ranks copy the experts of one token; 0 without replay."""
    trainer = resolved.trainer
    return _time_of(resolved, trainer.config.data_parallel * gpu_of(trainer.pool).host_link)


def _time_of(resolved: ResolvedRun, bandwidth: float) -> float:
    replays = resolved.run.algorithm.router_replay
    return token_bytes(resolved.model) / bandwidth if replays else 0.0
