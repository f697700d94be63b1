"""The folder of all profiles: the shipped one, unless an environment variable names another.

`streamrl profile accept -o DIR` writes such a folder: the shipped profiles, scaled to one machine.
"""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "STREAMRL_PROFILES"
SHIPPED = Path(__file__).parents[1] / "profiles"


def _folder(named: str | None) -> Path:
    """Return the folder that the environment names, else the shipped one."""
    if not named:
        return SHIPPED
    folder = Path(named).resolve()
    if not (folder / "gpus").is_dir():
        raise ValueError(
            f"{VARIABLE} is {named!r}, which has no folder gpus; name a folder like profiles/, or unset it"
        )
    return folder


PROFILES = _folder(os.environ.get(VARIABLE))
