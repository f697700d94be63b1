"""Published steps and throughputs of inference engines, as `profiles/published/serving_*.csv` have them."""

from __future__ import annotations

import csv
from functools import cache
from typing import Literal

import msgspec

from streamrl.hardware.profiles import PROFILES

Kind = Literal["step", "busy step", "request", "batch", "full load"]
"""step: ms of a decode step; busy step: the same, where it may have the prefill of new rollouts in it;
request: ms a token of output of one request alone, prefill in it; batch: ms a step of a static batch, prefill in
it; full load: output tokens/s a GPU, as many rollouts as memory holds."""


class ServingRow(msgspec.Struct, frozen=True, kw_only=True):
    """One published figure."""

    engine: str
    """Name in profiles/engines."""
    version: str
    gpu: str
    model: str
    """Name in profiles/models: all published models of one config are one shape."""
    dtype: str
    tensor_parallel: int
    expert_parallel: int
    kind: Kind
    batch: float | None
    """Rollouts that run; None where the source does not say."""
    prompt: float
    output: float
    context: float
    """Mean tokens of a running rollout."""
    value: float
    """Milliseconds, or tokens/s."""
    source: str = ""


COLUMNS = tuple(name for name in ServingRow.__struct_fields__ if name != "source")


@cache
def read_serving() -> tuple[ServingRow, ...]:
    """Read all tables."""
    rows: list[ServingRow] = []
    for path in sorted((PROFILES / "published").glob("serving_*.csv")):
        lines = path.read_text(encoding="utf-8").splitlines()
        head = [line for line in lines if line.startswith("#")]
        source = head[0].removeprefix("# source: ")
        for line in csv.DictReader(lines[len(head) :]):
            cells = {key: value or None for key, value in line.items()}
            rows.append(msgspec.convert({**cells, "source": source}, ServingRow, strict=False))
    return tuple(rows)
