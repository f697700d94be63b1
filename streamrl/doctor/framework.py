"""Report what a named framework fills in, and find settings that it does not support."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from streamrl.hardware.profiles import known_engines
from streamrl.runfile.config import Run
from streamrl.runfile.dispatch_choice import DEFAULT_DISPATCH
from streamrl.runfile.findings import Changes, Finding, Fix, Level
from streamrl.runfile.frameworks import (
    SPLITS,
    Framework,
    Setting,
    framework_of,
    settings_of,
)
from streamrl.runfile.policies_config import PoliciesConfig, SyncConfig, SyncMode
from streamrl.runfile.roles_config import TrainerConfig
from streamrl.runfile.simulation_config import FrameworkConfig

SECONDS = ("step_time", "switch_time")
CHOICES = ("system", "sync", "dispatch", "order", "engine")
"""Kinds of findings about settings for which a framework has a list of values, each named `framework-KIND`."""


class Chosen(NamedTuple):
    """A key, its value, and the values that the framework supports."""

    name: str
    key: str
    value: str
    able: list[str]


def find(run: Run) -> Iterator[Finding]:
    """Find settings that the framework does not support, and report what it fills in; nothing without a framework."""
    framework = framework_of(run.framework.name)
    if framework is None:
        return
    yield _finding("ok", "framework", f"{framework.head}: {_filled_in(settings_of(run))}")
    seconds = _seconds(framework, run.framework, run.sync, shares_gpus=run.policies.shares_gpus)
    yield _finding("ok", "framework-seconds", seconds)
    if framework.unknown:
        gaps = "; ".join(f"{what} ({why})" for what, why in framework.unknown.items())
        yield _finding("ok", "framework-unknown", f"unknown of framework {framework.name}: {gaps}")
    choices = _choices(framework, run.policies, run.sync.mode, run.costs.engine)
    yield from _find_choices(framework, choices)
    yield from _find_layout(framework, run.trainer)
    if run.rollout.others and not framework.mixes_replicas:
        text = f"rollout.others: framework {framework.name} supports replicas of one kind only"
        yield _finding("warning", "framework-kinds", text)


def _filled_in(settings: Iterable[tuple[Setting, object]]) -> str:
    parts = [
        f"{setting.key}={own}"
        + ("" if own == setting.value else f" of the run file, where it has {setting.value}")
        for setting, own in settings
    ]
    return ", ".join(parts) or "fills in nothing"


def _seconds(
    framework: Framework, config: FrameworkConfig, sync: SyncConfig, *, shares_gpus: bool
) -> str:
    parts = []
    for name in SECONDS:
        stated, known = getattr(config, name), getattr(framework, name)
        if stated is not None:
            parts.append(f"{name} {stated:g} s of the run file")
        elif known is None:
            parts.append(f"{name} unknown, so those of profiles/frameworks/usual.toml are used")
        else:
            parts.append(f"{name} {known.base:g} s")
    if framework.roofline_sync(shares_gpus, sync) is not None:
        parts.append(f"weight sync unknown, so {sync.backend} is used, a roofline of the links")
    return f"seconds of framework {framework.name}: {', '.join(parts)}"


# Unsupported settings -----------------------------------------------------------------------------


def _find_choices(framework: Framework, choices: Iterable[Chosen]) -> Iterator[Finding]:
    for choice in choices:
        if choice.value not in choice.able:
            text = (
                f"{choice.key} {choice.value!r} is not supported by framework {framework.name}: "
                f"{', '.join(choice.able)}"
            )
            yield _finding("warning", choice.name, text)


def _find_layout(framework: Framework, trainer: TrainerConfig) -> Iterator[Finding]:
    if framework.layout_for(trainer) is None:
        degrees = ", ".join(f"{split}={getattr(trainer, split)}" for split in SPLITS)
        known = ", ".join(layout.name for layout in framework.layouts)
        yield _finding(
            "warning",
            "framework-layout",
            f"trainer with {degrees} and zero={trainer.zero}: framework {framework.name} supports no such split ({known})",
        )


def _choices(
    framework: Framework, policies: PoliciesConfig, sync_mode: SyncMode, engine: str
) -> Iterator[Chosen]:
    of_each: tuple[tuple[str, str, Sequence[str] | None], ...] = (
        ("policies.system", policies.system, [way.name for way in framework.systems]),
        ("sync.mode", sync_mode, framework.sync_modes(engine)),
        ("policies.dispatch", policies.dispatch or DEFAULT_DISPATCH, framework.dispatch),
        ("policies.order", policies.order or "fifo", framework.order),
        ("costs.engine", engine, _engines(framework)),
    )
    for what, (key, value, able) in zip(CHOICES, of_each, strict=True):
        yield Chosen(f"framework-{what}", key, value, [value] if able is None else list(able))


def _engines(framework: Framework) -> list[str]:
    """Return the engines of profiles/engines that a framework generates with, the newest version first."""
    known = filter(framework.generates_with, known_engines())
    return sorted(known, key=_version, reverse=True)


def _version(engine: str) -> tuple[str, list[int]]:
    name, _, version = engine.rpartition("-")
    return name, [int(part) for part in version.split(".") if part.isdigit()]


def _finding(level: Level, name: str, text: str) -> Finding:
    return Finding(level=level, topic="run file", name=name, text=text)


# Fixes --------------------------------------------------------------------------------------------


def _another(name: str) -> Fix:
    """Return the fix for a finding about one setting: each value that the framework supports."""
    return Fix(
        lambda run: (
            {choice.key: value}
            for choice in _choices(
                _named(run.framework), run.policies, run.sync.mode, run.costs.engine
            )
            if choice.name == name
            for value in choice.able
        ),
        "let `streamrl plan` choose, or name another framework",
    )


def _named(config: FrameworkConfig) -> Framework:
    """Return the framework of a run that has findings about it."""
    framework = framework_of(config.name)
    assert framework is not None, "a run without one has no such finding"
    return framework


def _other_layouts(framework: Framework, trainer: TrainerConfig) -> Iterator[Changes]:
    """Yield another ZeRO stage, then data parallelism in place of each degree that is not supported."""
    for layout in framework.layouts:
        yield from ({"trainer.zero": zero} for zero in layout.zero)
    for layout in framework.layouts:
        missing = [split for split in SPLITS if split not in layout.splits]
        ranks = trainer.data_parallel
        for split in ("tensor_parallel", "pipeline_parallel"):
            ranks *= getattr(trainer, split) if split in missing else 1
        degrees = {f"trainer.{split}": 1 for split in missing}
        for zero in reversed(layout.zero):
            yield {**degrees, "trainer.data_parallel": ranks, "trainer.zero": zero}


FIXES = {
    **{f"framework-{what}": _another(f"framework-{what}") for what in CHOICES},
    "framework-layout": Fix(
        lambda run: _other_layouts(_named(run.framework), run.trainer),
        "let `streamrl plan` choose, or name another framework",
    ),
    "framework-kinds": Fix(lambda run: iter(()), "leave rollout.others out"),
}
