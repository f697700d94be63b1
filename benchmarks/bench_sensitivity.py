"""Compare what-ifs of plans with direct simulations over many more steps.

    python -m benchmarks.bench_sensitivity               40 rows of twelve offers; five minutes
    python -m benchmarks.bench_sensitivity --rows 100    more rows

Each offer is planned. Rows of all sensitivities are drawn at random. For each, the plan is simulated
with and without the change on the same prompts. If the row names another plan, it is simulated with
the change too. One JSON object is printed per row and per figure.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from streamrl.record.metrics import measure_speed
from streamrl.record.run_comparison import ratio_half_width
from streamrl.record.steady_state import START, Speed
from streamrl.runfile.config import Run
from streamrl.runfile.files import decode_run, encode_run, make_run
from streamrl.runfile.plan_config import PlanConfig
from streamrl.runfile.policies_config import SystemName
from streamrl.sim.planner.first_answer import Question, run_table_of
from streamrl.sim.planner.objective import value_of
from streamrl.sim.planner.plan import Change
from streamrl.sim.planner.planner import make_plan
from streamrl.sim.planner.shifts import shifts
from streamrl.sim.steady_state import simulate_steady

STEPS = 60
"""Steps of a direct simulation."""
POINTS = 0.03
"""Largest difference of two effects."""
NO_CHANGE = 0.005
"""Relative effect below which signs are not compared."""
SMALL: dict[str, Any] = {"prompts": 32, "group": 8, "mean_tokens": 1_500, "max_tokens": 6_000}
TWO = "8xH20@1.85,8xH800@5.27"
APART: dict[str, Any] = {"rollout_pools": ["h20"], "trainer_pools": ["h800"]}


class Offer(NamedTuple):
    """One case to plan."""

    question: Question
    systems: list[SystemName]
    plan: Mapping[str, Any] = MappingProxyType({})


def _small(model: str, gpus: str, **others: Any) -> Question:
    return Question(model=model, gpus=gpus, **{**SMALL, **others})


OFFERS: dict[str, Offer] = {
    "7B colocated": Offer(_small("qwen2.5-7b", "8xH100@2"), ["colocated"]),
    "7B synchronous": Offer(_small("qwen2.5-7b", "16xH100@2"), ["stream-sync"]),
    "7B one step ahead": Offer(_small("qwen2.5-7b", "16xH100@2"), ["one-step-async"]),
    "7B streaming": Offer(_small("qwen2.5-7b", "16xH100@2"), ["stream-async"]),
    "7B in two pools, one step ahead": Offer(_small("qwen2.5-7b", TWO), ["one-step-async"], APART),
    "7B in two pools, streaming": Offer(_small("qwen2.5-7b", TWO), ["stream-async"], APART),
    "7B in two pools, a slow link": Offer(
        _small("qwen2.5-7b", TWO, link="2 Gbps"), ["disaggregated", "stream-sync"], APART
    ),
    "7B, any system": Offer(_small("qwen2.5-7b", TWO), []),
    "7B, time": Offer(_small("qwen2.5-7b", TWO), [], {"objective": "step-time"}),
    "1.5B fully asynchronous": Offer(_small("qwen2.5-1.5b", "8xH100@2/1"), ["fully-async"]),
    "30B mixture": Offer(_small("qwen3-30b-a3b", "32xH100@2"), ["one-step-async", "stream-async"]),
    "14B, a deadline": Offer(
        _small("qwen3-14b", "16xH100@2,16xH20@1.1", deadline="12 h"), [], {"value_of_hour": 5.0}
    ),
}


class Row(NamedTuple):
    """One what-if of a plan."""

    offer: str
    plan: PlanConfig
    planned: Run
    """The run file of the chosen plan."""
    before: float
    """The objective of the chosen plan."""
    change: Change


class Direct(NamedTuple):
    """Effects in long simulations."""

    effect: float
    """Relative change of the chosen plan's objective."""
    half_width: float
    """Half the 95 % interval of the effect."""
    gain: float | None
    """Share of the objective that the other plan saves; None if no other is named."""


def main() -> None:
    """Print one line for each row, and the largest difference."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--offers", nargs="*", default=list(OFFERS), choices=list(OFFERS))
    options = parser.parse_args()
    rows = [row for name in options.offers for row in rows_of(name, OFFERS[name])]
    drawn = random.Random(options.seed).sample(rows, min(options.rows, len(rows)))
    with ProcessPoolExecutor() as pool:
        found = []
        for row, direct in zip(drawn, pool.map(simulate, drawn), strict=True):
            found.append(_line(row, direct))
            _print(found[-1])
    for line in _summary(found, len(rows)):
        _print(line)


def rows_of(name: str, offer: Offer) -> list[Row]:
    """Plan an offer and return its what-ifs."""
    run = make_run(run_table_of(offer.question))
    systems = {"systems": offer.systems} if offer.systems else {}
    run = replace(run, plan=replace(run.plan, time_limit=600.0, **systems, **offer.plan))
    found = make_plan(run)
    value = found.plan.objective.value
    _print({"offer": name, "plan": found.plan.allocation.text, "left out": found.plan.not_varied})
    known = {each.what for each in shifts(found.run)}  # without the pools that the plan leaves out
    changes = [each for each in found.plan.sensitivity if each.what in known]
    return [Row(name, run.plan, found.run, value, each) for each in changes]


def simulate(row: Row) -> Direct | None:
    """Simulate the plans of a row with and without its change; None if the plan does not fit then."""
    if not row.change.still_fits:
        return None
    (changed,) = [each.run for each in shifts(row.planned) if each.what == row.change.what]
    before, after = _speeds([row.planned, changed])
    ratio = value_of(row.plan, after) / value_of(row.plan, before)
    half_width, gain = ratio_half_width(after, before) or 0.0, None
    if row.change.is_other:
        _, other = _speeds([row.planned, _with_settings(encode_run(changed), row.change.settings)])
        gain = 1 - value_of(row.plan, other) / value_of(row.plan, after)
    return Direct(ratio - 1, half_width * ratio, gain)


def _speeds(runs: Iterable[Run]) -> list[Speed]:
    """Simulate runs for `STEPS` steps and measure them over the same steps."""
    traces = []
    for run in runs:
        simulate = replace(run.simulate, max_steps=STEPS, interval=1e-6)
        traces.append(simulate_steady(replace(run, simulate=simulate)))
    return [measure_speed(trace, (START + 1, STEPS)) for trace in traces]


def _with_settings(run: bytes, settings: Mapping[str, Any]) -> Run:
    """Return an encoded run file with other values of some keys."""
    table = msgspec.json.decode(run)
    table["rollout"].pop("others", None)
    for key, value in settings.items():
        *sections, name = key.split(".")
        section = table
        for each in sections:
            section = _section(section, each)
        section[name] = value
    return decode_run(msgspec.json.encode(table))


def _section(table: Any, name: str) -> Any:
    """Return a section of a table, or the further kind of replica with an index, made if missing."""
    if not isinstance(table, list):
        return table.setdefault(name, [] if name == "others" else {})
    table.extend({} for _ in range(len(table), int(name) + 1))
    return table[int(name)]


def _line(row: Row, direct: Direct | None) -> dict[str, Any]:
    effect = row.change.value / row.before - 1
    line = {"offer": row.offer, "what": row.change.what, "effect": round(effect, 4)}
    if direct is None:
        return {**line, "does not fit": True}
    line |= {"direct": round(direct.effect, 4), "half width": round(direct.half_width, 4)}
    line["points"] = round(100 * abs(effect - direct.effect), 2)
    line["may be chance"] = _may_be_chance(direct)
    line["sign agrees"] = _has_same_sign(effect, direct)
    if direct.gain is not None:
        line |= {"saves": round(row.change.gain, 4), "direct saves": round(direct.gain, 4)}
        line["points of savings"] = round(100 * abs(row.change.gain - direct.gain), 2)
    return line


def _has_same_sign(effect: float, direct: Direct) -> bool:
    """Return whether a direct effect that is beyond chance has the sign of the plan's, or both are tiny."""
    if _may_be_chance(direct) or max(abs(effect), abs(direct.effect)) < NO_CHANGE:
        return True
    return effect * direct.effect > 0


def _may_be_chance(direct: Direct) -> bool:
    return abs(direct.effect) < direct.half_width


def _summary(lines: list[dict[str, Any]], total: int) -> Iterator[dict[str, Any]]:
    points = [line["points"] for line in lines if "points" in line]
    savings = [line["points of savings"] for line in lines if "points of savings" in line]
    yield {"name": "what-ifs of all offers", "value": total, "unit": "rows"}
    yield {"name": "what-ifs compared", "value": len(points), "unit": "rows"}
    unknown = sum(line.get("may be chance", False) for line in lines)
    yield {"name": "direct effects without a known sign", "value": unknown, "unit": "rows"}
    wrong = sum(not line.get("sign agrees", True) for line in lines)
    yield {"name": "what-ifs with a wrong sign", "value": wrong, "unit": "rows"}
    yield {"name": "largest difference", "value": max(points), "unit": "points"}
    yield {"name": "largest allowed", "value": 100 * POINTS, "unit": "points"}
    yield {"name": "other plans named", "value": len(savings), "unit": "rows"}
    if savings:
        yield {"name": "largest difference of savings", "value": max(savings), "unit": "points"}


def _print(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
