"""The section `[sync]` of a run file."""

from __future__ import annotations

from typing import Literal

from streamrl.runfile.policies_config import SyncMode
from streamrl.runfile.section import Section
from streamrl.runfile.units import Size


class SyncConfig(Section, frozen=True, kw_only=True):
    """What a weight synchronisation sends, and how."""

    mode: SyncMode = "full"
    """full: all weights; lora: adapters alone; delta: indices and values of what the step changed."""
    backend: Literal[
        "broadcast-tree", "nccl-broadcast", "nccl-buckets", "checkpoint-engine", "nccl-reshard"
    ] = "broadcast-tree"
    """Simulated: who moves it, as measured in profiles/sync; broadcast-tree adds nothing to what the wires need. A `framework.name`
    whose own way was measured fills it in."""
    bucket_size: Size = Size(1e9)
    """Simulated: most bytes that are sent in one piece; pieces follow each other through gather, link and broadcast."""
    lora_rank: int = 32
    """Rank of the adapters on every linear layer of attention and MLP."""
    merge_adapters: bool | None = None
    """Mode lora: whether replicas load whole weights that adapters were merged with, or compute with the adapters beside the
    weights that the run began with, as vLLM can and does by default."""
    changed_share: float = 0.02
    """Simulated: share of the values that one step changes in 16 bits: about 1 % at learning rates up to 3e-6 (PULSE,
    arXiv 2602.03839), 2.1 to 2.6 % for a dense 72B (github.com/verl-project/verl issue 7060)."""
    wire: Literal["chunks", "gloo"] = "chunks"
    """Executed, where weights go over relays. chunks: pieces go from relay to relay by way of the process that decides;
    gloo: the trainer's relay broadcasts to one far relay, and that one to all others, over torch's gloo."""
    quantise_at: Literal["trainer", "replica"] = "trainer"
    """Simulated: who brings weights to a narrow `rollout.dtype`: the trainer before each push, so that fewer bytes are
    sent, or each replica while it loads them."""
    anchor_every: int = 20
    """Executed, mode delta: every so many synchronisations a place is sent all weights; 1: always."""
