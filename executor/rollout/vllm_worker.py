"""What vLLM's workers do for a replica beyond generating: take pushed weights, and time forward passes.

vLLM mixes `ReplicaExtension` into the class of its workers (`worker_extension_cls`), which live in processes of their
own. What they are told and return is MessagePack.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from streamrl.executor.roles import Manifest
from streamrl.executor.rollout.stopwatch import PassContent, PassLog
from streamrl.executor.rollout.torch_model import named_as_in_files
from streamrl.executor.transfer.shared_memory import read_buckets

if hasattr(
    torch.cpu, "_init_amx"
):  # else bfloat16 kernels end in SIGILL: Linux gives AMX to who asks for it
    torch.cpu._init_amx()


class ReplicaExtension:
    """Methods of every worker, called by name."""

    model_runner: Any
    """vLLM's, of the worker that this is mixed into."""
    vllm_config: Any
    """vLLM's: all of its settings."""
    reload_weights: Any
    """vLLM's: takes weights as Hugging Face names them, and keeps its own shards."""

    def load_pushed_weights(self, manifest: bytes) -> None:
        """Put the weights of a manifest in place of the model's."""
        pushed = msgspec.msgpack.decode(manifest, type=Manifest)
        if self.vllm_config.device_config.device_type == "cpu":
            _forget_experts(self.model_runner.get_model())
        directory: str = self.vllm_config.model_config.model
        weights = named_as_in_files(directory, read_buckets(pushed))
        self.reload_weights(weights_iterator=weights)

    def unused_adapters(self, number: int) -> bytes:
        """Return the layers of adapters that the model does not have, or packs under other names: they would add nothing."""
        manager = self.model_runner.lora_manager._adapter_manager
        loaded = manager.get_adapter(number).loras
        return msgspec.msgpack.encode([name for name in loaded if name not in manager.modules])

    def time_passes(self, device: str) -> None:
        """Time every forward pass from now on."""
        self._passes = PassLog(device)
        execute = self.model_runner.execute_model

        def timed(scheduled: Any, *arguments: Any, **options: Any) -> Any:
            if scheduled.total_num_scheduled_tokens:
                self._passes.begin(lambda: _content(scheduled))
            return execute(scheduled, *arguments, **options)

        self.model_runner.execute_model = timed

    def take_passes(self) -> bytes:
        """Return the passes since the last call."""
        return msgspec.msgpack.encode(self._passes.take())


def _forget_experts(model: Any) -> None:
    """Let layers of experts on a CPU prepare what they load next, as they did at the start.

    Once they have a kernel, they leave weights in the order of files, where it reads packed ones (vLLM 0.32.0,
    fused_moe/unquantized_fused_moe_method.py): log-probabilities are off by several nats then, without a word.
    """
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _content(scheduled: Any) -> PassContent:
    """Return what vLLM scheduled for a pass; a rollout decodes once it has output tokens."""
    counts, decoding = scheduled.num_scheduled_tokens, []
    prefixes = [counts[new.req_id] for new in scheduled.scheduled_new_reqs]
    cached = scheduled.scheduled_cached_reqs
    for name, computed, made in zip(
        cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
    ):
        if made and counts[name] == 1:
            decoding.append(computed + 1)
        else:
            prefixes.append(counts[name])
    return PassContent(decoding, prefixes)
