"""Published ratios of the same run in two modes (profiles/published/ratios.toml), compared with their simulation.

A ratio says more about the form of a prediction than two steps do. Errors of the hardware, and of unknown lengths, are
mostly the same in both modes and cancel. Both modes are simulated with the same combination of unknown inputs.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import msgspec

from streamrl.hardware.profiles import PROFILES
from streamrl.sim.fidelity.published_rows import AT_DEFAULTS, AT_LOW_ENDS, Row, middle
from streamrl.sim.fidelity.rl_steps import (
    Published,
    choices_of,
    load_published,
    simulate_step,
    with_keys,
)
from streamrl.sim.parallel import worker_pool

PATH = PROFILES / "published" / "ratios.toml"


class Ratio(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of a step of one variant over those of another."""

    name: str
    over: str
    under: str
    published: tuple[float, float]
    """Lowest and highest ratio that the source allows."""
    missed: str = ""
    """Why our prediction is outside of that range; empty if it is not."""


class RatioGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ratios of one published run."""

    source: str
    step: str
    """Name of a step in rl_steps.toml."""
    variants: dict[str, dict[str, Any]]
    """Keys of the run file that each variant changes, by the variant's name."""
    ratios: list[Ratio]


def load_ratios(path: Path = PATH) -> list[RatioGroup]:
    """Read profiles/published/ratios.toml."""
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    return msgspec.convert(table["groups"], list[RatioGroup])


def ratio_rows(published: Sequence[Published] | None = None) -> list[Row]:
    """Return every published ratio with the range of its prediction, for the steps of rl_steps.toml or other inputs of them."""
    steps = {step.name: step for step in published or load_published()}
    with worker_pool() as pool:
        rows = [list(_rows(group, steps[group.step], pool)) for group in load_ratios()]
    return [row for some in rows for row in some]


def _rows(group: RatioGroup, step: Published, pool: Executor) -> Iterator[Row]:
    choices = list(choices_of(step))
    variants = {name: with_keys(step, keys) for name, keys in group.variants.items()}
    wanted = [(one, choice) for one in variants.values() for choice in choices]
    found = iter(pool.map(simulate_step, *zip(*wanted, strict=True)))
    seconds = {name: [_step_of(next(found), name) for _ in choices] for name in variants}
    for ratio in group.ratios:
        pairs = zip(seconds[ratio.over], seconds[ratio.under], strict=True)
        yield _row(ratio, [over / under for over, under in pairs], group, step)


def _step_of(found: Any, name: str) -> float:
    """Return the seconds of a step.

    Raises:
        ValueError: our memory model refuses the variant.
    """
    if found is None:
        raise ValueError(f"{PATH.name}: our memory model refuses {name!r}")
    return float(found.seconds["step"])


def _row(ratio: Ratio, ours: Sequence[float], group: RatioGroup, step: Published) -> Row:
    return Row(
        name=f"{step.name.partition(':')[0]}: {ratio.name}",
        group="synchronous over asynchronous" if ratio.over == SYNCHRONOUS else "staleness",
        shape=step.table["model"]["name"],
        unit="x",
        published=ratio.published,
        predicted=(min(ours), max(ours)),
        band=None,
        note=f"{step.note}; {ratio.missed}" if ratio.missed else step.note,
        source=group.source,
    )


def pairs_of(steps: Sequence[Row]) -> list[Row]:
    """Return the ratio of each synchronous to each asynchronous step of one release, model and number of GPUs.

    Args:
        steps: rows of whole steps. Published mean lengths of the two are alike, not equal.
    """
    found: dict[str, dict[bool, Row]] = {}
    for row in steps:
        run, comma, mode = row.name.rpartition(", ")
        if row.stage == "step" and comma and (mode == ON_POLICY or mode.endswith(" off: step")):
            found.setdefault(run, {})[mode == ON_POLICY] = row
    return [
        Row(
            name=f"{run}: synchronous over asynchronous",
            group=PAIRS,
            shape=both[True].shape,
            unit="x",
            published=(_published(both[True]) / _published(both[False]),) * 2,
            predicted=(both[True].best / both[False].best,) * 2,
            readings=_readings(both[True], both[False]),
            note="mean lengths of the two are up to a tenth apart",
            source=both[True].source,
        )
        for run, both in found.items()
        if len(both) == 2
    ]


def doubled_of(steps: Sequence[Row]) -> list[Row]:
    """Return how many times as fast a published step is on twice the GPUs, in the same mode or asynchronous instead.

    Steps of one release and model, on GPUs of one type, are compared.

    Args:
        steps: rows of whole steps. Published mean lengths of the two are alike, not equal.
    """
    runs: dict[tuple[str, int], dict[str, Row]] = {}
    for row in steps:
        run, _, mode = row.name.partition(f" on {row.num_gpus} ")
        if row.stage == "step" and row.num_gpus is not None and mode:
            runs.setdefault((run, row.num_gpus), {})[mode] = row
    return [
        Row(
            name=f"{run}: {few} {mode} to {2 * few} {other}".replace(": step", ""),
            group=DOUBLED if mode == other else DOUBLED_ASYNCHRONOUS,
            shape=row.shape,
            unit="x",
            published=(_published(row) / _published(faster),) * 2,
            predicted=(row.best / faster.best,) * 2,
            is_fitted=row.is_fitted or faster.is_fitted,
            note="mean lengths of the two are up to a tenth apart",
            source=row.source,
        )
        for (run, few), modes in runs.items()
        for mode, row in modes.items()
        for other, faster in runs.get((run, 2 * few), {}).items()
        if mode == other or mode.removesuffix(ON_POLICY) == other.removesuffix(ONE_OFF)
    ]


def _published(row: Row) -> float:
    return middle(row.published)


def _readings(over: Row, under: Row) -> dict[str, float]:
    """Return the ratio of two steps by other readings of their inputs."""
    ratios = {AT_LOW_ENDS: over.predicted[0] / under.predicted[0]}
    if over.readings:
        ratios[AT_DEFAULTS] = over.readings[AT_DEFAULTS] / under.readings[AT_DEFAULTS]
    return ratios


def num_reversed(pairs: Sequence[Row], reading: str = "") -> int:
    """Return in how many pairs the faster one of two steps is predicted as the slower one, by a reading of their inputs."""
    return sum(
        (row.published[0] > 1) != (row.readings.get(reading, row.predicted[0]) > 1) for row in pairs
    )


ON_POLICY, ONE_OFF = "on policy: step", "1 step off: step"
"""How names of synchronous and of asynchronous steps end."""
DOUBLED = "the same run on twice the GPUs"
DOUBLED_ASYNCHRONOUS = "synchronous to asynchronous on twice the GPUs"
PAIRS = "synchronous over asynchronous, published lengths"
SYNCHRONOUS = "synchronous"


def meets(row: Row) -> bool:
    """Return whether the predicted range has a value that the source allows."""
    (low, high), (least, most) = row.predicted, row.published
    return low <= most and high >= least
