"""Read `profiles/`: what a GPU can do and what a model asks for, each figure with its source."""

from __future__ import annotations

import datetime
import difflib
import json
import tomllib
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from streamrl.config import ModelConfig
from streamrl.units import Bandwidth, Duration, Size, read_quantity

PROFILES = Path(__file__).resolve().parent.parent / "profiles"
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of one value by dtype."""

_Profile = TypeVar("_Profile")


class Roofline(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Assumed efficiencies, shares of the datasheet's peak; used where nothing is measured."""

    compute_efficiency: float
    training_efficiency: float
    bandwidth_efficiency: float
    step_overhead: Duration
    """Seconds that a decode step takes beside its memory traffic and arithmetic."""


class Gpu(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of GPU."""

    name: str
    source: str
    date: datetime.date
    memory: Size
    memory_bandwidth: Bandwidth
    nvlink: Bandwidth
    network: Bandwidth
    host_link: Bandwidth
    price: float
    """Dollars per GPU-hour."""
    price_source: str
    flops: dict[str, float]
    """Dense peak FLOP/s by dtype."""
    roofline: Roofline


class ModelShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shape of a decoder-only transformer; sizes and FLOPs follow from it."""

    name: str
    source: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    has_qkv_bias: bool
    has_tied_embeddings: bool

    @property
    def num_embedding_parameters(self) -> int:
        """Parameters of one embedding table."""
        return self.vocab_size * self.hidden_size

    @property
    def num_layer_parameters(self) -> int:
        """Parameters of one layer: attention, gated MLP, two norms."""
        q_size = self.num_heads * self.head_dim
        kv_size = self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * q_size + 2 * kv_size)
        bias = (q_size + 2 * kv_size) * self.has_qkv_bias
        return (
            attention + bias + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        )

    @property
    def num_parameters(self) -> int:
        """All parameters, a tied embedding counted once."""
        num_tables = 1 if self.has_tied_embeddings else 2
        return (
            self.num_layers * self.num_layer_parameters
            + num_tables * self.num_embedding_parameters
            + self.hidden_size
        )

    @property
    def num_active_parameters(self) -> int:
        """Parameters that a token multiplies with: all but the input embedding."""
        return self.num_layers * self.num_layer_parameters + self.num_embedding_parameters

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes of keys and values that one token of context keeps."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * BYTES[dtype]

    def forward_flops(self, num_tokens: float, context_pairs: float) -> float:
        """FLOPs of a forward pass over `num_tokens` that attend to `context_pairs` tokens in all.

        Two FLOPs a parameter and token, four a pair and attention channel (scores and values).
        """
        channels = self.num_layers * self.num_heads * self.head_dim
        return 2.0 * self.num_active_parameters * num_tokens + 4.0 * channels * context_pairs


def load_gpu(name: str) -> Gpu:
    """Read a GPU by its file name in profiles/gpus; `ValueError` with the closest names where none is."""
    return _read("gpus", name, Gpu)


def load_model(model: ModelConfig) -> ModelShape:
    """Read a model from profiles/models, or from the config.json of a Hugging Face directory."""
    if model.path is not None:
        return read_config_json(Path(model.path) / "config.json")
    assert model.name is not None, "check_run wants one of name and path"
    return _read("models", model.name, ModelShape)


def read_config_json(path: Path) -> ModelShape:
    """Read the shape of a Qwen2-, Qwen3- or Llama-like model from its config.json."""
    try:
        table = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"model.path: {path} cannot be read: {error}") from None
    kind = table.get("model_type")
    if kind not in ("qwen2", "qwen3", "llama", "mistral"):
        raise ValueError(
            f"model.path: {path} is of type {kind!r}; known: qwen2, qwen3, llama, mistral"
        )
    num_heads = table["num_attention_heads"]
    return ModelShape(
        name=path.parent.name,
        source=str(path),
        hidden_size=table["hidden_size"],
        num_layers=table["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=table.get("num_key_value_heads", num_heads),
        head_dim=table.get("head_dim") or table["hidden_size"] // num_heads,
        intermediate_size=table["intermediate_size"],
        vocab_size=table["vocab_size"],
        has_qkv_bias=kind == "qwen2",
        has_tied_embeddings=table.get("tie_word_embeddings", False),
    )


def find_profile(folder: str, name: str, ending: str) -> Path:
    """Give the file of a profile by name; `ValueError` with the closest names where there is none."""
    path = PROFILES / folder / f"{name}{ending}"
    if not path.is_file():
        names = sorted(file.stem for file in (PROFILES / folder).glob(f"*{ending}"))
        close = difflib.get_close_matches(name.lower(), names, n=3) or names
        raise ValueError(f"no profile {name!r} in profiles/{folder}; there is {', '.join(close)}")
    return path


def _read(folder: str, name: str, kind: type[_Profile]) -> _Profile:
    path = find_profile(folder, name, ".toml")
    table: dict[str, Any] = tomllib.loads(path.read_text())
    try:
        return msgspec.convert(table, kind, dec_hook=read_quantity)
    except msgspec.ValidationError as error:
        raise ValueError(f"{path}: {error}") from None
