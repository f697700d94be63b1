"""GPUs without tables: their seconds come from measured GPUs, and measured GPUs that are left out check them."""

from __future__ import annotations

from math import exp, log, sqrt
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from benchmarks.derive_efficiency import errors_text, table_text, thinned
from streamrl.hardware.efficiency import PATH, scaled_errors
from streamrl.hardware.profiles import load_gpu, load_model
from streamrl.hardware.step_errors import step_errors
from streamrl.hardware.tiers import Tier, datasheet_share
from streamrl.record.band import StepBasis, mixed_basis, model_error_of, scaled_spread
from streamrl.runfile.cluster_config import ModelConfig
from streamrl.sim.costs.inference import Shard
from streamrl.sim.costs.kernels import EFFICIENCY, Kernels
from streamrl.sim.costs.overheads import load_engine
from streamrl.sim.fidelity.datasheet import (
    KINSHIPS,
    NEAREST,
    OPERATORS,
    LeftOut,
    decode_left_out,
    donors,
    operator_left_out,
    training_left_out,
    typical_table,
)

DATASHEET = ("l4", "rtx-4090", "a6000", "mi300x", "mi325x", "mi355x", "tpu-v5p", "tpu-v6e")
MEDIAN = {
    ("gemm", "bfloat16"): (0.06, 0.14),
    ("gemm", "fp8"): (0.05, 0.21),
    ("decode_attention", "bfloat16"): (0.04, 0.14),
    ("prefill_attention", "bfloat16"): (0.13, 0.19),
    ("latent_decode_attention", "bfloat16"): (0.03, 0.22),
    ("moe", "bfloat16"): (0.03, 0.22),
    ("moe", "fp8"): (0.03, 0.36),
    ("all_reduce", "bfloat16"): (0.08, 0.37),
}
"""Most of the median error, with other GPUs of the generation and with other generations."""


@pytest.fixture(scope="module")
def steps() -> list[LeftOut]:
    """Errors of whole steps on GPUs that are left out."""
    return [*decode_left_out(), *training_left_out()]


def test_hidden_tables_of_measured_gpus_are_predicted_from_other_gpus() -> None:
    for (operator, dtype), bounds in MEDIAN.items():
        for kinship, most in zip(KINSHIPS, bounds, strict=True):
            assert operator_left_out(kinship, operator, dtype).error(50) <= most


def test_whole_steps_of_measured_gpus_are_predicted_from_other_gpus(steps: list[LeftOut]) -> None:
    found = {(each.kinship, each.name): each for each in steps}
    for key, median, p90 in (
        (("relative", "decode steps"), 0.03, 0.10),
        (("stranger", "decode steps"), 0.07, 0.32),
        (("relative", "training steps"), 0.07, 0.17),
        (("stranger", "training steps"), 0.09, 0.23),
    ):
        each = found[key]  # type: ignore[index]  # literals
        assert each.error(50) <= median and each.error(90) <= p90 and abs(each.bias) < 0.03


def test_the_committed_errors_are_those_of_the_method(steps: list[LeftOut]) -> None:
    assert PATH.read_text() == "\n".join(errors_text(steps)) + "\n"


@pytest.mark.parametrize("generation", sorted(NEAREST))
def test_the_committed_tables_are_those_of_the_method(generation: str) -> None:
    names = set()
    for operator, dtypes in OPERATORS.items():
        for dtype in dtypes:
            if tables := donors((generation,), operator, dtype):
                table = thinned(typical_table(tables, generation))
                names.add(f"{operator}.{table.facts.dtype}.csv")
                if operator in ("all_reduce", "moe", "quantise"):  # the others take seconds
                    path = EFFICIENCY / generation / f"{operator}.{table.facts.dtype}.csv"
                    assert path.read_text() == "\n".join(table_text(table)) + "\n"
    assert names == {path.name for path in (EFFICIENCY / generation).glob("*.csv")}


@pytest.mark.parametrize("gpu", DATASHEET)
def test_a_gpu_without_tables_takes_its_operators_from_another(gpu: str) -> None:
    kernels = Kernels(gpu, "bfloat16")
    assert load_gpu(gpu).is_scaled and kernels.is_composed
    found = kernels.time("gemm", np.array([1.0, 4096.0]), n=4096.0, k=4096.0)
    assert datasheet_share(found.provenance.shares) == 1.0
    assert found.sources[0].startswith(f"datasheet of {load_gpu(gpu).name}: gemm")


def test_a_faster_gpu_does_not_shorten_a_launch() -> None:
    tiny, one = {"n": 64.0, "k": 64.0}, np.ones(1)
    fast, slow = (Kernels(gpu, "bfloat16").time("gemm", one, **tiny) for gpu in ("mi355x", "l4"))
    assert 1.5e-6 < fast.seconds[0] < 4e-6
    assert slow.seconds[0] < 2 * fast.seconds[0]


def test_a_gpu_without_tables_has_the_overheads_of_its_engine() -> None:
    model, engine = load_model(ModelConfig(name="qwen3-8b")), load_engine("vllm-0.11")
    rollouts = np.array([1.0, 256.0])
    own, other = (
        Shard(model, Kernels(gpu, "bfloat16"), engine=engine).overhead(rollouts)
        for gpu in ("mi300x", "h200")
    )
    assert own.seconds.tolist() == other.seconds.tolist()


def test_a_datasheet_does_not_beat_a_table_by_more_than_bandwidth(steps: list[LeftOut]) -> None:
    decode = next(each for each in steps if each.kinship == "stranger")
    for gpu, ratios in decode.ratios.items():
        assert np.median(ratios) > 0.85, f"{gpu} looks faster than its tables say"


def test_the_band_of_scaled_seconds_is_the_error_on_hidden_tables() -> None:
    errors = scaled_errors()
    widest = log(1 + max(errors.decode.p90, errors.training.p90))
    assert scaled_spread() == pytest.approx(widest * 1.2816 / 1.645, rel=1e-3)
    known, scaled = (
        model_error_of(
            StepBasis(
                replicas={"generation": 1.0},
                trainer={},
                tiers={"generation": {tier: 1.0}},
                partition=("dense", "hopper"),
            ),
            float(tier == "scaled"),
        )
        for tier in get_args(Tier)[1:3]
    )
    factor = log(known.high) / step_errors().spread("generation", ["dense"])
    further = sqrt(log(scaled.high) ** 2 - log(known.high) ** 2) / factor
    assert further == pytest.approx(scaled_spread())
    assert scaled.note == "band of a guess: 100 % of the seconds are from datasheets"


def test_plans_that_compare_a_datasheet_with_tables_say_so() -> None:
    assert mixed_basis({"option 1": 1.0, "option 2": 0.97}) == ""
    text = mixed_basis({"option 1": 1.0, "option 2": 0.03})
    assert text.endswith("seconds from datasheets are 100 % of option 1 and 3 % of option 2")


def test_the_documentation_states_the_errors_of_whole_steps(steps: list[LeftOut]) -> None:
    text = (Path(__file__).parents[1] / "docs" / "costs.md").read_text()
    by_name: dict[str, list[str]] = {}
    for each in steps:
        errors = [f"{each.error(p):.1%}".replace("%", " %") for p in (50, 80, 90)]
        by_name.setdefault(each.name, []).extend(errors)
    for name, cells in by_name.items():
        assert f"| **whole {name}** | {' | '.join(cells)} |" in text
    assert f"a further spread of {exp(scaled_spread()) - 1:.0%}".replace("%", " %") in text
