"""What waits in the memory of a node while its GPUs hold something else, and what is staged on a replica's GPU."""

from __future__ import annotations

from math import inf

from streamrl.hardware.memory import model_states, num_models, trained_models, weight_bytes
from streamrl.hardware.precision import trained_dtype
from streamrl.hardware.profiles import load_gpu, load_model
from streamrl.runfile.config import Run
from streamrl.runfile.errors import Bounds, RunError
from streamrl.runfile.keys import pool_key


def check_host_memory(run: Run, key: str = "trainer") -> None:
    """Raise `RunError` where the models that `trainer.offload` moves out do not fit the host memory of a node.

    `key` is the section of the trainer of `run`.
    """
    need, held = offloaded_bytes(run), host_memory(run)
    if need > held:
        raise RunError(
            f"{key}.offload",
            True,
            None,
            f"{key}.offload: {need / 1e9:.0f} GB wait in the host memory of a node, but "
            f"{pool_key(run.trainer.pool, 'host_memory')} is {held / 1e9:.0f} GB",
            (f"{key}.data_parallel", pool_key(run.trainer.pool, "host_memory")),
        )


def host_memory(run: Run) -> float:
    """Return the bytes of host memory of a node of the trainer; without end where none is known to bind."""
    pool = run.cluster.pools[run.trainer.pool]
    if pool.host_memory is not None:
        return pool.host_memory
    share = load_gpu(pool.gpu).host_memory
    return inf if share is None else share * pool.gpus_per_node


def offloaded_bytes(run: Run) -> float:
    """Bytes of a node's GPUs of the trainer that wait in its host memory at most: all but the model at work."""
    if not run.trainer.offload:
        return 0.0
    model = load_model(run.model)
    states = model_states(model, run.trainer, trained_dtype(run))
    others, trained = num_models(run) - 1, trained_models(run)
    a_gpu = max(others * state.weights + trained * state.optimizer for state in states)
    num_gpus = min(run.cluster.pools[run.trainer.pool].gpus_per_node, run.trainer.num_gpus)
    return num_gpus * a_gpu


def check_sync_buffer(run: Run) -> None:
    """Raise `RunError` where a replica has no room for a bucket of the weights that it is sent.

    The bucket comes beside what `rollout.memory_utilization` gives weights and cache; GPUs that train too are
    sent theirs between themselves.
    """
    if run.shares_gpus or run.sync.mode != "full":
        return
    gpu = load_gpu(run.cluster.pools[run.rollout.pool].gpu)
    room = gpu.usable_memory * (1 - run.rollout.memory_utilization)
    bucket = min(run.sync.bucket_size, weight_bytes(run))
    if bucket > room:
        raise RunError(
            "sync.bucket_size",
            run.sync.bucket_size,
            Bounds(0, room),
            f"sync.bucket_size must fit beside rollout.memory_utilization "
            f"{run.rollout.memory_utilization:g} of {gpu.name}, which leaves {room / 1e9:.2f} GB, "
            f"got {bucket / 1e9:.2f} GB",
            ("rollout.memory_utilization",),
        )
