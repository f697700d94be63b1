"""Compare dynamic adjustment with StreamRL's Figure 11: 7B on 32 H800, outputs growing from 10K to 20K over 23 steps.

A node of replicas is added when generation lags behind training by at least the time that a node
saves. The paper adds nodes after steps 10, 16 and 22. The script simulates and prints each reading of
the details that the paper leaves open. Nothing is fitted to the triggers. The output ends with one
JSON object per figure.

The simulation does not reproduce the triggers. With 64 rollouts per replica, generation takes as
long as its longest rollout. The paper's Figure 8 shows the same: a step of 7B takes 9 to 10 ms per
token of the longest output. So another node saves little time here. In Figure 11, each node saves
its full share, as if there were no longest rollout. Also, both stages grow with the lengths here,
and generation grows by no more than the lengths themselves.
"""

from __future__ import annotations

import json
from statistics import median
from typing import Any

from streamrl.sim.fidelity.paper import load_paper
from streamrl.sim.fidelity.paper_scaling import STEPS, TOLERANCE, Outcome, adjust, wanted_triggers

READINGS: dict[str, dict[str, Any]] = {
    "as the other figures": {},
    "trainer does not offload": {"trainer.offload": False},
    "decides at once": {"policies.resize_window": 1},
    **{
        f"{n} let in on demand": {"rollout.admission": "on-demand", "rollout.max_running": n}
        for n in (16, 20, 64)
    },
    "batch by batch": {"policies.waits_for_whole_batches": True},
}


def main() -> None:
    """Simulate every reading, and print the lag of each step and the figures."""
    paper = load_paper().adjustment
    wanted = wanted_triggers()
    outcomes = {name: adjust(changes) for name, changes in READINGS.items()}
    print(f"{'generation less training, s':28}" + "".join(f"{s:6}" for s in range(1, STEPS + 1)))
    print(f"{'paper':28}" + "".join(f"{delta:6.1f}" for delta in paper.delta))
    for name, outcome in outcomes.items():
        print(f"{name:28}" + "".join(f"{step.lag:6.1f}" for step in outcome.steps))
    print(f"\n{'a node is added after steps':28}{', '.join(map(str, wanted))} in the paper")
    for name, outcome in outcomes.items():
        print(f"{name:28}{', '.join(map(str, outcome.triggers)) or 'none'}")
    for name, outcome in outcomes.items():
        print_figures(name, outcome, wanted)


def print_figures(name: str, outcome: Outcome, wanted: list[int]) -> None:
    """Print the number of triggers that are met, and the drop of the lag at the first addition: 37.6 s in the paper."""
    pairs = zip(outcome.triggers, wanted, strict=False)
    met = sum(abs(trigger - step) <= TOLERANCE for trigger, step in pairs)
    report(f"Figure 11 triggers within {TOLERANCE} steps ({name})", met, f"of {len(wanted)}")
    last, first = outcome.steps[-1], outcome.steps[0]
    report(f"Figure 11 replicas at the end ({name})", last.num_replicas, "replicas")
    grown = [k for k in range(1, STEPS) if outcome.steps[k].num_replicas > first.num_replicas]
    if grown:
        lags, place = [step.lag for step in outcome.steps], grown[0]
        drop = median(lags[place - 3 : place]) - median(lags[place : place + 3])
        report(f"Figure 11 drop of the lag at the first addition ({name})", drop, "s")
    report(f"first step, generation ({name})", first.generation_time, "s")
    report(f"first step, training ({name})", first.training_time, "s")


def report(name: str, value: float, unit: str) -> None:
    """Print one figure as a JSON object on its own line."""
    print(json.dumps({"name": name, "value": round(value, 3), "unit": unit}))


if __name__ == "__main__":
    main()
