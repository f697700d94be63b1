"""Check that the packages of the back ends are installed in compatible versions, without importing them."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator

from packaging.requirements import Requirement

from streamrl.executor.launchers.placement import PlacedRoles
from streamrl.runfile.backend_choice import engine_named, training_backend_named
from streamrl.runfile.config import Run
from streamrl.runfile.findings import Finding, Level
from streamrl.runfile.policies_config import SyncMode

PACKAGE = "streamrl"
EXTRA_OF = {
    "local": "",
    "in-process": "",
    "ray": "ray",
    "full": "",
    "delta": "",
    "lora": "lora",
}
"""The extra of this package that a launcher or sync mode needs; "" if the core is enough. Version ranges are only in
pyproject.toml. They are read from the metadata of the installed package."""
SHOWN = {"torch", "transformers", "safetensors"}
"""Packages whose versions are shown if all is well."""


def requirements(roles: PlacedRoles, sync_mode: SyncMode) -> list[Requirement]:
    """Return the requirements of the run's back ends and launcher, from the metadata of this package.

    Raises:
        PackageNotFoundError: this package is not installed.
    """
    extras = {training_backend_named(trainer.backend).extra for trainer in roles.trainers}
    extras |= {
        engine_named(own.backend).extra_of(roles.device_of(own.pool)) for own in roles.rollout.kinds
    }
    extras |= {EXTRA_OF[name] for name in (roles.execute.launcher, sync_mode)}
    declared = map(Requirement, importlib.metadata.requires(PACKAGE) or [])
    return [each for each in declared if _applies(each, extras)]


def _applies(requirement: Requirement, extras: set[str]) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in sorted(extras))


def find(run: Run) -> Iterator[Finding]:
    """Yield a finding for each package that is missing, or whose version this or another package does not accept."""
    try:
        needed = requirements(PlacedRoles.of(run), run.sync.mode)
    except importlib.metadata.PackageNotFoundError:
        text = f"{PACKAGE} is not installed as a package, so nothing says which versions it needs"
        yield _finding("warning", text, "pip install -e .")
        return
    level: Level = "error" if run.model.path is not None else "warning"
    wrong = [line for each in needed for line in _complaints(each, "")]
    names = [each.name for each in needed]
    for name in names:
        wrong += [line for other in _needs_of(name, names) for line in _complaints(other, name)]
    for requirement, text in wrong:
        yield _finding(level, text, f"pip install '{requirement}'")
    if not wrong:
        shown = [f"{name} {installed_version(name)}" for name in names if name in SHOWN]
        what = ", ".join(shown) if shown else "all"
        yield _finding("ok", f"installed as {PACKAGE} needs them: {what}")


def installed_version(name: str) -> str | None:
    """Return the version of an installed distribution without importing it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _complaints(requirement: Requirement, wanted_by: str) -> Iterator[tuple[str, str]]:
    """Yield the requirement and a message, if the package is missing or its version is outside the range."""
    version = installed_version(requirement.name)
    whose = f"{wanted_by or PACKAGE} needs {requirement.name}{requirement.specifier}"
    wanted = f"{requirement.name}{requirement.specifier}"
    if version is None:
        yield wanted, f"{whose}, which is not installed"
    elif not requirement.specifier.contains(version, prereleases=True):
        yield wanted, f"{whose}, but {version} is installed"


def _needs_of(name: str, others: list[str]) -> list[Requirement]:
    """Return the requirements of an installed package on `others`; vLLM and transformers conflict at times."""
    try:
        declared = map(Requirement, importlib.metadata.requires(name) or [])
    except importlib.metadata.PackageNotFoundError:
        return []
    return [each for each in declared if each.name in others and _applies(each, {""})]


def _finding(level: Level, text: str, fix: str = "") -> Finding:
    return Finding(level=level, topic="versions", name="versions", text=text, fix=fix)
