"""GPU checks of whole runs: a measured profile of this machine, executed steps, and their simulation from the profile.

The replica and the trainer share one GPU. In a `disaggregated` run they compute in turn, and both keep
their memory. In a `colocated` run one side sleeps while the other computes. The simulation uses the
output lengths and the share of non-zero advantages of the executed run, so only seconds differ.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from benchmarks.gpu_models import ON_GPU, REWARD_PATTERN, gpu_name, model_directory, write_prompts
from benchmarks.gpu_record import Recorder
from streamrl.executor.execute import execute
from streamrl.executor.profiling.measurements import Limits
from streamrl.executor.profiling.profile_file import make_setup, profile_model
from streamrl.hardware.measured_profile import MeasuredProfile, Seconds, write_measured
from streamrl.record.metrics import Metrics, measure
from streamrl.record.recorded_workload import recorded_workload
from streamrl.runfile.config import CostsConfig, Run
from streamrl.runfile.files import make_run
from streamrl.sim.world import simulate

STEP_ERROR = 0.15
"""Largest accepted relative error of a predicted step. docs/running.md states 3 to 4 % for the
quickstart on one H200.
"""
PROMPT = 24
"""Longest prompt, in tokens."""


class Job(NamedTuple):
    """A model, and the size of its profile and its runs."""

    model: str
    max_running: int
    max_tokens: int
    max_tokens_per_pass: int
    prompts: int
    group: int
    steps: int
    repeats: int
    """Rounds of the profile."""
    is_quick: bool
    """Whether the profile has few points."""


JOBS = (
    {
        "small": Job("small", 64, 128, 2048, 24, 8, 8, 3, False),
        "medium": Job("medium", 64, 256, 8192, 16, 8, 4, 1, True),
    }
    if ON_GPU
    else {
        "small": Job("small", 4, 40, 128, 2, 4, 4, 1, True),
        "medium": Job("medium", 4, 40, 128, 2, 4, 4, 1, True),
    }
)
POOL_GPU = gpu_name() if ON_GPU else "cpu"
DTYPE = "bfloat16" if ON_GPU else "float32"


def profile_path(out: Path, model: str) -> Path:
    """Return the path of a model's profile, which has the format of profiles/hosts."""
    return out / f"profile-{model}.toml"


# Profile ------------------------------------------------------------------------------------------


def check_profile(recorder: Recorder, scratch: Path, out: Path, model: str, bound: float) -> None:
    """Measure this machine for a model, as `streamrl profile` does, and write the profile."""
    recorder.check(f"profile/{model}", bound, _profile, scratch, out, JOBS[model])


def _profile(recorder: Recorder, name: str, scratch: Path, out: Path, job: Job) -> None:
    run = make_job_run(scratch, job, "disaggregated")
    setup = make_setup(
        model_directory(scratch, job.model),
        gpu=POOL_GPU,
        dtype=DTYPE,
        threads=2 if ON_GPU else 1,
        limits=Limits(
            max_running=job.max_running,
            max_context=job.max_tokens + PROMPT,
            max_tokens_per_pass=job.max_tokens_per_pass,
        ),
        is_quick=job.is_quick,
        packing=run.trainer.packing,
        recompute=run.trainer.recompute if ON_GPU else None,
    )
    # Without contention between roles: the profiler skips it on a GPU, and a CPU would take too long.
    plan = dataclasses.replace(setup.plan, repeats=job.repeats, companies=[], beside=[])
    found = profile_model(msgspec.structs.replace(setup, plan=plan), POOL_GPU, lambda what: None)
    write_measured(found, profile_path(out, job.model))
    _report_profile(recorder, name, found)


def _report_profile(recorder: Recorder, name: str, found: MeasuredProfile) -> None:
    largest = max(found.decode, key=lambda row: (row.running, row.context))
    train = max(found.train, key=lambda row: row.rollouts * row.tokens)
    rows: list[tuple[str, Seconds]] = [
        (f"decode step of {largest.running} x {largest.context:.0f} tokens", largest.seconds),
        (f"training pass of {train.rollouts} x {train.tokens} tokens", train.seconds),
        ("optimizer step", found.optimizer.seconds),
        (f"push of {found.push.bytes / 1e6:.1f} MB", found.push.seconds),
        (f"load of {found.load.bytes / 1e6:.1f} MB", found.load.seconds),
    ]
    for what, (low, middle, high) in rows:
        detail = f"quartiles {low * 1e3:.3g} to {high * 1e3:.3g} ms"
        recorder.add(f"{name}: {what}", middle, "s", None, detail)
    recorder.add(f"{name}: pace", found.pace, "mean / median", None, "1 on a quiet machine")


# Runs ---------------------------------------------------------------------------------------------


def check_run(
    recorder: Recorder, scratch: Path, out: Path, model: str, system: str, bound: float
) -> None:
    """Execute a few steps, and compare each stage with its simulation from the profile."""
    recorder.check(f"run/{model}, {system}", bound, _run, scratch, out, JOBS[model], system)


def make_job_run(
    scratch: Path, job: Job, system: str, more: Mapping[str, Any] = MappingProxyType({})
) -> Run:
    """Return the run file of a job with `more` sections; write its prompts if they do not exist."""
    prompts = scratch / "prompts.jsonl"
    if not prompts.is_file():
        write_prompts(prompts, 512)
    table: dict[str, Any] = {
        "model": {"path": str(model_directory(scratch, job.model)), "dtype": DTYPE},
        "cluster": {"pools": {"local": {"gpu": POOL_GPU, "gpus_per_node": 2}}},
        "rollout": {
            "pool": "local",
            "replicas": 1,
            "max_running": job.max_running,
            "max_tokens": job.max_tokens,
            "shares_prefixes": False,
        },
        "trainer": {"pool": "local", "max_tokens_per_pass": job.max_tokens_per_pass},
        "algorithm": {
            "name": "grpo",
            "steps": job.steps,
            "prompts_per_step": job.prompts,
            "group_size": job.group,
            "learning_rate": 1e-5,
        },
        "workload": {"prompts": str(prompts), "max_prompt_tokens": PROMPT},
        "verifier": {"reward": [{"scorer": "regex", "pattern": REWARD_PATTERN}]},
        "policies": {"system": system},
        "execute": {
            "output": str(scratch / f"run-{job.model}-{system}"),
            "checkpoint_every": 10**6,
            "live_trace": False,
            "device": "cuda:0" if ON_GPU else "cpu",
        },
        **more,
    }
    return make_run(table)


def _run(recorder: Recorder, name: str, scratch: Path, out: Path, job: Job, system: str) -> None:
    run = make_job_run(scratch, job, system)
    output = Path(run.execute.output)
    shutil.rmtree(output, ignore_errors=True)
    try:
        trace = execute(run)
    except Exception as error:
        raise RuntimeError(f"{error}; {_last_lines(output / 'logs')}") from error
    measured = measure(trace)
    detail = f"{measured.num_steps} steps, steady state {measured.counted_steps}"
    recorder.add(f"{name}: step, executed", measured.step_time, "s", None, detail)
    recorder.add(f"{name}: tokens generated", measured.throughput, "tokens/s", None)
    report_gap(recorder, name, output)
    profile = profile_path(out, job.model)
    if not profile.is_file():
        recorder.skip(f"{name}: step, simulated", "there is no profile to simulate from")
        return
    workload = recorded_workload(trace, output / "trace.jsonl")
    costs = CostsConfig(profile=str(profile))
    predicted = measure(
        simulate(msgspec.structs.replace(trace.run, workload=workload, costs=costs)),
        measured.counted_steps,
    )
    error = predicted.step_time / measured.step_time - 1
    detail = f"{error:+.1%} of the executed step, tiers {predicted.tiers}"
    is_near = abs(error) < STEP_ERROR if ON_GPU else None
    recorder.add(f"{name}: step, simulated", predicted.step_time, "s", is_near, detail)
    _report_stages(recorder, name, predicted, measured)


def _report_stages(recorder: Recorder, name: str, predicted: Metrics, measured: Metrics) -> None:
    """Write the GPU-seconds of a step by activity and by cause of idle time, executed and simulated.

    Only the sum of decode and prefill is comparable. If prefixes join running rollouts, an executed
    replica counts the whole pass as prefill, and a simulated one only the additional seconds.
    """
    for kind in ("busy", "idle"):
        ours, theirs = (_seconds(one, getattr(one, kind)) for one in (predicted, measured))
        if kind == "busy":
            for found in (ours, theirs):
                found["decode and prefill"] = found.get("decode", 0.0) + found.get("prefill", 0.0)
        for stage in sorted({*ours, *theirs}):
            simulated, executed = ours.get(stage, 0.0), theirs.get(stage, 0.0)
            if max(simulated, executed) > 1e-3 * measured.step_time:
                detail = f"GPU-seconds of a step; simulated {simulated:.4f}"
                recorder.add(f"{name}: {kind}, {stage}", executed, "s", None, detail)


def _seconds(metrics: Metrics, shares: dict[str, float]) -> dict[str, float]:
    whole = metrics.step_time * sum(metrics.num_gpus.values())
    found = {stage: share * whole for stage, share in shares.items()}
    if "underfilled" in found:  # only one of the two worlds has it
        found["decode"] = found.get("decode", 0.0) + found.pop("underfilled")
    return found


def report_gap(recorder: Recorder, name: str, output: Path) -> None:
    lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    gaps = [one["logprob_gap"] for one in map(msgspec.json.decode, lines) if "logprob_gap" in one]
    if gaps:
        detail = f"largest of {len(gaps)} steps; below 0.01 is usual"
        recorder.add(f"{name}: logprob_gap", max(gaps), "nats", max(gaps) < 0.02, detail)


def _last_lines(logs: Path) -> str:
    """Return the last lines of each role's log."""
    found = []
    for file in sorted(logs.glob("*.log")) if logs.is_dir() else []:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()[-3:]
        found.append(f"{file.name}: {' | '.join(line.strip() for line in lines)[-400:]}")
    return "; ".join(found)
