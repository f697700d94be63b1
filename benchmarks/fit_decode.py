"""Fit the overheads of a decode step to published steps, and write profiles/engines.

    python benchmarks/fit_decode.py [ENGINE ...]

The rows are those of profiles/published. `benchmarks/derive_serving.py` lists the supported
architectures and those left out. The seconds of a row are linear in the constants, so the fit needs
one prediction per constant. It is a least-squares fit of relative errors without negative constants.
Rows with an error above `HUBER` count linearly. Reported errors are of rows that were predicted with
constants fitted without their shape. A shape is all rows of one model config, for all names, GPUs
and layouts.

`benchmarks/bench_costs.py --fit` fits the paper's own engine (`streamrl`).
"""

from __future__ import annotations

import datetime
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from msgspec.structs import replace

from streamrl.hardware.operator_tables import Floats
from streamrl.hardware.profiles import PROFILES
from streamrl.runfile.units import Duration
from streamrl.sim.costs.overheads import Overheads, load_engine
from streamrl.sim.fidelity.served import covered, predict_range
from streamrl.sim.fidelity.serving import ServingRow, predict, read_serving

DATE = datetime.date(2026, 11, 21)
HUBER = 0.1
"""Relative error above which a row counts linearly."""
LAUNCHES = np.arange(100e-6, 1000e-6, 5e-6)
"""Candidate seconds of a layer's launches. They are searched, because a step is not linear in them.
"""
FEWEST_ROWS = 6
"""Least number of rows on a GPU for a separate error of an engine on this GPU."""
REQUEST = load_engine("streamrl").constants.request
"""Seconds per rollout if sampling does not sort, from the paper's decode curve. Published steps cannot
separate it from `logit`, because their vocabularies have similar sizes. Either of the two alone fits
them as well.
"""

STEP, GAPS = (getattr(load_engine("vllm-0.11").constants, term) for term in ("step", "layer"))
"""Seconds of a step, and between the kernels of a layer, with CUDA graphs. For engines whose rows do
not determine them.
"""
WAITING = load_engine("vllm-0.6").constants.step
"""Seconds of a step of vLLM without asynchronous scheduling: the host schedules, and unpacks outputs, while
the GPU waits. With `REQUEST`, 256 rollouts wait 5.8 ms. Published are 5 to 6 ms for the sum of both, with
Llama-2-7B on an engine of 2024 (vLLM issue 10634, and pull 11133 for the first V1 engine). With
asynchronous scheduling 0.15 to 0.17 ms are published.
"""
SCHEDULING = Duration(STEP + 460e-6)
"""Seconds of a step of the same without asynchronous scheduling, which saves 0.46 ms with whole CUDA
graphs. Ten requests of 128 tokens at once make 5.83 requests/s without it and 6.03 with it, or 5.98 and
6.20 (vLLM pull 25444: H100, September 2025). With `REQUEST`, 256 rollouts wait 5.0 ms; published are 5 to
6 (issue 10634).
"""
SPLIT = Duration(GAPS + 19.5e-6)
"""Seconds between the kernels of a layer whose attention is launched outside of CUDA graphs, as in vLLM
0.8 to 0.10. Whole graphs save 19.5 us a layer: 0.545 ms of a token of Qwen2.5-1.5B, the median of 0.28 to
0.73 ms at six request rates (vLLM pull 20059). It is the middle of three sources. Llama-3.1-8B with eight
requests saves 12 us (pull 10058), Qwen3-Coder-30B-A3B in fp8 with ten 129 us (pull 25444).
"""
LOG_PROB_STEP, LOG_PROB_HTTP = Duration(113.1e-6), Duration(18.22e-6)
"""Seconds of a step of vLLM with log-probabilities, and of each of its rollouts. With them, 1 and 64
requests make 407 and 13,583 tokens/s instead of 430 and 18,645 (vLLM pull 57442: Qwen2.5-0.5B on L20,
logprobs=0, its HTTP server, 0.29). The server's JSON is a part of it. At
64 to 512 requests throughput is 0.67 to 0.73 of that without. Five log-probabilities a token took
35 us each in the first version (pull 9880).
"""
LOG_PROB = Duration(7.7e-6)
"""The same for a framework that calls vLLM in its process: an assumption. NeMo-RL keeps the whole engine in one process
(VLLM_ENABLE_V1_MULTIPROCESSING=0). Functions of vLLM 0.32 take 0.9 us there to slice a rollout's values, and 6.8 us to
wrap them without text. Both were timed on two shared cores, with batches of 256. An engine with a process of its own
hides most of it.
"""
SYNCHRONIZATION = Duration(1046e-6)
"""Seconds of a step of SGLang until March 2026 with log-probabilities: 196.23 tokens/s of one request
with a wait for the GPU, and 246.91 without (SGLang pull 20972). Its seconds per rollout are not
published.
"""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The constants to fit, and the rows of an engine to fit them to."""

    name: str
    versions: tuple[str, ...]
    terms: tuple[str, ...]
    start: Overheads = field(default_factory=Overheads)
    """Constants from other sources, and what its kernels do."""
    kernels: dict[str, str] = field(default_factory=dict)
    """Backend of its kernels' tables. The profile must have them before a fit."""
    mixes_prefill: bool = True
    is_fitted: Callable[[ServingRow], bool] = lambda row: True
    note: str = ""


FITS = {
    "vllm-0.11": Fit(
        name="vLLM 0.11 and 0.12, async scheduling, CUDA graphs",
        versions=("0.11", "0.12"),
        terms=("step", "layer", "logit"),
        start=Overheads(
            request=REQUEST,
            log_prob=LOG_PROB,
            log_prob_http=LOG_PROB_HTTP,
            log_prob_step=LOG_PROB_STEP,
            quantises_apart=True,
            pads_experts=("hopper", "blackwell"),
        ),
        is_fitted=lambda row: (
            row.kind == "step" and row.dtype == "bfloat16" and row.version == "0.11.1"
        ),
        note="decode steps of 0.11.1 in 16 bits on H100 (rows in fp8 and busy steps are predicted only: inputs are quantised in "
        "kernels of their own, and experts go in padded blocks of 128 rows, as its deep_gemm_utils.py says); `log_prob_http` and "
        "`log_prob_step` from pull 57442",
    ),
    "vllm-0.9": Fit(
        name="vLLM 0.8 to 0.10, attention outside of CUDA graphs",
        versions=("0.8", "0.9", "0.10"),
        terms=(),
        start=Overheads(
            step=SCHEDULING,
            layer=SPLIT,
            request=REQUEST,
            log_prob=LOG_PROB,
            log_prob_http=LOG_PROB_HTTP,
            log_prob_step=LOG_PROB_STEP,
            quantises_apart=True,
            pads_experts=("hopper", "blackwell"),
        ),
        is_fitted=lambda row: False,
        note="nothing: `step` and `layer` are those of vLLM 0.11, and what it saves by asynchronous scheduling (pull 25444) and "
        "by whole graphs (pull 20059); `request` is the paper's: with it, 256 rollouts wait 5.0 ms, where 5 to 6 are published for "
        "Llama-2-7B with engines of 2024 (issue 10634, pull 11133); `log_prob_http` is that of one L20, a model of 0.5B and an HTTP server "
        "(pull 57442); formats are those of vLLM 0.11; no published row samples from the most likely tokens alone",
    ),
    "vllm-0.10": Fit(
        name="vLLM 0.10 with whole CUDA graphs, and newer, without asynchronous scheduling",
        versions=(),
        terms=(),
        start=Overheads(
            step=WAITING,
            layer=GAPS,
            request=REQUEST,
            log_prob=LOG_PROB,
            log_prob_http=LOG_PROB_HTTP,
            log_prob_step=LOG_PROB_STEP,
            quantises_apart=True,
            pads_experts=("hopper", "blackwell"),
        ),
        is_fitted=lambda row: False,
        note="nothing: `step` is that of vLLM 0.6, which does not schedule asynchronously either, and `request` the "
        "paper's: 5.8 ms for 256 rollouts, where 5 to 6 are published for Llama-2-7B with engines of 2024 (vLLM issue 10634, "
        "pull 11133); `log_prob_http` is that of one L20, a model of 0.5B and an HTTP server (pull 57442); `layer` and "
        "formats are those of vLLM 0.11; no published row samples from the most likely tokens alone",
    ),
    "vllm-0.19": Fit(
        name="vLLM 0.15 to 0.19",
        versions=("0.15", "0.16", "0.17", "0.18", "0.19"),
        terms=(),
        start=Overheads(
            step=STEP, layer=GAPS, log_prob_step=LOG_PROB_STEP, log_prob_http=LOG_PROB_HTTP
        ),
        kernels={"gemm.fp8": "sglang", "all_reduce": "trtllm"},
        note="nothing: `step` and `layer` are those of vLLM 0.11; asynchronous scheduling hides the work for each "
        "request, and greedy sampling sorts no logits; it also works with log-probabilities (pull 27615), so in a "
        "framework's process they take nothing for each rollout; experts in fp8 are no longer padded",
    ),
    "vllm-0.6": Fit(
        name="vLLM 0.6.3, CUDA graphs",
        versions=("0.6",),
        terms=("step", "layer"),
        start=Overheads(request=REQUEST),
        is_fitted=lambda row: row.version == "0.6.3",
        note="batch 1 on A100, so `request` is the paper's",
    ),
    "vllm-0.2": Fit(
        name="vLLM of 2023, without CUDA graphs",
        versions=("0.1", "0.2"),
        terms=("step", "layer", "request"),
        kernels={"all_reduce": "nccl"},
        note="hosts of two kinds, which no constant tells apart; all-reduces of NCCL, as it had no other; each query "
        "head reads keys and values, but out of the L2 cache: from 192 to 8,256 tokens a step of one rollout grows by "
        "3.6 ms on two A100, where one read a group is 1.3 and one a head 15; launches, a host each and other reads were "
        "tried and met these rows worse, so that their errors flatter it",
    ),
    "sglang-0.4": Fit(
        name="SGLang 0.4.6 on H20, CUDA graphs",
        versions=("0.4",),
        terms=("slowdown", "step", "layer"),
        start=Overheads(request=REQUEST, log_prob_step=SYNCHRONIZATION),
        note="batch 1 on H20, so `request` is the paper's; `slowdown`: weights and cache are read at half the "
        "bandwidth that the tables of H20 and H20-3e reach, whatever the size of the model, and no other page has that: eager "
        "Transformers read Qwen3-32B faster on the same GPUs, and SGLang 0.4.9 on H100 has no such factor; `log_prob_step` "
        "from pull 20972",
    ),
    "sglang-0.5": Fit(
        name="SGLang 0.5, CUDA graphs",
        versions=("0.4.9", "0.5"),
        terms=(),
        start=Overheads(
            request=REQUEST,
            layer=GAPS,
            log_prob_step=SYNCHRONIZATION,
            fuses_shared_experts=True,
            quantises_apart=True,
            composes_latent=True,
        ),
        kernels={"gemm.fp8": "sglang", "all_reduce": "sglang"},
        mixes_prefill=False,
        note="nothing is fitted, as three shapes on as many GPUs do not tell a constant from an error of a GPU's tables: "
        "`request` is the paper's, `layer` that of vLLM 0.11, another engine with CUDA graphs, `log_prob_step` from pull 20972",
    ),
    "tensorrt-llm-1.0": Fit(
        name="TensorRT-LLM 1.0 to 1.3, PyTorch back end",
        versions=("1.0", "1.1", "1.2", "1.3"),
        terms=("step", "layer", "request"),
        start=Overheads(spans_nodes=True),
        kernels={
            "gemm.fp8": "trtllm",
            "decode_attention.fp8": "trtllm",
            "all_reduce": "trtllm",
        },
        note="throughput at full load in fp8 on H100 and H200; its own all-reduce works between nodes of an NVLink domain "
        "(MNNVLAllReduce, tensorrt_llm/_torch/distributed/ops.py)",
    ),
    "tensorrt-llm-0.5": Fit(
        name="TensorRT-LLM 0.5.0 and 0.6.1",
        versions=("0.5", "0.6"),
        terms=("step", "layer"),
        start=Overheads(reads_cache_per_head=True),
        kernels={"decode_attention.fp8": "trtllm"},
        note="each query head reads keys and values (issue 407), which the L2 cache of A100 softens; one read a group was "
        "tried and met these rows worse",
    ),
    "transformers-4.51": Fit(
        name="Hugging Face Transformers 4.51.3, eager",
        versions=("4.51",),
        terms=("launch",),
        note="batch 1 and contexts of up to 2,000 tokens on H20",
    ),
}


def main() -> None:
    """Write the profiles of the named engines, or of all."""
    for engine in sys.argv[1:] or FITS:
        text = engine_profile(engine)
        (PROFILES / "engines" / f"{engine}.toml").write_text(text)
        print(f"--- {engine}\n{text}")


def rows_of(engine: str) -> list[ServingRow]:
    """Return the rows that an engine's constants are fitted to."""
    rows = (row for row in read_serving() if row.engine == engine)
    return [row for row in rows if FITS[engine].is_fitted(row)]


# The fit ------------------------------------------------------------------------------------------


def fit(engine: str, rows: Sequence[ServingRow]) -> Overheads:
    """Return the constants with the least loss, over all `LAUNCHES`."""
    plan = FITS[engine]
    if "launch" not in plan.terms:
        return _fit_linear(plan, rows, 0.0)
    found = [_fit_linear(plan, rows, float(launch)) for launch in LAUNCHES]
    return min(found, key=lambda constants: _loss(relative_errors(rows, constants)))


def _fit_linear(plan: Fit, rows: Sequence[ServingRow], launch: float) -> Overheads:
    terms = [term for term in plan.terms if term != "launch"]
    start = replace(plan.start, launch=Duration(launch))
    published, bare = _published(rows), _seconds(rows, start)
    if not terms:
        return start
    slopes = np.stack([_slope(rows, start, term) for term in terms], axis=1)
    weights = np.ones(len(rows))
    values = np.zeros(len(terms))
    for _ in range(50):
        scale = np.sqrt(weights) / published
        values = _least_squares(slopes * scale[:, None], (published - bare) * scale)
        error = (bare + slopes @ values) / published - 1
        weights = np.minimum(1.0, HUBER / np.maximum(np.abs(error), 1e-12))
    found = zip(terms, values.tolist(), strict=True)
    return replace(start, **{term: getattr(start, term) + value for term, value in found})


def _slope(rows: Sequence[ServingRow], start: Overheads, term: str) -> Floats:
    """Return the seconds that each row gains per unit of a constant."""
    unit = {"slowdown": 1.0, "step": 1e-3, "logit": 1e-9}.get(term, 1e-5)
    raised = replace(start, **{term: getattr(start, term) + unit})
    return (_seconds(rows, raised) - _seconds(rows, start)) / unit


def _least_squares(terms: Floats, target: Floats) -> Floats:
    """Solve without negative values: terms with a negative solution are set to 0, one after the other."""
    kept = list(range(terms.shape[1]))
    while kept:
        solved = np.linalg.lstsq(terms[:, kept], target, rcond=None)[0]
        if solved.min() >= 0:
            break
        del kept[int(solved.argmin())]
    values = np.zeros(terms.shape[1])
    if kept:
        values[kept] = solved
    return values


def _loss(errors: Floats) -> float:
    size = np.abs(errors)
    return float(np.sum(np.where(size < HUBER, size**2 / 2, HUBER * (size - HUBER / 2))))


def relative_errors(rows: Sequence[ServingRow], constants: Overheads) -> Floats:
    """Return predicted over published, minus 1, of each row."""
    return np.array([predict(row, constants) / row.value - 1 for row in rows])


def _seconds(rows: Sequence[ServingRow], constants: Overheads) -> Floats:
    """Return the quantity that is linear in the constants: milliseconds, or the inverse of a throughput."""
    return np.array([_linear(row, predict(row, constants)) for row in rows])


def _published(rows: Sequence[ServingRow]) -> Floats:
    return np.array([_linear(row, row.value) for row in rows])


def _linear(row: ServingRow, value: float) -> float:
    return 1 / value if row.kind == "full load" else value


# Leaving one shape out ----------------------------------------------------------------------------


@cache
def left_out(engine: str) -> dict[str, Overheads]:
    """Return the constants without each shape; empty if there is only one shape."""
    rows = rows_of(engine)
    shapes = sorted({row.model for row in rows})
    if len(shapes) < 2:
        return {}
    return {shape: fit(engine, [row for row in rows if row.model != shape]) for shape in shapes}


def held_out_errors(engine: str) -> Floats:
    """Return the relative error of every fitted row, predicted with constants without its shape."""
    rows, found = rows_of(engine), left_out(engine)
    return np.array([predict(row, found[row.model]) / row.value - 1 for row in rows])


# The profile --------------------------------------------------------------------------------------


def engine_profile(engine: str) -> str:
    """Return the profile of an engine as TOML text."""
    plan, rows = FITS[engine], rows_of(engine)
    sources = "; ".join(sorted({row.source for row in rows})) or "no rows"
    fitted_on = ", ".join(sorted({row.model for row in rows}))
    lines = [
        f'name = "{plan.name}"',
        f'source = "overheads of {plan.name}, fitted by benchmarks/fit_decode.py to {sources}"',
        'licence = "facts; the fit Apache-2.0"',
        f"date = {DATE}",
        f'fitted_on = "{": ".join(filter(None, (plan.note, fitted_on)))}"',
        f"versions = {json.dumps(plan.versions)}",
        f"gpus = {json.dumps(_answered(rows))}",
        f"rows = {len(rows) or sum(point.engine == engine for point in covered())}",
        *_narrow_gpus(engine, rows),
        *(("mixes_prefill = false",) * (not plan.mixes_prefill)),
        "",
        "[constants]",
        *_lines(fit(engine, rows)),
    ]
    if plan.kernels:
        lines += ["", "[kernels]"]
        lines += [f'"{key}" = "{backend}"' for key, backend in plan.kernels.items()]
    found = left_out(engine)
    if found:
        errors = held_out_errors(engine)
        lines += ["", "[spread]                       # of fits that leave one shape out"]
        for term in plan.terms:
            values = [float(getattr(constants, term)) for constants in found.values()]
            lines.append(f"{term} = [{min(values):.4g}, {max(values):.4g}]")
        lines += [
            "",
            "[held_out]                     # of rows predicted without their shape",
            *_summary(errors),
        ]
    lines += _errors_in_fp8(engine, rows)
    for gpu, some in served_errors(engine).items():
        lines += ["", f"[served.{gpu}]{NOTE_OF_SERVED}", *_summary(some)]
    others = other_version_errors(engine)
    if len(others):
        lines += ["", f"[other_versions]{NOTE_OF_OTHERS}", *_summary(others)]
    for shape, constants in found.items():
        lines += ["", f'[left_out."{shape}"]', *_lines(constants)]
    return "\n".join([*lines, ""])


NOTE_OF_SERVED = "                  # of served points, to which nothing is fitted"
NOTE_OF_OTHERS = "               # of the rows of neighbouring versions"


def served_errors(engine: str) -> dict[str, Floats]:
    """Return the relative errors of served points with known inputs, by GPU with `FEWEST_ROWS` or more."""
    found: dict[str, list[float]] = {}
    for point in covered():
        if point.engine == engine:
            low, high = predict_range(point)
            if high == low:
                found.setdefault(point.gpu, []).append(low / point.tpot - 1)
    counted = sorted(found.items())
    return {gpu: np.array(some) for gpu, some in counted if len(some) >= FEWEST_ROWS}


def other_version_errors(engine: str) -> Floats:
    """Return the relative errors of the rows of neighbouring versions, predicted as if of this one."""
    constants, others = load_engine(engine).constants, neighbours(engine)
    rows = [row for row in read_serving() if row.engine in others and row.kind != "busy step"]
    errors = [predict(replace(row, engine=engine), constants) / row.value - 1 for row in rows]
    for point in covered():
        if point.engine in others:
            low, high = predict_range(replace(point, engine=engine))
            errors += [low / point.tpot - 1] * (low == high)
    return np.array(errors)


def neighbours(engine: str) -> list[str]:
    """Return the profiles of the same engine just before and after a version."""
    family = engine.rpartition("-")[0]
    alike = [name for name in FITS if name.rpartition("-")[0] == family]
    alike.sort(key=lambda name: [int(part) for part in name.rpartition("-")[2].split(".")])
    place = alike.index(engine)
    return [*alike[max(0, place - 1) : place], *alike[place + 1 : place + 2]]


def _narrow_rows(engine: str, fitted: Sequence[ServingRow]) -> list[ServingRow]:
    """Return the fp8 steps of an engine whose constants are fitted to other steps."""
    found = [row for row in read_serving() if row.engine == engine and row.dtype == "fp8"]
    return [row for row in found if row.kind == "step" and row not in fitted]


def _narrow_gpus(engine: str, fitted: Sequence[ServingRow]) -> list[str]:
    gpus = _answered(_narrow_rows(engine, fitted))
    return [f"fp8_gpus = {json.dumps(gpus)}"] if gpus else []


def _errors_in_fp8(engine: str, fitted: Sequence[ServingRow]) -> list[str]:
    rows = _narrow_rows(engine, fitted)
    if not _answered(rows):
        return []
    without, every = left_out(engine), fit(engine, fitted)
    errors = [predict(row, without.get(row.model, every)) / row.value - 1 for row in rows]
    return [
        "",
        "[held_out_fp8]                 # of rows in fp8, to which nothing is fitted, predicted without their shape",
        *_summary(np.array(errors)),
    ]


def _summary(errors: Floats) -> list[str]:
    return [
        f"median = {np.median(np.abs(errors)):.4f}",
        f"p90 = {np.quantile(np.abs(errors), 0.9):.4f}",
        f"bias = {np.median(errors):.4f}",
    ]


def _answered(rows: Sequence[ServingRow]) -> list[str]:
    counted = Counter(row.gpu for row in rows)
    return sorted(gpu for gpu, count in counted.items() if count >= FEWEST_ROWS)


def _lines(constants: Overheads) -> list[str]:
    written = {
        "step": f'"{constants.step * 1e6:.4g} us"',
        "layer": f'"{constants.layer * 1e6:.4g} us"',
        "launch": f'"{constants.launch * 1e6:.4g} us"',
        "request": f'"{constants.request * 1e6:.4g} us"',
        "logit": f'"{constants.logit * 1e9:.4g} ns"',
        "log_prob": f'"{constants.log_prob * 1e6:.4g} us"',
        "log_prob_http": f'"{constants.log_prob_http * 1e6:.4g} us"',
        "log_prob_step": f'"{constants.log_prob_step * 1e6:.4g} us"',
        "reads_cache_per_head": "true",
        "quantises_apart": "true",
        "pads_experts": json.dumps(constants.pads_experts),
        "fuses_shared_experts": "true",
        "composes_latent": "true",
        "spans_nodes": "true",
    }
    lines = [f"{term} = {text}" for term, text in written.items() if getattr(constants, term)]
    return lines + [f"slowdown = {constants.slowdown:.4g}"] * (constants.slowdown != 1)


if __name__ == "__main__":
    main()
