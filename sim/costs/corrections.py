"""Corrections of profile seconds: factors of a calibration file, and a framework's own seconds per step and per switch.

Seconds that a framework takes of its own, each with where it comes from: of a step, and of a switch of shared GPUs.

What nothing measured stands for, and what the framework has not, is said beside them.

A figure is, in this order: the run file's, its calibration's, that of the framework it names, and what published frameworks
usually take.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from streamrl.hardware.calibration_file import StageName, load_calibration
from streamrl.hardware.profiles import load_model
from streamrl.runfile.config import Run
from streamrl.runfile.frameworks import SYNC_BACKEND, USUAL, framework_of, load_usual, settings_of


def generation_factor(run: Run) -> float:
    """Return how fast prefill and decode are relative to the profiles, by the calibration."""
    return _factor(run, "generation", run.rollout.pool)


def training_factors(run: Run) -> tuple[float, float]:
    """Return the same of passes that score, and of those that train with the optimizer step."""
    pool = run.trainer.pool
    return _factor(run, "score", pool), _factor(run, "train", pool)


def stated_overhead(run: Run) -> float | None:
    """Return the seconds of a step beside its stages: the run file's, else the calibration's; None where neither says."""
    if run.framework.step_time is not None:
        return run.framework.step_time
    calibration = load_calibration(run)
    if calibration is None or calibration.overhead is None:
        return None
    return calibration.overhead.seconds


def calibrated_sources(run: Run) -> dict[str, str]:
    """Return by operation what the calibration says of its seconds; those that it says nothing of are left out."""
    calibration = load_calibration(run)
    if calibration is None:
        return {}
    path, pools = str(run.costs.calibration), run.cluster.pools
    generates, trains = pools[run.rollout.pool].gpu, pools[run.trainer.pool].gpu
    told = {
        "prefill": calibration.tell("generation", generates, path),
        "decode": calibration.tell("generation", generates, path),
        "score": calibration.tell("score", trains, path),
        "train": calibration.tell("train", trains, path),
    }
    return {operation: text for operation, text in told.items() if text}


def _factor(run: Run, stage: StageName, pool: str) -> float:
    calibration = load_calibration(run)
    return 1.0 if calibration is None else calibration.factor(stage, run.cluster.pools[pool].gpu)


Figure = Literal["step_time", "switch_time"]
DYNAMIC_SAMPLING = "algorithm.dynamic_sampling"
FOLDER, ENGINE = "profiles/frameworks", "costs.engine"


class StatedTime(NamedTuple):
    """Seconds of a framework."""

    seconds: float
    source: str


def own_step_time(run: Run) -> StatedTime:
    """Return a framework's own seconds of a step; published ones are of clusters, and say nothing of CPUs."""
    if run.framework.step_time is None:
        calibrated = stated_overhead(run)
        if calibrated is not None:
            text = (
                f"framework.step_time {calibrated:.3g} s beside its stages, {run.costs.calibration}"
            )
            return StatedTime(calibrated, text)
        if run.costs.profile is not None:
            return StatedTime(0.0, "framework.step_time is none beside what costs.profile measured")
        if run.cluster.pools[run.trainer.pool].gpu == "cpu":
            return StatedTime(0.0, "framework.step_time is none on CPUs")
    return _own_time(run, "step_time")


def own_switch_time(run: Run) -> StatedTime:
    """Return the seconds of a framework's calls when GPUs turn from training to generating and back; none of CPUs."""
    is_told = run.framework.switch_time is not None
    if not is_told and run.cluster.pools[run.trainer.pool].gpu == "cpu":
        return StatedTime(0.0, "framework.switch_time is none on CPUs")
    return _own_time(run, "switch_time")


def framework_sources(run: Run) -> Iterator[str]:
    """Yield what a framework that is named makes of a run: its keys, and the seconds that it takes of its own."""
    framework = framework_of(run.framework.name)
    if framework is None:
        return
    yield f"{framework.head}: {FOLDER}/{framework.name}.toml"
    for setting, own in settings_of(run):
        if own == setting.value:
            yield f"framework {framework.name} has {setting.key} = {own}: {setting.source}"
        else:
            yield f"run file: {setting.key} = {own}, where framework {framework.name} has {setting.value}"
    is_told = any(setting.key == ENGINE for setting in framework.settings)
    if not (is_told or framework.generates_with(run.costs.engine)):
        yield (
            f"run file: {ENGINE} = {run.costs.engine}, where framework {framework.name} generates with "
            f"{framework.engine_names}"
        )
    why = framework.roofline_sync(run.policies.shares_gpus, run.sync)
    if why is not None:
        yield (
            f"{SYNC_BACKEND} of framework {framework.name} is unknown ({why}): {run.sync.backend} stands in, "
            "a roofline of what the wires need and nothing else"
        )
    how = framework.unknown.get(DYNAMIC_SAMPLING)
    if how is not None and run.leaves_out_uniform:
        yield f"{DYNAMIC_SAMPLING} of framework {framework.name} is not simulated as it is ({how})"
    times = [own_step_time(run), *([own_switch_time(run)] if run.policies.shares_gpus else [])]
    yield from (time.source for time in times)


def _own_time(run: Run, name: Figure) -> StatedTime:
    key, stated = f"framework.{name}", getattr(run.framework, name)
    if stated is not None:
        return StatedTime(stated, f"run file: {key} = {stated:.3g} s")
    framework, size = framework_of(run.framework.name), load_model(run.model).num_parameters
    usual = getattr(load_usual(), name)
    known = None if framework is None else getattr(framework, name)
    seconds = (known or usual).of(size)
    if framework is None:
        return StatedTime(seconds, f"{key} {seconds:.3g} s, {FOLDER}/{USUAL}.toml: {usual.source}")
    if known is None:
        why = framework.unknown.get(key, "nobody published it")
        return StatedTime(
            seconds,
            f"{key} of framework {framework.name} is unknown ({why}): {seconds:.3g} s of {FOLDER}/{USUAL}.toml stand in",
        )
    return StatedTime(
        seconds, f"{key} {seconds:.3g} s, {FOLDER}/{framework.name}.toml: {known.source}"
    )
