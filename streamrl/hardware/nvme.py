"""Compute the bytes that an optimizer on NVMe drives keeps and moves, and check whether a node can have it.

`trainer.offload_to` nvme is DeepSpeed's ZeRO-Infinity (Rajbhandari et al. 2021, arXiv 2104.07857). Float32 weights,
gradients and two moments of each parameter are on the drives of the GPU's node. A step reads all of them into host
memory in sub-groups, updates them on the CPU, and writes them back. The drives are slower than the CPU's arithmetic
and the GPU's host link, so only their bytes count. Reads and writes do not overlap, as DeepSpeed's `pipeline_read`
and `pipeline_write` are off by default.
"""

from __future__ import annotations

from streamrl.hardware.memory import SWAPPED_BYTES, gpus_of_a_node, model_states
from streamrl.hardware.resolved import TrainerHardware
from streamrl.runfile.errors import OneOf, RunError
from streamrl.runfile.keys import pool_key


def swapped_bytes(trainer: TrainerHardware) -> float:
    """Return the bytes that all optimizers of a trainer keep on the drives of its fullest node; 0 without any."""
    if not trainer.config.steps_on_nvme:
        return 0.0
    states = model_states(trainer.model, trainer.config, trainer.dtype)
    a_gpu = max(state.stepped for state in states) * SWAPPED_BYTES
    return gpus_of_a_node(trainer) * a_gpu * trainer.trained_models


def swap_time(trainer: TrainerHardware) -> float:
    """Return the seconds in which a step reads and writes the optimizers of all trained models."""
    pool = trainer.pool
    return swapped_bytes(trainer) * (1 / pool.nvme_read + 1 / pool.nvme_write)


def check_nvme(trainer: TrainerHardware) -> None:
    """Raise `RunError` if an optimizer on NVMe is not sharded, or does not fit the drives of a node."""
    config, key = trainer.config, trainer.key
    if not config.steps_on_nvme:
        return
    if config.zero != 3:
        raise RunError(
            f"{key}.zero",
            config.zero,
            OneOf([3]),
            f"{key}.zero must be 3 with {key}.offload_to nvme, got {config.zero}: DeepSpeed puts "
            "optimizers on NVMe with ZeRO 3 only",
            (f"{key}.offload_to",),
        )
    need, held = swapped_bytes(trainer), trainer.pool.nvme
    if held is not None and need > held:
        named = pool_key(config.pool, "nvme")
        raise RunError(
            f"{key}.offload_to",
            config.offload_to,
            None,
            f"{key}.offload_to nvme moves {need / 1e9:.0f} GB to the drives of a node, but {named} is "
            f"{held / 1e9:.0f} GB",
            (f"{key}.data_parallel", named),
        )
