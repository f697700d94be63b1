"""GPU checks of the card: installed packages, memory bandwidth, matrix products, and operator tables of this GPU.

The tables have the format of profiles/measured/GPU/OPERATOR.BACKEND.DTYPE.csv, with the backend
"torch". They measure matrix products and the attention of the trainer's packed passes
(`streamrl.executor.attention.attend`).
"""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import math
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.gpu_models import DEVICE, ON_GPU, SIZES, gpu_name
from benchmarks.gpu_record import Recorder
from streamrl.executor.attention import attend
from streamrl.executor.checksums import file_checksum
from streamrl.executor.profiling.node_benchmarks import median_seconds, seconds_of
from streamrl.executor.transfer.shared_directory import SharedDirectory
from streamrl.hardware.operator_tables import HEAD_DIM, check_table, read_table
from streamrl.hardware.profiles import load_gpu
from streamrl.sim.costs.kernels import peak_of

PACKAGES = (
    *("torch", "transformers", "triton", "tokenizers", "safetensors", "huggingface-hub", "numpy"),
    *("msgspec", "simpy", "typer", "peft", "zstandard", "psutil", "reasoning-gym", "math-verify"),
    *("flash-attn", "flash-attn-3", "vllm", "deepspeed", "ray"),
)
LEAST_SHARE = 0.6
"""Least share of the datasheet's bandwidth and matrix rate that a healthy card reaches."""
SHAPES = (
    *((1024, 1024), (2048, 1024), (1024, 2048), (3072, 1024), (6144, 1024), (1024, 3072)),
    *((4096, 4096), (12288, 4096)),
)
"""(n, k) of matrix products: those of Qwen3-0.6B, and two larger ones."""
ROWS = (1, 8, 64, 256, 1024, 4096, 16384) if ON_GPU else (1, 8, 64)
HEADS = ((16, 8), (16, 4), (32, 8))
CONTEXTS = (64, 256, 1024, 4096) if ON_GPU else (16, 32)
BATCHES = (1, 8) if ON_GPU else (1,)


def check_environment(recorder: Recorder, scratch: Path) -> None:
    """Report the installed packages, the card and the host."""
    recorder.check("environment", 30, _environment, scratch)


def _environment(recorder: Recorder, name: str, scratch: Path) -> None:
    found = {package: _version(package) for package in PACKAGES}
    listed = ", ".join(f"{key} {version}" for key, version in found.items() if version)
    recorder.add(f"{name}: python", None, "", None, f"{platform.python_version()}; {listed}")
    missing = [key for key, version in found.items() if not version]
    recorder.add(f"{name}: not installed", None, "", None, ", ".join(missing))
    cores = len(os.sched_getaffinity(0))
    for place in (Path("/dev/shm"), scratch):
        free = shutil.disk_usage(place).free if place.is_dir() else 0
        recorder.add(f"{name}: free in {place}", free / 1e9, "GB", None)
    recorder.add(f"{name}: host", cores, "cores", None, f"{platform.platform()}, {_processor()}")
    if not ON_GPU:
        recorder.skip(f"{name}: card", "torch sees no GPU")
        return
    card = torch.cuda.get_device_properties(0)
    description = (
        f"{card.name}, {card.multi_processor_count} multiprocessors, compute capability {card.major}.{card.minor}, "
        f"CUDA {torch.version.cuda}, {_driver_report()}"
    )
    recorder.add(f"{name}: card", card.total_memory / 1e9, "GB", None, description)
    free, _ = torch.cuda.mem_get_info()
    profile = load_gpu(gpu_name())
    detail = f"free of an empty process; profiles/gpus/{gpu_name()}.toml counts {profile.usable_memory / 1e9:.2f} GB as usable"
    recorder.add(
        f"{name}: free memory", free / 1e9, "GB", free >= 0.99 * profile.usable_memory, detail
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    return next((one.partition(":")[2].strip() for one in lines if "model name" in one), "")


def _driver_report() -> str:
    query = "--query-gpu=driver_version,memory.total,clocks.sm,clocks.mem,power.limit"
    command = ["nvidia-smi", query, "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except OSError as error:
        return f"nvidia-smi: {error}"
    return f"nvidia-smi: {done.stdout.strip().replace(chr(10), '; ')}"


# Ceilings -----------------------------------------------------------------------------------------


def check_ceilings(recorder: Recorder, scratch: Path) -> None:
    """Measure the limits of all other figures: copies, matrix products, checksums."""
    recorder.check("ceiling: device copy", 20, _copy)
    recorder.check("ceiling: matrix product", 30, _product)
    recorder.check("ceiling: host link", 30, _host_link)
    recorder.check("ceiling: checksum", 20, _checksum)


def _copy(recorder: Recorder, name: str) -> None:
    source = torch.randn(SIZES.copied // 4, device=DEVICE)
    target = torch.empty_like(source)
    ways: dict[str, Callable[[], object]] = {
        "kernel": lambda: torch.neg(source, out=target),
        "memcpy": lambda: target.copy_(source),
    }
    rates = {way: 2 * source.nbytes / median_seconds(call, DEVICE) for way, call in ways.items()}
    listed = ", ".join(f"{way} {rate / 1e12:.2f} TB/s" for way, rate in rates.items())
    detail = f"{source.nbytes / 1e9:.2f} GB, bytes read and written; {listed}"
    rate, peak = max(rates.values()), load_gpu(gpu_name()).memory_bandwidth
    _against_datasheet(recorder, name, rate, peak, "B/s", detail)


def _product(recorder: Recorder, name: str) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        size = SIZES.matrix
        one, other = (torch.randn(size, size, device=DEVICE, dtype=dtype) for _ in range(2))
        rate = 2 * size**3 / seconds_of([lambda one=one, other=other: one @ other], DEVICE)
        short = str(dtype).removeprefix("torch.")
        peak = load_gpu(gpu_name()).flops[short]
        detail = f"{size} x {size} x {size}, random data"
        _against_datasheet(recorder, f"{name}, {short}", rate, peak, "FLOP/s", detail)


def _against_datasheet(
    recorder: Recorder, name: str, rate: float, peak: float, unit: str, detail: str
) -> None:
    is_healthy = LEAST_SHARE * peak < rate < 1.02 * peak if ON_GPU else None
    detail = f"{detail}; {rate / peak:.0%} of {gpu_name()}'s datasheet"
    recorder.add(name, rate, unit, is_healthy, detail)


def _host_link(recorder: Recorder, name: str) -> None:
    """Copy between host and device, from pinned and from pageable memory."""
    for is_pinned in (True, False):
        host = torch.empty(SIZES.copied // 16, pin_memory=is_pinned and ON_GPU)
        device = torch.empty_like(host, device=DEVICE)
        for way, target, source in (("to device", device, host), ("to host", host, device)):
            found = []
            for _ in range(3):
                began_at = time.perf_counter()
                target.copy_(source)
                if ON_GPU:
                    torch.cuda.synchronize()
                found.append(host.nbytes / (time.perf_counter() - began_at))
            kind = "pinned" if is_pinned else "pageable"
            detail = f"{host.nbytes / 1e9:.2f} GB, {kind} host memory"
            recorder.add(f"{name}: {way}, {kind}", max(found), "B/s", None, detail)


def _checksum(recorder: Recorder, name: str) -> None:
    """Hash a file in shared memory with one thread, as each side of a weight sync does."""
    directory = SharedDirectory("gpu-checks")
    try:
        file, size = directory.path / "bytes", 2**28 if ON_GPU else 2**20
        began_at = time.perf_counter()
        file.write_bytes(os.urandom(2**20) * (size // 2**20))
        write_time = time.perf_counter() - began_at
        began_at = time.perf_counter()
        file_checksum(file)
        rate = size / (time.perf_counter() - began_at)
    finally:
        directory.remove()
    detail = f"BLAKE2b of {size / 1e6:.0f} MB; a write to shared memory ran at {size / write_time / 1e9:.2f} GB/s"
    recorder.add(name, rate, "B/s", None, detail)


# Operator tables ------------------------------------------------------------------------------------


def check_tables(recorder: Recorder, out: Path) -> None:
    """Write operator tables of this GPU."""
    recorder.check("table: gemm", 40, _gemm_table, out)
    recorder.check("table: prefill attention", 40, _attention_table, out)


def _gemm_table(recorder: Recorder, name: str, out: Path) -> None:
    shapes = SHAPES if ON_GPU else SHAPES[:2]
    rows = [((n, k), [_gemm(m, n, k) for m in ROWS]) for n, k in shapes]
    _write_table(recorder, name, out, "gemm", "m", ("n", "k"), ROWS, rows)


def _gemm(m: int, n: int, k: int) -> float:
    """Return the seconds of (m, k) times (k, n) in bfloat16, over more weights than the cache holds."""
    num_weights = math.ceil(2**27 / (2 * n * k)) if ON_GPU else 1
    inputs = torch.randn(m, k, device=DEVICE, dtype=torch.bfloat16)
    weights = [torch.randn(n, k, device=DEVICE, dtype=torch.bfloat16) for _ in range(num_weights)]
    return seconds_of(
        [lambda weight=weight: torch.nn.functional.linear(inputs, weight) for weight in weights],
        DEVICE,
    )


def _attention_table(recorder: Recorder, name: str, out: Path) -> None:
    rows = [
        ((heads, kv_heads, batch), [_attention(heads, kv_heads, batch, c) for c in CONTEXTS])
        for heads, kv_heads in HEADS
        for batch in BATCHES
    ]
    axes = ("heads", "kv_heads", "batch")
    _write_table(recorder, name, out, "prefill_attention", "context", axes, CONTEXTS, rows)


def _attention(heads: int, kv_heads: int, batch: int, context: int) -> float:
    query, key, value = (
        torch.randn(batch, number, context, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16)
        for number in (heads, kv_heads, kv_heads)
    )
    torch.backends.cuda.enable_cudnn_sdp(False)  # the executor disables it too
    how = {"mask": None, "is_causal": True, "scaling": None}
    return seconds_of([lambda: attend(query, key, value, **how)], DEVICE)


def _write_table(
    recorder: Recorder,
    name: str,
    out: Path,
    operator: str,
    columns: str,
    keys: tuple[str, ...],
    places: Sequence[int],
    rows: list[tuple[tuple[int, ...], list[float]]],
) -> None:
    path = out / f"{operator}.torch.bfloat16.csv"
    facts = {
        "operator": operator,
        "gpu": gpu_name() if ON_GPU else "cpu",
        "device": torch.cuda.get_device_name() if ON_GPU else platform.machine(),
        "dtype": "bfloat16",
        "unit": "us",
        "date": datetime.date.today().isoformat(),
        "columns": columns,
        "source": "make gpu, on one card",
        "licence": "Apache-2.0",
        "backend": "torch",
        "version": torch.__version__,
    }
    lines = [f"# {key}: {value}" for key, value in facts.items()]
    lines.append(",".join([*keys, *map(str, places)]))
    for shape, seconds in rows:
        lines.append(",".join([*map(str, shape), *(f"{1e6 * each:.4g}" for each in seconds)]))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    findings = check_table(read_table(path), peak_of(load_gpu(facts["gpu"]), "bfloat16"))
    wrong = [finding.text for finding in findings if finding.is_wrong]
    detail = f"{path.name}; {'; '.join(finding.text for finding in findings) or 'plausible'}"
    recorder.add(name, len(rows) * len(places), "cells", not wrong if ON_GPU else None, detail)
