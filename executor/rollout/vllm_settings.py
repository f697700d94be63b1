"""Configure vLLM: environment, engine arguments, sampling, and the LoRA adapters of its requests.

LoRA adapters beside the weights that a vLLM engine began with: every request uses them, and a load replaces them.

vLLM reads adapters from directories as PEFT writes them, and puts them into places that it keeps for them. One place is
all that a policy needs: new adapters take it over in place, also under requests in flight.
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

from streamrl.executor.adapter_layers import VLLM_PLACES, A, B, adapted_layers
from streamrl.executor.rollout.inference_engine import ReplicaSettings
from streamrl.executor.transfer.adapters import read_adapters, write_adapters
from streamrl.hardware.hugging_face import read_config_json

NAME, NUMBER = "policy", 1
"""Of the place, as requests name it."""
Tensors = dict[str, torch.Tensor]


def adapter_arguments(model: Any, settings: ReplicaSettings) -> dict[str, Any]:
    """Return the arguments of vLLM's engine that keep a place for adapters of a model, where there are any."""
    rank = settings.adapter_rank
    if rank is None:
        return {}
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": min(place for place in VLLM_PLACES if place >= rank),
        "lora_target_modules": sorted({name.rpartition(".")[2] for name in adapted_layers(model)}),
    }


class Adapters:
    """The adapters of one engine."""

    def __init__(self, model: Any, settings: ReplicaSettings) -> None:
        """Take the model as Hugging Face has it, without weights."""
        assert settings.adapter_rank is not None
        self._rank = settings.adapter_rank
        self._shapes = dict(_shapes(model, self._rank))
        self._base = settings.model
        self._path = ""

    def first(self, directory: str | None) -> Path:
        """Write the adapters that a replica begins with to a directory of their own, and return it."""
        if directory is None:
            tensors = {name: torch.zeros(shape) for name, shape in self._shapes.items()}
        else:
            tensors = read_adapters(Path(directory))
        return self.write(tensors.items(), Path(tempfile.gettempdir()), "its first adapters")

    def write(self, tensors: Iterable[tuple[str, torch.Tensor]], beside: Path, what: str) -> Path:
        """Write adapters to a new directory below another, as vLLM reads them, and return it.

        Raises:
            ValueError: they are not this model's, or of another rank.
        """
        found = dict(tensors)
        self._check(found, what)
        path = Path(tempfile.mkdtemp(prefix="adapters-", dir=beside))
        try:
            write_adapters(found, self._base, path)
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise
        return path

    async def load(self, llm: Any, path: Path) -> None:
        """Let vLLM put what a directory has in place of the adapters before, and remove the directory.

        Raises:
            Exception: whatever vLLM says; its adapters are as they were then, or none.
        """
        try:
            await llm.add_lora(_request(str(path), load_inplace=True))
        finally:
            shutil.rmtree(path, ignore_errors=True)
        self._path = str(path)

    async def check_used(self, llm: Any) -> None:
        """Raise `ValueError` where vLLM's model has not all of the layers whose adapters it loaded, as it says nothing of it."""
        first, *_ = await llm.collective_rpc("unused_adapters", args=(NUMBER,))
        if unused := msgspec.msgpack.decode(first, type=list[str]):
            raise ValueError(
                f"vLLM has no place for the adapters of {unused[0]}, one of {len(unused)} layers: "
                "set sync.merge_adapters=true"
            )

    def request(self) -> Any:
        """Return what lets a request use them."""
        return _request(self._path, load_inplace=False)

    def _check(self, found: Tensors, what: str) -> None:
        for name, shape in self._shapes.items():
            if name not in found:
                raise ValueError(f"{what}: tensor {name!r} is missing")
            if (its := tuple(found[name].shape)) != shape:
                ours = f"for rank {self._rank} the model's is {list(shape)}"
                raise ValueError(f"{what}: the shape of {name!r} is {list(its)}, {ours}")
        if others := found.keys() - self._shapes:
            raise ValueError(f"{what}: the model has no layer for {min(others)!r}")


def _request(path: str, *, load_inplace: bool) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(NAME, NUMBER, path, load_inplace=load_inplace)


def _shapes(model: Any, rank: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and the shape of each matrix of a model's adapters."""
    for name, layer in adapted_layers(model).items():
        yield name + A, (rank, layer.in_features)
        yield name + B, (layer.out_features, rank)


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
