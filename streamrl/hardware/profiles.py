"""Read `profiles/`: GPUs, models and inference engines by name, each figure with its source."""

from __future__ import annotations

import datetime
import difflib
import functools
import math
from pathlib import Path
from typing import Literal, TypeVar, assert_never

import msgspec
from msgspec.structs import replace

from streamrl.hardware.hugging_face import read_config_json
from streamrl.hardware.model_shape import BYTES, ModelShape
from streamrl.hardware.profile_table import ProfileTable, check_positive
from streamrl.runfile import profile_folder
from streamrl.runfile.cluster_config import ModelConfig, PoolConfig
from streamrl.runfile.config import Run
from streamrl.runfile.errors import OneOf, RunError, shown
from streamrl.runfile.keys import pool_key
from streamrl.runfile.reading import read_toml
from streamrl.runfile.roles_config import SpeculativeConfig
from streamrl.runfile.units import NO_FACTOR, Bandwidth, Duration, Factor, Size, read_quantity

FORMATS_COMPUTED = (*BYTES, "mxfp8", "int8", "nvfp4")
"""Formats in which products may be computed. `streamrl.hardware.precision` has the bytes of the narrow ones."""
PROFILES = profile_folder.PROFILES

_Profile = TypeVar("_Profile")


class Roofline(ProfileTable, frozen=True, kw_only=True):
    """Assumed efficiencies as shares of the datasheet's peak, for operators without measurements."""

    compute_efficiency: float
    training_efficiency: float
    bandwidth_efficiency: float
    step_overhead: Duration
    """Seconds of a decode step on top of its memory traffic and arithmetic, if nothing better is known."""
    like: list[str] = msgspec.field(default_factory=list)
    """Generations of profiles/efficiency, nearest first, for operators that this GPU's own generation does not have."""
    block_efficiency: float = 0.66
    """Share of peak FLOP/s and of bandwidth in grouped fp8 products by blocks of 128 rows. Source: H800 (DeepGEMM,
    alibaba/InferSim f2293da, prefill). A further block of 11.3 GFLOP takes 8.64 us, and one whose 44 MB of weights are
    read takes 19.6 us."""

    def __post_init__(self) -> None:
        check_positive(self)
        for key in (
            "compute_efficiency",
            "training_efficiency",
            "bandwidth_efficiency",
            "block_efficiency",
        ):
            if (share := getattr(self, key)) > 1:
                raise ValueError(f"{key} must be a share of the peak, at most 1, got {share}")


class Power(ProfileTable, frozen=True, kw_only=True):
    """Measured watts of one GPU, without the rest of its node; None if no measurement is published."""

    source: str
    generating: float | None = None
    training: float | None = None
    idle: float | None = None

    def __post_init__(self) -> None:
        check_positive(self)

    def watts(self, work: Literal["generating", "training", "idle"]) -> float | None:
        """Return the watts of a kind of work; None if they are unknown."""
        match work:
            case "generating":
                return self.generating
            case "training":
                return self.training
            case "idle":
                return self.idle
            case _:
                assert_never(work)


class Gpu(ProfileTable, frozen=True, kw_only=True):
    """One kind of GPU."""

    name: str
    source: str
    date: datetime.date
    generation: str | None = None
    """Kind of its silicon, such as "hopper"; without tables, it takes the efficiencies of that generation."""
    memory: Size
    """Bytes that the driver reports."""
    reserve: Size = Size(0)
    """Bytes of it that tensors cannot use: the driver's own, and the context of a process."""
    host_slowdown: Factor = NO_FACTOR
    """Seconds in which its host's CPU launches an operation, relative to x86 hosts."""
    host_memory: Size | None = None
    """The GPU's share of its node's host memory; None if no limit is known."""
    memory_bandwidth: Bandwidth
    nvlink: Bandwidth
    network: Bandwidth
    host_link: Bandwidth
    price: float
    """Dollars per GPU-hour."""
    price_source: str
    flops: dict[str, float]
    """Dense peak FLOP/s by dtype. Dtypes that the hardware cannot compute in are missing."""
    roofline: Roofline
    power: Power | None = None
    tables: dict[str, str] = msgspec.field(default_factory=dict)
    """By operator: the measured table to use, as "GPU/BACKEND". Operators without a table use the roofline. A key
    "OPERATOR.DTYPE" is for one dtype alone."""

    @property
    def alike(self) -> tuple[str, ...]:
        """Generations whose efficiencies apply to this GPU, nearest first; empty if none does."""
        return (self.generation, *self.roofline.like) if self.generation else ()

    @property
    def is_scaled(self) -> bool:
        """Whether its operators are scaled from measured GPUs, because it has no tables itself."""
        return not self.tables and bool(self.alike)

    @property
    def usable_memory(self) -> float:
        """Bytes that tensors can use."""
        return self.memory - self.reserve

    def __post_init__(self) -> None:
        check_positive(self, ("reserve",))
        if self.reserve >= self.memory:
            raise ValueError(
                f"reserve must be less than memory {self.memory:g}, got {self.reserve:g}"
            )
        for dtype, peak in self.flops.items():
            if dtype not in FORMATS_COMPUTED:
                raise ValueError(
                    f"flops.{dtype} is not a known dtype; known: {', '.join(FORMATS_COMPUTED)}"
                )
            if not (math.isfinite(peak) and peak > 0):
                raise ValueError(f"flops.{dtype} must be positive and finite, got {peak}")


def load_gpu(name: str) -> Gpu:
    """Return a GPU by its file name in profiles/gpus.

    Raises:
        ValueError: there is no such file. The text has the closest names.
    """
    return _read_gpu(PROFILES, name)


def gpu_of(pool: PoolConfig) -> Gpu:
    """Return the GPU of a pool, with its share of `node_bandwidth` if the pool states it."""
    gpu = load_gpu(pool.gpu)
    if pool.node_bandwidth is None:
        return gpu
    share = Bandwidth(pool.node_bandwidth / pool.gpus_per_node)
    return msgspec.structs.replace(gpu, network=share)


def price_of(pool: PoolConfig) -> float:
    """Return the dollars per GPU-hour of a pool: its own price, or else the price of its GPU."""
    return load_gpu(pool.gpu).price if pool.price is None else pool.price


def load_model(model: ModelConfig) -> ModelShape:
    """Return a model from profiles/models, or from the config.json of a Hugging Face directory.

    It has no vision tower if the run does not load that.
    """
    if model.path is not None:
        shape = read_config_json(Path(model.path) / "config.json")
    else:
        assert model.name is not None, "check_run requires model.name or model.path"
        shape = _read_model(PROFILES, model.name)
    has_unused = shape.num_vision_parameters and model.vision_tower == "none"
    return replace(shape, num_vision_parameters=0) if has_unused else shape


@functools.cache
def _read_gpu(profiles: Path, name: str) -> Gpu:
    return read_profile(_find_profile(profiles, "gpus", name, ".toml"), Gpu)


@functools.cache
def _read_model(profiles: Path, name: str) -> ModelShape:
    return read_profile(_find_profile(profiles, "models", name, ".toml"), ModelShape)


def check_profiles(run: Run) -> None:
    """Raise `RunError`, with the closest names, if a run names a GPU, model or lengths without a profile."""
    for name, pool in run.cluster.pools.items():
        _check_name(pool_key(name, "gpu"), "gpus", pool.gpu, ".toml")
    check_engine(run.costs.engine)
    if run.model.name is not None:
        _check_name("model.name", "models", run.model.name, ".toml")
    _check_draft(run.rollout.speculative, run.model)
    lengths = run.workload.lengths
    if lengths is not None and lengths.kind not in ("trace", "stated") and not lengths.names_a_file:
        _check_name("workload.lengths.source", "lengths", lengths.source, ".csv")


def _check_draft(speculative: SpeculativeConfig | None, model: ModelConfig) -> None:
    """Raise `RunError` for an unknown draft model, or for draft layers that the model does not have."""
    key = "rollout.speculative.model"
    if speculative is None:
        return
    if speculative.model is not None:
        _check_name(key, "models", speculative.model, ".toml")
    elif not (shape := load_model(model)).num_draft_layers:
        text = (
            f"{key} is missing: {shape.name} has no layers for multi-token prediction (num_draft_layers = 0 in "
            f"{Path(shape.source).name if model.path else f'profiles/models/{model.name}.toml'}); name a smaller model "
            "that drafts"
        )
        raise RunError(key, None, None, text, ("rollout.speculative",))


def known_engines() -> list[str]:
    """Return the names of all inference engines."""
    return _names(PROFILES / "engines", ".toml")


def _engine_title(name: str) -> str:
    """Return an engine and its versions, without the settings that follow a comma."""
    path = PROFILES / "engines" / f"{name}.toml"
    title: str = read_toml(path)["name"]
    return title.partition(",")[0]


def check_engine(name: str) -> None:
    """Raise `RunError`, with all names and their versions, if `costs.engine` is not in profiles/engines."""
    known = known_engines()
    if name not in known:
        named = ", ".join(f"{each} ({_engine_title(each)})" for each in known)
        text = f"costs.engine: no engine {shown(name)} in profiles/engines; there is {named}"
        raise RunError("costs.engine", name, OneOf(known), text)


def _check_name(key: str, folder: str, name: str, ending: str) -> None:
    if name not in _names(PROFILES / folder, ending):
        text = f"{key}: {_no_profile(folder, name, ending)}"
        raise RunError(key, name, OneOf(_close_names(folder, name, ending)), text)


def find_profile(folder: str, name: str, ending: str) -> Path:
    """Return the file of a profile by name.

    Raises:
        ValueError: there is no such profile. The text has all names, the closest first.
    """
    return _find_profile(PROFILES, folder, name, ending)


@functools.cache
def _find_profile(profiles: Path, folder: str, name: str, ending: str) -> Path:
    if name not in _names(profiles / folder, ending):
        raise ValueError(_no_profile(folder, name, ending))
    return profiles / folder / f"{name}{ending}"


def _no_profile(folder: str, name: str, ending: str) -> str:
    close = _close_names(folder, name, ending)
    others = [known for known in _names(PROFILES / folder, ending) if known not in close]
    text = f"no profile {shown(name)} in profiles/{folder}; there is {', '.join(close)}"
    return f"{text}; the others are {', '.join(others)}" if others else text


def _close_names(folder: str, name: str, ending: str) -> list[str]:
    """Return the names that are similar to a name, or all names if none is."""
    names, wanted = _names(PROFILES / folder, ending), name.lower()
    like = [known for known in names if wanted in known]
    return like or difflib.get_close_matches(wanted, names, n=3) or names


@functools.cache
def _names(folder: Path, ending: str) -> list[str]:
    """Return the names of all profiles in a folder."""
    return sorted(file.name.removesuffix(ending) for file in folder.glob(f"*{ending}"))


def read_profile(path: Path, kind: type[_Profile]) -> _Profile:
    """Return the content of a TOML profile.

    Raises:
        ValueError: the file is not a profile of this kind. The text has the file and the key.
    """
    try:
        table = read_toml(path)
        return msgspec.convert(table, kind, dec_hook=read_quantity)
    except (
        ValueError,
        RecursionError,
    ) as error:  # invalid TOML, wrong type, or wrong value
        raise ValueError(f"{path}: {error}") from None
