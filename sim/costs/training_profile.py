"""Seconds of a token in a training pass: three terms whose constants were fitted to measured training.

    pass of a layer = FLOPs / G  +  (t l + a p) / B  +  c w / W

G: FLOP/s that this GPU's matrix products reach in measured kernel tables. B, W: the datasheet's bytes a
second of memory, and of NVLink or network. l: bytes of the layer's activations; p: pairs of tokens times
attention channels; w: bytes that a rank sends. t, a and c are the constants, the same on every GPU: memory
traffic in units of activations, memory traffic that costs as much as the softmax of a pair and channel,
and seconds of a collective in units of bytes over bandwidth. A backward pass costs two forward ones.
`benchmarks/fit_training.py` fits them and writes the profile.
"""

from __future__ import annotations

import datetime
import functools
import tomllib
from pathlib import Path

import msgspec

from streamrl.hardware.model_shape import check_positive
from streamrl.hardware.profile_table import ProfileTable
from streamrl.hardware.profiles import PROFILES
from streamrl.hardware.tiers import Tier

PATH = PROFILES / "measured" / "training.toml"


class Constants(ProfileTable, frozen=True, kw_only=True):
    """What the fit found."""

    activation_traffic: float
    """Bytes through memory in a forward pass for each byte of a layer's activations."""
    attention_traffic: float
    """Bytes through memory that cost as much as one attention channel of one pair of tokens."""
    collective: float
    """Seconds of a collective for each second that its bytes take at the datasheet's bandwidth."""

    def __post_init__(self) -> None:
        check_positive(self)


class GemmRate(ProfileTable, frozen=True, kw_only=True):
    """How fast large matrix products of 16 bits run on one kind of GPU."""

    flops: float
    """FLOP/s that kernels reach."""
    tier: Tier
    """composed: training was measured on GPUs of this silicon; roofline: on none like it."""
    source: str

    def __post_init__(self) -> None:
        check_positive(self)


class Errors(ProfileTable, frozen=True, kw_only=True):
    """How far predicted and measured MFU are apart, relative, on models the fit had not seen."""

    median: float
    p90: float


class TrainingProfile(ProfileTable, frozen=True, kw_only=True):
    """The file profiles/measured/training.toml."""

    name: str
    source: str
    licence: str
    date: datetime.date
    fitted_on: str
    rows: int
    constants: Constants
    spread: dict[str, tuple[float, float]]
    """Least and largest value of each constant over fits to half of the models."""
    held_out: Errors
    gemm: dict[str, GemmRate]
    """By name of a GPU in profiles/gpus."""


@functools.cache
def load_training_profile(path: Path = PATH) -> TrainingProfile:
    """Read the profile; `ValueError` with file and key where something is wrong."""
    try:
        return msgspec.convert(tomllib.loads(path.read_text()), TrainingProfile)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
