"""What is known of the frameworks that `framework.name` may name, and the keys that a name fills in.

Each framework is a file in profiles/frameworks. A figure has its source beside it. A figure that
nobody published is left out, and `unknown` has the reason. A key that the run file sets is never
changed.
"""

from __future__ import annotations

import copy
import datetime
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_type_hints

import msgspec

from streamrl.runfile.algorithm_config import AlgorithmConfig
from streamrl.runfile.config import Run
from streamrl.runfile.dispatch_choice import DispatchName
from streamrl.runfile.errors import OneOf, RunError
from streamrl.runfile.findings import value_of
from streamrl.runfile.keys import full_key, place_of
from streamrl.runfile.plan_config import framework_of_target
from streamrl.runfile.policies_config import (
    OrderName,
    SyncConfig,
    SyncMode,
    SystemName,
)
from streamrl.runfile.profile_folder import PROFILES
from streamrl.runfile.reading import read_toml
from streamrl.runfile.roles_config import Sharding, TrainerConfig
from streamrl.runfile.simulation_config import FrameworkConfig, FrameworkName
from streamrl.runfile.units import NO_FACTOR, Bandwidth, Duration, Factor, read_quantity

FRAMEWORKS = PROFILES / "frameworks"
USUAL = "usual"
"""The file with seconds for frameworks that have no published ones of their own."""
_VERSION = re.compile(r"\d+(\.\d+)*((a|b|rc)\d+)?(\.(post|dev)\d+)?")
"""A version, such as 0.7.1 or 0.7.0rc1."""
SYNC_BACKEND, SYNC_MODE = "sync.backend", "sync.mode"

Value = str | int | float | bool
Split = Literal[
    "tensor_parallel",
    "pipeline_parallel",
    "expert_parallel",
    "expert_tensor_parallel",
    "virtual_stages",
    "context_parallel",
]
SPLITS: tuple[Split, ...] = get_args(Split)


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    source: str
    """Repository, commit and file, or who measured it on what."""


class Setting(_Table, frozen=True, kw_only=True):
    """A key of the run file that a framework fills in."""

    key: str
    value: Value
    where: dict[str, list[Value]] = {}
    """The setting applies only if each of these keys has one of these values."""
    unless: dict[str, list[Value]] = {}
    """The setting does not apply if one of these keys has one of these values."""

    def holds(self, value_at: Callable[[str], object]) -> bool:
        """Whether it applies to a run file whose keys have these values."""
        return all(value_at(key) in values for key, values in self.where.items()) and not any(
            value_at(key) in values for key, values in self.unless.items()
        )


class Release(_Table, frozen=True, kw_only=True):
    """What a release of a framework has that differs from the commit that was read."""

    version: str
    """Its number without the last digits: "0.6" is 0.6.0 and 0.6.1."""
    ships: str = ""
    """The inference engine that it installs, and what else is known of it."""
    settings: list[Setting] = []
    """Keys with other values. A key of the framework that no setting of the release sets stays."""
    returns_log_probs: bool | None = None
    """Whether its inference engine returns all log-probabilities; None: as at the commit."""
    sends_copies: bool = False
    """Whether its controller sends the batch to each rank on its own. Else tensor, context and
    pipeline ranks share what it sends once.
    """
    offloads_to_score: bool = False
    """Whether the optimizer is in host memory during passes that only score, also on GPUs that only train."""

    def is_of(self, version: str) -> bool:
        """Whether a version belongs to this release."""
        is_version = _VERSION.fullmatch(version) is not None
        return is_version and f"{version}.".startswith(f"{self.version}.")


class ExtraPass(_Table, frozen=True, kw_only=True):
    """A forward pass beside those of training, and when the framework runs it."""

    name: Literal["old log-probs", "reference"]
    runs: str


class EngineLogProbs(_Table, frozen=True, kw_only=True):
    """That a framework always asks the inference engine for the log-probability of every token."""


class SupportedSystem(_Table, frozen=True, kw_only=True):
    """A system that the framework has, and what turns it on there."""

    name: SystemName
    how: str


class SupportedSync(_Table, frozen=True, kw_only=True):
    """What a weight sync of the framework may send, and what turns it on there."""

    mode: SyncMode
    how: str
    engine: str = ""
    """How `costs.engine` begins, where only that inference engine takes it."""


class SupportedEngine(_Table, frozen=True, kw_only=True):
    """An inference engine that the framework generates with."""

    name: str
    """How `costs.engine` begins."""


class Layout(_Table, frozen=True, kw_only=True):
    """A training back end of the framework: degrees above 1 that it has, and its ZeRO stages."""

    name: str
    splits: list[Split] = []
    zero: list[int]
    offloads_with: list[int] | None = None
    """ZeRO stages with which it can keep the optimizer in host memory; all where absent."""
    shardings: list[Sharding] | None = None
    """What shards its weights with ZeRO 3, as `trainer.sharding`; not restricted where absent."""
    offloads_to_nvme: bool = False
    """Whether it can keep the optimizer on NVMe drives."""
    slowdown: Factor = NO_FACTOR
    """Seconds of its forward and backward passes for each second of the same passes in pretraining."""
    fills_micro_batches: bool = False
    """Whether the packed rollouts of a whole batch go into as few micro-batches as possible. Those of
    a pipeline are padded to the largest.
    """
    pads_training: bool = False
    """Whether training pads each of them to `trainer.max_tokens_per_pass`."""

    def unsupported(self, trainer: TrainerConfig) -> dict[str, int | str]:
        """Return the degrees above 1, the ZeRO stage and the offload target that it does not have, by key."""
        others = (split for split in SPLITS if split not in self.splits)
        degrees = {f"trainer.{split}": getattr(trainer, split) or 1 for split in others}
        found: dict[str, int | str] = {key: each for key, each in degrees.items() if each > 1}
        if trainer.steps_on_nvme and not self.offloads_to_nvme:
            found["trainer.offload_to"] = trainer.offload_to
        if trainer.zero == 3 and self.shardings is not None:
            is_own = trainer.sharding in self.shardings
            found |= {} if is_own else {"trainer.sharding": trainer.sharding}
        stages = self.zero
        if trainer.offload and self.offloads_with is not None:
            stages = self.offloads_with
        return found if trainer.zero in stages else found | {"trainer.zero": trainer.zero}


class Loss(_Table, frozen=True, kw_only=True):
    """How log-probs and the loss of a training back end move logits through memory, counted in its code.

    It replaces the seconds that `trainer.logits` stands for.
    """

    layout: str
    """The back end: a name of `layouts`."""
    releases: tuple[str, ...] = ()
    """The releases that have it; all without an entry of their own where empty."""
    scored_bytes: float
    """Bytes for each logit in a pass that only scores."""
    forward_bytes: float
    backward_bytes: float
    sequence_bytes: float = 0.0
    """Bytes for each logit of a micro-batch and each of its packed sequences, if the loss takes these one by one."""


class Seconds(_Table, frozen=True, kw_only=True):
    """Seconds that a framework takes."""

    base: Duration


class SwitchSeconds(Seconds, frozen=True, kw_only=True):
    """What a switch between training and generation takes on shared GPUs.

    `base` is the calls that put engines to sleep, wake them and map memory.
    """

    sleep: Duration = Duration(0.0)
    """The part of `base` in which engines go to sleep, which some published stages count as generation."""
    hand_over: str
    """File of profiles/sync that says how replicas get the weights from trainers on their GPUs."""
    offload_bandwidth: Bandwidth | None = None
    """Bytes a second of a GPU's optimizer states on their way to host memory, in every switch.
    None: they move only if there is no room, at the bandwidth of the GPU's host link.
    """
    onload_bandwidth: Bandwidth | None = None
    """Bytes a second of these states on their way back, from pageable memory. None: the host link's."""
    keeps_weights: bool = False
    """Whether engines that sleep copy their weights to host memory, and back when they wake (level 1 of
    vLLM's sleep mode). Otherwise they drop them.
    """

    def onload_time(self, num_bytes: float, host_link: float) -> float:
        """Return the seconds in which optimizer states of a GPU return from host memory.

        Args:
            num_bytes: bytes of these states.
            host_link: bytes a second of the GPU's host link, which no copy exceeds.
        """
        return num_bytes / min(host_link, self.onload_bandwidth or host_link)


class Sending(_Table, frozen=True, kw_only=True):
    """What one controller sends of a batch to the trainer's ranks, for each pass over it."""

    scored_bytes: int
    """Bytes of a token of the padded batch, for a pass that only scores."""
    trained_bytes: int
    """The same for training."""
    bandwidth: Bandwidth
    error: Factor
    """Seconds relative to those at `bandwidth`."""
    between_nodes: float = 1.0
    """Seconds to ranks on several nodes, relative to those on one."""
    releases: tuple[str, ...] = ()
    """The releases whose controller sends the batch; all, and the commit that was read, where empty."""

    def token_times(self, copies: int, num_nodes: int = 1) -> tuple[float, float]:
        """Return the seconds of a padded token for a scoring pass and for training, sent `copies` times to ranks on nodes."""
        times = copies * (self.between_nodes if num_nodes > 1 else 1.0) / self.bandwidth
        return times * self.scored_bytes, times * self.trained_bytes


class UsualSeconds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Default seconds, used where those of a framework are unknown or no framework is named."""

    step_time: Seconds
    switch_time: SwitchSeconds


class Framework(_Table, frozen=True, kw_only=True):
    """One framework, as its source and those who measured it have it."""

    name: FrameworkName
    commit: str = ""
    """Commit of its repository that was read, unless an entry names another one."""
    date: datetime.date
    version: str
    licence: str
    settings: list[Setting] = []
    releases: list[Release] = []
    passes: list[ExtraPass] = []
    engine_log_probs: EngineLogProbs | None = None
    """None if the engine returns log-probabilities only where the loss reads them."""
    over_http: str = ""
    """Where its code calls inference engines over HTTP, with JSON; "" if it calls them in their processes."""
    systems: list[SupportedSystem]
    sync: list[SupportedSync]
    engines: list[SupportedEngine] = []
    """None where it generates with whatever `costs.engine` names."""
    layouts: list[Layout]
    losses: list[Loss] = []
    dispatch: list[DispatchName] | None = None
    """Dispatch policies of this project that it has; all where absent."""
    order: list[OrderName] | None = None
    """The same of orders."""
    mixes_replicas: bool
    """Whether replicas of several kinds may generate at the same time."""
    step_time: Seconds | None = None
    switch_time: SwitchSeconds | None = None
    sending: Sending | None = None
    """None if no single controller sends the batch, or nobody published what it takes."""
    unknown: dict[str, str] = {}
    """What nobody published, and what is used instead."""

    @property
    def head(self) -> str:
        """Return the name, version and commit of the framework."""
        place = f"{self.source} {self.commit[:7]}".strip()
        return f"framework {self.name}, {self.version} ({place})"

    def release_of(self, version: str | None) -> Release | None:
        """Return the release of a version; None without a version, or if the release is unknown."""
        if version is None:
            return None
        return next((each for each in self.releases if each.is_of(version)), None)

    def settings_of(self, version: str | None) -> list[Setting]:
        """Return the settings of a version, those of its release first: the first that holds for a key counts."""
        release = self.release_of(version)
        return [*(release.settings if release else ()), *self.settings]

    def sending_of(self, version: str | None) -> Sending | None:
        """Return what one controller of a version sends; None if workers fetch their rollouts, or nobody published it."""
        release, sending = self.release_of(version), self.sending
        if sending is None or not sending.releases:
            return sending
        return sending if release is not None and release.version in sending.releases else None

    def returns_log_probs(self, version: str | None) -> bool:
        """Whether the inference engine of a version always returns log-probabilities."""
        release = self.release_of(version)
        if release is None or release.returns_log_probs is None:
            return self.engine_log_probs is not None
        return release.returns_log_probs

    def sync_modes(self, engine: str) -> list[SyncMode]:
        """Return what a sync may send to an inference engine of profiles/engines."""
        return [way.mode for way in self.sync if engine.startswith(way.engine)]

    def generates_with(self, engine: str) -> bool:
        """Whether it has an inference engine of profiles/engines."""
        return not self.engines or any(engine.startswith(each.name) for each in self.engines)

    @property
    def engine_names(self) -> str:
        """Name the inference engines that it generates with."""
        return " or ".join(each.name for each in self.engines)

    def roofline_sync(self, shares_gpus: bool, sync: SyncConfig) -> str | None:
        """Return why nothing measured stands for a run's weight sync; None where something does, or nothing is sent."""
        if shares_gpus or sync.backend != SyncConfig().backend:
            return None
        own = self.unknown.get(f"{SYNC_BACKEND} where {SYNC_MODE} is {sync.mode}")
        return own or self.unknown.get(SYNC_BACKEND)

    def layout_for(self, trainer: TrainerConfig) -> Layout | None:
        """Return the first training back end that supports a trainer's split; None if none does."""
        able = (layout for layout in self.layouts if not layout.unsupported(trainer))
        return next(able, None)


_Read = TypeVar("_Read")


@functools.cache
def load_framework(name: FrameworkName) -> Framework:
    """Read profiles/frameworks/NAME.toml."""
    return read_framework_file(FRAMEWORKS / f"{name}.toml", Framework)


@functools.cache
def load_usual() -> UsualSeconds:
    """Read profiles/frameworks/usual.toml."""
    return read_framework_file(FRAMEWORKS / f"{USUAL}.toml", UsualSeconds)


def read_framework_file(path: Path, kind: type[_Read]) -> _Read:
    """Read a file of profiles/frameworks; `ValueError` by file and key where it is not one."""
    try:
        table = read_toml(path)
        return msgspec.convert(table, kind, dec_hook=read_quantity)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def framework_of(name: FrameworkName | None) -> Framework | None:
    """Return the framework that a run names."""
    return None if name is None else load_framework(name)


def slowdown(name: FrameworkName | None, trainer: TrainerConfig) -> Factor:
    """Return the seconds of a framework's passes for each second of the same passes in pretraining.

    `trainer.efficiency` was measured with the framework and has its slowdown already.
    """
    framework = framework_of(name)
    layout = None if framework is None else framework.layout_for(trainer)
    has_own = trainer.efficiency is not None
    return NO_FACTOR if layout is None or has_own else layout.slowdown


def loss_of(config: FrameworkConfig, trainer: TrainerConfig) -> Loss | None:
    """Return how the loss of a run's framework moves logits; None if nobody counted it, or the trainer chunks them."""
    framework = framework_of(config.name)
    layout = None if framework is None else framework.layout_for(trainer)
    if framework is None or layout is None or trainer.logits == "chunked":
        return None
    release = framework.release_of(config.version)
    own = [each for each in framework.losses if each.layout == layout.name]
    named = [each for each in own if release is not None and release.version in each.releases]
    return next(iter(named or [each for each in own if not each.releases]), None)


class Packing(NamedTuple):
    """How a framework packs the rollouts of a whole batch."""

    fills_micro_batches: bool
    """Whether it packs them into as few micro-batches as possible."""
    pads_training: bool
    """Whether training pads each of these to the most tokens of a pass."""


def packing_of(name: FrameworkName | None, trainer: TrainerConfig) -> Packing:
    """Return how a framework packs a trainer's rollouts."""
    framework = framework_of(name)
    layout = None if framework is None else framework.layout_for(trainer)
    if layout is None or trainer.packing != "packed":
        return Packing(fills_micro_batches=False, pads_training=False)
    return Packing(layout.fills_micro_batches, layout.pads_training)


def returns_log_probs(config: FrameworkConfig, algorithm: AlgorithmConfig) -> bool:
    """Whether the inference engine of a framework returns the log-probability of every token."""
    framework = framework_of(config.name)
    is_always = framework is not None and framework.returns_log_probs(config.version)
    return is_always or algorithm.takes_engine_log_probs


def calls_over_http(config: FrameworkConfig) -> bool:
    """Whether a framework calls its inference engines over HTTP."""
    framework = framework_of(config.name)
    return framework is not None and bool(framework.over_http)


def has_layout(framework_name: FrameworkName | None, trainer: TrainerConfig) -> bool:
    """Whether the framework that a run names, if any, splits a trainer so."""
    framework = framework_of(framework_name)
    return framework is None or framework.layout_for(trainer) is not None


def fill_in(table: dict[str, Any]) -> dict[str, Any]:
    """Return a run file's table with the keys that its framework fills in. The table must have no other errors.

    Raises:
        RunError: `framework.version` is no release of the framework.
    """
    target = table.get("plan", {}).get("target")
    name = table.get("framework", {}).get("name")
    if name is None and target is not None:
        name = framework_of_target(target)
    _check_release(name, table.get("framework", {}).get("version"))
    if name is None:
        return table
    filled = copy.deepcopy(table)
    filled.setdefault("framework", {})["name"] = name
    version = filled["framework"].get("version")
    for setting in load_framework(name).settings_of(version):
        if setting.holds(lambda key: _value_in(filled, key)):
            place, last = _place_in(filled, setting.key)
            place.setdefault(last, setting.value)
    return filled


def _check_release(name: FrameworkName | None, version: str | None) -> None:
    """Raise `RunError` for a version of no framework, or of a release that the framework's profile does not have."""
    key, framework = "framework.version", framework_of(name)
    if version is None:
        return
    if framework is None:
        text = f"{key} is {version!r}, but no framework is named; set framework.name"
        raise RunError(key, version, None, text, ("framework.name",))
    known = [each.version for each in framework.releases]
    if framework.release_of(version) is None:
        told = f"known releases are {', '.join(known)}" if known else "no release is known"
        text = (
            f"{key} is {version!r}: {told} of {framework.name}; set one of them, or leave it out for "
            f"{framework.version}"
        )
        raise RunError(key, version, OneOf(known) if known else None, text, ("framework.name",))


def settings_of(run: Run) -> Iterator[tuple[Setting, object]]:
    """Yield each key that the framework of a run fills in where it is absent, with the value that the run has."""
    framework, seen = framework_of(run.framework.name), set()
    for setting in () if framework is None else framework.settings_of(run.framework.version):
        if setting.key not in seen and setting.holds(lambda key: value_of(run, key)):
            seen.add(setting.key)
            yield setting, value_of(run, setting.key)


def keep_filled_in(run: Run, changed: Run) -> Run:
    """Return a changed run with what its framework fills in for it; what the run before has otherwise stays.

    A key that has what the framework fills in is taken for filled in.
    """
    framework, version = framework_of(run.framework.name), run.framework.version
    keys = {setting.key for setting in framework.settings_of(version)} if framework else ()
    for key in keys:
        before, now = (_filled_in(settings_of(each), key) for each in (run, changed))
        if before != now and value_of(run, key) == before:
            section, name = key.split(".")
            own = msgspec.structs.replace(getattr(changed, section), **{name: now})
            changed = msgspec.structs.replace(changed, **{section: own})
    return changed


def _filled_in(settings: Iterable[tuple[Setting, object]], key: str) -> object:
    """Return the value of a key that the run file leaves out, with the settings of its framework."""
    filled = (setting.value for setting, _ in settings if setting.key == key)
    return next(filled, _default_of(key))


def _value_in(table: dict[str, Any], key: str) -> object:
    """Return what a table has at a key, or the key's default."""
    place, last = _place_in(table, key)
    return place.get(last, _default_of(key))


@functools.cache
def _default_of(key: str) -> object:
    """Return the default of a key that neither the run file nor a framework sets."""
    section, name = key.split(".")
    fields = msgspec.structs.fields(get_type_hints(Run)[section])
    return next(field.default for field in fields if field.name == name)


def _place_in(table: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    """Return the section that contains a key, and the key's name in it; for `[[trainer]]` the first section."""
    section, *rest = full_key(table, key.split("."))
    if len(rest) > 1:
        first: dict[str, Any] = table[section][int(rest[0])]
        return first, rest[1]
    return place_of(table, key)
