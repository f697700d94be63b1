"""Fit the constants of `streamrl.sim.costs.training` to published training steps, and write the profile.

    python benchmarks/fit_training.py

The rows are those of profiles/published/training.csv. `derive_training.py` lists the rows that are
left out, with reasons. Rates of matrix products and of experts come from kernel tables, never from
steps. The other constants are fitted to all shapes with plain attention on Ampere and Hopper, and every shape
has the same weight. Steps on Blackwell are compared alone. Then they are fitted again without each shape. The errors on the left-out shapes are the
profile's stated errors.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import exp, log

import numpy as np
from numpy.typing import NDArray

from streamrl.hardware.operator_tables import read_table
from streamrl.hardware.profiles import PROFILES
from streamrl.sim.costs.experts import BLOCK
from streamrl.sim.costs.training.profile import PATH, Constants, ExpertRate, GemmRate
from streamrl.sim.costs.training.training import Rates
from streamrl.sim.fidelity.training_steps import (
    PublishedStep,
    even_step_time,
    is_fitted,
    read_steps,
    shape_of,
)

Floats = NDArray[np.float64]

SOURCE = "profiles/published/training.csv"
LICENCE = "Apache-2.0, MIT and BSD-style, by row"
DATE = datetime.date(2026, 11, 22)
START = {
    "activation_traffic": 5.0,
    "logit_traffic": 8.0,
    "uncompiled_traffic": 1.8,
    "eager_traffic": 2.5,
    "attention": 1.0,
    "permutation_traffic": 2.0,
    "unfused_traffic": 4.0,
    "routing_time": 5e-4,
    "imbalance": 1.0,
    "trade": 1.2,
    "trade_overlap": 0.6,
    "reduce": 1.2,
    "collective": 1.2,
    "gather_overlap": 0.5,
    "step_time": 0.05,
    "triton_h100": 3.0,
    "triton_a100": 2.0,
}
"""Start values of the fit. A constant that no row depends on stays at its start value."""
SHARES = ("trade_overlap", "gather_overlap")
HUBER = 0.1
"""Relative error above which a row counts linearly: some published rows ran out of memory and
thrashed.
"""
PULL = 0.005
"""Weight of the squared distance of a constant's logarithm from its start value, against a squared
relative error.
"""
STEPS, FOLD_STEPS = 12, 5

BLACKWELL = ("b200", "b300", "gb200", "gb300")
"""GPUs with tables of their own whose training steps are compared, but never fitted."""
GEMM = {
    "a100": ("a100", "gemm.vllm.bfloat16", "composed", "A100"),
    "h100": ("h100", "gemm.vllm.bfloat16", "composed", "H100"),
    "h800": ("h100", "gemm.vllm.bfloat16", "composed", "H100, whose compute units the H800 has"),
    "h200": ("h200", "gemm.vllm.bfloat16", "composed", "H200"),
    **{gpu: (gpu, "gemm.vllm.bfloat16", "composed", gpu.upper()) for gpu in BLACKWELL},
    "h20": (
        "h20-3e",
        "gemm.sglang.float16",
        "roofline",
        "H20-3e, whose compute units the H20 has; no training was measured on either",
    ),
    "h20-3e": (
        "h20-3e",
        "gemm.sglang.float16",
        "roofline",
        "H20-3e; no training was measured on it",
    ),
}
"""By GPU: the GPU and file of the kernel table, the resulting tier, and the device that was
measured.
"""
GEMM_ROWS, GEMM_SIDE = 1024, 256
"""Least number of tokens, and least smaller side, of the products that rates are fitted to."""
EXPERTS = {
    "a100": ("a100", "composed", "A100"),
    "h100": ("h100", "composed", "H100"),
    "h800": ("h100", "composed", "H100, whose compute units the H800 has"),
    "h200": ("h200", "composed", "H200"),
    **{gpu: (gpu, "composed", gpu.upper()) for gpu in BLACKWELL},
    "h20": (None, "roofline", "no table of grouped products in 16 bits on H20"),
    "h20-3e": (None, "roofline", "no table of grouped products in 16 bits on H20-3e"),
}
GEMM_FP8 = {
    "h100": ("h100", "gemm.trtllm.fp8", "composed", "H100"),
    "h800": ("h100", "gemm.trtllm.fp8", "composed", "H100, whose compute units the H800 has"),
    "h200": ("h200", "gemm.trtllm.fp8", "composed", "H200"),
    **{gpu: (gpu, "gemm.trtllm.fp8", "composed", gpu.upper()) for gpu in BLACKWELL},
    "h20": ("h20", "gemm.deepgemm.fp8", "roofline", "H20; no training was measured on it"),
    "h20-3e": ("h20-3e", "gemm.sglang.fp8", "roofline", "H20-3e; no training was measured on it"),
}
"""The same as `GEMM`, for fp8. Transformer Engine multiplies with cuBLASLt and one scale a tensor, as
TensorRT-LLM does; vLLM has a scale for each token.
"""
EXPERTS_FP8 = {
    "h100": ("h800", "H800, whose compute units the H100 has"),
    "h800": ("h800", "H800"),
    "h200": ("h800", "H800, whose compute units the H200 has"),
    "h20": ("h20", "H20"),
    "h20-3e": ("h20", "H20, whose compute units the H20-3e has"),
}
"""By GPU: the GPU of the table of grouped fp8 products, and the device that was measured."""
EXPERT_TOKENS = 64
"""Least tokens per expert that rates of experts are fitted to."""


def main() -> None:
    """Fit, and write training.toml."""
    text = profile_text([step for step in read_steps() if is_fitted(step)])
    PATH.write_text(text)
    print(text)


# Rates from kernel tables -------------------------------------------------------------------------


def gemm_rate(gpu: str, tables: dict[str, tuple[str, str, str, str]] = GEMM) -> GemmRate:
    """Fit 1 / FLOP/s to a straight line in 1 / m, 1 / n and 1 / k: least squares of relative errors."""
    place, file, tier, device = tables[gpu]
    table = read_table(PROFILES / "measured" / place / f"{file}.csv")
    n, k = (table.rows[:, [table.keys.index(key)]] for key in ("n", "k"))
    m = np.array(list(table.columns), dtype=float)
    seconds = table.seconds
    sizes = np.broadcast_arrays(m, n, k)
    kept = np.isfinite(seconds) & (np.min(sizes[1:], axis=0) >= GEMM_SIDE) & (sizes[0] >= GEMM_ROWS)
    flops, *slower = _inverse_line(
        (seconds / (2 * m * n * k))[kept], [size[kept] for size in sizes]
    )
    tokens, columns, rows = slower
    return GemmRate(
        flops=flops,
        tokens=tokens,
        columns=columns,
        rows=rows,
        tier=tier,  # type: ignore[arg-type]  # a literal of the table above
        source=f"products of profiles/measured/{place}/{file}.csv, measured on {device}",
    )


def expert_rate(gpu: str) -> ExpertRate:
    """Fit the same to grouped products of whole experts, in 1 / tokens per expert and 1 / its channels.

    Without a table, return the GPU's own products, slowed down by the ratio of H100's experts to its products.
    """
    place, tier, device = EXPERTS[gpu]
    if place is None:
        known, gemm, own = expert_rate("h100"), gemm_rate("h100"), gemm_rate(gpu)
        return ExpertRate(
            flops=own.flops * known.flops / gemm.flops,
            tokens=known.tokens,
            width=known.width,
            tier=tier,  # type: ignore[arg-type]  # a literal of the table above
            source=f"{device}: as H100's, at the rate of its own products",
        )
    table = read_table(PROFILES / "measured" / place / "moe.vllm.bfloat16.csv")
    of = {key: table.rows[:, [i]] for i, key in enumerate(table.keys)}
    width = of["intermediate"] / of["tensor_parallel"]
    tokens = np.array(list(table.columns), dtype=float)
    each = tokens * of["topk"] / of["experts"]
    work = 2 * tokens * of["topk"] * 3 * of["hidden"] * width
    kept = np.isfinite(table.seconds) & (of["expert_parallel"] == 1) & (each >= EXPERT_TOKENS)
    sizes = np.broadcast_arrays(each, width)
    flops, slower, narrow = _inverse_line(
        (table.seconds / work)[kept], [size[kept] for size in sizes]
    )
    return ExpertRate(
        flops=flops,
        tokens=slower,
        width=narrow,
        tier=tier,  # type: ignore[arg-type]  # a literal of the table above
        source=f"whole experts in profiles/measured/{place}/moe.vllm.bfloat16.csv, measured on {device}",
    )


def fp8_expert_rate(gpu: str) -> ExpertRate:
    """Fit the same to grouped products of DeepGEMM's contiguous layout, which pads each expert's tokens to whole blocks.

    On Blackwell, return the rate of 16 bits, faster by the ratio that Hopper has.
    """
    if gpu in BLACKWELL:
        own, hopper = expert_rate(gpu), expert_rate("h100")
        known = fp8_expert_rate("h100")
        return ExpertRate(
            flops=own.flops * known.flops / hopper.flops,
            tokens=known.tokens,
            width=known.width,
            tier="roofline",
            source=f"experts of {gpu.upper()} in 16 bits, as much faster in fp8 as on H800; not measured",
        )
    place, device = EXPERTS_FP8[gpu]
    table = read_table(PROFILES / "measured" / place / "moe.deepgemm.fp8.csv")
    of = {key: table.rows[:, [i]] for i, key in enumerate(table.keys)}
    tokens = np.array(list(table.columns), dtype=float)
    each = tokens * of["topk"] / of["experts"]
    work = 2 * each * of["experts"] / of["expert_parallel"] * 3 * of["hidden"] * of["intermediate"]
    kept = np.isfinite(table.seconds) & (each >= BLOCK)
    sizes = np.broadcast_arrays(each, of["intermediate"])
    flops, slower, narrow = _inverse_line(
        (table.seconds / work)[kept], [size[kept] for size in sizes]
    )
    return ExpertRate(
        flops=flops,
        tokens=slower,
        width=narrow,
        tier="roofline",
        source=f"experts of profiles/measured/{place}/moe.deepgemm.fp8.csv, measured on {device}, in inference alone",
    )


def _inverse_line(seconds: Floats, sizes: Sequence[Floats]) -> list[float]:
    """Return the limit of the rate, and the sizes at which each term doubles the seconds; none is below 0."""
    columns = [np.ones_like(seconds), *(1 / size for size in sizes)]
    while True:
        terms = np.stack(columns, axis=1) / seconds[:, None]
        found, *_ = np.linalg.lstsq(terms, np.ones(len(seconds)), rcond=None)
        if (found >= 0).all():
            return [1 / found[0], *(max(term, 1e-30) / found[0] for term in found[1:])]
        columns = [
            column if term >= 0 else column * 0 for column, term in zip(columns, found, strict=True)
        ]


# The fit ------------------------------------------------------------------------------------------


class Fit:
    """The constants of a fit as logarithms, and shares as logits."""

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self._start = np.array([self._enter(name, value) for name, value in START.items()])

    def constants(self, place: Floats) -> tuple[Constants, dict[str, float]]:
        """Return the constants, and by GPU the seconds of Triton's attention over those of its kernel table."""
        values = {name: self._leave(name, v) for name, v in zip(START, place, strict=True)}
        triton = {
            name.removeprefix("triton_"): values.pop(name)
            for name in list(values)
            if name.startswith("triton_")
        }
        return Constants(**values), triton

    def errors(self, place: Floats, steps: Sequence[PublishedStep]) -> Floats:
        """Return the logarithm of predicted over published seconds."""
        constants, triton = self.constants(place)
        found = [
            log(even_step_time(step, self._rates, constants, triton) / step.seconds)
            for step in steps
        ]
        return np.array(found)

    def run(
        self, steps: Sequence[PublishedStep], place: Floats | None = None, turns: int = STEPS
    ) -> Floats:
        """Minimise the Huber loss by Gauss-Newton."""
        place = self._start.copy() if place is None else place.copy()
        counts = Counter(step.model for step in steps)
        share = np.array([1 / counts[step.model] for step in steps])
        for _ in range(turns):
            errors = self.errors(place, steps)
            weight = share * np.minimum(1.0, HUBER / np.maximum(np.abs(errors), 1e-12))
            moved = [
                (self.errors(place + 1e-3 * unit, steps) - errors) / 1e-3
                for unit in np.eye(len(place))
            ]
            jacobian = np.stack(moved, axis=1)
            normal = jacobian.T @ (weight[:, None] * jacobian) + PULL * np.eye(len(place))
            slope = jacobian.T @ (weight * errors) + PULL * (place - self._start)
            place = place - np.clip(np.linalg.solve(normal, slope), -0.5, 0.5)
        return place

    @staticmethod
    def _enter(name: str, value: float) -> float:
        return log(value / (1 - value)) if name in SHARES else log(value)

    @staticmethod
    def _leave(name: str, place: float) -> float:
        return 1 / (1 + exp(-place)) if name in SHARES else exp(place)


def leave_each_out(
    fit: Fit, steps: Sequence[PublishedStep], place: Floats
) -> tuple[dict[str, Floats], dict[str, Floats]]:
    """Return by shape the constants that were fitted without it, and the relative errors on it."""
    places, errors = {}, {}
    for model in sorted({step.model for step in steps}):
        others = [step for step in steps if step.model != model]
        places[model] = fit.run(others, place, FOLD_STEPS)
        left_out = [step for step in steps if step.model == model]
        errors[model] = np.exp(fit.errors(places[model], left_out)) - 1
    return places, errors


# The profile --------------------------------------------------------------------------------------


def profile_text(steps: Sequence[PublishedStep]) -> str:
    """Fit to all steps, and to all steps except each shape; return training.toml."""
    gemm = {gpu: gemm_rate(gpu) for gpu in GEMM}
    experts = {gpu: expert_rate(gpu) for gpu in EXPERTS}
    fit = Fit(Rates(gemm, experts))
    place = fit.run(steps)
    constants, triton = fit.constants(place)
    places, errors = leave_each_out(fit, steps, place)
    folds, triton_folds = (
        {model: fit.constants(found)[part] for model, found in places.items()} for part in (0, 1)
    )
    names = Constants.__struct_fields__
    kinds: dict[str, list[Floats]] = {"dense": [], "mixture": []}
    for model, found in errors.items():
        kinds["dense" if shape_of(model).experts is None else "mixture"].append(found)
    lines = [
        'name = "seconds of training"',
        f'source = "{SOURCE}"',
        f'licence = "{LICENCE}"',
        f"date = {DATE}",
        'fitted_on = "steps in 16 bits of models with plain attention on A100, H100 and H200: MPT 125M to 70B with FSDP, '
        "Llama 3, Qwen3 0.6B to 8B, Qwen3-30B-A3B and 235B-A22B, Mixtral 8x7B with Megatron, FSDP2 and their mixtures"
        '"',
        f"rows = {len(steps)}",
        "",
        "[constants]",
        *(f"{name} = {getattr(constants, name):.4g}" for name in names),
        "",
        "[triton_attention]             # of llm-foundry's rows alone: times the kernel table's seconds, by GPU",
        *(f"{gpu} = {times:.4g}" for gpu, times in triton.items()),
        "",
        "[spread]                       # over fits that leave a shape out",
        *(f"{name} = {_spread([getattr(one, name) for one in folds.values()])}" for name in names),
    ]
    for kind, found in kinds.items():
        lines += _errors(kind, np.concatenate(found))
    for model, one in folds.items():
        lines += ["", f'[without."{model}"]']
        lines += [f"{name} = {getattr(one, name):.4g}" for name in names]
    for model, one in triton_folds.items():
        lines += ["", f'[triton_without."{model}"]']
        lines += [f"{gpu} = {times:.4g}" for gpu, times in one.items()]
    lines += _rates("gemm", gemm) + _rates("experts", experts)
    lines += narrow_text(gemm, lambda model: fit.constants(places.get(model, place)))
    return "\n".join([*lines, ""])


def _rates(section: str, table: Mapping[str, GemmRate | ExpertRate]) -> list[str]:
    lines = []
    for gpu, rate in table.items():
        lines += ["", f"[{section}.{gpu}]"]
        lines += [f"{name} = {_value(getattr(rate, name))}" for name in rate.__struct_fields__]
    return lines


def narrow_text(
    wide: Mapping[str, GemmRate], constants_of: Callable[[str], tuple[Constants, dict[str, float]]]
) -> list[str]:
    """Return the rates in fp8, and the errors of published fp8 steps, to which nothing is fitted.

    Args:
        wide: rates of products that stay in 16 bits.
        constants_of: returns the constants of the fit without a model.
    """
    gemm = {gpu: gemm_rate(gpu, GEMM_FP8) for gpu in GEMM_FP8}
    experts = {gpu: fp8_expert_rate(gpu) for gpu in (*EXPERTS_FP8, *BLACKWELL)}
    rates = Rates(gemm, experts, wide=wide)
    errors = [
        even_step_time(step, rates, *constants_of(step.model)) / step.seconds - 1
        for step in read_steps()
        if step.dtype == "fp8"
    ]
    return [
        *_rates("gemm_fp8", gemm),
        *_rates("experts_fp8", experts),
        *_errors("fp8", np.array(errors)),
    ]


def _errors(kind: str, errors: Floats) -> list[str]:
    return [
        "",
        f"[held_out.{kind}]",
        f"rows = {len(errors)}",
        f"median = {np.median(np.abs(errors)):.4f}",
        f"p90 = {np.quantile(np.abs(errors), 0.9):.4f}",
        f"bias = {np.median(errors):.4f}",
    ]


def _value(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else f'"{value}"'


def _spread(values: Sequence[float]) -> str:
    return f"[{min(values):.4g}, {max(values):.4g}]"


if __name__ == "__main__":
    main()
