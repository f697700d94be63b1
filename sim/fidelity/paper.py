"""What the paper reports."""

from __future__ import annotations

import datetime
from functools import lru_cache

from streamrl.hardware.profile_table import ProfileTable
from streamrl.hardware.profiles import find_profile, read_profile


class Split(ProfileTable, frozen=True, kw_only=True):
    """GPUs of each side, and the seconds of its stage over those of generation on half of all GPUs."""

    generate: tuple[int, float]
    train: tuple[int, float]


class Splits(ProfileTable, frozen=True, kw_only=True):
    """Figure 10."""

    even: Split
    chosen: Split


class Adjustment(ProfileTable, frozen=True, kw_only=True):
    """Figure 11, one entry a step."""

    delta: list[float]
    gpus: list[int]


class Scaling(ProfileTable, frozen=True, kw_only=True):
    """Figure 2."""

    gpus: list[int]
    generate: list[float]
    train: list[float]
    tokens: list[int]
    generate_by_length: list[float]
    train_by_length: list[float]


class Decode(ProfileTable, frozen=True, kw_only=True):
    """Figure 6, right."""

    batch: list[int]
    milliseconds: list[float]


class Paper(ProfileTable, frozen=True, kw_only=True):
    """All figures that a simulation is compared with."""

    name: str
    source: str
    date: datetime.date
    throughput: dict[str, tuple[float, float, float, float]]
    ablation: dict[str, tuple[float, float, float, float]]
    dispatch: dict[str, tuple[float, float]]
    allocation: dict[str, Splits]
    adjustment: Adjustment
    heterogeneous: dict[str, tuple[float, float]]
    scaling: Scaling
    decode: Decode


@lru_cache(maxsize=1)
def load_paper() -> Paper:
    """Read profiles/papers/streamrl.toml."""
    return read_profile(find_profile("papers", "streamrl", ".toml"), Paper)
