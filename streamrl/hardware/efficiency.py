"""Read the errors of GPUs without tables: profiles/efficiency/errors.toml.

Such a GPU takes the mean seconds of measured GPUs, in proportion to its datasheet. The errors are those
of measured GPUs whose tables were hidden (`benchmarks/derive_efficiency.py`).
"""

from __future__ import annotations

import datetime
import functools
from typing import Literal

from streamrl.hardware.profile_table import ProfileTable
from streamrl.hardware.profiles import PROFILES, read_profile

PATH = PROFILES / "efficiency" / "errors.toml"


class LeftOutErrors(ProfileTable, frozen=True, kw_only=True):
    """Errors of one kind of step on measured GPUs that were predicted from others."""

    gpus: list[str]
    rows: int
    median: float
    """Median of the absolute relative errors."""
    p90: float
    bias: float
    """Median of the signed errors."""


class ScaledErrors(ProfileTable, frozen=True, kw_only=True):
    """Errors of both kinds of step."""

    decode: LeftOutErrors
    """Decode steps, with the error that an engine's own overheads have."""
    training: LeftOutErrors
    """Training steps, relative to published ones."""


class EfficiencyErrors(ProfileTable, frozen=True, kw_only=True):
    """The file profiles/efficiency/errors.toml."""

    name: str
    source: str
    date: datetime.date
    relative: ScaledErrors
    """Other GPUs of the same generation predict a GPU."""
    stranger: ScaledErrors
    """Only GPUs of other generations predict a GPU."""


@functools.cache
def scaled_errors(kinship: Literal["relative", "stranger"] = "stranger") -> ScaledErrors:
    """Return the errors of seconds that are scaled from measured GPUs.

    By default these are the larger ones, of a generation that was not measured. The GPUs of one
    generation that were measured mostly differ in memory alone.
    """
    errors = read_profile(PATH, EfficiencyErrors)
    return errors.stranger if kinship == "stranger" else errors.relative
