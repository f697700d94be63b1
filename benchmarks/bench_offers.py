"""Is the plan that `streamrl plan` chooses the best of its offer? Sixteen offers, each searched in other ways too.

    python benchmarks/bench_offers.py                      every offer of benchmarks/offers; hours on two cores
    python benchmarks/bench_offers.py 8b-2-h100 32b-8-h800

Of every offer the chosen plan is set against the best plan of each system searched alone, and against the best of a
search with twenty times the simulations (or as many as `--seconds` allow). Winner and challengers are simulated again, on
the prompts and lengths of a seed that no search has seen. A JSON object for each offer goes to `--output`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from sim.planner.modes import USUAL_SYSTEMS
from sim.planner.planner import make_plan
from sim.planner.race import FINAL_STEPS, Race
from sim.planner.search import ROUND, Search
from sim.planner.space import Candidate
from sim.planner.trial import Trial, run_all, short_speed_of, shortened
from streamrl.hardware.memory import trainer_memory
from streamrl.hardware.profiles import load_gpu
from streamrl.record.paired import ratio_half_width
from streamrl.runfile.config import Run
from streamrl.runfile.reading import load_run

OFFERS = Path(__file__).parent / "offers"
FRESH = 1000
"""What is added to a seed for a comparison of its own."""
WIDER = 20
"""Times as many simulations as planning took."""
ENOUGH = 0.02
"""Share by which the best plan may be better than the chosen one."""


class Challenger(NamedTuple):
    """A plan that another search has found."""

    found_by: str
    candidate: Candidate


def main() -> None:
    """Plan every offer and look for better plans."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("offers", nargs="*", help="names of files in benchmarks/offers")
    parser.add_argument("--seconds", type=float, default=600.0, help="most for the wide search")
    parser.add_argument("--output", type=Path, default=OFFERS / "results.jsonl")
    arguments = parser.parse_args()
    names = arguments.offers or sorted(path.stem for path in OFFERS.glob("*.toml"))
    for name in names:
        found = compare(name, load_run(OFFERS / f"{name}.toml"), arguments.seconds)
        line = json.dumps(found)
        print(line, flush=True)
        with arguments.output.open("a") as file:
            file.write(line + "\n")


def compare(name: str, run: Run, seconds: float) -> dict[str, Any]:
    """Plan an offer, and set the plan against what other searches find."""
    planned = make_plan(run)
    plan = planned.plan
    search = Search.open(run)
    chosen = _chosen(search, plan.allocation.settings)
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
    split = planned.run
    memory = load_gpu(split.cluster.pools[split.trainer.pool].gpu).usable_memory
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
        "seconds": round(plan.seconds, 1),
        "trainer_memory": round(sum(trainer_memory(split).values()) / memory, 3),
    }


def _chosen(search: Search, settings: dict[str, str | int | bool]) -> Candidate:
    """Return the plan that has these settings."""
    from sim.planner.found import settings_of

    space = search.space
    return next(
        candidate
        for candidate in map(space.candidate, range(len(space)))
        if settings_of(candidate) == settings
    )


def _alone(run: Run, pool: Executor) -> Iterator[Challenger]:
    """Yield the best plan of each system, searched as if there were no other."""
    for system in USUAL_SYSTEMS:
        try:
            search = Search.open(replace(run, plan=replace(run.plan, systems=[system])))
        except ValueError:
            continue
        search.deadline = time.perf_counter() + run.plan.time_limit
        search.run(pool, lambda: None)
        yield Challenger(system, search.space.candidate(Race(search).run(pool, lambda: None)))


def _wide(search: Search, pool: Executor, most: int, seconds: float) -> Iterator[Challenger]:
    """Yield the best of as many plans, the best by estimate, each other than those before."""
    until = time.perf_counter() + seconds
    while len(search.speeds) < most and time.perf_counter() < until:
        search.settle(pool, [])
        new = list(search.unlike(search.in_order()))[:ROUND]
        if not new:
            break
        search.simulate(pool, new, lambda: None)
    best = Race(search).run(pool, lambda: None)
    yield Challenger(f"the best of {len(search.speeds)}", search.space.candidate(best))


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
