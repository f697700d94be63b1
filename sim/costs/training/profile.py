"""Load the constants of training, fitted to published steps: the file profiles/measured/training.toml.

`benchmarks/fit_training.py` fits them and writes the profile. `streamrl.sim.costs.training.layer`
explains the terms that use them.
"""

from __future__ import annotations

import datetime
import functools
from pathlib import Path

import msgspec

from streamrl.hardware.profile_table import ProfileTable, check_positive
from streamrl.hardware.profiles import PROFILES
from streamrl.hardware.tiers import Tier
from streamrl.runfile.reading import read_toml

PATH = PROFILES / "measured" / "training.toml"


class Constants(ProfileTable, frozen=True, kw_only=True):
    """The fitted constants."""

    activation_traffic: float
    """Bytes through memory in a forward pass for each byte of activations that it keeps, with
    fused kernels.
    """
    logit_traffic: float
    """Bytes through memory for each logit in a forward pass, with fused kernels."""
    uncompiled_traffic: float
    """Traffic relative to fused kernels if elementwise operations are not fused."""
    eager_traffic: float
    """Traffic relative to fused kernels if a model's modules run one operation after the other."""
    attention: float
    """Seconds of attention in training for each second of the same kernel in inference."""
    permutation_traffic: float
    """Bytes through memory for each byte of tokens that are sorted by expert and back."""
    unfused_traffic: float
    """Additional bytes if the permutation is a separate operation."""
    routing_time: float
    """Seconds for which hosts and GPUs wait for token counts, per layer with experts and
    direction.
    """
    imbalance: float
    """Standard deviation of tokens over experts, relative to their mean, with free choice of the
    router.
    """
    trade: float
    """Seconds of an all-to-all of expert ranks for each second that its bytes take at the
    datasheet's bandwidth.
    """
    trade_overlap: float
    """Share of the all-to-all that is hidden behind another micro-batch, if the trainer overlaps
    them.
    """
    reduce: float
    """Seconds of collectives of tensor ranks for each second at the datasheet's bandwidth."""
    collective: float
    """Seconds of collectives of data-parallel ranks for each second at the datasheet's bandwidth."""
    gather_overlap: float
    """Share of ZeRO 3's gathers and scatters that is hidden behind computing, if that lasts long
    enough.
    """
    step_time: float
    """Seconds of a step in addition to passes, collectives and the optimizer's traffic."""

    def __post_init__(self) -> None:
        check_positive(self)


class GemmRate(ProfileTable, frozen=True, kw_only=True):
    """Rate of 16-bit matrix products on one kind of GPU.

    (m, k) times (k, n) runs at `flops` / (1 + tokens / m + columns / n + rows / k).
    """

    flops: float
    """FLOP/s of an infinitely large product."""
    tokens: float
    columns: float
    rows: float
    tier: Tier
    """composed: training was measured on GPUs of this silicon; roofline: on none like it."""
    source: str

    def __post_init__(self) -> None:
        check_positive(self)


class ExpertRate(ProfileTable, frozen=True, kw_only=True):
    """Rate of grouped products of experts on one kind of GPU.

    With m tokens of each expert and w channels of it on a GPU: `flops` / (1 + tokens / m + width /
    w).
    """

    flops: float
    tokens: float
    width: float
    tier: Tier
    source: str

    def __post_init__(self) -> None:
        check_positive(self)


class Errors(ProfileTable, frozen=True, kw_only=True):
    """Relative errors of step times, on shapes that were left out of the fit."""

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
    """Seconds of llm-foundry's Triton attention relative to the kernel table, by GPU."""
    without: dict[str, Constants]
    """Constants of a fit that left a model out, by its name among published steps."""
    triton_without: dict[str, dict[str, float]]
    """`triton_attention` of a fit that left a model out, by the model's name."""
    held_out: dict[str, Errors]
    """Errors by kind of model: dense, mixture."""
    gemm: dict[str, GemmRate]
    """Rates by name of a GPU in profiles/gpus."""
    experts: dict[str, ExpertRate]
    """Rates by name of a GPU in profiles/gpus."""
    gemm_fp8: dict[str, GemmRate]
    """Like `gemm` in fp8, for GPUs with measured fp8 products."""
    experts_fp8: dict[str, ExpertRate]


@functools.cache
def load_training_profile(path: Path = PATH) -> TrainingProfile:
    """Read the profile; `ValueError` names the file and the key of an error."""
    try:
        return msgspec.convert(read_toml(path), TrainingProfile)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
