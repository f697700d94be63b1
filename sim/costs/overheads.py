"""An inference engine and its version: what a decode step takes beside its operators, and which of them it uses.

| term       | seconds of                                                                           |
|------------|--------------------------------------------------------------------------------------|
| `step`     | each step: scheduling, inputs, hand-over                                             |
| `layer`    | each layer: gaps between kernels, elementwise kernels that no table has              |
| `launch`   | each layer's launches by the host, without CUDA graphs: kernels wait for them        |
| `request`  | each running rollout: scheduling, detokenising, handing over                         |
| `logit`    | each running rollout and word of the vocabulary: sampling, which sorts them          |
| `slowdown` | (a factor) the decode kernels of this version, relative to those of the tables       |

They are fitted to published steps by `benchmarks/fit_decode.py`, one file of `profiles/engines/` each. Which kernels an
engine uses is no fit: its code says so, or its release. Its fp8 has no constant of its own: rows in fp8 of vLLM 0.11 are
predicted from measured kernels and from what its code computes beside what is asked for.
"""

from __future__ import annotations

import datetime
from functools import cache

import msgspec

from streamrl.hardware.profile_table import ProfileTable, check_positive
from streamrl.hardware.profiles import PROFILES, check_engine, known_engines, load_gpu, read_profile
from streamrl.runfile.config import CostsConfig
from streamrl.runfile.units import Duration

TERMS = ("step", "layer", "launch", "request", "logit")
"""Those that are durations; 0 where an engine has none."""


class Overheads(ProfileTable, frozen=True, kw_only=True):
    """Seconds of a decode step beside its operators, by what they grow with."""

    step: Duration = Duration(0)
    layer: Duration = Duration(0)
    launch: Duration = Duration(0)
    request: Duration = Duration(0)
    logit: Duration = Duration(0)
    slowdown: float = 1.0
    reads_cache_per_head: bool = False
    """Whether query heads that share keys and values take as long as if each had its own: kernels of 2023 that read
    them for each head (TensorRT-LLM issue 407)."""
    all_reduce: str | None = None
    """Backend of its all-reduces; the GPU's choice where absent. vLLM had but NCCL's until 2024 (pull 2192)."""

    narrow_attention: str | None = None
    """Backend of its decode attention over a narrow cache, on GPUs where that was measured; the GPU's choice where absent."""
    quantises_apart: bool = False
    """Whether kernels of their own bring inputs of fp8 products to fp8, each row by its own scale, not those before them."""
    pads_experts: bool = False
    """Whether grouped fp8 experts go in padded blocks of 128 rows (`streamrl.sim.costs.experts`)."""
    fuses_shared_experts: bool = False
    """Whether shared experts are computed as one more routed expert, as SGLang's deepseek_v2.py does where GPUs slice them."""

    def __post_init__(self) -> None:
        check_positive(self, TERMS)


class HeldOut(ProfileTable, frozen=True, kw_only=True):
    """Relative errors of rows predicted by constants that were fitted without their shape."""

    median: float
    """Of absolute errors."""
    p90: float
    bias: float
    """Median of the signed errors."""


class ServingEngine(ProfileTable, frozen=True, kw_only=True):
    """One inference engine at one version."""

    name: str
    source: str
    licence: str
    date: datetime.date
    fitted_on: str
    """Which published rows, and which constants were taken from elsewhere."""
    gpus: list[str]
    """On which rows were measured, six or more."""
    rows: int
    constants: Overheads
    spread: dict[str, tuple[float, float]] = msgspec.field(default_factory=dict)
    """Least and greatest value of each constant, over the fits that leave one shape out: seconds, or a factor."""
    held_out: HeldOut | None = None
    """Absent where one shape is all there is."""
    fp8_gpus: list[str] = msgspec.field(default_factory=list)
    """On which rows in fp8 were measured, six or more, where constants are fitted to others."""
    held_out_fp8: HeldOut | None = None
    """Errors of those rows."""
    left_out: dict[str, Overheads] = msgspec.field(default_factory=dict)
    """Constants fitted without the rows of a shape, by its name in profiles/models."""


@cache
def decode_errors(engine: str, gpu: str, *, in_fp8: bool = False) -> HeldOut | None:
    """Return the errors of decode steps on a GPU, on shapes left out: None where nobody checked.

    In fp8 of the engine itself alone, as what it computes beside what it is asked for is its own.

    Of the engine itself where it was measured on such GPUs, otherwise the largest of those that were: overheads are
    an engine's own, but what kernel tables miss is the GPU's.
    """
    alike = {gpu, load_gpu(gpu).tables.get("gemm", gpu).partition("/")[0]}
    own = load_engine(engine)
    if in_fp8:
        return own.held_out_fp8 if alike & set(own.fp8_gpus) else None
    others = (load_engine(name) for name in known_engines())
    checked = [own] if alike & set(own.gpus) else [one for one in others if alike & set(one.gpus)]
    found = [one.held_out for one in checked if one.held_out]
    return max(found, key=lambda errors: errors.median, default=None)


@cache
def load_engine(name: str = CostsConfig().engine) -> ServingEngine:
    """Read an engine by its file name in profiles/engines; `RunError` with all names where there is none."""
    check_engine(name)
    return read_profile(PROFILES / "engines" / f"{name}.toml", ServingEngine)
