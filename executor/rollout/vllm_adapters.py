"""LoRA adapters beside the weights that a vLLM engine began with: every request uses them, and a load replaces them.

vLLM reads adapters from directories as PEFT writes them, and puts them into places that it keeps for them. One place is
all that a policy needs: new adapters take it over in place, also under requests in flight.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from streamrl.executor.adapter_directory import read_adapters, write_adapters
from streamrl.executor.adapter_layers import VLLM_PLACES, A, B, adapted_layers
from streamrl.executor.rollout.inference_engine import ReplicaSettings

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
