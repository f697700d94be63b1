"""Return the seconds of single operators on one kind of GPU, from its tables or from its roofline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from streamrl.hardware.interpolation import Surface
from streamrl.hardware.model_shape import BYTES
from streamrl.hardware.operator_tables import (
    OPERATORS,
    Floats,
    Operator,
    Peak,
    Table,
    read_table,
    weights_read,
)
from streamrl.hardware.precision import FORMATS, WEIGHT_ONLY, width_of
from streamrl.hardware.profiles import PROFILES, Gpu, load_gpu
from streamrl.hardware.tiers import Provenance

MEASURED, EFFICIENCY = PROFILES / "measured", PROFILES / "efficiency"
DTYPE_OF_ATTENTION = "bfloat16"
"""Keys and values stay in 16 bits if weights are in 8 bits."""
OF_KEPT = ("gemm", "moe")
"""Operators that read weights."""
LEAST = {"n": 64.0, "k": 64.0}
"""Shape of a tiny product, whose seconds are those of a kernel launch."""
OF_WEIGHTS = (
    "gemm",
    "quantised_gemm",
    "quantise",
    "moe",
    "masked_moe",
    "contiguous_moe",
    "latent_projections",
)
"""Operators that run in the dtype of the weights."""
OPERATOR_WORDS = {
    "gemm": "matrix products",
    "quantise": "quantisation",
    "moe": "experts",
    "decode_attention": "attention of decode",
    "latent_decode_attention": "attention of decode",
    "prefill_attention": "attention of prefill",
    "linear_decode": "linear attention of decode",
    "linear_prefill": "linear attention of prefill",
    "kimi_decode": "linear attention of decode",
    "kimi_prefill": "linear attention of prefill",
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "all_to_all": "all-to-all",
    "reduce_scatter": "reduce-scatter",
}
"""Operators in the words of a sentence."""
ALIKE = {
    "bfloat16": ("bfloat16", "float16"),
    "float16": ("float16", "bfloat16"),
    "fp8": ("fp8",),
    **{dtype: (dtype,) for dtype in FORMATS if dtype != "fp8"},
    "float32": ("float32",),
}
"""Dtypes that can use each other's tables: both 16-bit dtypes run at the same rate."""
EVEN, ONE_RANK = "even", "on one rank"
"""How a table states even shares of tokens over experts, and that those of one rank are not even."""
NEAREST = {"int8": "fp8", "mxfp8": "fp8"}
"""Unmeasured formats, and the measured format with as many bits whose distance from the roofline
they take. With a bare roofline, a format would win only because it has no table. All these seconds
are marked as unmeasured.
"""


Mask: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True)
class Estimate:
    """Seconds, how many of them are unmeasured, and the sources of the measured ones."""

    seconds: Floats
    unmeasured: Floats
    sources: tuple[str, ...] = ()
    parts: Mapping[str, Floats] = field(default_factory=dict)
    """The unmeasured seconds by what takes them, such as "attention on A100"."""

    def __add__(self, other: Estimate) -> Estimate:
        """Add two estimates, one after the other."""
        parts = dict(self.parts)
        for name, seconds in other.parts.items():
            parts[name] = parts[name] + seconds if name in parts else seconds
        return Estimate(
            self.seconds + other.seconds,
            self.unmeasured + other.unmeasured,
            tuple(dict.fromkeys(self.sources + other.sources)),
            parts,
        )

    def __mul__(self, times: float) -> Estimate:
        """Repeat an estimate `times` times."""
        parts = {name: seconds * times for name, seconds in self.parts.items()}
        return Estimate(self.seconds * times, self.unmeasured * times, self.sources, parts)

    def mean(self) -> Estimate:
        """Return the mean of all columns as an estimate of one column."""
        shape = self.seconds.shape
        parts = {
            name: np.broadcast_to(each, shape).mean(keepdims=True)
            for name, each in self.parts.items()
        }
        seconds, unmeasured = self.seconds.mean(keepdims=True), self.unmeasured.mean(keepdims=True)
        return Estimate(seconds, unmeasured, self.sources, parts)

    def taking(self, seconds: Floats) -> Estimate:
        """Return an estimate that takes other seconds, with the same unmeasured share."""
        ratio = seconds / self.seconds
        parts = {name: each * ratio for name, each in self.parts.items()}
        return Estimate(seconds, self.unmeasured * ratio, self.sources, parts)

    def where(self, is_own: Mask, other: Estimate) -> Estimate:
        """Return an estimate with the columns of this one where `is_own`, else those of the other."""
        none = np.zeros(1)
        parts = {
            name: np.where(is_own, self.parts.get(name, none), other.parts.get(name, none))
            for name in dict.fromkeys([*self.parts, *other.parts])
        }
        return Estimate(
            np.where(is_own, self.seconds, other.seconds),
            np.where(is_own, self.unmeasured, other.unmeasured),
            tuple(dict.fromkeys(self.sources + other.sources)),
            parts,
        )

    def within(self, name: str) -> Estimate:
        """Return an estimate whose unmeasured parts are those of a thing, such as "layers with a window"."""
        return replace(self, parts={f"{part}, {name}": each for part, each in self.parts.items()})

    @property
    def provenance(self) -> Provenance:
        """Return the share of all these seconds that is composed of measurements."""
        share = float(np.sum(self.unmeasured) / np.sum(self.seconds))
        shares = {"composed": 1 - share, "roofline": share}
        return Provenance(
            shares={tier: part for tier, part in shares.items() if part > 0},  # type: ignore[misc]  # literals
            sources=self.sources,
            datasheets={
                name: float(
                    np.sum(np.broadcast_to(each, self.seconds.shape)) / np.sum(self.seconds)
                )
                for name, each in self.parts.items()
                if np.any(each > 0)
            },
        )


def unmeasured(seconds: Floats, source: str, name: str) -> Estimate:
    """Return seconds without a measurement.

    Args:
        seconds: the seconds.
        source: where they come from.
        name: what takes them.
    """
    return Estimate(seconds, seconds, (source,), {name: seconds})


def total(estimates: Iterable[Estimate]) -> Estimate:
    """Add estimates up."""
    first, *others = estimates
    for other in others:
        first = first + other
    return first


Typical: TypeAlias = Callable[[str, str], Surface | None]
"""By operator and dtype: the surface that a GPU without tables uses; None if there is none."""


class Kernels:
    """One kind of GPU, computing in one dtype."""

    def __init__(
        self,
        gpu_name: str,
        dtype: str,
        backend: str | None = None,
        cache_dtype: str | None = None,
        tables: Mapping[str, str] | None = None,
        kept: str | None = None,
        typical: Typical | None = None,
    ) -> None:
        """Choose the tables: the GPU's default, `tables` instead, or those of one backend.

        A GPU without tables uses the efficiencies of its generation. If `typical` is given, it uses
        these, and none of its own tables.

        Keys and values have at least 16 bits, unless `cache_dtype` says otherwise. If `kept` is
        given, weights are stored in this narrower format and computed in `dtype`.

        Raises:
            ValueError: the backend was not measured on this GPU.
        """
        self._gpu_name = gpu_name
        self.gpu = load_gpu(gpu_name)
        self.dtype = dtype
        self.kept = kept or dtype
        """Format of stored weights."""
        wide = DTYPE_OF_ATTENTION if width_of(dtype) <= BYTES[DTYPE_OF_ATTENTION] else dtype
        self.wire_dtype = wide
        """Dtype of messages between GPUs and of attention."""
        self.cache_dtype = cache_dtype or wide
        """Dtype of keys and values."""
        self._tables = dict(self.gpu.tables if tables is None else tables)
        if typical is not None:
            self._tables = {}
        elif not self._tables and self.gpu.alike:
            typical = typical_of(self.gpu.alike)
        self._typical = typical
        self._is_chosen = backend is not None
        if backend is not None:
            self._tables |= _tables_of(gpu_name, backend)

    def of_engine(self, backends: Mapping[str, str]) -> Kernels:
        """Return these kernels with the tables of an inference engine, where this GPU has them.

        Args:
            backends: by operator, for 16 bits, or by "OPERATOR.DTYPE". They are ignored if a backend
                was named for the GPU.
        """
        if self._is_chosen or not self._tables:
            return self
        places = {}
        for key, backend in backends.items():
            operator, _, dtype = key.partition(".")
            for gpu in (self._gpu_name, self._place(operator, dtype).partition("/")[0]):
                place = f"{gpu}/{backend}"
                if table_path(place, operator, dtype or DTYPE_OF_ATTENTION) is not None:
                    places[key] = place
                    break
        return self._with_tables({**self._narrow_tables(places), **places})

    def _narrow_tables(self, changed: Mapping[str, str]) -> dict[str, str]:
        """Return the current tables of narrow formats whose operator gets another table for 16 bits."""
        return {
            f"{operator}.{dtype}": place
            for operator in changed
            if "." not in operator and (place := self._tables.get(operator))
            for dtype in FORMATS
            if f"{operator}.{dtype}" not in self._tables
        }

    def _with_tables(self, changed: Mapping[str, str]) -> Kernels:
        return Kernels(
            self._gpu_name,
            self.dtype,
            cache_dtype=self.cache_dtype,
            tables={**self._tables, **changed},
            kept=self.kept,
            typical=None if self._tables else self._typical,
        )

    @property
    def wide(self) -> Kernels:
        """The kernels of layers that keep 16-bit weights beside narrow ones."""
        return Kernels(
            self._gpu_name,
            self.wire_dtype,
            cache_dtype=self.cache_dtype,
            tables=self._tables,
            typical=None if self._tables else self._typical,
        )

    def has_table(self, operator: str) -> bool:
        """Return whether an operator was measured in the dtype of the weights."""
        return self._known(operator, self.dtype) is not None

    @property
    def is_composed(self) -> bool:
        """Whether operators have tables, of this GPU or of others; if not, rooflines have assumed efficiencies."""
        return bool(self._tables) or self._typical is not None

    def distribution(self, operator: str) -> str:
        """Return how tokens were distributed over experts in an operator's table; evenly by default."""
        surface = self._known(operator, self.dtype)
        return (surface.table.facts.distribution if surface else "") or "even"

    def has_even_shares(self, expert_parallel: int) -> bool:
        """Return whether experts were measured with as many tokens each, on this number of ranks."""
        text = self.distribution("moe")
        return text.startswith(EVEN) and not (expert_parallel == 1 and ONE_RANK in text)

    @property
    def has_expert_ranks(self) -> bool:
        """Whether experts were measured on several GPUs that share them, or not at all."""
        dtype = self.kept if self.kept in WEIGHT_ONLY else self.dtype
        surface = self._known("moe", dtype)
        return surface is None or surface.largest("expert_parallel") > 1

    def backend(self, operator: str) -> str | None:
        """Return the backend of an operator's table; None if there is no table."""
        surface = self._known(operator, self.dtype)
        return surface.table.facts.backend if surface else None

    def time(self, operator: str, columns: Floats, **shape: float) -> Estimate:
        """Return an operator's seconds for every value of its last axis.

        Args:
            operator: a name in `streamrl.hardware.operator_tables.OPERATORS`.
            columns: (n,) values of the last axis: m, context, tokens or bytes.
            shape: value of every other axis.
        """
        dtype = self.dtype if operator in OF_WEIGHTS else self.wire_dtype
        if operator in OF_KEPT and self.kept != self.dtype:
            return self._widened(operator, columns, shape)
        return self._timed(operator, dtype, columns, shape)

    def roofline_time(self, operator: str, columns: Floats, **shape: float) -> Estimate:
        """Return the seconds of an operator by its roofline, for a kind of it that no table has."""
        return self._roofline(OPERATORS[operator], operator, self.wire_dtype, columns, shape)

    def wide_time(self, operator: str, columns: Floats, **shape: float) -> Estimate:
        """Return the seconds of an operator whose weights always have 16 bits: routers and heads."""
        return self._timed(operator, self.wire_dtype, columns, shape)

    def cached_time(self, operator: str, contexts: Floats, **shape: float) -> Estimate:
        """Return the seconds of decode attention over contexts that are cached in `cache_dtype`.

        If this format was not measured, the tokens are scaled by its width, because reads limit
        decode attention.
        """
        share = BYTES[self.cache_dtype] / BYTES[self.wire_dtype]
        if share == 1:
            return self.time(operator, contexts, **shape)
        surface = self._known(operator, self.cache_dtype)
        if surface is not None and self.cache_dtype in self.gpu.flops:
            return self._timed(operator, self.cache_dtype, contexts, shape)
        found = self.time(operator, contexts * share, **shape)
        source = f"{operator} with a cache in {self.cache_dtype}, as of {share:g} times the tokens"
        name = self._name(operator, f" with a cache in {self.cache_dtype}")
        return replace(unmeasured(found.seconds, source, name), sources=(*found.sources, source))

    def _timed(
        self, operator: str, dtype: str, columns: Floats, shape: dict[str, float]
    ) -> Estimate:
        surface = self._known(operator, dtype)
        if surface is not None:
            return self._of_surface(surface, operator, dtype, columns, shape)
        if dtype in NEAREST:
            surface = self._known(operator, NEAREST[dtype])
        if surface is None:
            return self._roofline(OPERATORS[operator], operator, dtype, columns, shape)
        seconds = self._of_surface(surface, operator, dtype, columns, shape).seconds
        source = f"in {dtype} as far from its roofline as {surface.table.origin}"
        return unmeasured(seconds, source, self._name(operator, f" in {dtype}"))

    def _of_surface(
        self,
        surface: Surface,
        operator: str,
        dtype: str,
        columns: Floats,
        shape: dict[str, float],
    ) -> Estimate:
        seconds, is_inside = surface.seconds(shape, columns, peak_of(self.gpu, dtype))
        if surface.table.facts.generation:
            source = f"datasheet of {self.gpu.name}: {surface.table.origin}"
            return unmeasured(seconds, source, self._name(operator))
        outside = np.where(is_inside, 0.0, seconds)
        parts = {self._name(operator, " beyond its table"): outside}
        return Estimate(seconds, outside, (surface.table.origin,), parts)

    def _name(self, operator: str, what: str = "") -> str:
        """Return what takes seconds from a datasheet: "attention of decode beyond its table on A100"."""
        return f"{OPERATOR_WORDS.get(operator, operator)}{what} on {self._gpu_name.upper()}"

    def _known(self, operator: str, dtype: str) -> Surface | None:
        """Return an operator's table, or the typical one of similar GPUs if this one has no tables."""
        if self._tables or self._typical is None:
            return _surface(self._place(operator, dtype), operator, dtype)
        return self._typical(operator, dtype)

    def _place(self, operator: str, dtype: str) -> str:
        """Return "GPU/BACKEND" of an operator's table; a dtype may have its own."""
        return self._tables.get(f"{operator}.{dtype}") or self._tables.get(operator, "")

    def traffic(self, num_bytes: Floats) -> Estimate:
        """Return the seconds to move bytes through the GPU's memory, by its roofline."""
        bandwidth = self.gpu.memory_bandwidth * self.gpu.roofline.bandwidth_efficiency
        source = f"roofline of {self.gpu.name}: memory traffic"
        return unmeasured(num_bytes / bandwidth, source, self._name("norms and activations"))

    def _widened(self, operator: str, columns: Floats, shape: dict[str, float]) -> Estimate:
        """Return the seconds of a product whose weights are read narrow and widened before the multiplication.

        Without a measurement it is the roofline, but at least a wide product of the same rows of
        minimal size.
        """
        surface = None
        if self.kept in WEIGHT_ONLY:
            surface = self._known(operator, self.kept)
        if surface is not None:
            return self._of_surface(surface, operator, self.kept, columns, shape)
        source = OPERATORS[operator]
        axes: dict[str, Floats] = {key: np.array([value]) for key, value in shape.items()}
        axes[_COLUMN[operator]] = columns
        wide, efficiency = BYTES[self.dtype], self.gpu.roofline
        saved = (wide - width_of(self.kept)) * weights_read(operator, axes)
        work, peak = source.count(axes, wide), peak_of(self.gpu, self.dtype)
        compute = work.flops / (peak.flops * efficiency.compute_efficiency)
        memory = (work.memory - saved) / (peak.memory * efficiency.bandwidth_efficiency)
        least = self._timed("gemm", self.dtype, columns, LEAST).seconds
        seconds = np.maximum(np.maximum(compute, memory), least)
        text = f"roofline of {self.gpu.name}: {operator} of {self.kept} weights in {self.dtype}"
        return unmeasured(seconds, text, self._name(operator, f" of {self.kept} weights"))

    def _roofline(
        self, operator: Operator, name: str, dtype: str, columns: Floats, shape: dict[str, float]
    ) -> Estimate:
        axes: dict[str, Floats] = {key: np.array([value]) for key, value in shape.items()}
        axes[_COLUMN[name]] = columns
        efficiency, peak = self.gpu.roofline, peak_of(self.gpu, dtype)
        achieved = Peak(
            flops=peak.flops * efficiency.compute_efficiency,
            memory=peak.memory * efficiency.bandwidth_efficiency,
            nvlink=peak.nvlink * efficiency.bandwidth_efficiency,
            width=peak.width,
        )
        seconds = operator.roofline(achieved)(axes)
        source = f"roofline of {self.gpu.name}: {name} in {dtype}"
        return unmeasured(seconds, source, self._name(name))


_COLUMN = {
    "gemm": "m",
    "quantised_gemm": "m",
    "quantise": "m",
    "decode_attention": "context",
    "latent_decode_attention": "context",
    "latent_projections": "tokens",
    "prefill_attention": "context",
    "linear_decode": "batch",
    "linear_prefill": "tokens",
    "kimi_decode": "batch",
    "kimi_prefill": "tokens",
    "moe": "tokens",
    "masked_moe": "tokens",
    "contiguous_moe": "tokens",
    **dict.fromkeys(("all_reduce", "all_gather", "all_to_all", "reduce_scatter"), "bytes"),
}


def peak_of(gpu: Gpu, dtype: str) -> Peak:
    """Return a GPU's datasheet values for one dtype.

    Weights in a format without hardware units are multiplied in 16 bits.

    Raises:
        ValueError: the hardware has no units for that dtype.
    """
    if dtype in WEIGHT_ONLY:
        wide = peak_of(gpu, DTYPE_OF_ATTENTION)
        return replace(wide, width=width_of(dtype))
    if dtype not in gpu.flops:
        raise ValueError(
            f"{gpu.name} does not compute in {dtype}; it does in {', '.join(gpu.flops)}"
        )
    width = BYTES[dtype] if dtype in BYTES else width_of(dtype)
    return Peak(gpu.flops[dtype], gpu.memory_bandwidth, gpu.nvlink, width)


def table_path(place: str, operator: str, dtype: str) -> Path | None:
    """Find the table of an operator at "GPU/BACKEND", in this dtype or one with the same rate."""
    gpu, _, backend = place.partition("/")
    for kind in ALIKE[dtype]:
        path = MEASURED / gpu / f"{operator}.{backend}.{kind}.csv"
        if path.is_file():
            return path
    return None


@lru_cache(maxsize=64)
def typical_of(generations: tuple[str, ...]) -> Typical:
    """Return the surfaces of generations in profiles/efficiency; of each operator, the first that has it counts."""

    @lru_cache(maxsize=64)
    def surface(operator: str, dtype: str) -> Surface | None:
        for generation in generations:
            for kind in ALIKE[dtype]:
                path = EFFICIENCY / generation / f"{operator}.{kind}.csv"
                if path.is_file():
                    return surface_of(read_table(path))
        return None

    return surface


def surface_of(table: Table) -> Surface:
    """Return a table's surface."""
    return Surface(table, peak_of(load_gpu(table.facts.gpu), table.facts.dtype))


@lru_cache(maxsize=256)
def _surface(place: str, operator: str, dtype: str) -> Surface | None:
    path = table_path(place, operator, dtype)
    if path is None:
        return None
    return surface_of(read_table(path))


def _tables_of(gpu_name: str, backend: str) -> dict[str, str]:
    """Return the operators of a GPU that were measured with a backend."""
    paths = sorted((MEASURED / gpu_name).glob("*.csv"))
    found = {path.name.split(".")[0] for path in paths if path.name.split(".")[1] == backend}
    if not found:
        known = sorted({path.name.split(".")[1] for path in paths}) or ["none"]
        raise ValueError(
            f"costs.backend: nothing of {backend!r} was measured on {gpu_name}; "
            f"there is {', '.join(known)}"
        )
    return dict.fromkeys(found, f"{gpu_name}/{backend}")
