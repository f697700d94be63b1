"""GPU checks of the trainer: gradients against the CPU's in float32, attention kernels, and memory of a step.

The error of a gradient is the norm of its difference to the reference, divided by the reference's
norm, over all tensors.
"""

from __future__ import annotations

import gc
import importlib.util
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.gpu_models import (
    DEVICE,
    ON_GPU,
    SIZES,
    gpu_name,
    make_samples,
    model_directory,
    vocabulary_of,
)
from benchmarks.gpu_record import Recorder
from streamrl.executor.checkup.executed_memory import executed_memory
from streamrl.executor.launchers.role_configs import LOGITS_CHUNK
from streamrl.executor.roles import Sample
from streamrl.executor.trainer.learner import Learner, load_learner
from streamrl.executor.trainer.trainer_settings import TrainerSettings
from streamrl.hardware.memory import trainer_memory
from streamrl.hardware.resolved import resolve
from streamrl.runfile.files import make_run

GRADIENT_ERROR = {"float32": 1e-3, "bfloat16": 6e-2}
"""Largest accepted error of a gradient against the CPU's in float32. bfloat16 keeps 8 bits of each
operand.
"""
LOGPROB_ERROR = {"float32": 1e-3, "bfloat16": 3e-2}
"""Largest accepted mean difference of log-probabilities to the CPU's in float32, in nats."""
MEMORY_ERROR = 0.15
"""Largest accepted relative difference of a step's peak memory to the prediction of `streamrl
doctor`.
"""
ATTENTION_NAMES = ("flash", "fmha", "attention", "cutlass", "softmax")
"""Parts of the names of CUDA kernels that compute attention or its scores."""


class Variant(NamedTuple):
    """A set of options with which a pass is computed."""

    dtype: str
    packing: str
    recompute: str
    chunk: int | None
    adapter_rank: int | None = None

    def __str__(self) -> str:
        """Return the text that names the variant in a result."""
        chunk = "" if self.chunk is None else ", chunked logits"
        adapters = "" if self.adapter_rank is None else ", adapters"
        return f"{self.dtype}, {self.packing}, recompute {self.recompute}{chunk}{adapters}"


class Outcome(NamedTuple):
    """The results of one variant."""

    loss: float
    norm: float
    gradients: dict[str, torch.Tensor]
    logprobs: torch.Tensor
    seconds: float
    """Seconds of a second forward and backward pass over the same batch."""


REFERENCE = Variant("float32", "packed", "none", None)
FULL = [
    Variant(dtype, *path)
    for dtype in ("float32", "bfloat16")
    for path in (
        ("packed", "none", None),
        ("packed", "full", None),
        ("packed", "mlp", 64),
        ("padded", "none", None),
        ("padded", "full", 64),
    )
]
FEW = [variant for variant in FULL if (variant.packing, variant.recompute) in
       {("packed", "full"), ("padded", "none")}]  # fmt: skip
PATHS = {"small": FULL, "medium": FULL, "mixture": FEW, "window": FEW}


def settings_of(path: Path, variant: Variant, device: str = DEVICE) -> TrainerSettings:
    """Return a trainer's settings. It scores before it trains, so that log-probabilities can be compared."""
    return TrainerSettings(
        model=str(path),
        learning_rate=1e-6,
        temperature=1.0,
        correction="decoupled",
        max_tokens_per_pass=SIZES.memory[0] * SIZES.memory[1],
        packing=variant.packing,
        recompute=variant.recompute,
        logits_chunk=variant.chunk,
        adapter_rank=variant.adapter_rank,
        dtype=variant.dtype,
        device=device,
    )


def wait() -> None:
    """Wait until the GPU has finished all its work."""
    if ON_GPU:
        torch.cuda.synchronize()


def compute(path: Path, variant: Variant, samples: list[Sample], device: str = DEVICE) -> Outcome:
    """Score a batch, train on it, make an optimizer step, and return the results."""
    learner = load_learner(settings_of(path, variant, device), None)
    learner.score(samples)
    logprobs = torch.cat([learner.scores[s.rollout]["proximal"] for s in samples]).float().cpu()
    learner.train(samples)
    gradients = {
        name: parameter.grad.detach().float().cpu().clone()
        for name, parameter in learner.backend.model.named_parameters()
        if parameter.grad is not None
    }
    figures = learner.step(1)
    seconds = timed_pass(learner, samples)
    return Outcome(figures["loss"], figures["grad_norm"], gradients, logprobs, seconds)


def timed_pass(learner: Learner, samples: list[Sample]) -> float:
    """Return the seconds of a forward and backward pass over samples that were computed before."""
    learner.score(samples)
    wait()
    began_at = time.perf_counter()
    learner.train(samples)
    wait()
    return time.perf_counter() - began_at


def distance(found: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    """Return the norm of the difference of two gradients over the norm of the second; NaN if one is not finite."""
    if found.keys() != reference.keys():
        raise ValueError(
            f"gradients do not have the same tensors: {found.keys() ^ reference.keys()}"
        )
    squares = sum(float(((found[n] - reference[n]) ** 2).sum()) for n in reference)
    return (squares / sum(float((r**2).sum()) for r in reference.values())) ** 0.5


# Gradients ----------------------------------------------------------------------------------------


def check_gradients(recorder: Recorder, scratch: Path) -> None:
    """Compare every variant of every model with the CPU's, and padded passes with packed ones."""
    torch.set_num_threads(8 if ON_GPU else 1)  # for the reference
    for model, variants in PATHS.items():
        recorder.check(f"gradients/{model}", 80, _compare_paths, scratch, model, variants)
    if importlib.util.find_spec("peft") is None:
        recorder.skip("gradients/adapters", "peft is not installed")
    else:
        recorder.check("gradients/adapters", 20, _compare_adapters, scratch)


def _compare_paths(
    recorder: Recorder, name: str, scratch: Path, model: str, variants: list[Variant]
) -> None:
    path = model_directory(scratch, model)
    count = SIZES.rollouts if model != "medium" else max(4, SIZES.rollouts // 2)
    samples = make_samples(vocabulary_of(path), count, SIZES.prompt, SIZES.output)
    reference = compute(path, REFERENCE, samples, "cpu")
    recorder.add(f"{name}: reference", reference.loss, "loss", None, "CPU, float32, packed")
    found: dict[Variant, Outcome] = {}
    for variant in variants:
        recorder.check(
            f"{name}: {variant}", 20, _compare_one, path, variant, samples, reference, found
        )
    for dtype in GRADIENT_ERROR:
        packed, padded = (
            next((o for v, o in found.items() if (v.dtype, v.packing) == (dtype, packing)), None)
            for packing in ("packed", "padded")
        )
        if packed and padded:
            error = distance(padded.gradients, packed.gradients)
            speed = padded.seconds / packed.seconds
            detail = f"padded takes {speed:.2f} times packed's seconds"
            recorder.add(
                f"{name}: padded against packed, {dtype}",
                error,
                "relative",
                error < GRADIENT_ERROR[dtype],
                detail,
            )


def _compare_one(
    recorder: Recorder,
    name: str,
    path: Path,
    variant: Variant,
    samples: list[Sample],
    reference: Outcome,
    found: dict[Variant, Outcome],
) -> None:
    outcome = found[variant] = compute(path, variant, samples)
    error = distance(outcome.gradients, reference.gradients)
    gap = (outcome.logprobs - reference.logprobs).abs()
    num_tokens = sum(sample.output[0].num_tokens for sample in samples)
    is_right = (
        error < GRADIENT_ERROR[variant.dtype]
        and float(gap.mean()) < LOGPROB_ERROR[variant.dtype]
        and abs(outcome.norm / reference.norm - 1) < GRADIENT_ERROR[variant.dtype]
    )
    detail = (
        f"loss {outcome.loss:.6g} (CPU {reference.loss:.6g}), grad_norm {outcome.norm:.5g} "
        f"(CPU {reference.norm:.5g}), log-probabilities off by {float(gap.mean()):.2g} nats on average, "
        f"{float(gap.max()):.2g} at most; pass {outcome.seconds * 1e3:.1f} ms, {num_tokens} output tokens"
    )
    recorder.add(name, error, "relative", is_right, detail)


def _compare_adapters(recorder: Recorder, name: str, scratch: Path) -> None:
    path = model_directory(scratch, "small")
    samples = make_samples(vocabulary_of(path), SIZES.rollouts, SIZES.prompt, SIZES.output)
    for dtype in GRADIENT_ERROR:
        variant = Variant(dtype, "packed", "full", None, 8)
        reference = compute(path, variant._replace(dtype="float32"), samples, "cpu")
        _compare_one(recorder, f"{name}: {variant}", path, variant, samples, reference, {})


# Attention kernels --------------------------------------------------------------------------------


def check_kernels(recorder: Recorder, scratch: Path) -> None:
    """Report the CUDA kernels that computed the attention of a training pass."""
    for dtype, packing in (("bfloat16", "packed"), ("bfloat16", "padded"), ("float32", "packed")):
        name = f"attention kernels/{dtype}, {packing}"
        if ON_GPU:
            recorder.check(name, 20, _name_kernels, scratch, Variant(dtype, packing, "full", None))
        else:
            recorder.skip(name, "no CUDA kernels on a CPU")


def _name_kernels(recorder: Recorder, name: str, scratch: Path, variant: Variant) -> None:
    path = model_directory(scratch, "medium")
    samples = make_samples(vocabulary_of(path), 4, SIZES.prompt, SIZES.output)
    learner = load_learner(settings_of(path, variant), None)
    timed_pass(learner, samples)
    learner.score(samples)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        learner.train(samples)
        wait()
    kernels = sorted(profile.key_averages(), key=lambda one: -one.self_device_time_total)
    busy = sum(one.self_device_time_total for one in kernels)
    attention = [k for k in kernels if any(part in k.key.lower() for part in ATTENTION_NAMES)]
    share = sum(one.self_device_time_total for one in attention) / busy
    named = "; ".join(f"{one.key[:60]} x{one.count}" for one in attention[:6])
    recorder.add(
        name, share, "share of GPU time", None, f"GPU busy for {busy / 1e3:.1f} ms: {named}"
    )


# Memory -------------------------------------------------------------------------------------------

STEPS = (
    ("medium", "none", "eager"),
    ("medium", "full", "eager"),
    ("medium", "mlp", "chunked"),
    ("large", "full", "eager"),
    ("large", "full", "chunked"),
)
"""Model, `trainer.recompute` and `trainer.logits` of each step whose memory is measured."""


def check_memory(recorder: Recorder, scratch: Path) -> None:
    """Compare the peak memory of a training step with the prediction of `streamrl doctor`."""
    for model, recompute, logits in STEPS:
        name = f"training memory/{model}, recompute {recompute}, {logits} logits"
        recorder.check(name, 40, _compare_memory, scratch, model, recompute, logits)
        gc.collect()
        torch.cuda.empty_cache()


def _compare_memory(
    recorder: Recorder, name: str, scratch: Path, model: str, recompute: str, logits: str
) -> None:
    path = model_directory(scratch, model)
    count, length = SIZES.memory
    trainer = resolve(make_run(_memory_table(path, recompute, logits))).trainer
    predicted = executed_memory(trainer, length - length // 4) or {}
    planned = sum(trainer_memory(trainer).values())
    samples = make_samples(
        vocabulary_of(path), count, length // 4, length - length // 4, is_even=True
    )
    chunk = None if logits == "eager" else LOGITS_CHUNK
    settings = settings_of(path, Variant("bfloat16", "packed", recompute, chunk))
    learner = load_learner(settings, None)
    for version in (1, 2):  # the first step allocates the optimizer's state
        if ON_GPU:
            torch.cuda.reset_peak_memory_stats()
        seconds = timed_pass(learner, samples)
        peak_in_pass = torch.cuda.max_memory_allocated() if ON_GPU else 0
        learner.step(version)
    whole = sum(predicted.values())
    parts = ", ".join(f"{key} {size / 1e9:.2f}" for key, size in predicted.items())
    detail = (
        f"predicted {whole / 1e9:.2f} GB ({parts}); plans count {planned / 1e9:.2f} GB; "
        f"a pass of {count} x {length} tokens took {seconds:.3f} s"
    )
    if not ON_GPU:
        recorder.skip(name, f"no GPU memory to measure; {detail}")
        return
    peak = torch.cuda.max_memory_allocated()
    ratio = peak / whole
    detail = f"measured {peak / 1e9:.2f} GB ({peak_in_pass / 1e9:.2f} in the pass), {detail}"
    recorder.add(name, ratio, "measured / predicted", abs(1 / ratio - 1) < MEMORY_ERROR, detail)


def check_switched_pass(recorder: Recorder, scratch: Path) -> None:
    """Time passes before and after the trainer slept. After it, torch's allocator is empty and allocates every block anew."""
    recorder.check("training pass after a sleep", 30, _time_switched, scratch)


def _time_switched(recorder: Recorder, name: str, scratch: Path) -> None:
    path = model_directory(scratch, "small")
    samples = make_samples(vocabulary_of(path), SIZES.rollouts, SIZES.prompt, SIZES.output)
    learner = load_learner(settings_of(path, Variant("bfloat16", "packed", "full", None)), None)
    before = [timed_pass(learner, samples) for _ in range(3)][-1]
    learner.move("cpu")
    learner.move(DEVICE)
    after = [timed_pass(learner, samples) for _ in range(3)]
    listed = ", ".join(f"{seconds * 1e3:.1f}" for seconds in after)
    detail = f"{before * 1e3:.1f} ms before; {listed} ms after"
    recorder.add(name, after[0] - before, "s", None, detail)


def _memory_table(path: Path, recompute: str, logits: str) -> dict[str, Any]:
    count, length = SIZES.memory
    return {
        "model": {"path": str(path), "dtype": "bfloat16"},
        "cluster": {"pools": {"local": {"gpu": gpu_name(), "gpus_per_node": 2}}},
        "rollout": {"pool": "local", "replicas": 1, "max_tokens": length - length // 4},
        "trainer": {
            "pool": "local",
            "micro_batch": count,
            "max_tokens_per_pass": count * length,
            "recompute": recompute,
            "logits": logits,
        },
        "algorithm": {"name": "grpo", "steps": 1, "prompts_per_step": count, "group_size": 2},
        "workload": {"max_prompt_tokens": length // 4},
    }
