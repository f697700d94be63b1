"""Choose the back ends and the launcher with which `streamrl execute` runs a layout."""

from __future__ import annotations

from collections import Counter

from msgspec.structs import replace

from streamrl.runfile.backend_choice import ENGINES, TRAINING_BACKENDS
from streamrl.runfile.cluster_config import PoolConfig
from streamrl.runfile.config import ExecuteConfig, Run
from streamrl.runfile.gpu_pools import device_of
from streamrl.runfile.roles_config import RolloutConfig, TrainerConfig


def with_back_ends(run: Run) -> Run:
    """Return a run with the back ends and the launcher that its layout needs.

    Classes from outside this package stay.
    """
    rollout, trainer, execute, pools = run.rollout, run.trainer, run.execute, run.cluster.pools
    launcher = execute.launcher
    if launcher == "local" and num_nodes(rollout, trainer, pools, run.policies.shares_gpus) > 1:
        launcher = "ray"
    return replace(
        run,
        rollout=replace(rollout, backend=_engine_of(rollout, execute.device, pools)),
        trainer=replace(trainer, backend=_trainer_back_end_of(trainer)),
        execute=replace(execute, launcher=launcher),
    )


def back_end_settings(
    rollout: RolloutConfig, trainer: TrainerConfig, execute: ExecuteConfig
) -> dict[str, str]:
    """Return the keys that `with_back_ends` sets, with the values that a run has."""
    return {
        "rollout.backend": rollout.backend,
        "trainer.backend": trainer.backend,
        "execute.launcher": execute.launcher,
    }


def num_nodes(
    rollout: RolloutConfig, trainer: TrainerConfig, pools: dict[str, PoolConfig], shares_gpus: bool
) -> int:
    """Return the nodes with GPUs that both sides of a run use, of all pools together."""
    taken: Counter[str] = Counter()
    for kind in rollout.kinds:
        taken[kind.pool] += kind.num_gpus
    if shares_gpus:
        taken[trainer.pool] = max(taken[trainer.pool], trainer.num_gpus)
    else:
        taken[trainer.pool] += trainer.num_gpus
    on_gpus = {name: num for name, num in taken.items() if pools[name].gpu != "cpu"}
    return sum(-(-num // pools[name].gpus_per_node) for name, num in on_gpus.items())


def _engine_of(rollout: RolloutConfig, device: str, pools: dict[str, PoolConfig]) -> str:
    """Return vLLM on GPUs, where a replica may have several, else the engine of the run."""
    on_cpu = any(device_of(device, pools[kind.pool]) == "cpu" for kind in rollout.kinds)
    return rollout.backend if on_cpu or rollout.backend not in ENGINES.own else "vllm"


def _trainer_back_end_of(trainer: TrainerConfig) -> str:
    """Return DeepSpeed where ranks shard the training state, else torch."""
    if trainer.backend not in TRAINING_BACKENDS.own:
        return trainer.backend
    return "deepspeed" if trainer.zero and trainer.data_parallel > 1 else "torch"
