"""What vLLM is told: its processes, its engine, and how a request is sampled."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import psutil

from streamrl.executor.rollout.inference_engine import ReplicaSettings
from streamrl.executor.rollout.vllm_adapters import adapter_arguments
from streamrl.hardware.config_json import read_config_json

PAGE_TOKENS = 128
"""Tokens of a page of the cache on CPUs, as vLLM's kernels there like it."""
GPU_PASS_TOKENS = 8192
"""New prefix tokens of a pass on GPUs, beside those that decode, as vLLM's server has them: an embedded engine takes 2,048 in all."""
SPARE_PAGES = 2
"""Pages that vLLM keeps for itself."""


ANYWHERE = {
    "VLLM_NO_USAGE_STATS": "1",  # nothing is sent home
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a forked child would keep this process's connections open
    "VLLM_HOST_IP": "127.0.0.1",  # all of one replica is on this machine
    "VLLM_LOGGING_LEVEL": "WARNING",
}
ON_CPUS = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # replicas would share the first cores
    "CUDA_VISIBLE_DEVICES": "",  # a build for GPUs would take one
    "TORCHDYNAMO_DISABLE": "1",  # else each start compiles what samples
}
"""What vLLM reads from the environment of its process before it is imported."""


def environment(settings: ReplicaSettings) -> dict[str, str]:
    """Return what vLLM reads from the environment of this process, before its engine starts."""
    if settings.device != "cpu":
        return ANYWHERE
    found = {**ANYWHERE, **ON_CPUS, "OMP_NUM_THREADS": str(settings.num_threads)}
    if settings.tensor_parallel == 1:
        found["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one worker is its engine's own process
    return found


def make_arguments(settings: ReplicaSettings, model: Any) -> Any:
    """Return the arguments of vLLM's engine for a model, as Hugging Face has it, without weights."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    return AsyncEngineArgs(
        model=settings.model,
        dtype=settings.dtype,
        max_model_len=settings.max_length,
        max_num_seqs=settings.max_running,
        tensor_parallel_size=settings.tensor_parallel,
        enable_expert_parallel=settings.expert_parallel > 1,
        enable_prefix_caching=settings.shares_prefixes,
        seed=settings.seed,
        skip_tokenizer_init=True,
        generation_config="vllm",  # the model's own may truncate or penalise
        logprobs_mode="processed_logprobs",  # of logits / temperature
        scheduling_policy="priority",
        enable_sleep_mode=settings.takes_turns and settings.device != "cpu",  # refused on CPUs
        worker_extension_cls="streamrl.executor.rollout.vllm_worker.ReplicaExtension",
        enable_log_requests=False,
        **adapter_arguments(model, settings),
        **place_of(settings),
    )


def place_of(settings: ReplicaSettings) -> dict[str, Any]:
    """Return the arguments that depend on the device."""
    if settings.device == "cpu":
        return {
            "kv_cache_memory_bytes": _cache_bytes(settings),
            "block_size": PAGE_TOKENS,
            "enforce_eager": True,
            "distributed_executor_backend": "uni" if settings.tensor_parallel == 1 else "mp",
        }
    return {
        "gpu_memory_utilization": settings.memory_utilization,
        "max_num_batched_tokens": GPU_PASS_TOKENS + settings.max_running,
    }


def make_sampling(
    settings: ReplicaSettings, max_new_tokens: int, ends: frozenset[int], seed: int | None
) -> Any:
    """Return how a request is sampled: plainly, with the log-probability of each token, told token by token."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=settings.temperature,
        max_tokens=max_new_tokens,
        stop_token_ids=sorted(ends),
        ignore_eos=True,  # the tokens above are all that end a rollout
        seed=seed,
        logprobs=0,  # of the sampled token alone
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def _cache_bytes(settings: ReplicaSettings) -> int:
    """Return the bytes of a cache in host memory that `max_running` longest rollouts fit in.

    Raises:
        MemoryError: there is not as much.
    """
    shape = read_config_json(Path(settings.model) / "config.json")
    pages = settings.max_running * math.ceil(settings.max_length / PAGE_TOKENS) + SPARE_PAGES
    wanted = pages * PAGE_TOKENS * shape.kv_bytes_per_token(settings.dtype)
    free = psutil.virtual_memory().available
    if wanted > free:
        raise MemoryError(
            f"the cache of {settings.max_running} rollouts of {settings.max_length} tokens takes {wanted:,} bytes, "
            f"and {free:,} are free"
        )
    return wanted
