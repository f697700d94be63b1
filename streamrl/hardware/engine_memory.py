"""Load the memory that an inference engine keeps on a GPU besides weights and KV cache.

An engine measures a forward pass at its start and gives the rest of its share to the KV cache. Its log
states each part:

| key                 | bytes of                                                                   |
|---------------------|----------------------------------------------------------------------------|
| `logit`             | sampling, per logit of the largest batch                                    |
| `fixed`             | input buffers and workspaces of libraries                                   |
| `single`, `ranks`   | memory outside PyTorch on one GPU, or on a GPU with tensor ranks (NCCL)     |
| `keeps_experts`     | inputs and products of experts, in addition to the logits                   |

Every tensor rank has the complete logits, so more ranks do not reduce `logit`.

SGLang differs: `mem_fraction_static` is the share of weights and KV cache alone. Activations and CUDA
graphs use what is left. `profiles/published/kv_room.csv` has logs of both, and
`streamrl.sim.fidelity.kv_room` compares them.
"""

from __future__ import annotations

import datetime
from functools import cache

from streamrl.hardware.profile_table import ProfileTable, check_positive
from streamrl.hardware.profiles import PROFILES, read_profile
from streamrl.runfile.units import Size

DEFAULT_LOGIT = 20
"""Bytes per logit of an engine without a log: logits and probabilities in float32, sorted ones, and
their 64-bit indices.
"""


class EngineMemory(ProfileTable, frozen=True, kw_only=True):
    """Memory on one GPU of a replica besides weights and KV cache."""

    source: str = "assumption: no log of this engine is published"
    licence: str = "facts"
    date: datetime.date | None = None
    logit: float = DEFAULT_LOGIT
    """Bytes of sampling for each logit of the largest batch."""
    fixed: Size = Size(0)
    single: Size = Size(0)
    """Bytes outside PyTorch on a GPU without tensor ranks, besides the context of the process."""
    ranks: Size = Size(0)
    """Bytes outside PyTorch on a GPU with tensor ranks."""
    keeps_experts: bool = False
    """Whether buffers of experts stay allocated while logits are computed, as in vLLM from 0.17."""
    counts_activations: bool = True
    """Whether the share of memory in the run file includes the activations of a pass."""

    def __post_init__(self) -> None:
        check_positive(self, ("fixed", "single", "ranks"))

    def outside_torch(self, tensor_parallel: int) -> float:
        """Return the bytes outside PyTorch on a GPU."""
        return float(self.ranks if tensor_parallel > 1 else self.single)


@cache
def load_engine_memory(engine: str) -> EngineMemory:
    """Return the profile of an engine's memory; the assumed one if no log of it is published."""
    path = PROFILES / "engine_memory" / f"{engine}.toml"
    return read_profile(path, EngineMemory) if path.exists() else EngineMemory()
