"""Read `profiles/`: what a GPU can do and what a model asks for, each figure with its source."""

from __future__ import annotations

import datetime
import difflib
import functools
import math
import tomllib
from pathlib import Path
from typing import TypeVar

import msgspec

from streamrl.hardware.config_json import read_config_json
from streamrl.hardware.model_shape import BYTES, ModelShape, check_positive
from streamrl.runfile.cluster_config import ModelConfig, PoolConfig
from streamrl.runfile.units import Bandwidth, Duration, Size, read_quantity

PROFILES = Path(__file__).resolve().parents[2] / "profiles"

_Profile = TypeVar("_Profile")


class Roofline(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Assumed efficiencies, shares of the datasheet's peak; used where nothing is measured."""

    compute_efficiency: float
    training_efficiency: float
    bandwidth_efficiency: float
    step_overhead: Duration
    """Seconds that a decode step takes beside its memory traffic and arithmetic."""

    def __post_init__(self) -> None:
        check_positive(self)
        for key in ("compute_efficiency", "training_efficiency", "bandwidth_efficiency"):
            if (share := getattr(self, key)) > 1:
                raise ValueError(f"{key} must be a share of the peak, at most 1, got {share}")


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
    """Dense peak FLOP/s by dtype; a dtype is absent where the hardware has no units for it."""
    roofline: Roofline
    tables: dict[str, str] = {}
    """Which measured table stands for each operator, as "GPU/BACKEND"; the roofline where none does."""

    def __post_init__(self) -> None:
        check_positive(self)
        for dtype, peak in self.flops.items():
            if dtype not in BYTES:
                raise ValueError(f"flops.{dtype} is no dtype; there is {', '.join(BYTES)}")
            if not (math.isfinite(peak) and peak > 0):
                raise ValueError(f"flops.{dtype} must be positive and finite, got {peak}")


def load_gpu(name: str) -> Gpu:
    """Read a GPU by its file name in profiles/gpus; `ValueError` with the closest names where none is."""
    return _read_gpu(find_profile("gpus", name, ".toml"))


def price_of(pool: PoolConfig) -> float:
    """Give the dollars of a pool's GPU for an hour: the pool's own price, else the GPU's."""
    return load_gpu(pool.gpu).price if pool.price is None else pool.price


def load_model(model: ModelConfig) -> ModelShape:
    """Read a model from profiles/models, or from the config.json of a Hugging Face directory."""
    if model.path is not None:
        return read_config_json(Path(model.path) / "config.json")
    assert model.name is not None, "check_run wants one of name and path"
    return _read_model(find_profile("models", model.name, ".toml"))


@functools.cache
def _read_gpu(path: Path) -> Gpu:
    return read_profile(path, Gpu)


@functools.cache
def _read_model(path: Path) -> ModelShape:
    return read_profile(path, ModelShape)


def find_profile(folder: str, name: str, ending: str) -> Path:
    """Give the file of a profile by name; `ValueError` with the closest names where there is none."""
    path = PROFILES / folder / f"{name}{ending}"
    if not path.is_file():
        names = sorted(file.stem for file in (PROFILES / folder).glob(f"*{ending}"))
        wanted = name.lower()
        like = [known for known in names if wanted in known]
        close = like or difflib.get_close_matches(wanted, names, n=3) or names
        raise ValueError(f"no profile {name!r} in profiles/{folder}; there is {', '.join(close)}")
    return path


def read_profile(path: Path, kind: type[_Profile]) -> _Profile:
    """Read a TOML profile of any kind; `ValueError` by file and key where it is not one."""
    try:
        table = tomllib.loads(path.read_text())
        return msgspec.convert(table, kind, dec_hook=read_quantity)
    except ValueError as error:  # of TOML, of a value's type, or of the value itself
        raise ValueError(f"{path}: {error}") from None
