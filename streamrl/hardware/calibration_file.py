"""Read and write a calibration: factors on simulated seconds by stage, which `streamrl calibrate` fits to logged steps.

A run file names it under `costs.calibration`. A factor is the speed of a stage relative to the profiles. It
applies only to the GPU on which it was measured. The overhead applies to each step on any GPU.
"""

from __future__ import annotations

import datetime
import hashlib
import logging
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import tomli_w

from streamrl.hardware.cost_model import cost_model_digest
from streamrl.hardware.profile_table import ProfileTable
from streamrl.hardware.profiles import load_model, read_profile
from streamrl.runfile.cluster_config import ModelConfig
from streamrl.runfile.config import CostsConfig
from streamrl.runfile.errors import RunError
from streamrl.runfile.recorded_numbers import Count, Factor, NotNegative, Seconds, check_order

logger = logging.getLogger(__name__)

StageName = Literal["generation", "score", "train", "sync"]
STAGES: tuple[StageName, ...] = get_args(StageName)
"""Stages that have a factor. "score" is forward passes before training, and "sync" is push and load."""
SECTION = "costs.calibration"
OUTDATED = "the cost model has changed since; run `streamrl calibrate` again"
"""Said of a calibration whose factors belong to other seconds."""


class StageErrors(ProfileTable, frozen=True, kw_only=True):
    """Median absolute relative errors of a step's simulated seconds; None without steps to compare."""

    before: NotNegative | None = None
    """Without the calibration, on the steps that it was fitted to."""
    after: NotNegative | None = None
    """With the calibration, on the same steps."""
    held_out: NotNegative | None = None
    """With the calibration, on later steps that it was not fitted to."""


class StageFactor(ProfileTable, frozen=True, kw_only=True):
    """The speed of one stage relative to the profiles. Its simulated seconds are divided by the factor."""

    gpu: str
    """GPU on which it was measured. It does not apply to other GPUs."""
    factor: Factor
    """Median over the fitted steps."""
    interval: tuple[NotNegative, NotNegative] | None = None
    """95 % interval (sampling error) of the factor, from the scatter of the steps; None if they are too few."""
    errors: StageErrors = StageErrors()

    def __post_init__(self) -> None:
        check_order(self.interval)


class StepOverhead(ProfileTable, frozen=True, kw_only=True):
    """Seconds of a step outside its stages: data, rewards, logging."""

    seconds: Seconds
    interval: tuple[NotNegative, NotNegative] | None = None

    def __post_init__(self) -> None:
        check_order(self.interval)


class Calibration(ProfileTable, frozen=True, kw_only=True):
    """Factors and overhead of one framework on one cluster."""

    source: str
    """The log file and its framework."""
    date: datetime.date
    model: str
    system: str
    """`policies.system` of the run."""
    profile: str | None = None
    """Digest of the `costs.profile` for whose seconds the factors were fitted; "none" without a profile. Absent in files
    of earlier versions of this program."""
    cost_model: str | None = None
    """`cost_model_digest` of the program that fitted the factors; None in files of earlier versions."""
    fitted_steps: tuple[Count, Count] | None = None
    """First and last step that it was fitted to."""
    held_out_steps: tuple[Count, Count] | None = None
    """First and last step that was used only for its errors."""
    generation: StageFactor | None = None
    score: StageFactor | None = None
    train: StageFactor | None = None
    sync: StageFactor | None = None
    overhead: StepOverhead | None = None
    """Replaces the assumed `framework.step_time`, unless the run file states one."""
    step: StageErrors = StageErrors()
    """Errors of whole steps."""

    @property
    def is_empty(self) -> bool:
        """Whether the calibration has neither a factor nor an overhead."""
        return self.overhead is None and all(self.stage(name) is None for name in STAGES)

    def stage(self, name: StageName) -> StageFactor | None:
        """Return the factor of a stage; None if it has none."""
        factor: StageFactor | None = getattr(self, name)
        return factor

    @property
    def is_outdated(self) -> bool:
        """Whether the factors were fitted to the seconds of another version of the cost model."""
        return self.cost_model is not None and self.cost_model != cost_model_digest()

    def factor(self, name: StageName, gpu: str) -> float:
        """Return the factor of a stage on a GPU; 1 if it has none."""
        own = self.stage(name)
        return 1.0 if own is None or own.gpu != gpu else own.factor

    def describe(self, name: StageName, gpu: str, path: str) -> str:
        """Return how a stage's seconds were changed, as the text of a source; "" without a factor.

        The text is part of traces, so a change of its wording changes recorded files.
        """
        own = self.stage(name)
        if own is None:
            return ""
        if own.gpu != gpu:
            return f"{path}: {name} was calibrated on {own.gpu}, so {gpu} is as the profiles say"
        within = "" if own.interval is None else " ({:.3g} to {:.3g})".format(*own.interval)
        old = f"; {OUTDATED}" if self.is_outdated else ""
        return f"{path}: {name} at {own.factor:.3g}{within} of the profiles' speed, from {self.source}{old}"


def load_calibration(costs: CostsConfig, model: ModelConfig) -> Calibration | None:
    """Return the calibration of a run file; None if it names none.

    Raises:
        RunError: as `named_calibration`, or the calibration was fitted with another `costs.profile`.
    """
    calibration = named_calibration(costs.calibration, model)
    if (
        calibration is None
        or calibration.profile is None
        or calibration.profile == profile_digest(costs.profile)
    ):
        return calibration
    path, profile = costs.calibration, costs.profile or "no profile"
    text = (
        f"{SECTION}: {path} was fitted with another costs.profile, but the run has {profile}; "
        "run `streamrl calibrate` again with this profile"
    )
    raise RunError(SECTION, str(path), None, text, ("costs.profile",))


def named_calibration(named: str | None, model: ModelConfig) -> Calibration | None:
    """Return the calibration in the file `named`, without a check of its profile; None if `named` is None.

    Raises:
        RunError: the file is unreadable or not a calibration, or it was made for another model.
    """
    if named is None:
        return None
    path = Path(named)
    try:
        stat = path.stat()
        calibration = _read(path, stat.st_mtime_ns, stat.st_size)
    except OSError as error:
        raise RunError(SECTION, named, None, f"{SECTION}: {path}: {error.strerror}") from None
    except ValueError as error:
        raise RunError(SECTION, named, None, f"{SECTION}: {error}") from None
    _check_model(calibration.model, model, path)
    return calibration


def profile_digest(profile: str | None) -> str:
    """Return a digest of the contents of a profile; "none" without a profile.

    Raises:
        RunError: the profile is unreadable.
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
    """Raise `RunError` for factors of another model, because the speed of kernels depends on the model's shapes."""
    name, key = load_model(model).name, "model.path" if model.name is None else "model.name"
    names = {each.lower() for each in (name, model.name) if each is not None}
    if calibrated.lower() not in names:
        text = (
            f"{SECTION}: {path} was made for model {calibrated!r}, but the model of {key} is {name!r}; "
            "run `streamrl calibrate` on steps of this model"
        )
        raise RunError(SECTION, str(path), None, text, (key,))


def write_calibration(calibration: Calibration) -> str:
    """Return a calibration as TOML, without unknown values."""
    table = _known(msgspec.to_builtins(calibration, builtin_types=(datetime.date,)))
    return tomli_w.dumps(table)


def _known(table: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in table.items():
        known = _known(value) if isinstance(value, dict) else value
        if known is not None and known != {}:
            values[key] = float(f"{known:.6g}") if isinstance(known, float) else known
    return values


@cache
def _digest(path: Path, changed_at: int, size: int) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()


@cache
def _read(path: Path, changed_at: int, size: int) -> Calibration:
    """Return the calibration in a file. It is read once for all plans of a search, and again after a change."""
    calibration = read_profile(path, Calibration)
    if calibration.is_outdated:
        logger.warning("%s %s: %s", SECTION, path, OUTDATED)
    return calibration
