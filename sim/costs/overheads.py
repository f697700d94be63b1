"""Load an inference engine's constants: its overheads per decode step, and the operators that it uses.

| term            | seconds of                                                                      |
|-----------------|---------------------------------------------------------------------------------|
| `step`          | each step: scheduling, inputs, outputs                                          |
| `layer`         | each layer: gaps between kernels, elementwise kernels that have no table        |
| `launch`        | each layer's launches by the host, without CUDA graphs: kernels wait for them   |
| `request`       | each running rollout: scheduling, detokenising, returning results               |
| `logit`         | each running rollout and word of the vocabulary: sampling, which sorts them     |
| `log_prob_step` | each step that returns the log-probability of every token                       |
| `log_prob`      | each running rollout in such a step: slicing, sending and wrapping its value    |
| `slowdown`      | (a factor) the decode kernels of this version, relative to those of the tables  |

`benchmarks/fit_decode.py` fits them to published steps, and `profiles/engines/` has one file per
engine. The choice of kernels is not fitted; it comes from the engine's code or release notes. fp8
has no constant of its own. fp8 steps of vLLM 0.11 are predicted from measured kernels and from the
extra work in its code. The two terms of log-probabilities come from published throughput with and
without them, on models so small that the host limits the step. They add to the step: RL frameworks
launch the next step after the results of the last one.
"""

from __future__ import annotations

import datetime
from functools import cache

import msgspec

from streamrl.hardware.profile_table import ProfileTable, check_positive
from streamrl.hardware.profiles import PROFILES, check_engine, known_engines, load_gpu, read_profile
from streamrl.runfile.config import CostsConfig
from streamrl.runfile.units import Duration

TERMS = ("step", "layer", "launch", "request", "logit", "log_prob", "log_prob_step")
"""Constants that are durations; 0 if an engine has none."""


class Overheads(ProfileTable, frozen=True, kw_only=True):
    """Overheads of a decode step, by the quantity with which they grow."""

    step: Duration = Duration(0)
    layer: Duration = Duration(0)
    launch: Duration = Duration(0)
    request: Duration = Duration(0)
    logit: Duration = Duration(0)
    log_prob: Duration = Duration(0)
    log_prob_step: Duration = Duration(0)
    slowdown: float = 1.0
    reads_cache_per_head: bool = False
    """Whether attention reads shared keys and values once per query head, as kernels of 2023 did
    (TensorRT-LLM issue 407).
    """
    all_reduce: str | None = None
    """Backend of its all-reduces; None for the GPU's default. vLLM had only NCCL until 2024 (pull
    2192).
    """

    narrow_attention: str | None = None
    """Backend of its decode attention over a narrow cache, on GPUs where that was measured; None
    for the GPU's default.
    """
    quantises_apart: bool = False
    """Whether separate kernels quantise the inputs of fp8 products, each row with its own scale."""
    pads_experts: tuple[str, ...] = ()
    """Generations of GPUs on which grouped fp8 experts use padded blocks of 128 rows
    (`streamrl.sim.costs.experts`).
    """
    fuses_shared_experts: bool = False
    """Whether shared experts count as one more routed expert, as in SGLang's deepseek_v2.py if
    GPUs slice them.
    """

    def __post_init__(self) -> None:
        check_positive(self, TERMS)

    def returning_log_probs(self) -> Overheads:
        """Return the overheads of a step that returns the log-probability of every token."""
        return msgspec.structs.replace(
            self,
            step=Duration(self.step + self.log_prob_step),
            request=Duration(self.request + self.log_prob),
        )


class HeldOut(ProfileTable, frozen=True, kw_only=True):
    """Relative errors of steps predicted by constants that were fitted without their model shape."""

    median: float
    """Median of the absolute errors."""
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
    """The published rows, and the constants that come from elsewhere."""
    gpus: list[str]
    """GPUs with six or more measured rows."""
    rows: int
    constants: Overheads
    spread: dict[str, tuple[float, float]] = msgspec.field(default_factory=dict)
    """Least and greatest value of each constant over leave-one-shape-out fits: seconds, or a
    factor.
    """
    held_out: HeldOut | None = None
    """None if there is only one shape."""
    fp8_gpus: list[str] = msgspec.field(default_factory=list)
    """GPUs with six or more measured fp8 rows, if constants are fitted to other rows."""
    held_out_fp8: HeldOut | None = None
    """Errors of those rows."""
    left_out: dict[str, Overheads] = msgspec.field(default_factory=dict)
    """Constants fitted without the rows of a shape, by its name in profiles/models."""

    def returning_log_probs(self) -> ServingEngine:
        """Return this engine if it returns the log-probability of every token."""
        constants = self.constants.returning_log_probs()
        return msgspec.structs.replace(self, constants=constants)


@cache
def decode_errors(engine: str, gpu: str, *, in_fp8: bool = False) -> HeldOut | None:
    """Return the held-out errors of decode steps on a GPU; None if they were not checked.

    If the engine was measured on such GPUs, these are its own errors. Otherwise they are the
    largest among the engines that were, because errors of kernel tables depend on the GPU. For fp8
    only the engine's own errors are used, because its extra work differs from that of other
    engines.
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
    """Read an engine by its file name in profiles/engines; if it does not exist, `RunError` lists all names."""
    check_engine(name)
    return read_profile(PROFILES / "engines" / f"{name}.toml", ServingEngine)
