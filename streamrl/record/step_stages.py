"""Seconds of a step by stage, from the GPU-seconds of a simulated or an executed run."""

from __future__ import annotations

from collections.abc import Sequence

from streamrl.hardware.step_errors import STAGES, Stage
from streamrl.record.attribution import SHARED, TRAINER, VERIFIER, SidesAttribution
from streamrl.record.uncertainty import OPERATION_OF_ACTIVITY

STAGE_OF_OPERATION: dict[str, Stage] = {
    "prefill": "generation",
    "decode": "generation",
    "score": "score",
    "train": "train",
}


def stage_shares(
    shares: SidesAttribution, secondary: Sequence[str] = ()
) -> tuple[dict[Stage, float], dict[Stage, float]]:
    """Return the share of a step that replicas, and the trainer, spend in each stage.

    The time for which replicas wait for stragglers counts as generation, and their wait for weights as sync. Shared
    GPUs count as replicas; those that wait for others to train count as training.

    Args:
        shares: what the GPU-seconds were used for.
        secondary: names of secondary trainers, which delay nobody.
    """
    aside = {TRAINER, VERIFIER, *secondary}
    replicas = [side for name, side in shares.sides.items() if name not in aside]
    total = sum(side.gpu_seconds for side in replicas) or 1.0
    working: dict[Stage, float] = dict.fromkeys(STAGES, 0.0)
    for side in replicas:
        part = side.gpu_seconds / total
        for activity, share in side.busy.items():
            if (operation := OPERATION_OF_ACTIVITY.get(activity)) is not None:
                working[STAGE_OF_OPERATION[operation]] += share * part
        working["generation"] += side.idle.get("skew", 0.0) * part
        working["sync"] += side.idle.get("sync", 0.0) * part
    if (shared := shares.sides.get(SHARED)) is not None:
        working["train"] += shared.idle.get("pipeline", 0.0)
    training: dict[Stage, float] = {}
    if SHARED not in shares.sides and (trainer := shares.sides.get(TRAINER)) is not None:
        busy = trainer.busy
        training = {"score": busy.get("score", 0.0), "train": busy.get("train", 0.0)}
    return working, training


def stage_seconds(
    shares: SidesAttribution, step_time: float, secondary: Sequence[str] = ()
) -> dict[str, float]:
    """Return the seconds of a mean step in each stage that it has. Stages of the two sides may overlap.

    Args:
        shares: what the GPU-seconds of the steps were used for.
        step_time: seconds of a mean step.
        secondary: names of secondary trainers.
    """
    replicas, trainer = stage_shares(shares, secondary)
    seconds = {stage: (replicas[stage] + trainer.get(stage, 0.0)) * step_time for stage in STAGES}
    return {stage: value for stage, value in seconds.items() if value > 0}
