"""Corrections of profile seconds: factors of a calibration file, and a framework's own seconds per step and per switch.

Seconds that a framework takes of its own, each with where it comes from: of a step, and of a switch of shared GPUs.

What nothing measured stands for, and what the framework has not, is said beside them.

A figure is, in this order: the run file's, its calibration's, that of the framework it names, and what published frameworks
usually take.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from streamrl.hardware.calibration_file import Calibration, StageName, load_calibration
from streamrl.hardware.resolved import ResolvedRun, resolve
from streamrl.runfile.config import Run
from streamrl.runfile.frameworks import SYNC_BACKEND, USUAL, framework_of, load_usual, settings_of
from streamrl.runfile.simulation_config import FrameworkConfig


@dataclass(frozen=True, kw_only=True)
class Corrections:
    """What the calibration that a run names says of its GPUs; nothing where it names none."""

    calibration: Calibration | None
    path: str
    generates_on: str
    """GPU of the replicas."""
    trains_on: str
    """GPU of the trainer."""

    @classmethod
    def of(cls, resolved: ResolvedRun) -> Corrections:
        """Read what a run names, for its first kind of replica and the trainer that leads.

        Raises:
            RunError: as `load_calibration`.
        """
        run = resolved.run
        return cls(
            calibration=load_calibration(run.costs, run.model),
            path=str(run.costs.calibration),
            generates_on=resolved.replica.pool.gpu,
            trains_on=resolved.trainer.pool.gpu,
        )

    @property
    def generation_factor(self) -> float:
        """How fast prefill and decode are relative to the profiles."""
        return self._factor("generation", self.generates_on)

    @property
    def training_factors(self) -> tuple[float, float]:
        """The same of passes that score, and of those that train with the optimizer step."""
        return self._factor("score", self.trains_on), self._factor("train", self.trains_on)

    @property
    def sync_factor(self) -> float:
        """The same of a push and a load of weights."""
        return self._factor("sync", self.generates_on)

    @property
    def sync_source(self) -> str | None:
        """What the calibration says of the seconds of a weight sync; None where it says nothing of them."""
        if self.calibration is None or self.calibration.sync is None:
            return None
        return self.calibration.tell("sync", self.generates_on, self.path)

    @property
    def overhead_time(self) -> float | None:
        """Seconds of a step beside its stages; None where it says nothing of them."""
        if self.calibration is None or self.calibration.overhead is None:
            return None
        return self.calibration.overhead.seconds

    @property
    def sources(self) -> dict[str, str]:
        """By operation what it says of its seconds; those that it says nothing of are left out."""
        if self.calibration is None:
            return {}
        tell, path = self.calibration.tell, self.path
        told = {
            "prefill": tell("generation", self.generates_on, path),
            "decode": tell("generation", self.generates_on, path),
            "score": tell("score", self.trains_on, path),
            "train": tell("train", self.trains_on, path),
        }
        return {operation: text for operation, text in told.items() if text}

    def _factor(self, stage: StageName, gpu: str) -> float:
        return 1.0 if self.calibration is None else self.calibration.factor(stage, gpu)


Figure = Literal["step_time", "switch_time"]
DYNAMIC_SAMPLING = "algorithm.dynamic_sampling"
FOLDER, ENGINE = "profiles/frameworks", "costs.engine"


class StatedTime(NamedTuple):
    """Seconds of a framework."""

    seconds: float
    source: str


def own_step_time(
    framework: FrameworkConfig, corrections: Corrections, profile: str | None, num_parameters: int
) -> StatedTime:
    """Return a framework's own seconds of a step; published ones are of clusters, and say nothing of CPUs.

    Args:
        framework: its section of the run file.
        corrections: what a calibration says.
        profile: `costs.profile`.
        num_parameters: of the model that is trained.
    """
    if framework.step_time is None:
        calibrated = corrections.overhead_time
        if calibrated is not None:
            text = f"framework.step_time {calibrated:.3g} s beside its stages, {corrections.path}"
            return StatedTime(calibrated, text)
        if profile is not None:
            return StatedTime(0.0, "framework.step_time is none beside what costs.profile measured")
        if corrections.trains_on == "cpu":
            return StatedTime(0.0, "framework.step_time is none on CPUs")
    return _own_time(framework, "step_time", num_parameters)


def own_switch_time(framework: FrameworkConfig, gpu: str, num_parameters: int) -> StatedTime:
    """Return the seconds of a framework's calls when GPUs turn from training to generating and back; none of CPUs.

    Args:
        framework: its section of the run file.
        gpu: the GPU of the trainer.
        num_parameters: of the model that is trained.
    """
    if framework.switch_time is None and gpu == "cpu":
        return StatedTime(0.0, "framework.switch_time is none on CPUs")
    return _own_time(framework, "switch_time", num_parameters)


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
    yield from _time_sources(resolve(run))


def _time_sources(resolved: ResolvedRun) -> Iterator[str]:
    run, size = resolved.run, resolved.model.num_parameters
    corrections = Corrections.of(resolved)
    yield own_step_time(run.framework, corrections, run.costs.profile, size).source
    if run.policies.shares_gpus:
        yield own_switch_time(run.framework, corrections.trains_on, size).source


def _own_time(config: FrameworkConfig, name: Figure, num_parameters: int) -> StatedTime:
    key, stated = f"framework.{name}", getattr(config, name)
    if stated is not None:
        return StatedTime(stated, f"run file: {key} = {stated:.3g} s")
    framework = framework_of(config.name)
    usual = getattr(load_usual(), name)
    known = None if framework is None else getattr(framework, name)
    seconds = (known or usual).of(num_parameters)
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
