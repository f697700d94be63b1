"""Convert the readings of this machine to a measured profile, with the host and the versions of packages."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from streamrl.executor.execute import facts
from streamrl.executor.launchers.placement import usable_cores
from streamrl.executor.profiling.environment_times import MeasuredEnvironment
from streamrl.executor.profiling.measurements import (
    BESIDE_REPLICA,
    Company,
    Limits,
    RayPlace,
    Readings,
    RefillStream,
    Setup,
    full_plan,
    quick_plan,
)
from streamrl.executor.profiling.profiler import Watch, measure
from streamrl.hardware.hugging_face import why_not_executed
from streamrl.hardware.measured_profile import (
    CallRow,
    DecodeRow,
    Host,
    JoinRow,
    MeasuredModel,
    MeasuredProfile,
    MixedRow,
    ModelOperation,
    PassRow,
    PrefillRow,
    RelayRow,
    Seconds,
    SharingRow,
    WeightTransfer,
    mean_over_median,
    shape_digest,
)
from streamrl.hardware.parallelism import threads_per_role
from streamrl.hardware.profile_fit import fit_decode, fit_padded_share, fit_prefill
from streamrl.hardware.profiles import load_gpu, load_model
from streamrl.runfile.backend_choice import engine_named
from streamrl.runfile.cluster_config import ModelConfig
from streamrl.runfile.roles_config import Packing, Recompute

QUARTILES = (25, 50, 75)
LEAST = 1e-6
"""Minimum seconds of a turnover, because times in a profile must be positive."""
LEAST_JOINS = 3
"""Minimum number of joins of one kind; a median of fewer is unreliable."""


def make_setup(
    model: Path,
    *,
    gpu: str,
    dtype: str,
    threads: int | None,
    limits: Limits,
    is_quick: bool,
    backend: str = "transformers",
    packing: Packing = "packed",
    recompute: Recompute | None = None,
    lora_rank: int | None = None,
    ray: RayPlace | None = None,
    reward_model: Path | None = None,
    environment: MeasuredEnvironment | None = None,
) -> Setup:
    """Return the setup of a profile, with the defaults of a run.

    Without `threads`, a replica and a trainer on the CPU share its cores. Without `recompute`, the trainer on a GPU
    recomputes all activations, and on a CPU none.

    Raises:
        ValueError: `model` is no model directory, has no weights to merge adapters with, or the GPU is unknown.
    """
    if not (model / "config.json").is_file():
        raise ValueError(f"{model} is no model directory: it has no config.json")
    load_gpu(gpu)
    if gpu == "cpu" and recompute not in (None, "none"):
        raise ValueError(
            f"--recompute must be none on a CPU, where runs recompute nothing, got {recompute!r}"
        )
    if (
        lora_rank is not None
        and not engine_named(backend).serves_adapters
        and not any(model.glob("model*.safetensors"))
    ):
        raise ValueError(
            f"--lora-rank merges adapters with weights, but {model} has no model*.safetensors"
        )
    for directory in (model, *([reward_model] if reward_model else [])):
        if (reason := why_not_executed(Path(directory))) is not None:
            raise ValueError(f"{directory} must be {reason}")
    plan = quick_plan(limits) if is_quick else full_plan(limits)
    if gpu != "cpu":
        plan = replace(plan, companies=[], beside=[])  # each role has its own GPUs
    return Setup(
        model=str(model),
        dtype=dtype,
        device="cpu" if gpu == "cpu" else "cuda",
        threads=threads or threads_per_role(usable_cores(), 2),
        backend=backend,
        limits=limits,
        plan=plan,
        packing=packing,
        recompute=recompute or ("none" if gpu == "cpu" else "full"),
        lora_rank=lora_rank,
        ray=ray,
        reward_model=None if reward_model is None else str(reward_model),
        environment=environment,
    )


def profile_model(setup: Setup, gpu: str, watch: Watch) -> MeasuredProfile:
    """Measure a model on this machine and return its profile; call `watch` for each of `setup.num_points` points."""
    return to_profile(setup, gpu, measure(setup, watch))


def to_profile(setup: Setup, gpu: str, readings: Readings) -> MeasuredProfile:
    """Return the profile of these readings; each row has the quartiles of one point."""
    tables = _tables(setup, gpu, readings)
    turnover, serving = (
        _once([*turnover_times(tables, streams)]) for streams in (readings.streams, readings.turns)
    )
    return msgspec.structs.replace(tables, turnover=turnover, serving=serving)


def turnover_times(profile: MeasuredProfile, streams: Sequence[RefillStream]) -> Iterator[float]:
    """Yield, for each stream, the seconds per rollout that the profile's tables do not predict.

    The tables predict the seconds of each pass of a stream. The rest is the cost of starting and ending rollouts. If they
    arrive one by one, it includes the time in which the server keeps the interpreter from the passes.
    """
    most = max((one.running for stream in streams for one in stream.passes), default=1)
    decode, prefill = fit_decode(profile.decode, most), fit_prefill(profile.prefill, profile.join)
    padded = fit_padded_share(profile.mixed, decode) if profile.mixed else profile.pads_context
    for stream in streams:
        known = 0.0
        for one in stream.passes:
            tokens, pairs = sum(one.prefixes), sum(n * n / 2 for n in one.prefixes)
            known += prefill.added_time(len(one.prefixes), tokens, pairs)
            if one.running:
                context = padded * one.running * one.longest + (1 - padded) * one.context
                known += decode.step_time(one.running, context)
            else:
                known += prefill.alone
        whole = sum(one.seconds for one in stream.passes)
        yield max(LEAST, (whole - known) / stream.num_rollouts)


def _tables(setup: Setup, gpu: str, readings: Readings) -> MeasuredProfile:
    shape = load_model(ModelConfig(path=setup.model))
    versions = {key: str(value) for key, value in facts().items() if key != "host"}
    return MeasuredProfile(
        source=f"streamrl profile of {shape.name} on this machine",
        date=datetime.date.today(),
        gpu=gpu,
        tensor_parallel=1,
        dtype=setup.dtype,
        backend=setup.backend,
        shares_prefixes=False,
        packing=setup.packing,
        recompute=setup.recompute,
        lora_rank=setup.lora_rank,
        serves_adapters=setup.serves_adapters,
        pads_context=readings.pads_context,
        prefill_tokens=readings.prefill_tokens,
        refill_passes=round(float(np.median(readings.refill_passes))),
        repeats=setup.plan.repeats,
        pace=mean_over_median(readings.timed),
        model=_measured_model(setup.model),
        host=_host(setup),
        versions=versions,
        decode=[
            DecodeRow(
                running=key[0],
                context=float(np.mean(readings.decode_context[key])),
                seconds=quartiles(seconds),
            )
            for key, seconds in sorted(readings.decode.items())
        ],
        mixed=_mixed_rows(readings) if readings.pads_context else (),
        prefill=[
            PrefillRow(rollouts=n, tokens=tokens, seconds=quartiles(seconds))
            for (n, tokens), seconds in sorted(readings.prefill.items())
        ],
        join=_join_rows(readings),
        train=_pass_rows(readings.train),
        score=_pass_rows(readings.score),
        reward=tuple(_pass_rows(readings.reward)),
        reward_model=None if setup.reward_model is None else _measured_model(setup.reward_model),
        call=[
            CallRow(tokens=tokens, seconds=quartiles(seconds))
            for tokens, seconds in sorted(readings.call.items())
        ],
        optimizer=ModelOperation(seconds=quartiles(readings.optimizer)),
        push=WeightTransfer(bytes=readings.pushed_bytes, seconds=quartiles(readings.push)),
        load=WeightTransfer(bytes=readings.loaded_bytes, seconds=quartiles(readings.load)),
        relay=tuple(
            RelayRow(
                mode=mode,
                bytes=num_bytes,
                values=num_values,
                encode=quartiles(readings.pack[mode]),
                decode=quartiles(readings.unpack[mode]),
            )
            for mode, (num_bytes, num_values) in sorted(readings.packed.items())
        ),
        sharing=tuple(sharing_row(readings, key) for key in sorted(readings.generation)),
        handling=_once(readings.handling),
        episode=_once(readings.episode),
        action=_once(readings.action),
        environment_action=_once(readings.environment_action[BESIDE_REPLICA]),
        environment_start=_once(readings.environment_start[BESIDE_REPLICA]),
        handling_over_ray=_once(readings.handling_over_ray),
        push_over_ray=_once(readings.push_over_ray),
        lend=_once(readings.lend),
        take_back=_once(readings.take_back),
    )


def sharing_row(readings: Readings, key: Company) -> SharingRow:
    """Return the row of a company; in those with environments, these have a speed too."""
    return SharingRow(
        generating=key.generating,
        training=key.training,
        acting=float(np.median(readings.acting[key])) if key.acts else 0.0,
        generation=quartiles(readings.generation[key]),
        train=quartiles(readings.training[key]) if key.training else None,
        action=quartiles(_speeds_of_environments(readings, key)) if key.acts else None,
    )


def _speeds_of_environments(readings: Readings, key: Company) -> list[float]:
    """Return the speeds of environments in a company relative to those beside one replica, of each round."""
    alone, shared = (
        np.add(readings.environment_start[each], readings.environment_action[each])
        for each in (BESIDE_REPLICA, key)
    )
    return [float(speed) for speed in alone / shared]


def _measured_model(directory: str) -> MeasuredModel:
    shape = load_model(ModelConfig(path=directory))
    return MeasuredModel(
        name=shape.name, num_parameters=shape.num_parameters, digest=shape_digest(shape)
    )


def _once(seconds: Sequence[float]) -> ModelOperation | None:
    return ModelOperation(seconds=quartiles(seconds)) if seconds else None


def quartiles(seconds: Sequence[float]) -> Seconds:
    """Return the lower quartile, the median and the upper quartile."""
    low, median, high = np.percentile(seconds, QUARTILES).tolist()
    return low, median, high


def _mixed_rows(readings: Readings) -> tuple[MixedRow, ...]:
    rows = []
    for key, seconds in sorted(readings.mixed.items()):
        context, longest = np.mean(readings.mixed_context[key], axis=0).tolist()
        rows.append(
            MixedRow(running=key[0], context=context, longest=longest, seconds=quartiles(seconds))
        )
    return tuple(rows)


def _join_rows(readings: Readings) -> list[JoinRow]:
    return [
        JoinRow(
            rollouts=joining,
            tokens=tokens,
            running=running,
            context=float(np.mean(readings.join_context[running, joining, tokens])),
            step=quartiles(readings.step[running, joining, tokens]),
            seconds=quartiles(seconds),
        )
        for (running, joining, tokens), seconds in sorted(readings.join.items())
        if len(seconds) >= LEAST_JOINS
    ]


def _pass_rows(readings: Mapping[tuple[int, int], Sequence[float]]) -> list[PassRow]:
    return [
        PassRow(rollouts=n, tokens=width, seconds=quartiles(seconds))
        for (n, width), seconds in sorted(readings.items())
    ]


def _host(setup: Setup) -> Host:
    cpu = _cpu_name()
    if setup.device == "cuda":
        import torch

        device = torch.cuda.get_device_name()
    else:
        device = cpu
    return Host(cpu=cpu, cores=usable_cores(), threads=setup.threads, device=device)


def _cpu_name() -> str:
    """Return the name of the processor from /proc/cpuinfo, or the architecture without that file."""
    facts_file = Path("/proc/cpuinfo")
    if facts_file.is_file():
        for line in facts_file.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
