"""What may not stand together in a run file."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

from streamrl.runfile.bounds import POSITIVE, check_bounds
from streamrl.runfile.config import DEVICE, Run
from streamrl.runfile.errors import Bounds, OneOf, RunError
from streamrl.runfile.plan_checks import check_plan
from streamrl.runfile.policy_checks import POLICY_CHECKS
from streamrl.runfile.pools import POOL_CHECKS


def check_run(run: Run) -> None:
    """Raise `RunError` where a value is out of bounds, or values contradict each other."""
    for check in CHECKS:
        check(run)


def _check_model(run: Run) -> None:
    model = run.model
    if (model.name is None) == (model.path is None):
        found = "neither" if model.name is None else f"both {model.name!r} and {model.path!r}"
        text = f"model needs exactly one of name and path, got {found}"
        raise RunError("model.name", model.name, text=text, others=("model.path",))


def _check_group(run: Run) -> None:
    algorithm = run.algorithm
    if algorithm.trains_whole_groups and algorithm.group_size < 2:
        raise RunError(
            "algorithm.group_size",
            algorithm.group_size,
            Bounds(2),
            f"algorithm.group_size must be at least 2 for {algorithm.name}, "
            f"got {algorithm.group_size}",
            ("algorithm.name",),
        )


def _check_batch(run: Run) -> None:
    algorithm, ranks = run.algorithm, run.trainer.data_parallel
    if algorithm.rollouts_per_step < ranks:
        raise RunError(
            "algorithm.prompts_per_step",
            algorithm.prompts_per_step,
            Bounds(ceil(ranks / algorithm.group_size)),
            f"algorithm.prompts_per_step={algorithm.prompts_per_step} x group_size="
            f"{algorithm.group_size} gives {algorithm.rollouts_per_step} rollouts, fewer than "
            f"trainer.data_parallel={ranks}",
            ("algorithm.group_size", "trainer.data_parallel"),
        )


def _check_lengths(run: Run) -> None:
    lengths, most = run.workload.lengths, run.workload.max_prompt_tokens
    if lengths is not None and not 1 <= lengths.prompt_tokens <= most:
        raise RunError(
            "workload.lengths.prompt_tokens",
            lengths.prompt_tokens,
            Bounds(1, most),
            f"workload.lengths.prompt_tokens must be between 1 and workload.max_prompt_tokens="
            f"{most}, got {lengths.prompt_tokens}",
            ("workload.max_prompt_tokens",),
        )


def _check_sync(run: Run) -> None:
    sync = run.sync
    if sync.mode == "delta" and run.model.dtype == "float32":
        raise RunError(
            "sync.mode",
            sync.mode,
            OneOf(["full", "lora"]),
            "sync.mode 'delta' needs a model.dtype of 16 bits, got 'float32', "
            "in which a step changes nearly every value",
            ("model.dtype",),
        )
    if sync.backend == "nccl-reshard" and sync.mode != "full":
        raise RunError(
            "sync.mode",
            sync.mode,
            OneOf(["full"]),
            f"sync.backend 'nccl-reshard' moves shards of all weights, so sync.mode must be 'full', "
            f"got {sync.mode!r}",
            ("sync.backend",),
        )


def _check_latency(run: Run) -> None:
    points = run.policies.latency
    if points is None:
        return
    batches = [batch for batch, _ in points]
    if not batches or batches != sorted(set(batches)) or batches[0] < 1:
        text = f"policies.latency must hold batches in rising order from 1, got {batches}"
        raise RunError("policies.latency", points, list, text)
    for batch, seconds in points:
        if not POSITIVE.hold(seconds):
            text = f"policies.latency at batch {batch} must be {POSITIVE}, got {seconds}"
            raise RunError("policies.latency", points, list, text)


def _check_device(run: Run) -> None:
    device = run.execute.device
    if not DEVICE.fullmatch(device):
        text = f"execute.device must be auto, cpu, cuda or cuda:N, got {device!r}"
        raise RunError("execute.device", device, OneOf(["auto", "cpu", "cuda"]), text)


CHECKS: tuple[Callable[[Run], None], ...] = (
    *(_check_model, check_bounds, *POOL_CHECKS, _check_group, _check_batch, _check_lengths),
    *(_check_sync, _check_latency, *POLICY_CHECKS, check_plan, _check_device),
)
"""Each raises `RunError`; later ones rely on earlier ones."""
