"""The constants of training, fitted to published steps: the file profiles/measured/training.toml.

`benchmarks/fit_training.py` fits them and writes the profile; `streamrl.sim.costs.training.layer` says what each is for.
"""

from __future__ import annotations

import datetime
import functools
import tomllib
from pathlib import Path

import msgspec

from streamrl.hardware.profile_table import ProfileTable, check_positive
from streamrl.hardware.profiles import PROFILES
from streamrl.hardware.tiers import Tier

PATH = PROFILES / "measured" / "training.toml"


class Constants(ProfileTable, frozen=True, kw_only=True):
    """What the fit found."""

    activation_traffic: float
    """Bytes through memory in a forward pass for each byte of activations that it keeps, with fused kernels."""
    logit_traffic: float
    """Bytes through memory for each logit in a forward pass, with fused kernels."""
    uncompiled_traffic: float
    """Times that of fused kernels where elementwise operations are not fused."""
    eager_traffic: float
    """Times that of fused kernels where the modules of a model run one operation after the other."""
    attention: float
    """Seconds of attention in training for each second of the same kernel in inference."""
    permutation_traffic: float
    """Bytes through memory for each byte of tokens that are put in the order of their experts and back."""
    unfused_traffic: float
    """The same in addition, where permutation is an operation of its own."""
    routing_time: float
    """Seconds of a layer with experts and direction in which hosts and GPUs wait for token counts."""
    imbalance: float
    """Standard deviation of tokens over experts, relative to their mean, where the router chooses freely."""
    trade: float
    """Seconds of an all-to-all of expert ranks for each second that its bytes take at the datasheet's bandwidth."""
    trade_overlap: float
    """Share of that which is hidden behind another micro-batch, where the trainer overlaps them."""
    reduce: float
    """The same of collectives of tensor ranks."""
    collective: float
    """The same of collectives of data-parallel ranks."""
    gather_overlap: float
    """Share of what ZeRO 3 gathers and scatters that is hidden behind computing, where that lasts long enough."""
    step_time: float
    """Seconds of a step beside passes, collectives and the optimizer's traffic."""

    def __post_init__(self) -> None:
        check_positive(self)


class GemmRate(ProfileTable, frozen=True, kw_only=True):
    """How fast matrix products of 16 bits run on one kind of GPU.

    (m, k) times (k, n) runs at `flops` / (1 + tokens / m + columns / n + rows / k).
    """

    flops: float
    """FLOP/s of a product without end."""
    tokens: float
    columns: float
    rows: float
    tier: Tier
    """composed: training was measured on GPUs of this silicon; roofline: on none like it."""
    source: str

    def __post_init__(self) -> None:
        check_positive(self)


class ExpertRate(ProfileTable, frozen=True, kw_only=True):
    """How fast grouped products of experts run on one kind of GPU.

    With m tokens of each expert and w channels of it on a GPU: at `flops` / (1 + tokens / m + width / w).
    """

    flops: float
    tokens: float
    width: float
    tier: Tier
    source: str

    def __post_init__(self) -> None:
        check_positive(self)


class Errors(ProfileTable, frozen=True, kw_only=True):
    """Relative errors of the seconds of a step, on shapes the fit had not seen."""

    rows: int
    median: float
    p90: float
    bias: float


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
    """Least and largest value of each constant over fits that leave a shape out."""
    triton_attention: dict[str, float]
    """Seconds of the attention that llm-foundry's rows were measured with, times those of the kernel table, by GPU."""
    without: dict[str, Constants]
    """The constants of a fit that left a model out, by its name among published steps."""
    triton_without: dict[str, dict[str, float]]
    """`triton_attention` of a fit that left a model out, by the model's name."""
    held_out: dict[str, Errors]
    """By kind of model: dense, mixture."""
    gemm: dict[str, GemmRate]
    """By name of a GPU in profiles/gpus."""
    experts: dict[str, ExpertRate]
    """By name of a GPU in profiles/gpus."""
    gemm_fp8: dict[str, GemmRate]
    """As `gemm`, in fp8, of GPUs whose products were measured so."""
    experts_fp8: dict[str, ExpertRate]


@functools.cache
def load_training_profile(path: Path = PATH) -> TrainingProfile:
    """Read the profile; `ValueError` with file and key where something is wrong."""
    try:
        return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8-sig")), TrainingProfile)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
