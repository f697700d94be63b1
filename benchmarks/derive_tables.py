"""Derive profiles/measured/GPU/*.csv from published kernel measurements.

    python benchmarks/derive_tables.py DATA

DATA has `infersim/` (bench_data of alibaba/InferSim) and `aiconfigurator/` (tables of NVIDIA's
aiconfigurator, one folder per GPU). The script keeps 16-bit and fp8 rows with shapes of decoder-only
models, with four digits. It keeps regular batch sizes, because inference servers pad to them. Some
rows of the wheel may be missing in such an export. If a folder has them, they are kept too:
quantisation, int4 experts, and decode attention over an fp8 cache. Their files are `quantize_*`,
`moe_int4_*` and `generation_attention_fp8_*`. They have the columns of the wheel's
parquet files, 128-wide heads and no window.

    python benchmarks/derive_tables.py --wheel SYSTEMS

SYSTEMS is `aiconfigurator_core/systems` of the unpacked wheel aiconfigurator-core 0.12.0. From it the
script derives the GPUs of `WHEEL` with the same filters, and the kernels of each inference engine
(`ENGINES`) for those GPUs, H100 and H200. Products in 16 bits are the same library in all engines
(the median ratio of two engines is 1.00 to 1.03), so there is one table of them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from streamrl.hardware.operator_tables import OPERATORS, UNCERTAIN, read_table
from streamrl.hardware.profiles import load_gpu
from streamrl.sim.costs.kernels import peak_of

OUT = Path(__file__).resolve().parent.parent / "profiles" / "measured"
DATE = "2026-11-21"
GEMM_ROWS = {
    *(1, 2, 4, 8, 16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 384, 512, 768),
    *(1024, 1280, 1536, 1792, 2048, 2560, 3072, 4096, 8192, 16384, 32768),
}
MOE_TOKENS = {2**i for i in range(20)} | {48, 80, 96, 160, 192, 384, 768, 1536, 3072}
SHORTEST_CONTEXT = 512
"""Tokens. Below this context, decode attention takes the time of its launch, which differs by half
between kernels.
"""
INFERSIM = {
    "source": "github.com/alibaba/InferSim f2293da, bench_data",
    "licence": "Apache-2.0",
    "version": "f2293da",
}
CORE = {"source": "PyPI aiconfigurator-core 0.12.0", "licence": "Apache-2.0"}
H20_3E = {
    "source": "github.com/ai-dynamo/aiconfigurator pull 134, 1641793",
    "licence": "Apache-2.0",
}
VLLM = {"h100": "0.24.0", "h200": "0.24.0", "a100": "0.14.0"}
TRTLLM = "1.3.0rc20"
MARLIN = "0.5.10"
"""Version of SGLang whose experts with int4 weights were measured: Marlin's kernels, which vLLM has
too. Only rows of one GPU with all experts, or of tensor ranks, are used. With expert ranks, its
collector also requested experts of other GPUs, and computed their rows as if the experts were
local. So 8 ranks take as long as one at 8,192 tokens. With 0.5.14, which skips them, they take a
sixth.
"""
NCCL = {"h100": "2.29.2", "h200": "2.29.2", "a100": "2.27.3"}
DEVICES = {
    "h100": "NVIDIA H100 80GB HBM3",
    "h200": "NVIDIA H200",
    "a100": "NVIDIA A100-SXM4-80GB",
    "h20-3e": "NVIDIA H20-3e",
    "h20": "NVIDIA H20",
    "h800": "NVIDIA H800",
}


class WheelGpu(NamedTuple):
    """A GPU of the wheel: its folder, the name that the device reported, and the versions to read."""

    folder: str
    device: str
    nccl: str = "2.29.2"
    all_reduce: str = "0.24.0"


WHEEL = {
    "b200": WheelGpu("b200_sxm", "NVIDIA B200"),
    "b300": WheelGpu("b300_sxm", "NVIDIA B300 SXM6 AC"),
    "gb200": WheelGpu("gb200", "NVIDIA GB200"),
    "gb300": WheelGpu("gb300", "NVIDIA GB300", all_reduce="0.27.0"),
    "l40s": WheelGpu("l40s", "NVIDIA L40S", nccl="2.27.3", all_reduce="0.22.0"),
    "rtx-pro-6000": WheelGpu("rtx_pro_6000_server", "NVIDIA RTX PRO 6000 Blackwell Server Edition"),
}
WHEEL_FACTS = {**CORE, "date": "2026-11-29"}
VLLM_OF_WHEEL = "0.24.0"
"""Version of vLLM whose products, attention and experts are read for the GPUs of `WHEEL`."""
LEAST_FP8_ROWS = 2
"""Fewest rows of an fp8 product. On Blackwell a single row takes twice as long as two rows, which no other size does."""
WITHOUT_CACHED = f"{CORE['source']}, without cells that beat the datasheet"
SGLANG_OF_WHEEL = "0.5.14"
"""Version of SGLang whose latent attention is read, alone and not with the products around it."""
BLOCKS_OF_WHEEL = "sglang"
"""Engine whose products in fp8 with a scale for each block of 128 by 128 are read (DeepGEMM), for all
engines. vLLM's own table has 3 to 14 times the seconds of one scale a tensor, TensorRT-LLM's has SGLang's.
"""
SKEWED = "power_law_1.01"
"""Shares of tokens over experts in the wheel's tables of narrow formats, if every GPU has slices of all
experts. With even shares, versions of one kernel differ by up to 1.7 at 16 to 128 tokens (Triton in fp8 on
H200). With these, they differ by 5 %. GPUs with whole experts keep even shares, because the model adds the
tokens of the fullest GPU.
"""
WIDE = "0.5.10"
"""Version of SGLang whose experts after DeepEP's dispatch were measured."""
MXFP4 = {"hopper": "w4a16_mxfp4", "blackwell": "w4a8_mxfp4_mxfp8"}
"""Experts of gpt-oss: weights alone in mxfp4, or with mxfp8 inputs, which Blackwell multiplies."""
ENGINES = {"sglang": SGLANG_OF_WHEEL, "trtllm": TRTLLM}
"""Engines whose all-reduces are read. vLLM's on Blackwell are TensorRT-LLM's, by FlashInfer."""
BLACKWELL = ("b200", "b300", "gb200", "gb300")
LONGEST_COMPARED = 4096
"""Tokens of context up to which a module of latent attention is compared with its attention."""
GATED_KERNELS = 2
"""Kernels of a gated delta net: the convolution, and the changes of the state."""
ADA = ("l40s", "rtx-pro-6000")
"""GPUs of workstations, whose other engines are not read."""
KIMI_VERSION = "0.1.dev19262"
"""Version of vLLM whose Kimi delta attention is read: the only one that all GPUs have."""
KIMI_STEP, KIMI_PREFILL = "fused_kda_decode", "flashkda_fwd"
"""Its kernels. L40S has neither."""
KIMI_TOKENS = 128
"""Fewest tokens of a prefill that are kept. Below, kernels take the time of their launch."""
LINEAR = ("linear_decode", "linear_prefill", "kimi_decode", "kimi_prefill")
BOTH = {"h100": "h100_sxm", "h200": "h200_sxm"}
"""Folders of the wheel of GPUs whose other tables come from `aiconfigurator/`."""
HEAD_DIM = 128
"""Width of the heads of all attention tables."""
GATED_HEADS = 32
"""Value heads of the gated delta net that was measured. It is Qwen3-Next's, with 128 channels and
16 key heads.
"""
GATED_PREFILL = {
    2048: {8: 0.086, 32: 0.152, 64: 0.279},
    4096: {8: 0.144, 32: 0.287, 64: 0.536},
    8192: {8: 0.259, 32: 0.552, 64: 1.045},
    16384: {8: 0.508, 32: 1.089, 64: 2.090},
    32768: {8: 0.997, 32: 2.208, 64: 4.273},
    65536: {8: 1.954, 32: 4.405, 64: 8.633},
}
"""Milliseconds of FLA's gated delta rule over one sequence on an H100, by its tokens and its value heads
of 128 channels. Source: column FLA/Triton in the pull requests of `FLASHINFER`. The convolution before
it is not included.
"""
FLASHINFER = {
    "source": "github.com/flashinfer-ai/flashinfer pulls 3788 (32 and 64 heads) and 3866 (8 heads)",
    "licence": "Apache-2.0",
    "version": "not stated",
}
MLA_HEADS = 128
"""Heads of the latent attention that was measured, as in DeepSeek-V3."""


def main() -> None:
    """Write every table."""
    if sys.argv[1] == "--wheel":
        data = Path(sys.argv[2]) / "data"
        for gpu, source in WHEEL.items():
            _of_wheel(data / source.folder, gpu, source)
        for gpu in (*BOTH, *BLACKWELL):
            folder = data / (BOTH.get(gpu) or WHEEL[gpu].folder)
            _shared(folder, gpu)
        for gpu in (*BOTH, *BLACKWELL, *ADA):
            _linear(data / (BOTH.get(gpu) or WHEEL[gpu].folder), gpu)
        return
    data = Path(sys.argv[1])
    core, infersim = data / "aiconfigurator", data / "infersim"
    for gpu in VLLM:
        _vllm(core / gpu, gpu)
    _h20_3e(core / "h20e")
    for gpu in ("h20", "h800"):
        _infersim(infersim, gpu)
    _gated_prefill("h100")


def _gated_prefill(gpu: str) -> None:
    rows = [
        {"tokens": tokens, "heads": heads, "latency": latency}
        for tokens, row in GATED_PREFILL.items()
        for heads, latency in row.items()
    ]
    facts = {**FLASHINFER, "backend": "fla"}
    _write(pd.DataFrame(rows), gpu, "linear_prefill", "bfloat16", ("heads",), "tokens", facts)


def _vllm(folder: Path, gpu: str) -> None:
    facts = {**CORE, "backend": "vllm", "version": VLLM[gpu]}
    gemm = pd.read_csv(folder / f"gemm_vllm_{VLLM[gpu]}.csv")
    for dtype in ("bfloat16", "fp8"):
        _gemm(gemm[gemm.gemm_dtype == dtype], gpu, dtype, facts)
    quantise = folder / f"quantize_vllm_{VLLM[gpu]}.csv"
    if quantise.exists():
        _quantise(pd.read_csv(quantise), gpu, facts)
    for operator, name in (("decode", "generation"), ("prefill", "context")):
        table = pd.read_csv(folder / f"{name}_attention_vllm_{VLLM[gpu]}.csv")
        _attention(table, gpu, operator, "bfloat16", facts)
    cached = folder / f"generation_attention_fp8_vllm_{VLLM[gpu]}.csv"
    if cached.exists():
        _attention(pd.read_csv(cached), gpu, "decode", "fp8", facts)
    cached = folder / f"generation_attention_fp8_trtllm_{TRTLLM}.csv"
    if cached.exists():
        own = {**CORE, "backend": "trtllm", "version": TRTLLM}
        _attention(pd.read_csv(cached), gpu, "decode", "fp8", own)
    _moe(pd.read_csv(folder / f"moe_vllm_{VLLM[gpu]}.csv"), gpu, "bfloat16", facts)
    marlin = folder / f"moe_int4_sglang_{MARLIN}.csv"
    if marlin.exists():
        own = {**CORE, "backend": "sglang", "version": MARLIN}
        table = pd.read_csv(marlin)
        _moe(table[table.moe_ep_size == 1], gpu, "int4", own)
    _collectives(pd.read_csv(folder / f"nccl_{NCCL[gpu]}.csv"), gpu, {**CORE, "version": NCCL[gpu]})
    custom = pd.read_csv(folder / f"custom_allreduce_vllm_{VLLM[gpu]}.csv")
    _all_reduce(custom, gpu, facts)


def _of_wheel(folder: Path, gpu: str, source: WheelGpu) -> None:
    """Write the tables of one GPU of the unpacked wheel."""
    facts = {**WHEEL_FACTS, "backend": "vllm", "version": VLLM_OF_WHEEL}
    gemm = _parquet(folder, "gemm", "vllm", VLLM_OF_WHEEL, "gemm_perf")
    gemm = _padded(gemm[(gemm.gemm_dtype != "fp8") | (gemm.m >= LEAST_FP8_ROWS)], "m")
    for dtype in ("bfloat16", "fp8", "nvfp4"):
        _gemm(gemm[gemm.gemm_dtype == dtype], gpu, dtype, facts)
    parts = [
        _parquet(folder, "quantize", "vllm", VLLM_OF_WHEEL, name)
        for name in ("computescale_perf", "scale_matrix_perf")
    ]
    _quantise(pd.concat(parts), gpu, facts)
    for operator, name in (("decode", "generation"), ("prefill", "context")):
        table = _parquet(folder, "attention", "vllm", VLLM_OF_WHEEL, f"{name}_attention_perf")
        table = table[(table.head_dim == HEAD_DIM) & (table.window_size == 0)]
        for dtype in ("bfloat16", "fp8") if operator == "decode" else ("bfloat16",):
            _attention(table[table.kv_cache_dtype == dtype], gpu, operator, dtype, facts)
    moe = _padded(_parquet(folder, "moe", "vllm", VLLM_OF_WHEEL, "moe_perf"), "num_tokens")
    for dtype in ("bfloat16", "fp8", "nvfp4"):
        _moe(moe[moe.moe_dtype == dtype], gpu, dtype, facts)
    latent = _parquet(folder, "mla", "sglang", SGLANG_OF_WHEEL, "generation_mla_perf")
    _latent(latent, gpu, "bfloat16", {**facts, "backend": "sglang", "version": SGLANG_OF_WHEEL})
    nccl = _parquet(folder, "comm", "nccl", source.nccl, "nccl_perf")
    _collectives(nccl, gpu, {**WHEEL_FACTS, "version": source.nccl})
    custom = _parquet(folder, "comm", "vllm", source.all_reduce, "custom_allreduce_perf")
    _all_reduce(_padded(custom, "message_size"), gpu, {**facts, "version": source.all_reduce})
    for path in sorted((OUT / gpu).glob("*.csv")):
        _remove_cached(path)


def _shared(folder: Path, gpu: str) -> None:
    """Write tables that all engines share, for a GPU of either kind of export."""
    facts = {**WHEEL_FACTS, "backend": "vllm", "version": VLLM_OF_WHEEL}
    moe = _parquet(folder, "moe", "vllm", VLLM_OF_WHEEL, "moe_perf")
    is_hopper = gpu in BOTH
    names = {"fp8": "fp8_block", "mxfp4": MXFP4["hopper" if is_hopper else "blackwell"]}
    if not is_hopper:
        names |= {"int4": "int4_wo", "nvfp4": "nvfp4"}
    for dtype, name in names.items():
        _moe(_padded(moe[moe.moe_dtype == name], "num_tokens"), gpu, dtype, facts, SKEWED)
    sglang = {**WHEEL_FACTS, "backend": BLOCKS_OF_WHEEL, "version": SGLANG_OF_WHEEL}
    gemm = _parquet(folder, "gemm", BLOCKS_OF_WHEEL, SGLANG_OF_WHEEL, "gemm_perf")
    _gemm(_sparse(_padded(gemm[gemm.gemm_dtype == "fp8_block"], "m")), gpu, "fp8", sglang)
    own = {**WHEEL_FACTS, "backend": "trtllm", "version": TRTLLM}
    gemm = _parquet(folder, "gemm", "trtllm", TRTLLM, "gemm_perf")
    fixed = _with_fixed_scales(gemm[gemm.gemm_dtype == "fp8"], folder)
    _gemm(_sparse(fixed), gpu, "fp8", own)
    if not is_hopper:
        quantised = _padded(gemm[gemm.gemm_dtype == "nvfp4"], "m")
        _gemm(_sparse(quantised), gpu, "nvfp4", own, "quantised_gemm")
    latent = _parquet(folder, "mla", "sglang", SGLANG_OF_WHEEL, "generation_mla_perf")
    _latent(latent, gpu, "bfloat16", sglang)
    trtllm = {**WHEEL_FACTS, "backend": "trtllm", "version": TRTLLM}
    latent = _parquet(folder, "mla", "trtllm", TRTLLM, "generation_mla_perf")
    _latent(latent, gpu, "fp8", trtllm)
    module = _parquet(folder, "mla", "trtllm", TRTLLM, "mla_generation_module_perf")
    _latent_projections(module, latent, gpu, trtllm)
    _wide_experts(folder, gpu)
    for engine, version in ENGINES.items():
        if engine == "trtllm" and is_hopper:
            continue
        table = _parquet(folder, "comm", engine, version, "custom_allreduce_perf")
        if "backend" in table:
            table = table[table.backend == f"{engine}_graph"]
        table = table.rename(columns={"num_gpus": "gpus"})
        own = {**WHEEL_FACTS, "backend": engine, "version": version}
        table = _padded(table, "message_size")
        _write(table, gpu, "all_reduce", "bfloat16", ("gpus",), "message_size", own)


def _wide_experts(folder: Path, gpu: str) -> None:
    """Write DeepGEMM's experts of DeepEP's two layouts, with even shares of tokens.

    The masked layout of few tokens, and the contiguous one of many, have as columns the tokens of all ranks.
    """
    facts = {**WHEEL_FACTS, "backend": "sglang", "version": WIDE}
    for phase, operator in (("generation", "masked_moe"), ("context", "contiguous_moe")):
        table = _parquet(folder, "moe", "sglang", WIDE, f"wideep_{phase}_moe_perf")
        table = table[table.distribution == "uniform"].assign(distribution="balanced")
        _moe(_padded(table, "num_tokens"), gpu, "fp8", facts, operator=operator)


def _latent_projections(
    module: pd.DataFrame, attention: pd.DataFrame, gpu: str, facts: dict[str, str]
) -> None:
    """Subtract attention from a whole module of latent attention: what remains are its products and norms.

    Both were measured with a cache in fp8. Contexts of up to `LONGEST_COMPARED` tokens count.
    """
    keys = ["num_heads", "batch_size", "context"]
    attention = attention[attention.kv_cache_dtype == "fp8"]
    attention = attention.assign(context=attention.step + 1).groupby(keys).latency.median()
    for dtype, name in (("bfloat16", "bfloat16"), ("fp8", "fp8_block")):
        whole = module[(module.kv_cache_dtype == "fp8") & (module.gemm_type == name)]
        whole = whole.assign(context=whole.step).groupby(keys).latency.median()
        rest = (whole - attention).dropna().reset_index()
        rest = rest[rest.context.between(SHORTEST_CONTEXT, LONGEST_COMPARED)]
        rest = rest.groupby(keys[:2], as_index=False).latency.median()
        rest = _padded(rest, "batch_size").rename(columns={"num_heads": "heads"})
        rest = rest.rename(columns={"batch_size": "num_tokens"})
        _write(rest, gpu, "latent_projections", dtype, ("heads",), "num_tokens", facts)


def _with_fixed_scales(gemm: pd.DataFrame, folder: Path) -> pd.DataFrame:
    """Subtract the kernel that computes scales of inputs from TensorRT-LLM's products in fp8.

    Checkpoints with a scale for each tensor fix the scales of inputs too.
    """
    keys = ["m", "k"]
    apart = _parquet(folder, "quantize", "trtllm", TRTLLM, "computescale_perf")
    apart = apart.groupby(keys).latency.median().rename("apart").reset_index()
    rest = gemm.merge(apart, on=keys)
    rest = rest.assign(latency=rest.latency - rest.apart)
    return _padded(rest[rest.latency > 0].drop(columns="apart"), "m")


def _sparse(gemm: pd.DataFrame) -> pd.DataFrame:
    """Keep products of powers of two of rows, but for the largest: their ratio to the roofline is smooth."""
    return gemm[gemm.m.isin([2**power for power in range(14)])]


def _padded(table: pd.DataFrame, column: str) -> pd.DataFrame:
    """Take at most the seconds of a larger shape, because an engine can pad to it.

    Some cells of single shapes take twice as long as those on both sides.
    """
    keys = [
        name
        for name in table.columns
        if name not in (column, "latency", "power", "power_limit", "kernel_source")
    ]
    table = table.sort_values(column, ascending=False)
    least = table.groupby(keys, dropna=False).latency.cummin()
    return table.assign(latency=least)


def _linear(folder: Path, gpu: str) -> None:
    """Write linear attention whose states have 128 x 128 values a head: gated delta nets, and Kimi's.

    A prefill of Kimi's is parallel over sequences, so their number is an axis. Its convolution is not included.
    """
    gated = _parquet(folder, "linear_attention", "sglang", SGLANG_OF_WHEEL, "gdn_perf")
    sglang = {**WHEEL_FACTS, "backend": "sglang", "version": SGLANG_OF_WHEEL}
    _gated_kernels(gated, gpu, sglang)
    facts = {**WHEEL_FACTS, "backend": "vllm", "version": KIMI_VERSION}
    kimi = _parquet(folder, "kda", "vllm", KIMI_VERSION, "kda_perf")
    kimi = kimi.rename(columns={"num_v_heads": "heads"})
    step = kimi[kimi.kernel_source == KIMI_STEP]
    _write(step, gpu, "kimi_decode", "bfloat16", ("heads",), "batch_size", facts)
    prefill = kimi[(kimi.kernel_source == KIMI_PREFILL) & (kimi.num_tokens >= KIMI_TOKENS)]
    keys = ("heads", "batch_size")
    _write(prefill, gpu, "kimi_prefill", "bfloat16", keys, "num_tokens", facts)
    for path in sorted((OUT / gpu).glob("*.csv")):
        if path.name.split(".")[0] in LINEAR:
            _remove_cached(path)


def _gated_kernels(table: pd.DataFrame, gpu: str, facts: dict[str, str]) -> None:
    """Add up the two kernels of gated delta nets, for the fewest heads of keys of each number of value heads.

    Some large shapes have the convolution alone. They are left out.
    """
    table = table[(table.head_k_dim == HEAD_DIM) & (table.head_v_dim == HEAD_DIM)]
    table = table.rename(columns={"num_v_heads": "heads", "batch_size": "batch"})
    keys = ["heads", "num_k_heads", "d_model", "batch", "seq_len", "kernel_source"]
    table = table.groupby([*keys, "phase"], as_index=False).latency.median()
    whole = table.groupby(
        ["heads", "num_k_heads", "d_model", "batch", "seq_len", "phase"], as_index=False
    )
    whole = whole.latency.agg(["sum", "size"]).reset_index()
    whole = whole[whole["size"] == GATED_KERNELS].rename(columns={"sum": "latency"})
    whole = whole.drop(columns="size")
    step = whole[whole.phase == "generation"].assign(size=lambda some: some.batch)
    prefill = whole[(whole.phase == "context") & (whole.batch == 1)].assign(
        size=lambda some: some.seq_len
    )
    for operator, rows, column in (
        ("linear_decode", step, "batch"),
        ("linear_prefill", prefill, "tokens"),
    ):
        rows = rows.drop(columns=["batch", "seq_len"]).rename(columns={"size": column})
        _write(rows, gpu, operator, "bfloat16", ("heads",), column, facts)


def _parquet(folder: Path, kind: str, backend: str, version: str, name: str) -> pd.DataFrame:
    return pd.read_parquet(folder / kind / backend / version / f"{name}.parquet")


def _remove_cached(path: Path) -> None:
    """Remove cells that beat the datasheet, because their operands stayed in the L2 cache between calls.

    An L2 cache of 96 MB (L40S) or 128 MB (RTX PRO 6000) holds whole matrices. A model's step reads all
    of them from memory.
    """
    table = read_table(path)
    axes = {name: table.rows[:, i][:, None] for i, name in enumerate(table.keys)}
    axes[table.facts.columns] = table.columns[None, :]
    peak = peak_of(load_gpu(table.facts.gpu), table.facts.dtype)
    is_cached = OPERATORS[table.facts.operator].roofline(peak)(axes) > table.seconds
    if table.facts.operator in UNCERTAIN or not is_cached.any():
        return
    lines = path.read_text().splitlines()
    first = len(lines) - len(is_cached)
    lines[:first] = [line.replace(CORE["source"], WITHOUT_CACHED) for line in lines[:first]]
    kept = [_without(line, row) for line, row in zip(lines[first:], is_cached, strict=True)]
    path.write_text("\n".join([*lines[:first], *(line for line in kept if line)]) + "\n")


def _without(line: str, is_cached: Sequence[bool]) -> str:
    """Return a row without some of its cells; an empty text if none is left."""
    cells = line.split(",")
    keys = len(cells) - len(is_cached)
    rest = ["" if hidden else cell for cell, hidden in zip(cells[keys:], is_cached, strict=True)]
    return ",".join([*cells[:keys], *rest]) if any(rest) else ""


def _latent(table: pd.DataFrame, gpu: str, dtype: str, facts: dict[str, str]) -> None:
    """Keep a cache of one format, without the columns that state from which degree of parallelism the heads come."""
    table = table[table.kv_cache_dtype == dtype].rename(columns={"num_heads": "heads"})
    table = table.assign(context=table.step + 1)
    table = table[table.context >= SHORTEST_CONTEXT]
    keys = ("heads", "batch_size")
    _write(table, gpu, "latent_decode_attention", dtype, keys, "context", facts)


def _all_reduce(table: pd.DataFrame, gpu: str, facts: dict[str, str]) -> None:
    """Keep all-reduce in a CUDA graph, as decode steps run."""
    table = table[table.backend == "vllm_graph"].rename(columns={"num_gpus": "gpus"})
    _write(table, gpu, "all_reduce", "bfloat16", ("gpus",), "message_size", facts)


def _h20_3e(folder: Path) -> None:
    gpu = "h20-3e"
    gemm = pd.read_csv(folder / "gemm_perf.csv")
    facts = {**H20_3E, "backend": "sglang", "version": "0.5.1.post1"}
    for dtype in ("float16", "fp8"):
        _gemm(gemm[gemm.gemm_dtype == dtype], gpu, dtype, facts)
    facts["version"] = "0.5.5.post2"
    for operator, name in (("decode", "generation"), ("prefill", "context")):
        table = pd.read_csv(folder / f"{name}_attention_perf.csv")
        is_half = (table.attn_dtype == "float16") & (table.kv_cache_dtype == "float16")
        _attention(table[is_half], gpu, operator, "float16", facts)
    nccl = {
        "source": "github.com/ai-dynamo/aiconfigurator 0bd529d",
        "licence": "Apache-2.0",
        "version": "2.23",
    }
    _collectives(pd.read_csv(folder / "h20e_nccl_perf.csv"), gpu, nccl)


LAUNCH_SHARE = 0.95
"""Share of the shortest of DeepGEMM's products that is its launch; assumption: a product of 2,048 by 512 has hardly any work.
Most products are beyond the 34 measured shapes, where the launch of a small product would grow with the work.
"""


def _infersim(folder: Path, gpu: str) -> None:
    gemm = pd.read_csv(folder / "gemm" / gpu / "data.csv").drop_duplicates(["m", "k", "n"])
    gemm["latency"] = gemm.latency_us / 1e3
    kept = gemm[gemm.m.isin(GEMM_ROWS)]
    shortest = kept.groupby(["m", "n", "k"]).latency_us.median().min()
    launch = f"{LAUNCH_SHARE * shortest:.4g}"
    _gemm(gemm, gpu, "fp8", {**INFERSIM, "backend": "deepgemm", "launch": launch})
    flash = {**INFERSIM, "backend": "flashinfer"}
    for kept, dtype in (("bf16", "bfloat16"), ("fp8", "fp8")):
        _write(
            pd.concat(_mha(folder / "mha" / "decode" / gpu, kept)),
            gpu,
            "decode_attention",
            dtype,
            ("heads", "kv_heads", "batch_size"),
            "kv_len",
            flash,
        )
    if (folder / "mha" / "prefill" / gpu).exists():
        prefill = pd.concat(_mha(folder / "mha" / "prefill" / gpu)).assign(batch_size=1)
        _write(
            prefill,
            gpu,
            "prefill_attention",
            "bfloat16",
            ("heads", "kv_heads", "batch_size"),
            "seq_len",
            {**INFERSIM, "backend": "fa3"},
        )
    mla = _read_mha(folder / "mla" / "decode" / gpu / "128-512-64.csv")
    mla = mla[mla.kv_dtype == "bf16"].assign(heads=MLA_HEADS)
    facts = {**INFERSIM, "backend": "flashmla"}
    _write(
        mla,
        gpu,
        "latent_decode_attention",
        "bfloat16",
        ("heads", "batch_size"),
        "kv_len",
        facts,
    )
    if (folder / "gdn" / "decode" / gpu).exists():
        _gated_delta(folder / "gdn", gpu)
    grouped = pd.concat(
        pd.read_csv(folder / "grouped_gemm" / phase / gpu / "data.csv").rename(
            columns={"batch_size_per_gpu": "tokens", "seq_len_per_gpu": "tokens"}
        )
        for phase in ("decode", "prefill")
    )
    # The table counts the tokens of one GPU, the operator those of all GPUs.
    grouped["tokens"] *= grouped.num_gpus
    grouped["latency"] = (grouped.up_proj_us + grouped.down_proj_us) / 1e3
    grouped = grouped.rename(
        columns={"hidden_size": "hidden", "intermediate_size": "intermediate"}
    ).rename(columns={"num_experts": "experts", "num_gpus": "expert_parallel"})
    grouped["tensor_parallel"] = 1
    _write(grouped, gpu, "moe", "fp8", MOE_KEYS, "tokens", {**INFERSIM, "backend": "deepgemm"})


def _gated_delta(folder: Path, gpu: str) -> None:
    """Add up the kernels of a layer. The file of 64 heads repeats that of 32 heads, which is Qwen3-Next's."""
    name, facts = f"4-16-128-{GATED_HEADS}-128.csv", {**INFERSIM, "backend": "fla"}
    for phase, size, column in (("decode", "batchsize", "batch"), ("prefill", "seq_len", "tokens")):
        table = pd.read_csv(folder / phase / gpu / name).rename(columns={size: column})
        table["latency"] = table.drop(columns=column).sum(axis=1) / 1e3
        table = table.assign(heads=GATED_HEADS)
        _write(table, gpu, f"linear_{phase}", "bfloat16", ("heads",), column, facts)


MOE_KEYS = ("hidden", "intermediate", "topk", "experts", "tensor_parallel", "expert_parallel")


def _mha(folder: Path, kept: str = "bf16") -> Iterable[pd.DataFrame]:
    """Read each file `heads-kv_heads-head_dim.csv` with 128-wide heads, whose keys and values have the dtype `kept`."""
    for path in sorted(folder.glob("*-128.csv")):
        heads, kv_heads, _ = map(int, path.stem.split("-"))
        table = _read_mha(path)
        dtype = table.kv_dtype if "kv_dtype" in table else table.dtype
        yield table[dtype == kept].assign(heads=heads, kv_heads=kv_heads)


def _read_mha(path: Path) -> pd.DataFrame:
    table = pd.read_csv(path)
    if "latency_us" not in table:  # one file has no header line
        names = ["dtype", "kv_dtype", "batch_size", "kv_len", "latency_us", "mfu"]
        table = pd.read_csv(path, names=names)
    return table.assign(latency=table.latency_us / 1e3, dtype=table["dtype"])


def _gemm(
    table: pd.DataFrame, gpu: str, dtype: str, facts: dict[str, str], operator: str = "gemm"
) -> None:
    table = table[table.m.isin(GEMM_ROWS) & (table.n >= 64) & (table.k >= 64)]
    _write(table, gpu, operator, dtype, ("n", "k"), "m", facts)


def _quantise(table: pd.DataFrame, gpu: str, facts: dict[str, str]) -> None:
    """Add up the two parts: quantisation with a given scale, and the additional time to compute a scale per row."""
    whole = table.groupby(["m", "k"], as_index=False).latency.sum()
    whole = whole[whole.m.isin(GEMM_ROWS) & (whole.k >= 64)]
    _write(whole, gpu, "quantise", "fp8", ("k",), "m", facts)


def _attention(
    table: pd.DataFrame, gpu: str, operator: str, dtype: str, facts: dict[str, str]
) -> None:
    table = table.rename(columns={"num_heads": "heads", "num_key_value_heads": "kv_heads"})
    table = table.assign(context=table.step + 1 if operator == "decode" else table.isl)
    least = SHORTEST_CONTEXT if operator == "decode" else 16
    table = table[table.context >= least].drop_duplicates(
        ["heads", "kv_heads", "batch_size", "context"]
    )
    keys = ("heads", "kv_heads", "batch_size")
    _write(table, gpu, f"{operator}_attention", dtype, keys, "context", facts)


def _moe(
    table: pd.DataFrame,
    gpu: str,
    dtype: str,
    facts: dict[str, str],
    shares: str = "balanced",
    operator: str = "moe",
) -> None:
    """Keep these shares of tokens over experts; if they were not measured, keep the most equal ones."""
    is_even = table.distribution == "balanced"
    kept = is_even if is_even.any() else table.distribution == SKEWED
    if shares == SKEWED:
        kept = is_even.where(table.moe_ep_size > 1, table.distribution == SKEWED)
    table = table[kept & table.num_tokens.isin(MOE_TOKENS)]
    names = {"hidden_size": "hidden", "inter_size": "intermediate", "num_experts": "experts"}
    names |= {"moe_tp_size": "tensor_parallel", "moe_ep_size": "expert_parallel"}
    table = table.rename(columns=names).drop_duplicates([*MOE_KEYS, "num_tokens"])
    text = "even" if is_even.any() else "power law 1.01"
    rest = "; power law 1.01 on one rank" if shares == SKEWED else ""
    note = {"distribution": f"{text} shares of tokens over experts{rest}"}
    _write(table, gpu, operator, dtype, MOE_KEYS, "num_tokens", {**facts, **note})


def _collectives(table: pd.DataFrame, gpu: str, facts: dict[str, str]) -> None:
    facts = {**facts, "backend": "nccl"}
    table = table[table.nccl_dtype == "half"].rename(columns={"num_gpus": "gpus"})
    names = {"all_gather": "all_gather", "alltoall": "all_to_all", "all_reduce": "all_reduce"}
    for name, operator in {**names, "reduce_scatter": "reduce_scatter"}.items():
        rows = table[table.op_name == name]
        if len(rows):
            _write(rows, gpu, operator, "float16", ("gpus",), "message_size", facts)


def _write(
    table: pd.DataFrame,
    gpu: str,
    operator: str,
    dtype: str,
    keys: tuple[str, ...],
    column: str,
    facts: dict[str, str],
) -> None:
    """Write one operator's table: a row per key, and a column per value of the last axis."""
    if table.empty:
        return
    names = {"batch_size": "batch", "message_size": "bytes", "kv_len": "context"}
    names |= {"seq_len": "context", "num_tokens": "tokens"}
    wide = table.pivot_table(index=list(keys), columns=column, values="latency", aggfunc="median")
    wide = (wide * 1e-3).sort_index()
    keys = tuple(names.get(key, key) for key in keys)
    header = {
        "operator": operator,
        "gpu": gpu,
        "device": DEVICES[gpu] if gpu in DEVICES else WHEEL[gpu].device,
        "dtype": dtype,
        "unit": "us",
        "date": DATE,
        "columns": names.get(column, column),
        **facts,
    }
    lines = [f"# {key}: {value}" for key, value in header.items()]
    lines.append(",".join([*keys, *(str(int(c)) for c in wide.columns)]))
    for index, row in wide.iterrows():
        cells = [str(int(i)) for i in (index if isinstance(index, tuple) else (index,))]
        cells += ["" if pd.isna(v) else f"{v * 1e6:.4g}" for v in row]
        lines.append(",".join(cells))
    path = OUT / gpu / f"{operator}.{header['backend']}.{dtype}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
