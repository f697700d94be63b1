"""Whether seconds that were measured on a machine are those of a run."""

from __future__ import annotations

from pathlib import Path

from streamrl.hardware.machine_profile import MeasuredProfile, shape_digest
from streamrl.hardware.profiles import load_model
from streamrl.runfile.config import Run
from streamrl.runfile.errors import RunError
from streamrl.runfile.keys import pool_key


def check_fits(profile: MeasuredProfile, run: Run, path: Path) -> None:
    """Raise `RunError` where the profile is of something else than the run, with the run's key."""
    shape = load_model(run.model)
    model_key = "model.name" if run.model.path is None else "model.path"
    pools, rollout, trainer = run.cluster.pools, run.rollout, run.trainer
    # vLLM's prefixes were measured one by one, and one for a whole group is one of those
    shares = run.shares_prefixes if profile.backend == "vllm" else profile.shares_prefixes
    ours = (
        (pool_key(rollout.pool, "gpu"), pools[rollout.pool].gpu, profile.gpu),
        (pool_key(trainer.pool, "gpu"), pools[trainer.pool].gpu, profile.gpu),
        ("model.dtype", run.model.dtype, profile.dtype),
        ("rollout.dtype", rollout.dtype or profile.dtype, profile.dtype),
        ("rollout.kv_dtype", rollout.kv_dtype or profile.dtype, profile.dtype),
        ("trainer.dtype", trainer.dtype or profile.dtype, profile.dtype),
        ("rollout.backend", rollout.backend, profile.backend),
        ("rollout.tensor_parallel", rollout.tensor_parallel, profile.tensor_parallel),
        ("rollout.speculative", rollout.drafts, None),
        ("rollout.shares_prefixes", run.shares_prefixes, shares),
        ("trainer GPUs", trainer.num_gpus, 1),
    )
    if shape_digest(shape) != profile.model.digest:
        text = (
            f"costs.profile: {path} was measured for {profile.model.name} "
            f"({profile.model.num_parameters} parameters), but {model_key} has the shape of "
            f"{shape.name} ({shape.num_parameters} parameters)"
        )
        raise RunError("costs.profile", str(path), None, text, (model_key,))
    for key, value, measured in ours:
        if value != measured:
            text = f"costs.profile: {path} was measured with {key} {measured!r}, but here it is {value!r}"
            raise RunError("costs.profile", str(path), None, text)
    if profile.lora_rank is not None and run.sync.mode != "lora":
        text = (
            f"costs.profile: {path} was measured with adapters of rank {profile.lora_rank}, "
            f"but sync.mode is {run.sync.mode!r}"
        )
        raise RunError("costs.profile", str(path), None, text, ("sync.mode",))
    if profile.lora_rank is not None and run.algorithm.has_critic:
        text = (
            f"costs.profile: {path} was measured with adapters of rank {profile.lora_rank}, "
            f"but a critic of algorithm.name {run.algorithm.name!r} trains all its weights"
        )
        raise RunError("costs.profile", str(path), None, text, ("algorithm.name",))
