"""Experts in int4 that GPUs share out: measured where one GPU has them all, and checked against kernels that skip the others'."""

from __future__ import annotations

import numpy as np
import pytest

from streamrl.hardware.model_shape import Experts
from streamrl.sim.costs.experts import (
    dispatched_experts_time,
    experts_time,
    num_experts_read,
    skipping_time,
)
from streamrl.sim.costs.kernels import Kernels

KIMI, HIDDEN = Experts(num_experts=384, experts_per_token=8, intermediate_size=2048), 7168
DEEPSEEK = Experts(num_experts=256, experts_per_token=8, intermediate_size=2048)
TOKENS = np.array([1.0, 16, 256, 1024, 8192])
MARLIN = {
    ("h200", 2): (58.1, 486.5, 1551.0, 3074.1, 11511.0),
    ("h200", 8): (32.3, 145.4, 766.3, 1015.9, 3607.2),
    ("h200", 64): (32.5, 52.4, 177.8, 266.2, 1296.5),
}
"""Microseconds of SGLang 0.5.14 for Kimi K2's experts and `TOKENS`, by GPU and ranks, even shares of tokens: it skips what
other ranks have (PyPI aiconfigurator-core 0.12.0, Apache-2.0). No table of a profile has them."""


def kernels(gpu: str = "h200") -> Kernels:
    return Kernels(gpu, "bfloat16", kept="int4")


@pytest.mark.parametrize(("gpu", "ranks"), MARLIN)
def test_ranks_take_as_long_as_kernels_that_skip_experts_elsewhere(gpu: str, ranks: int) -> None:
    num_read = np.maximum(1.0, np.minimum(TOKENS * 8, 384) / ranks)
    found = skipping_time(kernels(gpu), TOKENS, KIMI, num_read, HIDDEN, ranks).seconds
    errors = found / (np.array(MARLIN[gpu, ranks]) * 1e-6) - 1
    assert np.abs(errors).max() < 0.35 and np.median(np.abs(errors)) < 0.2


def test_more_ranks_take_less_and_a_rank_more_than_its_share() -> None:
    def of(ranks: int) -> np.ndarray:
        return experts_time(kernels(), TOKENS, DEEPSEEK, HIDDEN, ranks, ranks).seconds

    alone = experts_time(kernels(), TOKENS, DEEPSEEK, HIDDEN, 1, 1).seconds
    seconds = [alone, *(of(ranks) for ranks in (2, 4, 8, 16, 32, 64))]
    assert (np.diff(seconds, axis=0) < 0).all()
    assert all((of(ranks) > alone / ranks).all() for ranks in (2, 8, 64))
    sliced = experts_time(kernels(), TOKENS, DEEPSEEK, HIDDEN, 8, 1).seconds
    assert of(8)[-1] == pytest.approx(sliced[-1], rel=0.2)


def test_a_gpu_that_is_sent_its_own_tokens_alone_skips_less() -> None:
    given, sent = (
        experts_time(kernels(), TOKENS, DEEPSEEK, HIDDEN, 64, 64).seconds,
        dispatched_experts_time(kernels(), TOKENS, DEEPSEEK, HIDDEN, 64).seconds,
    )
    assert (sent <= given).all() and sent[-1] < given[-1] / 2
    wide = dispatched_experts_time(
        Kernels("h200", "bfloat16"), TOKENS, DEEPSEEK, HIDDEN, 64
    ).seconds
    assert (sent < wide)[TOKENS <= 1024].all()  # above, Marlin computes slower than it reads


def test_seconds_of_ranks_are_composed_of_what_was_measured() -> None:
    num_read = num_experts_read(TOKENS, DEEPSEEK, 8)
    found = skipping_time(kernels(), TOKENS, DEEPSEEK, num_read, HIDDEN, 8)
    assert (found.unmeasured == 0).all()
    assert ["moe int4" in found.sources[0], "elsewhere" in found.sources[1]] == [True, True]
    shape = (kernels("a100"), TOKENS, DEEPSEEK, HIDDEN, 8, 8)
    assert any("roofline" in source for source in experts_time(*shape).sources)
