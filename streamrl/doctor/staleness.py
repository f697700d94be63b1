"""Which staleness can the chosen policies reach, and does the algorithm correct for it?"""

from __future__ import annotations

from collections.abc import Iterator

from streamrl.doctor.finding import Changes, Finding, Level
from streamrl.doctor.fix import Fix
from streamrl.engine.systems import System, choose_system
from streamrl.runfile.config import Run

MIXED = ("load-in-flight", "abort-and-resume")
"""Weight sync under which one rollout is sampled from several versions."""


def find(run: Run) -> Iterator[Finding]:
    """Say how stale a rollout may be, and find what makes the bound void or leaves it uncorrected."""
    system = choose_system(run.policies)
    bound = system.max_staleness
    if system.consumption == "greedy" and bound:
        text = (
            f"policies.consumption 'greedy' trains on what is complete first: max_staleness={bound} bounds "
            f"when a rollout may start, not how often it is overtaken, so a straggler grows staler with every step"
        )
        yield _finding("warning", "unbounded-staleness", text)
    else:
        yield _finding("ok", "staleness-bound", _bounded(run, system))
    if bound and run.algorithm.corrected_by == "none":
        text = (
            f"rollouts are up to {bound} versions stale, and algorithm.correction 'none' weighs them as if "
            f"the newest policy had sampled them"
        )
        yield _finding("warning", "uncorrected", text)
    if bound >= run.algorithm.steps:
        text = (
            f"policies.max_staleness={bound} lets every prompt of the {run.algorithm.steps} steps start from the "
            f"first weights: nothing that is learned is sampled from"
        )
        yield _finding("warning", "all-at-once", text)


def _bounded(run: Run, system: System) -> str:
    """Say which bound holds and why: see `streamrl.engine.policies.staleness`."""
    mixed = (
        f"; {system.weight_sync} samples one rollout from several versions, its first token's counts"
        if system.weight_sync in MIXED and system.max_staleness
        else ""
    )
    return (
        f"{run.policies.system}: a prompt starts at most {system.max_staleness} steps ahead and "
        f"{system.consumption} trains in the order of the draws, so no rollout is trained on more than "
        f"{system.max_staleness} versions stale{mixed}"
    )


def _finding(level: Level, name: str, text: str) -> Finding:
    return Finding(level=level, topic="staleness", name=name, text=text)


def _strict(run: Run) -> Iterator[Changes]:
    yield {"policies.consumption": "strict-fifo"}


def _corrected(run: Run) -> Iterator[Changes]:
    yield {"algorithm.correction": "token-tis"}


def _fresher(run: Run) -> Iterator[Changes]:
    for bound in range(
        min(choose_system(run.policies).max_staleness, run.algorithm.steps) - 1, -1, -1
    ):
        yield {"policies.max_staleness": bound}


FIXES = {
    "unbounded-staleness": Fix(_strict, "train on groups in the order of their draws"),
    "uncorrected": Fix(_corrected, "choose a correction, or policies.max_staleness=0"),
    "all-at-once": Fix(_fresher, "train for more steps"),
}
