"""The inference engines that tests hold to one contract."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from streamrl.runfile.backend_choice import measured_engines

NAMES: tuple[str, ...] = ("static", *measured_engines())
"""Engines in processes of their own; those over HTTP have tests of their own (`test_external`)."""
HANG = 300.0
"""Seconds after which a scenario hangs: on a busy machine an engine takes more than one minute to come up."""
APART = {"vllm": pytest.mark.vllm, "ray": pytest.mark.ray}
"""What comes in packages that fit no environment of others: what is tested with it is selected by its mark."""


def params(engines: Iterable[str] = NAMES, *others: str) -> list[Any]:
    """Return parameters of a test: each engine, or each with each of `others` as a pair."""
    if not others:
        return [pytest.param(name, marks=APART.get(name, ())) for name in engines]
    return [
        pytest.param(
            (name, other),
            marks=[APART[each] for each in (name, other) if each in APART],
            id=f"{name}-{other}",
        )
        for name in engines
        for other in others
    ]
