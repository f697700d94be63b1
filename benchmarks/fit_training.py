"""Fit the constants of `sim.costs.training_profile` to measured training, and write the profile.

    python benchmarks/fit_training.py [DATA]

DATA is the published table (mosaicml/llm-foundry, scripts/train/benchmarking/README.md, as one CSV file);
with it training.csv is derived anew. Without it the fit starts from the committed training.csv.

The model that is fitted is the one that the simulator runs: `sim.costs.passes.Ranks` with a TrainerConfig of
ZeRO 3, which is PyTorch's FSDP. Its seconds are linear in the constants, so one evaluation for each constant
gives all that the fit needs.
"""

from __future__ import annotations

import csv
import datetime
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from sim.costs.passes import Ranks
from sim.costs.training_profile import PATH, Constants
from streamrl.hardware.memory import activation_bytes, logit_bytes, model_state
from streamrl.hardware.model_shape import ModelShape
from streamrl.hardware.profiles import PROFILES, Gpu, load_gpu
from streamrl.hardware.tables import read_table
from streamrl.runfile.sides_config import TrainerConfig
from streamrl.runfile.units import Bandwidth, Size

Floats = NDArray[np.float64]

SOURCE = "github.com/mosaicml/llm-foundry 8c8dd48, scripts/train/benchmarking/README.md"
LICENCE = "Apache-2.0"
DATE = datetime.date(2026, 11, 21)
TABLE = PATH.with_suffix(".csv")
NAMES = ("activation_traffic", "attention_traffic", "collective")
VOCABULARY = 50432
"""Of every MPT model in the table: NumParams minus layers and positions, over the hidden size."""
SHAPES = {
    "125m": (768, 12, 12),
    "350m": (1024, 24, 16),
    "760m": (1536, 24, 12),
    "1b": (2048, 24, 16),
    "3b": (2560, 32, 20),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 48, 56),
    "70b": (8192, 80, 64),
}
"""Hidden size, layers and heads of the MPT models (llm-foundry, scripts/train/yamls/pretrain)."""
DEVICES = {"h100_80gb": "h100", "a100_80gb": "a100", "a100_40gb": "a100-40"}
GEMM = {
    "a100": ("a100", "gemm.vllm.bfloat16", "composed", "A100"),
    "h100": ("h100", "gemm.vllm.bfloat16", "composed", "H100"),
    "h800": ("h100", "gemm.vllm.bfloat16", "composed", "H100, whose compute units the H800 has"),
    "h200": ("h200", "gemm.vllm.bfloat16", "composed", "H200"),
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
"""GPU: whose kernel table, which, the tier of what follows, and what the table was measured on."""
GEMM_ROWS, GEMM_SIDE = 8192, 8192
"""Large products: tokens in one pass, and the smaller side of the weight matrix, at least."""
HUBER = 0.1
"""Relative error past which a row counts linearly: some published rows ran out of memory and thrashed."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One measured training run."""

    gpu: str
    model: str
    parameters: int
    """With position embeddings, as the published MFU counts them."""
    hidden: int
    layers: int
    heads: int
    sequence: int
    gpus: int
    micro_batch: int
    accumulation: int
    """Micro-batches of one step."""
    recompute: str
    precision: str
    sharding: str
    mfu: float
    """Share of the datasheet's peak; FLOPs (6 N + 12 layers hidden sequence) a token, attention not causal."""


def main() -> None:
    """Write training.csv where DATA is given, then training.toml."""
    if len(sys.argv) > 1:
        write_rows(read_published(Path(sys.argv[1])))
    rows = read_rows()
    profile = fit_profile(rows)
    PATH.write_text(profile)
    print(profile)


# Rows ---------------------------------------------------------------------------------------------


def read_published(path: Path) -> list[Row]:
    """Read the 16-bit rows of the published table; 8-bit training is another kernel."""
    rows = []
    with path.open() as file:
        for line in csv.DictReader(file):
            if line["Precision"] == "amp_fp8":
                continue
            hidden, layers, heads = SHAPES[line["Model"]]
            rows.append(
                Row(
                    gpu=DEVICES[line["GPU"]],
                    model=f"mpt-{line['Model']}",
                    parameters=int(line["NumParams"]),
                    hidden=hidden,
                    layers=layers,
                    heads=heads,
                    sequence=int(line["SeqLen (T)"]),
                    gpus=int(line["# GPUs"]),
                    micro_batch=int(line["MicroBatchSize"]),
                    accumulation=int(line["GradAccum"]),
                    recompute="full" if line["Activation Checkpointing"] == "True" else "none",
                    precision="pure bf16" if line["MP Mode"] == "PURE" else "mixed bf16",
                    sharding=line["Sharding Strategy"],
                    mfu=round(float(line["MFU"]) / 100, 4),
                )
            )
    return rows


def write_rows(rows: Sequence[Row]) -> None:
    """Write the derived table."""
    head = [
        f"# source: {SOURCE}",
        f"# licence: {LICENCE}",
        f"# date: {DATE}",
        "# Training of MPT models with PyTorch FSDP and flash attention; mfu is a share of the datasheet's",
        "# dense 16-bit peak, of FLOPs (6 parameters + 12 layers hidden sequence) a token.",
    ]
    names = Row.__struct_fields__
    body = [",".join(str(getattr(row, name)) for name in names) for row in rows]
    TABLE.write_text("\n".join([*head, ",".join(names), *body]) + "\n")


def read_rows(path: Path = TABLE) -> list[Row]:
    """Read the committed table."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    return [msgspec.convert(line, Row, strict=False) for line in csv.DictReader(lines)]


# One row through the simulator's model ------------------------------------------------------------


@functools.cache
def gpu_of(name: str) -> Gpu:
    """Return the GPU; the 40 GB A100 is the 80 GB one with NVIDIA's figures for its memory."""
    if name != "a100-40":
        return load_gpu(name)
    return msgspec.structs.replace(
        load_gpu("a100"), memory=Size(40e9), memory_bandwidth=Bandwidth(1.555e12)
    )


@functools.cache
def gemm_flops(name: str) -> float:
    """Median FLOP/s of large matrix products on a GPU, from its kernel table."""
    gpu, file, *_ = GEMM[name.removesuffix("-40")]
    table = read_table(PROFILES / "measured" / gpu / f"{file}.csv")
    n, k = (table.rows[:, table.keys.index(key)] for key in ("n", "k"))
    seconds = table.seconds[:, list(table.columns).index(GEMM_ROWS)]
    large = (np.minimum(n, k) >= GEMM_SIDE) & np.isfinite(seconds)
    return float(np.median(2 * GEMM_ROWS * (n * k / seconds)[large]))


def ranks_of(row: Row, collective: float = 1.0) -> Ranks:
    """Return the row's GPUs; a gated MLP of 8/3 has as many parameters as MPT's plain one of 4."""
    shape = ModelShape(
        name=row.model,
        source=SOURCE,
        hidden_size=row.hidden,
        num_layers=row.layers,
        num_heads=row.heads,
        num_kv_heads=row.heads,
        head_dim=row.hidden // row.heads,
        intermediate_size=round(8 * row.hidden / 3),
        vocab_size=VOCABULARY,
        has_qkv_bias=False,
        has_tied_embeddings=True,
    )
    trainer = TrainerConfig(
        pool="measured",
        data_parallel=row.gpus,
        micro_batch=row.micro_batch,
        max_tokens_per_pass=row.micro_batch * row.sequence,
        zero=3,
        recompute="full" if row.recompute == "full" else "none",
    )
    return Ranks(
        model=shape,
        gpu=gpu_of(row.gpu),
        trainer=trainer,
        gpus_per_node=8,
        dtype="bfloat16",
        collective=collective,
    )


def step_time(row: Row, constants: Constants) -> float:
    """Return the seconds of one optimizer step."""
    ranks = ranks_of(row, constants.collective)
    _, train = ranks.fitted_passes(gemm_flops(row.gpu), constants)
    micro_time = row.micro_batch * train.rollout_time(row.sequence) + train.per_micro_batch
    return row.accumulation * micro_time + ranks.update_time()


def mfu(row: Row, seconds: float) -> float:
    """Return the MFU of a step of that many seconds, counted as the published one."""
    per_token = 6 * row.parameters + 12 * row.layers * row.hidden * row.sequence
    tokens = row.accumulation * row.micro_batch * row.sequence
    return per_token * tokens / gpu_of(row.gpu).flops["bfloat16"] / seconds


def memory_share(row: Row) -> float:
    """Return the share of the GPU's memory that the memory model expects the row to take."""
    ranks = ranks_of(row)
    state = model_state(ranks.model, ranks.trainer, ranks.dtype)
    tokens = row.micro_batch * row.sequence
    activations = activation_bytes(ranks.model, ranks.trainer, ranks.dtype, tokens)
    logits = logit_bytes(ranks.model, ranks.trainer, tokens)
    states = state.weights + state.gradients + state.optimizer
    return (states + activations + logits) / ranks.gpu.memory


# The fit ------------------------------------------------------------------------------------------


def fit(rows: Sequence[Row]) -> Constants:
    """Minimise the Huber loss of log(predicted / measured) by Gauss-Newton on log constants."""
    fixed, slopes = linear_terms(rows)
    measured = np.array([mfu(row, 1.0) / row.mfu for row in rows])
    logs = np.log([5.0, 0.05, 1.0])
    for _ in range(100):
        parts = slopes * np.exp(logs)
        seconds = fixed + parts.sum(axis=1)
        error = np.log(seconds / measured)
        weight = np.minimum(1.0, HUBER / np.maximum(np.abs(error), 1e-12))
        jacobian = parts / seconds[:, None]
        normal = jacobian.T @ (weight[:, None] * jacobian)
        logs = logs - np.clip(np.linalg.solve(normal, jacobian.T @ (weight * error)), -1, 1)
    return _constants(np.exp(logs))


def linear_terms(rows: Sequence[Row]) -> tuple[Floats, Floats]:
    """Return (rows,) seconds at constants of 0, and (rows, constants) seconds that each adds at 1."""
    ones = np.ones(len(NAMES))
    base = np.array([step_time(row, _constants(ones)) for row in rows])
    raised = [
        [step_time(row, _constants(ones + unit)) for row in rows] for unit in np.eye(len(NAMES))
    ]
    slopes = np.array(raised).T - base[:, None]
    return base - slopes.sum(axis=1), slopes


def relative_errors(rows: Sequence[Row], constants: Constants) -> Floats:
    """Return predicted over measured MFU, minus 1, of each row."""
    return np.array([mfu(row, step_time(row, constants)) / row.mfu - 1 for row in rows])


def halves(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Split by model: every other size."""
    even = {f"mpt-{name}" for name in list(SHAPES)[::2]}
    return [r for r in rows if r.model in even], [r for r in rows if r.model not in even]


def _constants(values: Floats) -> Constants:
    return Constants(**{name: float(value) for name, value in zip(NAMES, values, strict=True)})


# The profile --------------------------------------------------------------------------------------


def fit_profile(rows: Sequence[Row]) -> str:
    """Fit to all rows, and to each half for the spread and the error; return training.toml."""
    first, second = halves(rows)
    all_rows, *folds = (fit(some) for some in (rows, first, second))
    unseen = zip(folds, (second, first), strict=True)
    errors = np.abs(np.concatenate([relative_errors(some, c) for c, some in unseen]))
    return "\n".join(
        [
            'name = "seconds of training"',
            f'source = "{SOURCE}"',
            f'licence = "{LICENCE}"',
            f"date = {DATE}",
            'fitted_on = "16-bit rows of training.csv: MPT 125M to 70B, sequences of 512 to 65536, '
            'PyTorch FSDP on 8 to 512 H100 80 GB, A100 80 GB and A100 40 GB"',
            f"rows = {len(rows)}",
            "",
            "[constants]",
            *_lines(lambda name: f"{getattr(all_rows, name):.4g}"),
            "",
            "[spread]                       # of fits to half of the models",
            *_lines(lambda name: _spread([getattr(fold, name) for fold in folds])),
            "",
            "[held_out]                     # relative error of MFU, on the models of the other half",
            f"median = {np.median(errors):.4f}",
            f"p90 = {np.quantile(errors, 0.9):.4f}",
            *(line for name in GEMM for line in _gemm_lines(name)),
            "",
        ]
    )


def _lines(value: Callable[[str], str]) -> list[str]:
    return [f"{name} = {value(name)}" for name in NAMES]


def _spread(values: Sequence[float]) -> str:
    return f"[{min(values):.4g}, {max(values):.4g}]"


def _gemm_lines(name: str) -> list[str]:
    gpu, file, tier, device = GEMM[name]
    return [
        "",
        f"[gemm.{name}]",
        f"flops = {gemm_flops(name):.4g}",
        f'tier = "{tier}"',
        f'source = "large matrix products of profiles/measured/{gpu}/{file}.csv, measured on {device}"',
    ]


if __name__ == "__main__":
    main()
