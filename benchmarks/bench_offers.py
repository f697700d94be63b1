"""Check that `streamrl plan` chooses the best plan of an offer, on seventeen offers that are also searched in other ways.

    python benchmarks/bench_offers.py                      every offer of benchmarks/offers; hours on two cores
    python benchmarks/bench_offers.py 8b-2-h100 32b-8-h800

For every offer, the chosen plan is compared with the best plan of each system, searched alone. It is
also compared with the best plan of a search with twenty times the simulations, or as many as
`--seconds` allows. The columns `simulated` and `wide` are the numbers of simulations. The chosen plan
and the others are then simulated again, on prompts and lengths of a seed that no search used. The
output also has the findings of `doctor` and the memory of each side. Each offer is a line of JSON in
`--output`. Offers that already have a line of this commit are skipped.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from streamrl.doctor.diagnosis import diagnose
from streamrl.hardware.resolved import resolve
from streamrl.hardware.side_memory import memory_of
from streamrl.record.run_comparison import ratio_half_width
from streamrl.runfile.config import Run
from streamrl.runfile.files import load_run
from streamrl.runfile.findings import Finding
from streamrl.runfile.section import Section
from streamrl.sim.checkup.checkup import check_up
from streamrl.sim.planner.layouts import Degrees, Replicas
from streamrl.sim.planner.modes import USUAL_SYSTEMS, Mode
from streamrl.sim.planner.plan import Plan
from streamrl.sim.planner.planner import make_plan
from streamrl.sim.planner.race import FINAL_STEPS, Race
from streamrl.sim.planner.reward_replicas import RewardReplicas
from streamrl.sim.planner.search import ROUND, Search
from streamrl.sim.planner.space import Candidate
from streamrl.sim.planner.trial import Trial, run_all, short_speed_of, shortened

OFFERS = Path(__file__).parent / "offers"
RESULTS, PAGE = OFFERS / "results.jsonl", Path(__file__).parent.parent / "docs" / "plans.md"
HEAD = """| offer | chosen | simulated | wide search | behind | trainer memory | doctor | commit |
|---|---|---|---|---|---|---|---|
"""
"""Head of the page's table. The table is rewritten with the results."""
FRESH = 1000
"""Added to a seed to get a seed for the comparison."""
WIDER = 20
"""Number of simulations of the wide search, relative to those of planning."""
ENOUGH = 0.02
"""Share by which the best plan may be better than the chosen one."""


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
    names = arguments.offers or sorted(path.stem for path in OFFERS.glob("*.toml"))
    for name in names:
        known = read_results(arguments.output)
        if known.get(name, {}).get("commit") == _commit():
            continue
        found = compare(
            name, load_run(OFFERS / f"{name}.toml", ["plan.tolerance=0"]), arguments.seconds
        )
        print(json.dumps(found), flush=True)
        lines = [json.dumps(each) + "\n" for each in {**known, name: found}.values()]
        arguments.output.write_text("".join(lines))
    if arguments.output == RESULTS:
        before, rest = PAGE.read_text().split(HEAD)
        after = rest.partition("\n\n")[2]
        rows = "\n".join(row_of(found) for found in read_results(RESULTS).values())
        PAGE.write_text(f"{before}{HEAD}{rows}\n\n{after}")


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """Return the earlier results by name of the offer."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {found["offer"]: found for found in map(json.loads, lines)}


def row_of(found: dict[str, Any]) -> str:
    """Return the row of an offer in the page's table."""
    width = f" ± {found['half_width']:.1%}" if found["half_width"] is not None else ""
    memory = found["memory"]["trainer"]
    cells = (
        found["offer"],
        found["plan"],
        f"{found['simulated']} of {found['candidates']:,}",
        f"{found['wide']} ({found['times_as_many']:.1f} times)",
        f"{found['behind_at_most']:.1%}{width}",
        f"{memory:.0%}",
        ", ".join(found["doctor"]) or "silent",
        found["commit"],
    )
    return f"| {' | '.join(cells)} |"


def compare(name: str, run: Run, seconds: float) -> dict[str, Any]:
    """Plan an offer, and compare the plan with those of other searches."""
    planned = make_plan(run)
    plan = planned.plan
    search = Search.open(run)
    chosen = _chosen(planned.run)
    with ProcessPoolExecutor() as pool:
        rivals = [*_alone(run, pool), *_wide(search, pool, WIDER * plan.simulated, seconds)]
        trials = [("plan", chosen), *((each.found_by, each.candidate) for each in rivals)]
        fresh = shortened(run, run.seed + FRESH, FINAL_STEPS)
        speeds = run_all(pool, short_speed_of, [(who, Trial(fresh, plan)) for who, plan in trials])
    ours = speeds.pop("plan")
    behind = {
        who: search.value_of(ours) / search.value_of(other) - 1 for who, other in speeds.items()
    }
    worst = max(behind, key=lambda who: behind[who])
    half_width = ratio_half_width(ours, speeds[worst])
    sides = memory_of(resolve(planned.run))
    return {
        "offer": name,
        "commit": _commit(),
        "plan": plan.allocation.text,
        "why": plan.why,
        "objective": plan.objective.value,
        "behind": {who: round(share, 4) for who, share in behind.items()},
        "behind_at_most": round(behind[worst], 4),
        "half_width": half_width,
        "is_met": behind[worst] <= max(ENOUGH, half_width or 0.0),
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


def _chosen(run: Run) -> Candidate:
    """Return the plan that a run file executes."""
    kinds = [Replicas(*_settings(kind, Replicas)) for kind in (run.rollout, *run.rollout.others)]
    beside = reduce(lambda last, kind: kind._replace(beside=last), reversed(kinds[1:]), None)
    mode = Mode(*_settings(run.policies, Mode), sync_mode=run.sync.mode)
    if run.verifier.pool is not None:
        mode = mode._replace(rewards=RewardReplicas(*_settings(run.verifier, RewardReplicas)))
    trainer = Degrees(*_settings(run.trainer, Degrees))
    return Candidate(kinds[0]._replace(beside=beside), trainer, mode)


def _settings(section: Section, kind: type[NamedTuple]) -> Iterator[Any]:
    """Yield the values of a plan part's fields in a section, for the fields that the section has."""
    return (getattr(section, name) for name in kind._fields if hasattr(section, name))


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
    """Yield the best plan of a wider search. It simulates new kinds of plan first, then the best estimates, then others."""
    until, is_mixed = time.perf_counter() + seconds, False
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
    best = Race(search).run(pool, lambda: None)
    yield Challenger(f"the best of {len(search.speeds)}", search.space.candidate(best))


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
