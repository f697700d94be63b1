"""Check that no plan beats the one that `streamrl plan` recommends, on 29 offers that are also searched in other ways.

    python benchmarks/bench_offers.py                      every offer of benchmarks/offers; hours on two cores
    python benchmarks/bench_offers.py 8b-2-h100 32b-8-h800

An offer is a run file in benchmarks/offers, or a question in questions.toml there. Its recommended plan
is compared with the best plan of each system, searched alone, and with the best plans of a search with
twenty times the simulations, or as many as `--seconds` allows. Half of that search is for the cheapest
plan, and half for the fastest one that costs little more. All are simulated again, on prompts and
lengths of a seed that no search used. `better` is the largest saving at the same speed, or the largest
gain in speed at the same cost. The output also has the findings of `doctor` and the memory of each side.
Each offer is a line of JSON in `--output`. Offers that already have a line of this commit are skipped.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
import tomllib
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from streamrl.doctor.diagnosis import diagnose
from streamrl.hardware.resolved import resolve
from streamrl.hardware.side_memory import memory_of
from streamrl.record.run_comparison import ratio_half_width
from streamrl.record.steady_state import Speed
from streamrl.runfile.config import Run
from streamrl.runfile.files import load_offer, make_run
from streamrl.runfile.findings import Finding
from streamrl.runfile.formatting import format_dollars
from streamrl.runfile.units import SECONDS_PER_HOUR
from streamrl.sim.checkup.checkup import check_up
from streamrl.sim.planner.first_answer import Question, run_table_of
from streamrl.sim.planner.modes import USUAL_SYSTEMS
from streamrl.sim.planner.objective import Spend
from streamrl.sim.planner.plan import Plan
from streamrl.sim.planner.plan_settings import candidate_of, describe
from streamrl.sim.planner.planner import make_plan
from streamrl.sim.planner.race import FINAL_STEPS, Race
from streamrl.sim.planner.search import ROUND, Search
from streamrl.sim.planner.space import Candidate
from streamrl.sim.planner.trial import Trial, run_all, short_speed_of, shortened

OFFERS = Path(__file__).parent / "offers"
RESULTS, PAGE = OFFERS / "results.jsonl", Path(__file__).parent.parent / "docs" / "plans.md"
QUESTIONS = OFFERS / "questions.toml"
HEAD = """| offer | recommended | whole run | simulated | wide search | best found by it | dominated | trainer memory | doctor | commit |
|---|---|---|---|---|---|---|---|---|---|
"""
"""Head of the page's table. The table is rewritten with the results."""
FRESH = 1000
"""Added to a seed to get a seed for the comparison."""
WIDER = 20
"""Number of simulations of the wide search, relative to those of planning."""
ENOUGH = 0.02
"""Share by which another plan may be cheaper at the same speed, or faster at the same cost."""


class Challenger(NamedTuple):
    """A plan from another search."""

    found_by: str
    candidate: Candidate


def main() -> None:
    """Plan every offer, and search for better plans."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("offers", nargs="*", help="names of files in benchmarks/offers")
    parser.add_argument(
        "--seconds", type=float, default=600.0, help="time limit of the wide search"
    )
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    for name in arguments.offers or offer_names():
        known = read_results(arguments.output)
        if known.get(name, {}).get("commit") == _commit():
            continue
        found = compare(name, offer_of(name), arguments.seconds)
        print(json.dumps(found), flush=True)
        lines = [json.dumps(each) + "\n" for each in {**known, name: found}.values()]
        arguments.output.write_text("".join(lines))
    if arguments.output == RESULTS:
        before, rest = PAGE.read_text().split(HEAD)
        after = rest.partition("\n\n")[2]
        rows = "\n".join(row_of(found) for found in read_results(RESULTS).values())
        PAGE.write_text(f"{before}{HEAD}{rows}\n\n{after}")


def offer_names() -> list[str]:
    """Return the names of all offers."""
    files = [path.stem for path in OFFERS.glob("*.toml") if path != QUESTIONS]
    return sorted([*files, *_questions()])


def offer_of(name: str) -> Run:
    """Return the run file of an offer, or that of a question."""
    if name in _questions():
        return make_run(run_table_of(Question(**_questions()[name])))
    return load_offer(OFFERS / f"{name}.toml").run


def _questions() -> dict[str, dict[str, Any]]:
    return tomllib.loads(QUESTIONS.read_text())


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """Return the earlier results by name of the offer."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {found["offer"]: found for found in map(json.loads, lines)}


def row_of(found: dict[str, Any]) -> str:
    """Return the row of an offer in the page's table."""
    width = f" ± {found['half_width']:.1%}" if found["half_width"] is not None else ""
    cells = (
        found["offer"],
        found["plan"],
        f"{format_dollars(found['dollars'])}, {found['hours']:.3g} h",
        f"{found['simulated']} of {found['candidates']:,}",
        f"{found['wide']} ({found['times_as_many']:.1f} times)",
        f"{found['better']:.1%}{width}" if found["better"] > 0 else "nothing better",
        "yes" if found["is_dominated"] else "no",
        f"{found['memory']['trainer']:.0%}",
        ", ".join(found["doctor"]) or "silent",
        found["commit"],
    )
    return f"| {' | '.join(cells)} |"


def compare(name: str, run: Run, seconds: float) -> dict[str, Any]:
    """Plan an offer, and compare the plan with those of other searches."""
    planned = make_plan(run, shows_own=name not in _questions())
    plan = planned.plan
    search, chosen = Search.open(run), candidate_of(plan.allocation.settings)
    with ProcessPoolExecutor() as pool:
        rivals = [*_alone(run, pool), *_wide(search, pool, WIDER * plan.simulated, seconds)]
        trials = [("plan", chosen), *((each.found_by, each.candidate) for each in rivals)]
        fresh = shortened(run, run.seed + FRESH, FINAL_STEPS)
        speeds = run_all(pool, short_speed_of, [(who, Trial(fresh, plan)) for who, plan in trials])
    ours = speeds.pop("plan")
    assert isinstance(ours, Speed), "a recommended plan finishes"
    finished = {who: speed for who, speed in speeds.items() if isinstance(speed, Speed)}
    kept = {who: speed for who, speed in finished.items() if search.keeps_limits(speed)}
    spend = search.spend_of(ours)
    rated = {who: _better(search.spend_of(speed), spend) for who, speed in kept.items()}
    best = max(rated, key=lambda who: rated[who])
    half_width = ratio_half_width(ours, kept[best])
    sides, whole = memory_of(resolve(planned.run)), plan.whole_run
    assert whole is not None, "a recommended plan finishes"
    return {
        "offer": name,
        "commit": _commit(),
        "plan": plan.allocation.text,
        "why": plan.why,
        "dollars": round(whole.dollars, 2),
        "hours": round(whole.seconds / SECONDS_PER_HOUR, 2),
        "options": [
            {"labels": each.labels, "plan": each.text, "relation": each.relation}
            for each in plan.options
        ],
        "better_by": {who: round(share, 4) for who, share in rated.items()},
        "best": next(
            describe(run.cluster.pools, r.candidate) for r in rivals if r.found_by == best
        ),
        "better": round(rated[best], 4),
        "half_width": half_width,
        "is_dominated": _is_dominated(search, ours, kept.values()),
        "is_met": rated[best] <= max(ENOUGH, half_width or 0.0),
        "candidates": plan.candidates,
        "simulated": plan.simulated,
        "open_gap": plan.open_gap,
        "wide": len(search.speeds),
        "times_as_many": round(len(search.speeds) / plan.simulated, 1),
        "seconds": round(plan.seconds, 1),
        "steps_in_time": plan.steps_in_time,
        "interval": _interval(plan),
        "memory": {side.side: round(side.need / side.usable, 3) for side in sides},
        "doctor": [each.name for each in _findings(planned.run) if each.level != "ok"],
    }


def _better(other: Spend[float], ours: Spend[float]) -> float:
    """Return the saving of another plan at the same speed, or its gain in speed at the same cost; 0 if neither."""
    is_as_fast, is_as_cheap = other.seconds <= ours.seconds, other.whole <= ours.whole
    saves = 1 - other.whole / ours.whole if is_as_fast and ours.whole else 0.0
    gains = 1 - other.seconds / ours.seconds if is_as_cheap else 0.0
    return max(saves, gains, 0.0)


def _is_dominated(search: Search, ours: Speed, others: Iterable[Speed]) -> bool:
    """Return whether another plan is both cheaper and faster by more than the interval of the difference."""
    own = search.spend_of(ours)
    for other in others:
        spend, width = search.spend_of(other), ratio_half_width(ours, other) or ENOUGH
        ratios = [spend.seconds / own.seconds, spend.whole / own.whole if own.whole else 1.0]
        if max(ratios) < 1 - width:
            return True
    return False


def _interval(plan: Plan) -> float | None:
    """Return the half-width of the 95 % interval of the step time, as a share; None if too few steps were simulated."""
    if plan.allocation.step_time_interval is None:
        return None
    least, most = plan.allocation.step_time_interval
    return round((most - least) / 2 / plan.allocation.step_time, 4)


def _findings(run: Run) -> list[Finding]:
    """Return the findings of `doctor` on a run, without those about this machine and its files."""
    return [*diagnose(run), *check_up(run).findings]


def _alone(run: Run, pool: Executor) -> Iterator[Challenger]:
    """Yield the best plan of each system, from a search of this system alone."""
    for system in USUAL_SYSTEMS:
        try:
            search = Search.open(replace(run, plan=replace(run.plan, systems=[system])))
        except ValueError:
            continue
        search.deadline = time.perf_counter() + run.plan.time_limit
        search.run(pool, lambda: None)
        yield Challenger(system, search.space.candidate(Race(search).run(pool, lambda: None)))


def _wide(search: Search, pool: Executor, most: int, seconds: float) -> Iterator[Challenger]:
    """Yield the best plans of a wider search: by the objective, then the fastest that cost little more."""
    began, plan = time.perf_counter(), search.space.run.plan
    _widen(search, pool, most // 2, began + seconds / 2)
    yield _best_of(search, pool, "objective")
    if plan.takes_faster:
        least = min(search.spend_of(speed).whole for speed in search.speeds.values())
        budget = (1 + plan.tolerance) * least
        search.aim_at(replace(plan, objective="step-time", budget=budget))
        _widen(search, pool, most, began + seconds)
        yield _best_of(search, pool, "speed for little more")
        search.aim_at(plan)


def _widen(search: Search, pool: Executor, most: int, until: float) -> None:
    """Simulate new kinds of plan first, then the best estimates, then others."""
    is_mixed = False
    while len(search.speeds) < most and time.perf_counter() < until:
        search.settle(pool, [])
        order = search.in_order()
        new = [
            *search.unlike(order, search.scores()),
            *(i for i in order if i not in search.speeds),
        ]
        if not new:
            break
        search.simulate(pool, list(dict.fromkeys(new))[:ROUND], lambda: None)
        if not is_mixed:
            is_mixed = True
            search.mix()


def _best_of(search: Search, pool: Executor, by: str) -> Challenger:
    best = Race(search).run(pool, lambda: None)
    return Challenger(f"the best of {len(search.speeds)} by {by}", search.space.candidate(best))


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
