"""Correct profile seconds by calibration factors, and add a framework's own seconds per step and per switch.

Each of these figures comes with its source. Unmeasured figures and unknown features of a framework
are listed among the sources. A figure is taken from the first of these that has it: the run file,
its calibration, the framework that it names, the usual values of published frameworks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from streamrl.hardware.calibration_file import Calibration, StageName, load_calibration
from streamrl.hardware.resolved import ResolvedRun, TrainerHardware
from streamrl.runfile.frameworks import (
    SYNC_BACKEND,
    USUAL,
    SwitchSeconds,
    framework_of,
    load_usual,
    settings_of,
)
from streamrl.runfile.simulation_config import FrameworkConfig


@dataclass(frozen=True, kw_only=True)
class Corrections:
    """The calibration factors that apply to a run's GPUs; neutral if the run names no calibration."""

    calibration: Calibration | None
    path: str
    generates_on: str
    """GPU of the replicas."""
    trains_on: str
    """GPU of the trainer."""

    @classmethod
    def of(cls, resolved: ResolvedRun) -> Corrections:
        """Read the calibration of a run for its first kind of replica and its primary trainer.

        Raises:
            RunError: as `load_calibration`.
        """
        run = resolved.run
        return cls(
            calibration=load_calibration(run.costs, run.model),
            path=str(run.costs.calibration),
            generates_on=run.cluster.pools[run.rollout.pool].gpu,
            trains_on=run.cluster.pools[run.trainer.pool].gpu,
        )

    @property
    def generation_factor(self) -> float:
        """Speed of prefill and decode relative to the profiles."""
        return self._factor("generation", self.generates_on)

    @property
    def training_factors(self) -> tuple[float, float]:
        """Speeds of scoring passes, and of training passes with the optimizer step, relative to the profiles."""
        return self._factor("score", self.trains_on), self._factor("train", self.trains_on)

    @property
    def sync_factor(self) -> float:
        """Speed of a push and a load of weights relative to the profiles."""
        return self._factor("sync", self.generates_on)

    @property
    def sync_source(self) -> str | None:
        """Source text of the weight-sync correction; None if there is none."""
        if self.calibration is None or self.calibration.sync is None:
            return None
        return self.calibration.describe("sync", self.generates_on, self.path)

    @property
    def overhead_time(self) -> float | None:
        """Seconds of a step in addition to its stages; None if the calibration has none."""
        if self.calibration is None or self.calibration.overhead is None:
            return None
        return self.calibration.overhead.seconds

    @property
    def sources(self) -> dict[str, str]:
        """Source texts of the corrections by operation; uncorrected operations are left out."""
        if self.calibration is None:
            return {}
        describe, path = self.calibration.describe, self.path
        texts = {
            "prefill": describe("generation", self.generates_on, path),
            "decode": describe("generation", self.generates_on, path),
            "score": describe("score", self.trains_on, path),
            "train": describe("train", self.trains_on, path),
        }
        return {operation: text for operation, text in texts.items() if text}

    def _factor(self, stage: StageName, gpu: str) -> float:
        return 1.0 if self.calibration is None else self.calibration.factor(stage, gpu)


Figure = Literal["step_time", "switch_time"]
DYNAMIC_SAMPLING = "algorithm.dynamic_sampling"
FOLDER, ENGINE = "profiles/frameworks", "costs.engine"


class StatedTime(NamedTuple):
    """Seconds that a framework takes, and their source."""

    seconds: float
    source: str


class OwnSwitch(NamedTuple):
    """What a framework takes to switch, beside the bytes on wires, and where that comes from."""

    seconds: float
    """Its calls."""
    per_gpu: SwitchSeconds | None
    """How it hands over weights and offloads; None if the seconds of its calls include all of this."""
    source: str


class OwnTransfer(NamedTuple):
    """Seconds in which one controller sends a token of the padded batch to the trainer."""

    scored: float
    """For each pass that only scores."""
    trained: float
    spread: float = 0.0
    """By how much both may be off, as a share."""
    source: str | None = None
    """None if there are none."""


def own_transfer(framework: FrameworkConfig, trainer: TrainerHardware) -> OwnTransfer:
    """Return what a framework's controller takes to send a batch; none where the run and its framework have none."""
    key, stated = "framework.transfer_time", framework.transfer_time
    if stated is not None:
        source = f"run file: {key} = {stated * 1e9:.3g} ns" if stated else None
        return OwnTransfer(stated, stated, source=source)
    known = framework_of(framework.name)
    sending = None if known is None else known.sending_of(framework.version)
    if known is None or sending is None:
        return OwnTransfer(0.0, 0.0)
    release, config = known.release_of(framework.version), trainer.config
    sends_copies = release is not None and release.sends_copies
    copies = config.ranks_alike * config.pipeline_parallel if sends_copies else 1
    num_nodes = -(-config.num_gpus // trainer.pool.gpus_per_node)
    times = sending.token_times(copies, num_nodes)
    source = (
        f"{key} {times[1] * 1e9:.3g} ns for training, {copies} {'copy' if copies == 1 else 'copies'} of the batch, "
        f"{FOLDER}/{known.name}.toml: {sending.source}"
    )
    return OwnTransfer(*times, sending.error.spread, source)


def offload_to_score(framework: FrameworkConfig) -> SwitchSeconds | None:
    """Return how a framework offloads the optimizer to score; None if it keeps it on the GPU."""
    known = framework_of(framework.name)
    release = None if known is None else known.release_of(framework.version)
    if known is None or release is None or not release.offloads_to_score:
        return None
    own = known.switch_time
    return own if own is not None and own.offload_bandwidth is not None else None


def own_step_time(
    framework: FrameworkConfig, corrections: Corrections, profile: str | None
) -> StatedTime:
    """Return a framework's own seconds per step; published values are for GPU clusters and not for CPUs.

    Args:
        framework: its section of the run file.
        corrections: the calibration.
        profile: `costs.profile`.
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
    return _own_time(framework, "step_time")


def own_switch(framework: FrameworkConfig, gpu: str) -> OwnSwitch:
    """Return what a framework takes to switch between training and generation; nothing on CPUs.

    Args:
        framework: its section of the run file.
        gpu: the GPU of the trainer.
    """
    if framework.switch_time is None and gpu == "cpu":
        return OwnSwitch(0.0, None, "framework.switch_time is none on CPUs")
    seconds, source = _own_time(framework, "switch_time")
    if framework.switch_time is not None:
        return OwnSwitch(seconds, None, source)
    known = framework_of(framework.name)
    own = known.switch_time if known is not None else None
    return OwnSwitch(seconds, own or load_usual().switch_time, source)


def framework_sources(resolved: ResolvedRun) -> Iterator[str]:
    """Yield the effects of the named framework on a run: its keys and its own seconds."""
    run = resolved.run
    framework = framework_of(run.framework.name)
    if framework is None:
        return
    yield f"{framework.head}: {FOLDER}/{framework.name}.toml"
    if (release := framework.release_of(run.framework.version)) is not None:
        ships = f" ships {release.ships}" if release.ships else ""
        yield f"run file: framework.version = {run.framework.version}: release {release.version}{ships}"
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
            "a roofline of the network behind the median rate of other frameworks' senders"
        )
    how = framework.unknown.get(DYNAMIC_SAMPLING)
    if how is not None and run.leaves_out_uniform:
        yield f"{DYNAMIC_SAMPLING} of framework {framework.name} is not simulated as it is ({how})"
    corrections = Corrections.of(resolved)
    yield own_step_time(run.framework, corrections, run.costs.profile).source
    sent = own_transfer(run.framework, resolved.trainer)
    if sent.source is not None:
        yield sent.source
    offload = None if run.policies.shares_gpus else offload_to_score(run.framework)
    if offload is not None and offload.offload_bandwidth is not None and release is not None:
        rate = offload.offload_bandwidth / 1e9
        yield f"the optimizer is in host memory for log-probs, moved at {rate:.3g} GB/s: {release.source}"
    if run.policies.shares_gpus:
        yield own_switch(run.framework, corrections.trains_on).source


def _own_time(config: FrameworkConfig, name: Figure) -> StatedTime:
    key, stated = f"framework.{name}", getattr(config, name)
    if stated is not None:
        return StatedTime(stated, f"run file: {key} = {stated:.3g} s")
    framework = framework_of(config.name)
    usual = getattr(load_usual(), name)
    known = None if framework is None else getattr(framework, name)
    seconds = (known or usual).base
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
