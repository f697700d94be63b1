"""Configure vLLM: environment, engine arguments, sampling parameters, and LoRA adapters.

With adapters, every request uses the same set, and a load replaces it. vLLM reads adapters from directories in PEFT's
format and keeps a fixed number of slots for them. One slot is enough: new adapters replace the old ones in place,
also for running requests.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch

from streamrl.executor.adapter_layers import A, B, adapted_layers
from streamrl.executor.rollout.inference_engine import GPU_PASS_TOKENS, ReplicaSettings
from streamrl.executor.sampling import Sampling
from streamrl.executor.transfer.adapters import read_adapters, write_adapters
from streamrl.hardware.hugging_face import read_config_json
from streamrl.targets.execute_limits import VLLM_PLACES

NAME, NUMBER = "policy", 1
"""Name and number of the adapter slot in requests."""
Tensors = dict[str, torch.Tensor]


def adapter_arguments(model: Any, settings: ReplicaSettings) -> dict[str, Any]:
    """Return the engine arguments that reserve an adapter slot; none without adapters."""
    rank = settings.adapter_rank
    if rank is None:
        return {}
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": min(allowed for allowed in VLLM_PLACES if allowed >= rank),
        "lora_target_modules": sorted({name.rpartition(".")[2] for name in adapted_layers(model)}),
    }


class Adapters:
    """The LoRA adapters of one engine."""

    def __init__(self, model: Any, settings: ReplicaSettings) -> None:
        """Take the Hugging Face model without weights."""
        assert settings.adapter_rank is not None
        self._rank = settings.adapter_rank
        self._shapes = dict(_shapes(model, self._rank))
        self._base = settings.model
        self._path = ""

    def first(self, directory: str | None) -> Path:
        """Write the adapters that a replica starts with to a new directory, and return it."""
        if directory is None:
            tensors = {name: torch.zeros(shape) for name, shape in self._shapes.items()}
        else:
            tensors = read_adapters(Path(directory))
        return self.write(tensors.items(), Path(tempfile.gettempdir()), "its first adapters")

    def write(self, tensors: Iterable[tuple[str, torch.Tensor]], beside: Path, what: str) -> Path:
        """Write adapters to a new directory inside `beside`, in vLLM's format, and return it.

        Raises:
            ValueError: the adapters belong to another model or have another rank.
        """
        adapters = dict(tensors)
        self._check(adapters, what)
        path = Path(tempfile.mkdtemp(prefix="adapters-", dir=beside))
        try:
            write_adapters(adapters, self._base, path)
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise
        return path

    async def load(self, llm: Any, path: Path) -> None:
        """Make vLLM replace its adapters by those of a directory; then remove the directory.

        Raises:
            Exception: any error of vLLM; the old adapters are then still loaded, or none.
        """
        try:
            await llm.add_lora(_request(str(path), load_inplace=True))
        finally:
            shutil.rmtree(path, ignore_errors=True)
        self._path = str(path)

    async def check_used(self, llm: Any) -> None:
        """Raise `ValueError` if vLLM's model lacks a layer whose adapters were loaded; vLLM reports no error."""
        first, *_ = await llm.collective_rpc("unused_adapters", args=(NUMBER,))
        if unused := msgspec.msgpack.decode(first, type=list[str]):
            raise ValueError(
                f"vLLM cannot use the adapters of {unused[0]} (one of {len(unused)} layers): "
                "set sync.merge_adapters=true"
            )

    def request(self) -> Any:
        """Return the request argument that selects the adapters."""
        return _request(self._path, load_inplace=False)

    def _check(self, adapters: Tensors, what: str) -> None:
        for name, shape in self._shapes.items():
            if name not in adapters:
                raise ValueError(f"{what}: tensor {name!r} is missing")
            if (its := tuple(adapters[name].shape)) != shape:
                ours = f"for rank {self._rank} the model's is {list(shape)}"
                raise ValueError(f"{what}: the shape of {name!r} is {list(its)}, {ours}")
        if others := adapters.keys() - self._shapes:
            raise ValueError(f"{what}: the model has no layer for {min(others)!r}")


def _request(path: str, *, load_inplace: bool) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(NAME, NUMBER, path, load_inplace=load_inplace)


def _shapes(model: Any, rank: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and the shape of each adapter matrix of a model."""
    for name, layer in adapted_layers(model).items():
        yield name + A, (rank, layer.in_features)
        yield name + B, (layer.out_features, rank)


PAGE_TOKENS = 128
"""Tokens in a page of the KV cache on CPUs; vLLM's CPU kernels prefer this size."""
SPARE_PAGES = 2
"""Pages that vLLM reserves for itself."""


ANYWHERE = {
    "VLLM_NO_USAGE_STATS": "1",  # send no usage statistics
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a forked child would keep this process's connections
    "VLLM_HOST_IP": "127.0.0.1",  # all processes of a replica are on this machine
    "VLLM_LOGGING_LEVEL": "WARNING",
}
ON_CPUS = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # otherwise all replicas bind to the first cores
    "CUDA_VISIBLE_DEVICES": "",  # otherwise a GPU build takes a GPU
    "TORCHDYNAMO_DISABLE": "1",  # otherwise each start compiles the sampler
}
"""Environment variables that vLLM reads when it is imported."""


RECORDS_EXPERTS = "enable_return_routed_experts"
"""Argument of vLLM's engine. It needs the V2 model runner and prefix caching (vllm/config/vllm.py of 0.32.0)."""


def environment(settings: ReplicaSettings) -> dict[str, str]:
    """Return the environment variables to set in this process before vLLM's engine starts."""
    replay = {"VLLM_USE_V2_MODEL_RUNNER": "1"} if settings.router_replay else {}
    if settings.device != "cpu":
        return {**ANYWHERE, **replay}
    variables = {**ANYWHERE, **ON_CPUS, **replay, "OMP_NUM_THREADS": str(settings.num_threads)}
    if settings.tensor_parallel == 1:
        variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine's process is its one worker
    return variables


def make_arguments(settings: ReplicaSettings, model: Any) -> Any:
    """Return the arguments of vLLM's engine; `model` is the Hugging Face model without weights."""
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
        logprobs_mode="processed_logprobs",  # of the tokens that may be sampled
        scheduling_policy="priority",
        enable_sleep_mode=settings.takes_turns
        and settings.device != "cpu",  # vLLM rejects it on CPUs
        worker_extension_cls="streamrl.executor.rollout.vllm_worker.ReplicaExtension",
        enable_log_requests=False,
        **_replay_arguments(AsyncEngineArgs, settings),
        **adapter_arguments(model, settings),
        **device_arguments(settings),
    )


def _replay_arguments(arguments: type, settings: ReplicaSettings) -> dict[str, bool]:
    """Return the argument that makes vLLM tell which experts its routers chose, if they are recorded.

    Raises:
        ValueError: this version of vLLM cannot.
    """
    if not settings.router_replay:
        return {}
    if not hasattr(arguments, RECORDS_EXPERTS):
        raise ValueError(
            f"algorithm.router_replay needs a vLLM with --{RECORDS_EXPERTS.replace('_', '-')}, such as 0.32; "
            "set it to false, or rollout.backend to transformers"
        )
    return {RECORDS_EXPERTS: True}


def device_arguments(settings: ReplicaSettings) -> dict[str, Any]:
    """Return the arguments that depend on the device.

    All GPUs of a replica are on one node. So its workers are child processes of this one, also in a Ray actor. Left to
    itself, vLLM would make them Ray actors there, with one bundle for each, but a replica has one bundle for all its GPUs.
    """
    executor = {"distributed_executor_backend": "uni" if settings.tensor_parallel == 1 else "mp"}
    if settings.device == "cpu":
        return {
            "kv_cache_memory_bytes": _cache_bytes(settings),
            "block_size": PAGE_TOKENS,
            "enforce_eager": True,
            **executor,
        }
    return {
        **executor,
        "gpu_memory_utilization": settings.memory_utilization,
        "max_num_batched_tokens": GPU_PASS_TOKENS + settings.max_running,
    }


def make_sampling(
    sampling: Sampling, max_new_tokens: int, ends: frozenset[int], seed: int | None
) -> Any:
    """Return sampling parameters: the log-probability of each token among those that may be sampled, and streamed output."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.truncation.top_k or 0,
        top_p=sampling.truncation.top_p,
        min_p=sampling.truncation.min_p,
        max_tokens=max_new_tokens,
        stop_token_ids=sorted(ends),
        ignore_eos=True,  # only the tokens above end a rollout
        seed=seed,
        logprobs=0,  # only of the sampled token
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def _cache_bytes(settings: ReplicaSettings) -> int:
    """Return the bytes of a KV cache in host memory for `max_running` rollouts of maximum length.

    Raises:
        MemoryError: the host has less free memory.
    """
    shape = read_config_json(Path(settings.model) / "config.json")
    pages = settings.max_running * math.ceil(settings.max_length / PAGE_TOKENS) + SPARE_PAGES
    wanted = pages * PAGE_TOKENS * shape.kv_bytes_per_token(settings.dtype)
    free = psutil.virtual_memory().available
    if wanted > free:
        raise MemoryError(
            f"the KV cache for {settings.max_running} rollouts of {settings.max_length} tokens takes {wanted:,} bytes, "
            f"but only {free:,} bytes of host memory are free; lower rollout.max_running or rollout.max_tokens"
        )
    return wanted
