"""What would change the cost: from a plan's own what-ifs, or for a run by arithmetic over its prices."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from streamrl.hardware.profiles import price_of
from streamrl.record.trace import Trace
from streamrl.report.pictures.tornado import Swing
from streamrl.report.plan import Change, Plan
from streamrl.report.words import percent
from streamrl.runfile.sides import sides_of

SHIFT = re.compile(r"(?P<what>.+) (?P<sign>[+-])(?P<share>\d+) ?%")
BY = 0.2
"""Share by which prices of a run are shifted, as a plan's are."""
WANTED = {
    "prices": "price",
    "lengths": "length",
    "bandwidth": "bandwidth",
    "training speed (MFU)": "training|mfu",
}
"""What a reader will ask for, and what the name of a swing must have to answer."""


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """Swings of one figure."""

    of: str
    """Which option, and which figure."""
    by: str
    swings: list[Swing]
    changes: list[Change]
    """What a plan says beside the numbers: what would be chosen then."""
    missing: list[str]
    """What nobody varied."""
    source: str


def of_plan(plan: Plan, name: str, source: str) -> Sensitivity:
    """Read a plan's what-ifs; each is planned again, and its figure is that of the chosen plan then."""
    base = plan.objective.value
    found: dict[str, dict[str, float]] = {}
    notes: dict[str, str] = {}
    shares: dict[str, None] = {}
    used: set[str] = set()
    for change in plan.sensitivity:
        match = SHIFT.fullmatch(change.what)
        what = match["what"] if match else change.what
        sign = "+" if match is None or match["sign"] == "+" else "-"
        found.setdefault(what, {})[sign] = change.value / base - 1
        if match:
            shares[f"{match['share']} %"] = None
        if change.is_used:
            used.add(what)
        if change.is_other:
            notes[what] = change.choice
    swings = [
        Swing(what, values.get("-"), values.get("+"), notes.get(what, ""), what in used)
        for what, values in found.items()
    ]
    return Sensitivity(
        of=f"{plan.objective.unit} of {name}",
        by=" or ".join(shares) or "as named",
        swings=swings,
        changes=list(plan.sensitivity),
        missing=_missing(swings),
        source=source,
    )


def of_run(trace: Trace, name: str, source: str) -> Sensitivity:
    """Shift the price of each pool: what a pool costs is a fixed share of all dollars."""
    dollars: dict[str, float] = dict(_dollars_by_pool(trace))
    total = sum(dollars.values()) or 1.0
    swings = [
        Swing(f"price of {pool}", -BY * part / total, BY * part / total)
        for pool, part in dollars.items()
    ]
    return Sensitivity(
        of=f"dollars per million tokens of {name}",
        by=percent(BY),
        swings=swings,
        changes=[],
        missing=_missing(swings),
        source=source,
    )


def _dollars_by_pool(trace: Trace) -> Iterator[tuple[str, float]]:
    """Yield each pool with the dollars an hour of its allocated GPUs."""
    run = trace.run
    found: dict[str, float] = {}
    for side in sides_of(run):
        dollars = side.num_gpus * price_of(run.cluster.pools[side.pool])
        found[side.pool] = found.get(side.pool, 0.0) + dollars
    yield from found.items()


def _missing(swings: list[Swing]) -> list[str]:
    named = " ".join(swing.what.lower() for swing in swings)
    return [what for what, pattern in WANTED.items() if not re.search(pattern, named)]
