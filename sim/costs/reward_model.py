"""Compute the seconds of a reward model's calls: from the run file, a measured profile, or operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from streamrl.hardware.measured_profile import (
    read_measured,
    scaled_to_mean_speed,
    shape_digest,
)
from streamrl.hardware.memory import check_reward_memory
from streamrl.hardware.model_shape import ModelShape
from streamrl.hardware.profile_fit import PassFit, fit_passes
from streamrl.hardware.resolved import RewardHardware
from streamrl.hardware.tiers import Provenance
from streamrl.runfile.config import CostsConfig
from streamrl.runfile.errors import RunError
from streamrl.sim.costs.curves import PrefillCurve
from streamrl.sim.costs.inference import Shard
from streamrl.sim.costs.interconnect import Interconnect
from streamrl.sim.costs.kernels import Kernels
from streamrl.sim.costs.machine_profile import passes
from streamrl.sim.costs.overheads import load_engine

TO_MEASURE = "streamrl profile MODELDIR --reward-model DIR measures it"


@dataclass(frozen=True)
class StatedRewards:
    """Fixed seconds per rollout, from the run file."""

    rollout_time: float
    provenance: None = None
    """None, because the run file sets the value."""

    def call_time(self, lengths: Sequence[int]) -> float:
        """Return the seconds of a call that scores rollouts (prompt + output tokens)."""
        return self.rollout_time * len(lengths)


@dataclass(frozen=True)
class ModelRewards:
    """Forward passes over padded rollouts, the longest first, as in `executor`."""

    pass_costs: PassFit | PrefillCurve
    max_tokens_per_pass: int
    provenance: Provenance

    def call_time(self, lengths: Sequence[int]) -> float:
        """Return the seconds of a call that scores rollouts (prompt + output tokens)."""
        return sum(
            self._pass_time(*one) for one in passes(lengths, self.max_tokens_per_pass, "padded")
        )

    def _pass_time(self, rollouts: int, tokens: int, pairs: float) -> float:
        if isinstance(self.pass_costs, PassFit):
            return self.pass_costs.time(rollouts, tokens, pairs)
        return self.pass_costs.time(tokens, pairs, 0, rollouts)


def reward_costs(
    reward: RewardHardware | None, config: CostsConfig
) -> StatedRewards | ModelRewards | None:
    """Return the costs of a run's reward model; None if it has none.

    Raises:
        RunError: its shape is unknown, or it does not fit on a GPU.
    """
    if reward is None:
        return None
    check_reward_memory(reward)
    verifier = reward.config
    if verifier.time:
        return StatedRewards(verifier.time)
    if config.profile is not None:
        return _measured(reward, Path(config.profile))
    if reward.shape is None:
        text = f"verifier.time is missing: the shape of {reward.name} is not here to compose its seconds"
        raise RunError("verifier.time", None, None, text, (reward.key, "costs.profile"))
    curve = _composed(reward, reward.shape, config)
    return ModelRewards(curve, verifier.max_tokens_per_pass, curve.provenance)


def _measured(reward: RewardHardware, path: Path) -> ModelRewards:
    """Read the seconds from a profile of this machine.

    Raises:
        RunError: the profile has no reward model, or its model or GPU differs.
    """
    profile = scaled_to_mean_speed(read_measured(path))
    key, shape = reward.key, reward.shape
    measured = profile.reward_model
    if measured is None or not profile.reward:
        text = f"costs.profile: {path} has no reward model: {TO_MEASURE}, or verifier.time states its seconds"
        raise RunError("costs.profile", str(path), None, text, (key,))
    if shape is not None and shape_digest(shape) != measured.digest:
        text = f"costs.profile: {path} was measured for the reward model {measured.name}, but {key} has the shape of {shape.name}"
        raise RunError("costs.profile", str(path), None, text, (key,))
    _check_gpu(reward, profile.gpu, path)
    provenance = Provenance.of(
        "measured", [f"{path}: {profile.source}, reward model {measured.name}"]
    )
    return ModelRewards(fit_passes(profile.reward), reward.config.max_tokens_per_pass, provenance)


def _check_gpu(reward: RewardHardware, measured: str, path: Path) -> None:
    assert reward.pool is not None, "check_rewards wants one"
    pool, gpu = reward.config.pool, reward.pool.gpu
    if gpu != measured:
        text = f"costs.profile: {path} was measured with {measured!r}, but cluster.pools.{pool}.gpu is {gpu!r}: verifier.time states the seconds of other GPUs"
        raise RunError("costs.profile", str(path), None, text, (f"cluster.pools.{pool}.gpu",))


def _composed(reward: RewardHardware, shape: ModelShape, config: CostsConfig) -> PrefillCurve:
    """Compose its passes like those of an inference engine that only prefills."""
    assert reward.pool is not None, "check_rewards wants one"
    shard = Shard(
        shape,
        Kernels(reward.pool.gpu, reward.dtype, config.backend, reward.dtype),
        max(1, reward.config.gpus_per_worker),
        engine=load_engine(config.engine),
        wires=Interconnect.of(reward.pool),
    )
    return PrefillCurve(shard, 1, is_mixed=False)
