"""Methods that vLLM's worker processes need for a replica: load pushed weights and time forward passes.

vLLM mixes `ReplicaExtension` into its worker class (`worker_extension_cls`). Workers are separate processes, so
arguments and results are MessagePack.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from streamrl.executor.libc import listening_sockets, refuse_connections
from streamrl.executor.roles import Manifest
from streamrl.executor.rollout.stopwatch import PassContent, PassLog
from streamrl.executor.rollout.torch_model import named_as_in_files
from streamrl.executor.transfer.shared_memory import read_buckets

# Linux enables AMX only on request; without it bfloat16 kernels end in SIGILL.
if hasattr(torch.cpu, "_init_amx"):
    torch.cpu._init_amx()


class ReplicaExtension:
    """Methods of every worker, which the engine calls by name."""

    model_runner: Any
    """vLLM's model runner of this worker."""
    vllm_config: Any
    """All settings of vLLM."""
    reload_weights: Any
    """vLLM's method that takes weights under Hugging Face names and keeps this worker's shards."""

    def load_pushed_weights(self, manifest: bytes) -> None:
        """Replace the model's weights by those of a manifest."""
        pushed = msgspec.msgpack.decode(manifest, type=Manifest)
        if self.vllm_config.device_config.device_type == "cpu":
            _reset_expert_kernels(self.model_runner.get_model())
        directory: str = self.vllm_config.model_config.model
        weights = named_as_in_files(directory, read_buckets(pushed))
        self.reload_weights(weights_iterator=weights)

    def refuse_connections(self) -> None:
        """Let nobody connect to the sockets on which this process still listens; its groups are connected.

        PyTorch's store and gloo's groups have no token. Any user of the machine could write to the store, or open
        connections until the process has no file descriptor left.
        """
        for descriptor in listening_sockets():
            refuse_connections(descriptor)

    def unused_adapters(self, number: int) -> bytes:
        """Return the loaded adapter layers that the model does not have, or packs under another name.

        vLLM ignores such layers without an error.
        """
        manager = self.model_runner.lora_manager._adapter_manager
        loaded = manager.get_adapter(number).loras
        return msgspec.msgpack.encode([name for name in loaded if name not in manager.modules])

    def time_passes(self, device: str) -> None:
        """Start timing every forward pass."""
        self._passes = PassLog(device)
        execute = self.model_runner.execute_model

        def timed(scheduled: Any, *arguments: Any, **options: Any) -> Any:
            if scheduled.total_num_scheduled_tokens:
                self._passes.begin(lambda: _content(scheduled))
            return execute(scheduled, *arguments, **options)

        self.model_runner.execute_model = timed

    def take_passes(self) -> bytes:
        """Return the completed passes since the last call."""
        return msgspec.msgpack.encode(self._passes.take())


def _reset_expert_kernels(model: Any) -> None:
    """Make expert layers on a CPU repack the next weights that they load.

    A layer that already has a kernel keeps new weights in file order, but its kernel reads packed weights (vLLM
    0.32.0, fused_moe/unquantized_fused_moe_method.py). Log-probabilities are then wrong by several nats, without an
    error.
    """
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _content(scheduled: Any) -> PassContent:
    """Return the tokens that vLLM scheduled for a pass; a rollout with output tokens decodes."""
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
