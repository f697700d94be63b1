"""Published training steps: what the shipped constants make of them, and of models that they had not seen."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType

import msgspec
import numpy as np
import pytest

from streamrl.hardware.profiles import load_gpu
from streamrl.sim.costs.training.profile import Constants, load_training_profile
from streamrl.sim.costs.training.training import Rates
from streamrl.sim.fidelity.published_rows import Row
from streamrl.sim.fidelity.training_steps import (
    PublishedStep,
    even_step_time,
    is_blackwell,
    is_fitted,
    read_steps,
    shape_of,
    step_time,
    training_rows,
)

ROOT = Path(__file__).parent.parent
DATA = Path(__file__).parents[2] / "shared" / "data"
FIT = load_training_profile()
RATES = Rates(FIT.gemm, FIT.experts)


@cache
def rows() -> list[tuple[PublishedStep, Row]]:
    return list(zip(read_steps(), training_rows(), strict=True))


def errors(kind: str, *, plain: bool = True) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return the errors on models left out, of one kind of model."""
    return np.array(
        [
            row.error
            for step, row in rows()
            if is_fitted(step) == plain
            and (kind == "dense") == (shape_of(step.model).experts is None)
        ]
    )


# Errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_the_profile_claims_the_errors_that_its_own_constants_make_on_models_left_out(
    kind: str,
) -> None:
    found, claimed = errors(kind), FIT.held_out[kind]
    assert len(found) == claimed.rows
    # the fit has every micro-batch in one closed form, the schedule has each by itself, with what stages send
    assert np.median(np.abs(found)) == pytest.approx(claimed.median, abs=3e-3)
    assert np.median(found) == pytest.approx(claimed.bias, abs=1e-2)
    assert np.quantile(np.abs(found), 0.9) == pytest.approx(claimed.p90, abs=1e-2)


@pytest.mark.parametrize(("kind", "most"), [("dense", 0.10), ("mixture", 0.20)])
def test_steps_of_models_left_out_are_predicted_within_a_tenth_or_a_fifth(
    kind: str, most: float
) -> None:
    assert np.median(np.abs(errors(kind))) <= most


@pytest.mark.parametrize("gpu", ["h100", "a100", "a100-40"])
def test_no_gpu_is_predicted_badly_for_what_others_are_predicted_well(gpu: str) -> None:
    found = [abs(row.error) for step, row in rows() if step.gpu == gpu and is_fitted(step)]
    assert len(found) >= 10 and np.median(found) <= 0.15


def test_steps_on_blackwell_are_predicted_from_its_kernel_tables_alone() -> None:
    found = [(step, row) for step, row in rows() if is_blackwell(step)]
    assert not any(row.is_fitted for _, row in found)
    dense = [row.error for step, row in found if shape_of(step.model).experts is None]
    large = [row.error for step, row in found if step.model == "llama-3.1-405b"]
    dense = [error for error in dense if error not in large]
    plain = [row.error for step, row in found if step.model in ("deepseek-v3", "qwen3-235b-a22b")]
    assert (len(dense), len(plain)) == (5, 4)
    assert len(large) == 14 and np.median(np.abs(large)) < 0.05 and np.max(np.abs(large)) < 0.15
    assert np.max(np.abs(dense)) < 0.05 and np.max(np.abs(plain)) < 0.12
    assert np.median([abs(row.error) for _, row in found]) < 0.20  # most rows are of GPT-OSS


def test_every_model_with_plain_attention_is_left_out_once_and_no_other_was_fitted() -> None:
    assert set(FIT.without) == set(FIT.triton_without)
    assert set(FIT.without) == {step.model for step, _ in rows() if is_fitted(step)}
    for step, row in rows():
        assert row.is_fitted == is_fitted(step) == (row.left_out is not None)
    assert sum(is_fitted(step) for step, _ in rows()) == FIT.rows


def test_constants_lie_between_those_of_fits_that_leave_a_model_out() -> None:
    for name in Constants.__struct_fields__:
        values = [getattr(one, name) for one in FIT.without.values()]
        assert FIT.spread[name] == pytest.approx((min(values), max(values)), rel=1e-3)
        assert 0.5 * min(values) < getattr(FIT.constants, name) < 2 * max(values)


def test_the_closed_form_of_the_fit_is_the_schedule_but_for_what_stages_send() -> None:
    for step, _ in rows():
        seconds, even = (
            one(step, RATES, FIT.constants, FIT.triton_attention)
            for one in (step_time, even_step_time)
        )
        assert seconds == pytest.approx(even, rel=0.03 if step.pipeline_parallel > 1 else 1e-9)


def test_a_published_step_is_predicted_for_its_own_layout() -> None:
    step = next(step for step, _ in rows() if step.model == "mpt-70b" and step.gpu == "h100")
    half = msgspec.structs.replace(step, sequences=step.sequences // 2)
    eager = msgspec.structs.replace(step, kernels="eager")
    seconds, fewer, slower = (
        step_time(each, RATES, FIT.constants, FIT.triton_attention) for each in (step, half, eager)
    )
    assert fewer < seconds and slower != seconds


# Where the figures come from ----------------------------------------------------------------------


def script(name: str) -> ModuleType:
    """Return a script of benchmarks/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_published_table_is_what_its_sources_say() -> None:
    if not (DATA / "parallel_training").is_dir():
        pytest.skip("the published tables that it is derived from are not on this machine")
    found = script("derive_training").derived(DATA)
    assert len(found) == len(read_steps())
    for ours, theirs in zip(read_steps(), found, strict=True):
        rounded = {"seconds": ours.seconds, "peak_memory": ours.peak_memory}
        for key, value in rounded.items():
            assert (value or 0.0) == pytest.approx(getattr(theirs, key) or 0.0, rel=1e-4)
        assert msgspec.structs.replace(theirs, **rounded) == ours


def test_rates_of_products_and_experts_are_those_that_the_kernel_tables_give() -> None:
    fitting = script("fit_training")
    for gpu in FIT.gemm:
        for found, shipped in (
            (fitting.gemm_rate(gpu), FIT.gemm[gpu]),
            (fitting.expert_rate(gpu), FIT.experts[gpu]),
        ):
            for name in shipped.__struct_fields__:
                value = getattr(shipped, name)
                close = pytest.approx(value, rel=1e-3) if isinstance(value, float) else value
                assert getattr(found, name) == close, (gpu, name)


def test_published_steps_have_layouts_that_their_gpus_can_have() -> None:
    for step, _ in rows():
        assert step.sequences % (step.data_parallel * step.micro_batch) == 0, step
        ranks = step.data_parallel * step.context_parallel * step.tensor_parallel
        assert ranks % step.expert_parallel == 0, step
        assert load_gpu(step.gpu.removesuffix("-40")).flops["bfloat16"] > 0
        assert step.seconds > 0 and step.source
