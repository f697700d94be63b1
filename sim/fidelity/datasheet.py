"""Derive the efficiencies of GPU generations from measured GPUs, and predict measured GPUs that are left out.

A GPU without tables takes as long as measured GPUs of its generation, in proportion to its datasheet:

    seconds = launch + (measured seconds - launch of the measured GPU) x own roofline / its roofline

A launch is the time of an operator's smallest shapes. It does not shrink with a faster GPU. The
typical table of a generation is the geometric mean of its GPUs, each scaled to the peak of the first.
`benchmarks/derive_efficiency.py` writes these tables to profiles/efficiency.

A measured GPU is left out in two ways:

- relative: other GPUs of its generation predict it, like a new product of known silicon;
- stranger: only GPUs of other generations predict it, like a new generation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from math import inf
from typing import Literal, get_args

import msgspec
import numpy as np
from msgspec.structs import replace

from streamrl.hardware.interpolation import Surface
from streamrl.hardware.operator_tables import UNITS, Floats, Peak, Table, read_table
from streamrl.hardware.profiles import PROFILES, load_gpu, load_model
from streamrl.runfile.cluster_config import ModelConfig
from streamrl.sim.costs.curves import compose_decode
from streamrl.sim.costs.inference import Shard
from streamrl.sim.costs.kernels import ALIKE, Kernels, Typical, peak_of, surface_of, table_path
from streamrl.sim.costs.overheads import load_engine
from streamrl.sim.costs.training.profile import load_training_profile
from streamrl.sim.costs.training.training import donors_of, rates_from, rates_of
from streamrl.sim.fidelity.training_steps import (
    PublishedStep,
    is_fitted,
    read_steps,
    shape_of,
    step_time,
)

Kinship = Literal["relative", "stranger"]
KINSHIPS: tuple[Kinship, ...] = get_args(Kinship)

OPERATORS = {
    "gemm": ("bfloat16", "fp8", "nvfp4"),
    "quantise": ("fp8",),
    "decode_attention": ("bfloat16", "fp8"),
    "latent_decode_attention": ("bfloat16",),
    "prefill_attention": ("bfloat16",),
    "linear_decode": ("bfloat16",),
    "linear_prefill": ("bfloat16",),
    "kimi_decode": ("bfloat16",),
    "kimi_prefill": ("bfloat16",),
    "moe": ("bfloat16", "fp8", "nvfp4", "int4"),
    "all_reduce": ("bfloat16",),
    "all_gather": ("bfloat16",),
    "all_to_all": ("bfloat16",),
    "reduce_scatter": ("bfloat16",),
}
"""Operators with typical tables, and their dtypes."""
FEW_SHAPES = ("h20", "h800")
"""GPUs that were measured at few shapes, with kernels of alibaba/InferSim. They count only for
operators that no other GPU of the generation has.
"""
NEAREST = {
    "ampere": ("hopper",),
    "hopper": ("ampere", "blackwell"),
    "blackwell": ("hopper",),
    "ada": ("blackwell-rtx",),
    "blackwell-rtx": ("ada",),
}
"""Nearest other generations: neighbours in time with the same kind of memory."""
LAUNCH = 1.0
"""Percentile of an operator's seconds that counts as its launch."""


# Typical tables ---------------------------------------------------------------------------------------


@cache
def measured_gpus() -> tuple[str, ...]:
    """Return the names of the GPUs that have tables of their own."""
    names = (path.stem for path in sorted((PROFILES / "gpus").glob("*.toml")))
    return tuple(
        name
        for name in names
        if any(place.startswith(f"{name}/") for place in load_gpu(name).tables.values())
    )


@cache
def own_table(gpu: str, operator: str, dtype: str) -> Table | None:
    """Return the table of an operator that was measured on this GPU itself; None if there is none."""
    tables = load_gpu(gpu).tables
    place = tables.get(f"{operator}.{dtype}") or tables.get(operator, "")
    path = table_path(place, operator, dtype) if place.startswith(f"{gpu}/") else None
    return None if path is None else read_table(path)


@cache
def donors(
    generations: tuple[str, ...], operator: str, dtype: str, left_out: str = ""
) -> tuple[Table, ...]:
    """Return an operator's tables on the measured GPUs of some generations, the largest first, without one GPU."""
    tables = {
        gpu: table
        for gpu in measured_gpus()
        if gpu != left_out and load_gpu(gpu).generation in generations
        if (table := own_table(gpu, operator, dtype)) is not None
    }
    many = [table for gpu, table in tables.items() if gpu not in FEW_SHAPES]
    return tuple(sorted(many or tables.values(), key=lambda table: -table.seconds.size))


def launch_of(table: Table) -> float:
    """Return the seconds of an operator with next to no work."""
    return float(np.nanpercentile(table.seconds, LAUNCH))


def typical_table(tables: Sequence[Table], generation: str) -> Table:
    """Return the geometric mean of an operator's tables, at the shapes and the peak of the first one."""
    first, facts = tables[0], [table.facts for table in tables]
    peak = peak_of(load_gpu(first.facts.gpu), first.facts.dtype)
    logarithms = [np.log(seconds_at(_scalable(table), first, peak)) for table in tables]
    seconds = np.where(np.isnan(first.seconds), np.nan, np.exp(np.mean(logarithms, axis=0)))
    launch = np.exp(np.mean([np.log(launch_of(table)) for table in tables]))
    return replace_facts(
        Table(first.facts, first.keys, first.rows, first.columns, seconds),
        generation=generation,
        device=f"{generation} ({', '.join(fact.gpu for fact in facts)})",
        version=" and ".join(dict.fromkeys(fact.version for fact in facts)),
        source="; ".join(dict.fromkeys(fact.source for fact in facts)),
        licence=" and ".join(dict.fromkeys(fact.licence for fact in facts)),
        launch=float(launch) / UNITS[first.facts.unit],
    )


@cache
def _surface_of_donor(gpu: str, operator: str, dtype: str) -> Surface:
    """Return the surface of a measured table whose launch does not depend on the peak."""
    table = own_table(gpu, operator, dtype)
    assert table is not None, "it is the table of a donor"
    return surface_of(replace_facts(table, launch=launch_of(table) / UNITS[table.facts.unit]))


def _scalable(table: Table) -> Surface:
    return _surface_of_donor(table.facts.gpu, table.facts.operator, table.facts.dtype)


def replace_facts(table: Table, **facts: str | float) -> Table:
    """Return a table with some of its facts changed."""
    changed = replace(table.facts, **facts)
    return Table(changed, table.keys, table.rows, table.columns, table.seconds)


def seconds_at(surface: Surface, table: Table, peak: Peak) -> Floats:
    """Return a surface's seconds at the shapes of a table, on a GPU with this peak: (rows, columns)."""
    shapes = (dict(zip(table.keys, row, strict=True)) for row in table.rows.tolist())
    return np.array([surface.seconds(shape, table.columns, peak)[0] for shape in shapes])


@cache
def typical_without(gpu: str, kinship: Kinship) -> Typical:
    """Return the typical surfaces for a measured GPU that is left out."""

    @cache
    def surface(operator: str, dtype: str) -> Surface | None:
        for kind in ALIKE[dtype]:
            tables = donors_for(gpu, kinship, operator, kind)
            if tables:
                return surface_of(typical_table(tables, kinship))
        return None

    return surface


def donors_for(gpu: str, kinship: Kinship, operator: str, dtype: str) -> tuple[Table, ...]:
    """Return the tables that predict a measured GPU that is left out; empty if there is none of this kinship."""
    return donors(_kin(gpu, kinship), operator, dtype, gpu)


def _kin(gpu: str, kinship: Kinship) -> tuple[str, ...]:
    """Return the generations that predict a measured GPU that is left out."""
    generation = load_gpu(gpu).generation
    assert generation is not None, "measured GPUs have one"
    return (generation,) if kinship == "relative" else NEAREST[generation]


# Errors of GPUs that are left out ---------------------------------------------------------------------


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted over measured seconds of an operator, or of whole steps, for GPUs that are left out."""

    kinship: Kinship
    name: str
    """An operator with its dtype, or a kind of step."""
    ratios: dict[str, list[float]]
    """By GPU."""

    @property
    def all_ratios(self) -> Floats:
        """Return the ratios of all GPUs."""
        return np.concatenate([np.array(found) for found in self.ratios.values()])

    def error(self, percentile: float) -> float:
        """Return a percentile of the absolute relative errors."""
        return float(np.percentile(np.abs(self.all_ratios - 1), percentile))

    @property
    def bias(self) -> float:
        """Return the median of the signed errors."""
        return float(np.median(self.all_ratios) - 1)


def operators_left_out() -> Iterator[LeftOut]:
    """Yield the errors of every operator that a GPU of this kinship has."""
    for kinship, (operator, dtypes) in product(KINSHIPS, OPERATORS.items()):
        found = (operator_left_out(kinship, operator, dtype) for dtype in dtypes)
        yield from (each for each in found if each.ratios)


def operator_left_out(kinship: Kinship, operator: str, dtype: str) -> LeftOut:
    """Return the errors of an operator's cells, predicted from other GPUs."""
    found = {
        gpu: ratios
        for gpu in measured_gpus()
        if (ratios := _ratios(gpu, kinship, operator, dtype)) is not None
    }
    return LeftOut(kinship=kinship, name=f"{operator} in {dtype}", ratios=found)


def _ratios(gpu: str, kinship: Kinship, operator: str, dtype: str) -> list[float] | None:
    own, tables = own_table(gpu, operator, dtype), donors_for(gpu, kinship, operator, dtype)
    if own is None or not tables or gpu in FEW_SHAPES:
        return None
    surface = surface_of(typical_table(tables, kinship))
    predicted = seconds_at(surface, own, peak_of(load_gpu(gpu), own.facts.dtype))
    ratios = (predicted / own.seconds)[~np.isnan(own.seconds)]
    found: list[float] = ratios.tolist()
    return found


ENGINE = "vllm-0.11"
STEPS = (
    ("qwen3-8b", 1),
    ("qwen2.5-32b", 4),
    ("llama-3.1-70b", 8),
    ("qwen3-30b-a3b", 2),
    ("qwen3-235b-a22b", 8),
)
"""Models and tensor-parallel degrees of the decode steps."""
BATCHES, CONTEXTS = (1, 16, 64, 256), (1024.0, 4096.0, 16384.0)


def decode_left_out() -> Iterator[LeftOut]:
    """Yield the errors of whole decode steps, relative to those from the GPU's own tables."""
    for kinship in KINSHIPS:
        found: dict[str, list[float]] = {}
        for gpu in measured_gpus():
            if _is_whole(gpu) and donors_for(gpu, kinship, "moe", "bfloat16"):
                found[gpu] = list(_decode_ratios(gpu, typical_without(gpu, kinship)))
        yield LeftOut(kinship=kinship, name="decode steps", ratios=found)


def _is_whole(gpu: str) -> bool:
    """Return whether all operators of a decode step were measured on this GPU."""
    needed = ("gemm", "decode_attention", "moe", "all_reduce")
    return all(own_table(gpu, operator, "bfloat16") is not None for operator in needed)


def _decode_ratios(gpu: str, typical: Typical) -> Iterator[float]:
    for name, degree in STEPS:
        own, predicted = (
            compose_decode(
                Shard(
                    load_model(ModelConfig(name=name)),
                    Kernels(gpu, "bfloat16", typical=one),
                    degree,
                    engine=load_engine(ENGINE),
                ),
                max(BATCHES),
                2 * max(CONTEXTS),
                inf,
            )
            for one in (None, typical)
        )
        for batch, context in product(BATCHES, CONTEXTS):
            tokens = batch * context
            yield predicted.step_time(batch, tokens) / own.step_time(batch, tokens)


def training_left_out() -> Iterator[LeftOut]:
    """Yield the errors of published training steps, relative to the published seconds.

    Rates of products and attention come from other GPUs. The constants of training stay, because they
    count traffic and waiting, which no GPU has for itself.
    """
    for kinship in KINSHIPS:
        found: dict[str, list[float]] = {}
        for step in (step for step in read_steps() if is_fitted(step)):
            gpu = step.gpu.removesuffix("-40")
            if (seconds := _step_from_others(step, gpu, kinship)) is not None:
                found.setdefault(gpu, []).append(seconds / step.seconds)
        yield LeftOut(kinship=kinship, name="training steps", ratios=found)


def _step_from_others(step: PublishedStep, gpu: str, kinship: Kinship) -> float | None:
    """Return a step's seconds with the rates of other GPUs; None if there is no GPU of this kinship."""
    profile = load_training_profile()
    rates = rates_of(profile, step.dtype)
    names = donors_of(rates, _kin(gpu, kinship), gpu)
    if not names:
        return None
    factor = _attention_factor(step.model, step.tensor_parallel, step.tokens, gpu, kinship)
    constants = replace(profile.constants, attention=profile.constants.attention * factor)
    triton = {name: value * factor for name, value in profile.triton_attention.items()}
    return step_time(step, rates_from(rates, names, gpu, step.dtype), constants, triton)


@cache
def _attention_factor(model: str, degree: int, tokens: int, gpu: str, kinship: Kinship) -> float:
    """Return the seconds of prefill attention from other GPUs, over those of the GPU's own table."""
    shape, contexts = shape_of(model), np.array([float(tokens)])
    own, others = (
        Kernels(gpu, "bfloat16", typical=typical)
        .time(
            "prefill_attention",
            contexts,
            heads=shape.num_heads / degree,
            kv_heads=max(1.0, shape.num_kv_heads / degree),
            batch=1.0,
        )
        .seconds[0]
        for typical in (None, typical_without(gpu, kinship))
    )
    return float(others / own)
