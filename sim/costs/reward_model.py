"""Seconds of a reward model's calls: stated in the run file, measured in a profile, or composed of operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from streamrl.hardware.measured_profile import (
    MeasuredProfile,
    read_measured,
    scaled_to_mean_speed,
    shape_digest,
)
from streamrl.hardware.memory import check_reward_memory, reward_model_key, reward_shape
from streamrl.hardware.model_shape import ModelShape
from streamrl.hardware.profile_fit import PassFit, fit_passes
from streamrl.hardware.tiers import Provenance
from streamrl.runfile.config import Run
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
    """So many seconds for each rollout."""

    rollout_time: float
    provenance: None = None
    """It stands in the run file."""

    def call_time(self, lengths: Sequence[int]) -> float:
        """Return the seconds of a call that scores rollouts (prompt + output tokens)."""
        return self.rollout_time * len(lengths)


@dataclass(frozen=True)
class ModelRewards:
    """Forward passes over padded rollouts, the longest first, as `executor` makes them."""

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


def reward_costs(run: Run) -> StatedRewards | ModelRewards | None:
    """Return what a run's reward model costs; None where it has none.

    Raises:
        RunError: nobody knows, or a GPU does not hold it.
    """
    verifier = run.verifier
    if verifier.reward_model is None:
        return None
    check_reward_memory(run)
    if verifier.time:
        return StatedRewards(verifier.time)
    if run.costs.profile is not None:
        return _measured(run, Path(run.costs.profile))
    shape = reward_shape(run)
    if shape is None:
        text = f"verifier.time is missing: the shape of {verifier.reward_model.model} is not here to compose its seconds"
        raise RunError("verifier.time", None, None, text, (reward_model_key(run), "costs.profile"))
    curve = _composed(run, shape)
    return ModelRewards(curve, verifier.max_tokens_per_pass, curve.provenance)


def _measured(run: Run, path: Path) -> ModelRewards:
    """Return the seconds of a profile of this machine.

    Raises:
        RunError: it has none of a reward model, or of another one, or on another GPU.
    """
    profile = scaled_to_mean_speed(read_measured(path))
    key, shape = reward_model_key(run), reward_shape(run)
    measured = profile.reward_model
    if measured is None or not profile.reward:
        text = f"costs.profile: {path} has no reward model: {TO_MEASURE}, or verifier.time states its seconds"
        raise RunError("costs.profile", str(path), None, text, (key,))
    if shape is not None and shape_digest(shape) != measured.digest:
        text = f"costs.profile: {path} was measured for the reward model {measured.name}, but {key} has the shape of {shape.name}"
        raise RunError("costs.profile", str(path), None, text, (key,))
    _check_gpu(run, profile, path)
    provenance = Provenance.of(
        "measured", [f"{path}: {profile.source}, reward model {measured.name}"]
    )
    return ModelRewards(fit_passes(profile.reward), run.verifier.max_tokens_per_pass, provenance)


def _check_gpu(run: Run, profile: MeasuredProfile, path: Path) -> None:
    pool = run.verifier.pool
    assert pool is not None, "check_rewards wants one"
    gpu = run.cluster.pools[pool].gpu
    if gpu != profile.gpu:
        text = f"costs.profile: {path} was measured with {profile.gpu!r}, but cluster.pools.{pool}.gpu is {gpu!r}: verifier.time states the seconds of other GPUs"
        raise RunError("costs.profile", str(path), None, text, (f"cluster.pools.{pool}.gpu",))


def _composed(run: Run, shape: ModelShape) -> PrefillCurve:
    """Compose its passes as those of an inference engine that prefills and does nothing else."""
    verifier = run.verifier
    assert verifier.pool is not None, "check_rewards wants one"
    pool = run.cluster.pools[verifier.pool]
    shard = Shard(
        shape,
        Kernels(pool.gpu, run.model.dtype, run.costs.backend, run.model.dtype),
        max(1, verifier.gpus_per_worker),
        engine=load_engine(run.costs.engine),
        wires=Interconnect.of(pool),
    )
    return PrefillCurve(shard, 1, is_mixed=False)
