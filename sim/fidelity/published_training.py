"""Published training steps: the rows of profiles/published/training.csv."""

from __future__ import annotations

import csv
import functools
from pathlib import Path
from typing import Literal

import msgspec

from streamrl.hardware.model_shape import ModelShape
from streamrl.hardware.profiles import PROFILES, find_profile, read_profile

PATH = PROFILES / "published" / "training.csv"
MPT_VOCABULARY = 50432
"""Of every MPT model in the table: parameters minus layers and positions, over the hidden size."""
MPT = {
    "125m": (768, 12, 12),
    "350m": (1024, 24, 16),
    "760m": (1536, 24, 12),
    "1b": (2048, 24, 16),
    "3b": (2560, 32, 20),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 48, 56),
    "70b": (8192, 80, 64),
}
"""Hidden size, layers and heads of the MPT models (llm-foundry, scripts/train/yamls/pretrain)."""

Recompute = Literal["none", "selective", "mlp", "full"]


class PublishedStep(msgspec.Struct, frozen=True, kw_only=True):
    """One published optimizer step."""

    framework: str
    release: str
    gpu: str
    gpus_per_node: int = 8
    model: str
    sequences: int
    """Of the whole step."""
    tokens: int
    """Of a sequence; packed or padded to that many."""
    micro_batch: int
    data_parallel: int
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    virtual_stages: int = 1
    expert_parallel: int = 1
    context_parallel: int = 1
    zero: Literal[1, 3] = 1
    recompute: Recompute = "none"
    routing: Literal["natural", "balanced"] = "natural"
    dispatch: Literal["all-to-all", "deduplicated"] = "all-to-all"
    overlaps: bool = False
    """Whether expert dispatch hides behind other micro-batches."""
    kernels: Literal["fused", "uncompiled", "eager"] = "fused"
    logits: Literal["eager", "fused", "chunked"] | None = None
    dtype: Literal["bfloat16", "fp8"] = "bfloat16"
    """What products of linear layers are computed in."""
    seconds: float
    peak_memory: float | None = None
    """Bytes that the fullest GPU held at most, where they are published."""
    source: str

    @property
    def num_gpus(self) -> int:
        """GPUs of the step."""
        split = self.tensor_parallel * self.pipeline_parallel
        return self.data_parallel * self.context_parallel * split


@functools.cache
def read_steps(path: Path = PATH) -> tuple[PublishedStep, ...]:
    """Read the committed table."""
    lines = [
        line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")
    ]
    return tuple(
        msgspec.convert(_typed(line), PublishedStep, strict=False) for line in csv.DictReader(lines)
    )


def _typed(line: dict[str, str]) -> dict[str, object]:
    return {
        key: {"True": True, "False": False, "": None}.get(value, value)
        for key, value in line.items()
    }


def is_plain(step: PublishedStep) -> bool:
    """Whether a step is of plain attention, in 16 bits and without context ranks: the others are groups never fitted."""
    is_wide = step.dtype == "bfloat16"
    return kind_of_attention(step.model) == "plain" and is_wide and step.context_parallel == 1


def kind_of_attention(model: str) -> Literal["plain", "latent", "windows", "linear"]:
    """Return how a published model attends, where that is not always to all keys and values."""
    shape = shape_of(model)
    if shape.latent is not None:
        return "latent"
    if shape.linear is not None:
        return "linear"
    return "plain" if shape.sliding_window is None else "windows"


@functools.cache
def shape_of(model: str) -> ModelShape:
    """Return the shape of a published model: a profile's, or one of MPT's, which no profile can say exactly.

    A gated MLP of 8/3 has as many parameters as MPT's plain one of 4.
    """
    if model.startswith("mpt-"):
        hidden, layers, heads = MPT[model.removeprefix("mpt-")]
        return ModelShape(
            name=model,
            source="mosaicml/llm-foundry, scripts/train/yamls/pretrain",
            hidden_size=hidden,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=hidden // heads,
            intermediate_size=round(8 * hidden / 3),
            vocab_size=MPT_VOCABULARY,
            has_qkv_bias=False,
            has_tied_embeddings=True,
        )
    return read_profile(find_profile("models", model, ".toml"), ModelShape)
