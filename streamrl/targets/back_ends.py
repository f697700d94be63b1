"""Choose the back ends and the launcher with which `streamrl execute` runs a layout."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from streamrl.runfile.backend_choice import (
    ENGINES,
    TRAINING_BACKENDS,
    engine_named,
    training_backend_named,
)
from streamrl.runfile.cluster_config import PoolConfig
from streamrl.runfile.config import ExecuteConfig, Run
from streamrl.runfile.gpu_pools import Side, device_of, gpus_used, sides_of
from streamrl.runfile.plan_config import TargetName
from streamrl.runfile.roles_config import RolloutConfig, TrainerConfig


def for_target(run: Run, target: TargetName | None) -> Run:
    """Return a run with the settings that a target needs for its layout.

    For execute these are the back ends and the launcher. Classes from outside this package stay.
    """
    if target != "execute":
        return run
    rollout, trainer, execute, pools = run.rollout, run.trainer, run.execute, run.cluster.pools
    launcher = execute.launcher
    if launcher == "local" and num_nodes(sides_of(run), pools) > 1:
        launcher = "ray"
    return replace(
        run,
        rollout=replace(rollout, backend=_engine_of(rollout, execute.device, pools)),
        trainer=replace(
            trainer,
            backend=_trainer_back_end_of(trainer, takes_turns=run.policies.shares_gpus),
        ),
        execute=replace(execute, launcher=launcher),
    )


def back_end_settings(
    rollout: RolloutConfig, trainer: TrainerConfig, execute: ExecuteConfig
) -> dict[str, str]:
    """Return the keys that `for_target` sets for execute, with the values that a run has."""
    return {
        "rollout.backend": rollout.backend,
        "trainer.backend": trainer.backend,
        "execute.launcher": execute.launcher,
    }


def num_nodes(sides: Iterable[Side], pools: dict[str, PoolConfig]) -> int:
    """Return the nodes with GPUs that the sides of a run use, of all pools together."""
    on_gpus = {name: pool for name, pool in pools.items() if pool.gpu != "cpu"}
    own = list(sides)
    return sum(-(-gpus_used(own, name) // pool.gpus_per_node) for name, pool in on_gpus.items())


def _engine_of(rollout: RolloutConfig, device: str, pools: dict[str, PoolConfig]) -> str:
    """Return vLLM for GPUs if the engine of the run cannot split a model over several, else that engine."""
    on_cpu = any(device_of(device, pools[kind.pool]) == "cpu" for kind in rollout.kinds)
    is_kept = rollout.backend not in ENGINES.own or engine_named(rollout.backend).splits_model
    return rollout.backend if on_cpu or is_kept else "vllm"


def _trainer_back_end_of(trainer: TrainerConfig, *, takes_turns: bool) -> str:
    """Return FSDP2 where ranks split weights or layers, DeepSpeed where they split the rest, else torch."""
    if trainer.backend not in TRAINING_BACKENDS.own:
        return trainer.backend
    splits_weights = trainer.zero == 3 and trainer.data_parallel > 1
    if trainer.tensor_parallel > 1 or (trainer.offload and not takes_turns):
        return "fsdp2"
    if splits_weights:
        return trainer.backend if training_backend_named(trainer.backend).split else "fsdp2"
    return "deepspeed" if trainer.zero and trainer.data_parallel > 1 else "torch"
