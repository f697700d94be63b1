"""Do narrow weights make a replica faster? Not where padded blocks of many small experts cost more than they save."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from streamrl.doctor.changes import value_of
from streamrl.doctor.finding import Changes, Finding
from streamrl.doctor.fix import Fix
from streamrl.doctor.lengths import mean_lengths
from streamrl.doctor.replica_batch import replica_batch
from streamrl.report.run_tables import format_duration
from streamrl.runfile.config import Run
from streamrl.runfile.dtypes import NARROW
from streamrl.sim.costs.costs import Costs

WAYS: tuple[Changes, ...] = (
    {"rollout.weight_only": True},
    {"rollout.dtype": None, "rollout.weight_only": False},
)
"""Narrow weights that are widened before each product keep their memory."""


def find(run: Run) -> Iterator[Finding]:
    """Find that a decode step takes longer with the narrow weights that a replica has than with those of `model.dtype`.

    Raises:
        ValueError: the model fits its replica in one of both alone.
    """
    dtype, lengths = run.rollout.dtype, mean_lengths(run)
    if dtype not in NARROW or lengths is None:
        return
    batch = replica_batch(run)
    assert batch is not None, "there are lengths"
    running = max(1, int(min(batch)))
    wide = replace(run, rollout=replace(run.rollout, dtype=None, weight_only=False))
    narrow_time, wide_time = (
        Costs.load(each).decode.step_time(running, running * lengths.context)
        for each in (run, wide)
    )
    if narrow_time > wide_time:
        text = (
            f"a decode step of {running:,} rollouts takes {format_duration(narrow_time)} with weights in {dtype}, and "
            f"{format_duration(wide_time)} in {run.model.dtype}"
        )
        yield Finding(level="warning", topic="batch", name="slow-format", text=text)


def _other_formats(run: Run) -> Iterator[Changes]:
    for way in WAYS:
        yield {key: new for key, new in way.items() if value_of(run, key) != new}


FIXES = {
    "slow-format": Fix(_other_formats, "keep rollout.dtype for the memory that it saves alone"),
}
