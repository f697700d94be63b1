"""A calibration: what the seconds of one's own steps say of the simulated ones, by stage, as `streamrl calibrate` writes it.

A run file names it under `costs.calibration`. A factor says how fast a stage is relative to what the profiles say, and
holds for the GPU that it was measured on; the overhead is of each step, whatever the GPU.
"""

from __future__ import annotations

import datetime
import hashlib
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import tomli_w

from streamrl.hardware.profile_table import ProfileTable
from streamrl.hardware.profiles import load_model, read_profile
from streamrl.runfile.cluster_config import ModelConfig
from streamrl.runfile.config import CostsConfig
from streamrl.runfile.errors import RunError

StageName = Literal["generation", "score", "train", "sync"]
STAGES: tuple[StageName, ...] = get_args(StageName)
"""Stages that have a factor; score are forward passes before training, sync is push and load."""
SECTION = "costs.calibration"


class StageErrors(ProfileTable, frozen=True, kw_only=True):
    """Medians of the absolute relative errors of a step's simulated seconds; absent where no step tells."""

    before: float | None = None
    """Without the calibration, of the steps that it was fitted to."""
    after: float | None = None
    """With it, of the same steps."""
    held_out: float | None = None
    """With it, of later steps that it was not fitted to."""


class StageFactor(ProfileTable, frozen=True, kw_only=True):
    """How fast one stage is, relative to what the profiles say: its seconds are divided by it."""

    gpu: str
    """Of the pool that it was measured on; for another GPU it says nothing."""
    factor: float
    interval: tuple[float, float] | None = None
    """95 % interval of the factor, the median over steps, from their scatter; absent where they are too few to tell."""
    errors: StageErrors = StageErrors()

    def __post_init__(self) -> None:
        if not (isfinite(self.factor) and self.factor > 0):
            raise ValueError(f"factor must be positive and finite, got {self.factor}")


class StepOverhead(ProfileTable, frozen=True, kw_only=True):
    """Seconds of a step beside its stages: data, rewards, logging."""

    seconds: float
    interval: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if not (isfinite(self.seconds) and self.seconds >= 0):
            raise ValueError(f"seconds must be 0 or more and finite, got {self.seconds}")


class Calibration(ProfileTable, frozen=True, kw_only=True):
    """Factors and overhead of one framework on one cluster."""

    source: str
    """What was measured: which file, of which framework."""
    date: datetime.date
    model: str
    system: str
    """`policies.system` of the run."""
    profile: str | None = None
    """Digest of the `costs.profile` whose seconds the factors are of, `none` where it named none; absent where an earlier
    version wrote it."""
    fitted_steps: tuple[int, int] | None = None
    """First and last step that it was fitted to."""
    held_out_steps: tuple[int, int] | None = None
    """First and last step that only its errors were taken of."""
    generation: StageFactor | None = None
    score: StageFactor | None = None
    train: StageFactor | None = None
    sync: StageFactor | None = None
    overhead: StepOverhead | None = None
    """Replaces the assumed `framework.step_time`; one that the run file states stays."""
    step: StageErrors = StageErrors()
    """Errors of whole steps."""

    @property
    def says_nothing(self) -> bool:
        """Whether it has neither a factor nor an overhead."""
        return self.overhead is None and all(self.stage(name) is None for name in STAGES)

    def stage(self, name: StageName) -> StageFactor | None:
        """Return what it says of a stage; None where it says nothing."""
        found: StageFactor | None = getattr(self, name)
        return found

    def factor(self, name: StageName, gpu: str) -> float:
        """Return the factor of a stage on a GPU, 1 where it says nothing of it."""
        found = self.stage(name)
        return 1.0 if found is None or found.gpu != gpu else found.factor

    def tell(self, name: StageName, gpu: str, path: str) -> str:
        """Say what was made of a stage's seconds; nothing where it says nothing of it."""
        found = self.stage(name)
        if found is None:
            return ""
        if found.gpu != gpu:
            return f"{path}: {name} was calibrated on {found.gpu}, so {gpu} is as the profiles say"
        within = "" if found.interval is None else " ({:.3g} to {:.3g})".format(*found.interval)
        return f"{path}: {name} at {found.factor:.3g}{within} of the profiles' speed, from {self.source}"


def load_calibration(costs: CostsConfig, model: ModelConfig) -> Calibration | None:
    """Read the calibration that a run file names, for the seconds of its profile; None where it names none.

    Raises:
        RunError: as of `named_calibration`, or it was fitted beside another profile.
    """
    found = named_calibration(costs.calibration, model)
    if found is None or found.profile is None or found.profile == profile_digest(costs.profile):
        return found
    path, profile = costs.calibration, costs.profile or "no profile"
    text = f"{SECTION}: {path} was fitted beside another costs.profile than {profile}, and its factors are of those seconds: calibrate again"
    raise RunError(SECTION, str(path), None, text, ("costs.profile",))


def named_calibration(named: str | None, model: ModelConfig) -> Calibration | None:
    """Read the calibration that `costs.calibration` names, to tell of it; None where it names none.

    Raises:
        RunError: the file is none, or was made for another model.
    """
    if named is None:
        return None
    path = Path(named)
    try:
        stat = path.stat()
        found = _read(path, stat.st_mtime_ns, stat.st_size)
    except OSError as error:
        raise RunError(SECTION, named, None, f"{SECTION}: {path}: {error.strerror}") from None
    except ValueError as error:
        raise RunError(SECTION, named, None, f"{SECTION}: {error}") from None
    _check_model(found.model, model, path)
    return found


def profile_digest(profile: str | None) -> str:
    """Tell the contents of the profile that `costs.profile` names apart from those of others; `none` where it names none.

    Raises:
        RunError: it cannot be read.
    """
    if profile is None:
        return "none"
    path = Path(profile)
    try:
        stat = path.stat()
        return _digest(path, stat.st_mtime_ns, stat.st_size)
    except OSError as error:
        key = "costs.profile"
        raise RunError(key, str(path), None, f"{key}: {path}: {error.strerror}") from None


def _check_model(calibrated: str, model: ModelConfig, path: Path) -> None:
    """Refuse factors of another model: kernels that are slow with its shapes say little of these."""
    name, key = load_model(model).name, "model.path" if model.name is None else "model.name"
    names = {each.lower() for each in (name, model.name) if each is not None}
    if calibrated.lower() not in names:
        text = f"{SECTION}: {path} was made for model {calibrated!r}, but {key} is of {name!r}: calibrate on what you run"
        raise RunError(SECTION, str(path), None, text, (key,))


def write_calibration(calibration: Calibration) -> str:
    """Return a calibration as TOML, with what is not known left out."""
    table = _known(msgspec.to_builtins(calibration, builtin_types=(datetime.date,)))
    return tomli_w.dumps(table)


def _known(table: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        known = _known(value) if isinstance(value, dict) else value
        if known is not None and known != {}:
            found[key] = float(f"{known:.6g}") if isinstance(known, float) else known
    return found


@cache
def _digest(path: Path, changed_at: int, size: int) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()


@cache
def _read(path: Path, changed_at: int, size: int) -> Calibration:
    """Read it once for all plans of a search, and again where it was written anew."""
    return read_profile(path, Calibration)
