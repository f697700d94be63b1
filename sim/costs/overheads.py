"""Load an inference engine's constants: its overheads per decode step, and the operators that it uses.

| term            | seconds of                                                                      |
|-----------------|---------------------------------------------------------------------------------|
| `step`          | each step: scheduling, inputs, outputs                                          |
| `layer`         | each layer: gaps between kernels, elementwise kernels that have no table        |
| `launch`        | each layer's launches by the host, without CUDA graphs: kernels wait for them   |
| `request`       | each running rollout: scheduling, detokenising, returning results               |
| `logit`         | each running rollout and word of the vocabulary: sorting (`top_p`, `top_k`)     |
| `log_prob_step` | each step that returns the log-probability of every token                       |
| `log_prob`      | each running rollout in such a step, in the engine's process: slicing, encoding |
| `log_prob_http` | the same behind an HTTP server, with its wrapping and JSON; instead of it       |
| `slowdown`      | (a factor) the decode kernels of this version, relative to those of the tables  |

`benchmarks/fit_decode.py` fits them to published steps, and `profiles/engines/` has one file per
engine. The choice of kernels is not fitted; it comes from the engine's code or release notes. fp8
has no constant of its own. fp8 steps of vLLM 0.11 are predicted from measured kernels and from the
extra work in its code. vLLM sorts logits only for `rollout.top_p` or `rollout.top_k` (0.10 to 0.17,
v1/sample/ops/topk_topp_sampler.py), and RL samples from all tokens. The two terms of
log-probabilities come from published throughput with and without them, on models so small that the
host limits the step. vLLM's were measured on one L20 with a model of 0.5B, behind its HTTP server
(pull request 57442). So its JSON is in `log_prob_http`. No publication says what remains for a framework that calls the
engine in its process: `log_prob` is an assumption. They add to the step: RL frameworks launch the next step after the
results of the last one.
"""

from __future__ import annotations

import datetime
from functools import cache
from typing import Literal

import msgspec

from streamrl.hardware.profile_table import ProfileTable, check_positive
from streamrl.hardware.profiles import PROFILES, check_engine, known_engines, load_gpu, read_profile
from streamrl.runfile.config import CostsConfig
from streamrl.runfile.units import Duration

TERMS = (
    "step",
    "layer",
    "launch",
    "request",
    "logit",
    "log_prob",
    "log_prob_http",
    "log_prob_step",
)
"""Constants that are durations; 0 if an engine has none."""
LogProbs = Literal["none", "in process", "over HTTP"]
"""How the log-probability of every token leaves the engine."""


class Overheads(ProfileTable, frozen=True, kw_only=True):
    """Overheads of a decode step, by the quantity with which they grow."""

    step: Duration = Duration(0)
    layer: Duration = Duration(0)
    launch: Duration = Duration(0)
    request: Duration = Duration(0)
    logit: Duration = Duration(0)
    log_prob: Duration = Duration(0)
    log_prob_http: Duration = Duration(0)
    log_prob_step: Duration = Duration(0)
    slowdown: float = 1.0
    reads_cache_per_head: bool = False
    """Whether attention reads shared keys and values once per query head, as kernels of 2023 did
    (TensorRT-LLM issue 407).
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

    spans_nodes: bool = False
    """Whether its own all-reduce works between the nodes of one NVLink domain. NCCL's is used otherwise."""
    composes_latent: bool = False
    """Whether the products around latent attention are single products of the engine, and not the
    whole module that was measured with TensorRT-LLM.
    """

    def __post_init__(self) -> None:
        check_positive(self, TERMS)

    def sampling_from_all(self) -> Overheads:
        """Return the overheads of a step that samples from all tokens, so that no logits are sorted."""
        return msgspec.structs.replace(self, logit=Duration(0))

    def returning(self, log_probs: LogProbs) -> Overheads:
        """Return the overheads of a step that returns the log-probability of every token, or of none."""
        if log_probs == "none":
            return self
        value = self.log_prob_http if log_probs == "over HTTP" else self.log_prob
        return msgspec.structs.replace(
            self,
            step=Duration(self.step + self.log_prob_step),
            request=Duration(self.request + value),
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
    mixes_prefill: bool = True
    """Whether prompts are prefilled in the steps of decoding requests, not in steps of their own."""
    kernels: dict[str, str] = msgspec.field(default_factory=dict)
    """Backend of the tables of its kernels, by operator or "OPERATOR.DTYPE", on GPUs that have them;
    others keep the GPU's default.
    """
    versions: list[str] = msgspec.field(default_factory=list)
    """Versions that the constants and kernels are of, by their beginning."""
    served: dict[str, HeldOut] = msgspec.field(default_factory=dict)
    """By GPU: errors of served points, to which nothing was fitted (`streamrl validate served`)."""
    other_versions: HeldOut | None = None
    """Errors of the published rows of neighbouring versions, predicted with these constants and kernels."""
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

    def is_of(self, version: str) -> bool:
        """Return whether the profile is of a version."""
        return any(f"{version}.".startswith(f"{start}.") for start in self.versions)

    def as_sampled(self, *, sorts: bool, log_probs: LogProbs) -> ServingEngine:
        """Return this engine with the overheads of what is asked of it.

        Args:
            sorts: whether it samples from the most likely tokens alone.
            log_probs: how it returns the log-probability of every token.
        """
        constants = self.constants if sorts else self.constants.sampling_from_all()
        return msgspec.structs.replace(self, constants=constants.returning(log_probs))


@cache
def decode_errors(
    engine: str, gpu: str, *, in_fp8: bool = False, version: str | None = None
) -> HeldOut | None:
    """Return the errors of decode steps on a GPU without a fit to them; None if they were not checked.

    If the engine was measured on such GPUs, these are its own errors. Otherwise they are the
    largest among the engines that were, because errors of kernel tables depend on the GPU. For fp8
    only the engine's own errors are used, because its extra work differs from that of other
    engines. A version that the profile is not of has at least the errors of neighbouring versions.
    """
    alike = {gpu, load_gpu(gpu).tables.get("gemm", gpu).partition("/")[0]}
    own = load_engine(engine)
    if in_fp8 and own.fp8_gpus:
        found = [own.held_out_fp8] if alike & set(own.fp8_gpus) else []
    else:
        others = [load_engine(name) for name in known_engines()] if not in_fp8 else []
        found = _of_gpus(own, alike) or [
            errors for one in others for errors in _of_gpus(one, alike)
        ]
    if version is not None and not own.is_of(version) and found:
        found.append(own.other_versions)
    return max(filter(None, found), key=lambda errors: errors.median, default=None)


def _of_gpus(engine: ServingEngine, gpus: set[str]) -> list[HeldOut | None]:
    """Return an engine's errors on any of some GPUs: of the rows that it was fitted to, else of served points."""
    if gpus & set(engine.gpus):
        return [engine.held_out]
    return [errors for gpu, errors in engine.served.items() if gpu in gpus]


@cache
def load_engine(name: str = CostsConfig().engine) -> ServingEngine:
    """Read an engine by its file name in profiles/engines; if it does not exist, `RunError` lists all names."""
    check_engine(name)
    return read_profile(PROFILES / "engines" / f"{name}.toml", ServingEngine)
