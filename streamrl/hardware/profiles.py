"""Read `profiles/`: what a GPU can do and what a model asks for, each figure with its source."""

from __future__ import annotations

import datetime
import difflib
import functools
import math
import tomllib
from pathlib import Path
from typing import Literal, TypeVar, assert_never

import msgspec

from streamrl.hardware.hugging_face import read_config_json
from streamrl.hardware.model_shape import BYTES, ModelShape
from streamrl.hardware.profile_table import ProfileTable, check_positive
from streamrl.runfile.cluster_config import ModelConfig, PoolConfig
from streamrl.runfile.config import Run
from streamrl.runfile.errors import OneOf, RunError, shown
from streamrl.runfile.keys import pool_key
from streamrl.runfile.roles_config import SpeculativeConfig
from streamrl.runfile.units import Bandwidth, Duration, Size, read_quantity

FORMATS_COMPUTED = (*BYTES, "mxfp8", "int8", "nvfp4")
"""What products may be computed in; `streamrl.hardware.precision` says how the narrow ones are kept."""
PROFILES = Path(__file__).parents[1] / "profiles"

_Profile = TypeVar("_Profile")


class Roofline(ProfileTable, frozen=True, kw_only=True):
    """Assumed efficiencies, shares of the datasheet's peak; used where nothing is measured."""

    compute_efficiency: float
    training_efficiency: float
    bandwidth_efficiency: float
    step_overhead: Duration
    """Seconds that a decode step takes beside its memory traffic and arithmetic."""
    block_efficiency: float = 0.66
    """Of peak FLOP/s and of bandwidth in grouped fp8 products by blocks of 128 rows. H800 (DeepGEMM, alibaba/InferSim
    f2293da, prefill): 8.64 us for each further block of 11.3 GFLOP, 19.6 for one whose 44 MB of weights are read."""

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
    """Watts of one GPU as they were measured, of what else a node holds none; absent where nobody published any."""

    source: str
    generating: float | None = None
    training: float | None = None
    idle: float | None = None

    def __post_init__(self) -> None:
        check_positive(self)

    def watts(self, work: Literal["generating", "training", "idle"]) -> float | None:
        """Return the watts of what it does; None where they are not known."""
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
    memory: Size
    """Bytes that the driver reports."""
    reserve: Size = Size(0)
    """Bytes of it that no tensor gets: the driver's own, and the context of a process."""
    host_memory: Size | None = None
    """A GPU's share of its node's own memory; None where none is known to bind."""
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
    power: Power | None = None
    tables: dict[str, str] = msgspec.field(default_factory=dict)
    """Which measured table stands for each operator, as "GPU/BACKEND"; the roofline where none does. A key
    "OPERATOR.DTYPE" is for one dtype alone."""

    @property
    def usable_memory(self) -> float:
        """Bytes that tensors can take."""
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
                    f"flops.{dtype} is no dtype; there is {', '.join(FORMATS_COMPUTED)}"
                )
            if not (math.isfinite(peak) and peak > 0):
                raise ValueError(f"flops.{dtype} must be positive and finite, got {peak}")


def load_gpu(name: str) -> Gpu:
    """Read a GPU by its file name in profiles/gpus; `ValueError` with the closest names where none is."""
    return _read_gpu(find_profile("gpus", name, ".toml"))


def gpu_of(pool: PoolConfig) -> Gpu:
    """Read a pool's GPU, with its share of what the pool says of its nodes' network."""
    gpu = load_gpu(pool.gpu)
    if pool.node_bandwidth is None:
        return gpu
    share = Bandwidth(pool.node_bandwidth / pool.gpus_per_node)
    return msgspec.structs.replace(gpu, network=share)


def price_of(pool: PoolConfig) -> float:
    """Return the dollars of a pool's GPU for an hour: the pool's own price, else the GPU's."""
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


def check_profiles(run: Run) -> None:
    """Raise `RunError`, with the closest names, where a run names a GPU, model or lengths that have no profile."""
    for name, pool in run.cluster.pools.items():
        _check_name(pool_key(name, "gpu"), "gpus", pool.gpu, ".toml")
    check_engine(run.costs.engine)
    if run.model.name is not None:
        _check_name("model.name", "models", run.model.name, ".toml")
    _check_draft(run.rollout.speculative, run.model)
    lengths = run.workload.lengths
    if lengths is not None and lengths.kind != "trace" and not lengths.names_a_file:
        _check_name("workload.lengths.source", "lengths", lengths.source, ".csv")


def _check_draft(speculative: SpeculativeConfig | None, model: ModelConfig) -> None:
    """Refuse to draft with a model that is unknown, or with layers that the model does not come with."""
    key = "rollout.speculative.model"
    if speculative is None:
        return
    if speculative.model is not None:
        _check_name(key, "models", speculative.model, ".toml")
    elif not (shape := load_model(model)).num_draft_layers:
        text = (
            f"{key} is missing: {shape.name} comes with no layer for multi-token prediction (num_draft_layers = 0 in "
            f"{Path(shape.source).name if model.path else f'profiles/models/{model.name}.toml'}), so a smaller model "
            "has to draft"
        )
        raise RunError(key, None, None, text, ("rollout.speculative",))


def known_engines() -> list[str]:
    """Return the names of all inference engines."""
    return _names(PROFILES / "engines", ".toml")


def check_engine(name: str) -> None:
    """Raise `RunError`, with all names, where `costs.engine` is no engine of profiles/engines."""
    known = known_engines()
    if name not in known:
        text = f"costs.engine: no engine {shown(name)} in profiles/engines; there is {', '.join(known)}"
        raise RunError("costs.engine", name, OneOf(known), text)


def _check_name(key: str, folder: str, name: str, ending: str) -> None:
    if name not in _names(PROFILES / folder, ending):
        text = f"{key}: {_no_profile(folder, name, ending)}"
        raise RunError(key, name, OneOf(_close_names(folder, name, ending)), text)


def find_profile(folder: str, name: str, ending: str) -> Path:
    """Return the file of a profile by name; `ValueError` with the closest names where there is none."""
    return _find_profile(PROFILES, folder, name, ending)


@functools.cache
def _find_profile(profiles: Path, folder: str, name: str, ending: str) -> Path:
    if name not in _names(profiles / folder, ending):
        raise ValueError(_no_profile(folder, name, ending))
    return profiles / folder / f"{name}{ending}"


def _no_profile(folder: str, name: str, ending: str) -> str:
    close = _close_names(folder, name, ending)
    return f"no profile {shown(name)} in profiles/{folder}; there is {', '.join(close)}"


def _close_names(folder: str, name: str, ending: str) -> list[str]:
    """Return the names that are like a name, or all."""
    names, wanted = _names(PROFILES / folder, ending), name.lower()
    like = [known for known in names if wanted in known]
    return like or difflib.get_close_matches(wanted, names, n=3) or names


@functools.cache
def _names(folder: Path, ending: str) -> list[str]:
    """Return the names of all profiles of a kind."""
    return sorted(file.name.removesuffix(ending) for file in folder.glob(f"*{ending}"))


def read_profile(path: Path, kind: type[_Profile]) -> _Profile:
    """Read a TOML profile of any kind; `ValueError` by file and key where it is not one."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        return msgspec.convert(table, kind, dec_hook=read_quantity)
    except (
        ValueError,
        RecursionError,
    ) as error:  # of TOML, of a value's type, or of the value itself
        raise ValueError(f"{path}: {error}") from None
