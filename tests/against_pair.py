"""Small runs that are set against each other."""

from __future__ import annotations

from io import StringIO
from typing import Any

from rich.console import Console

from streamrl.record.run_comparison import Against
from streamrl.report.against_report import against_report
from streamrl.runfile.config import Run
from tests.runs import small_run

SOME: dict[str, Any] = {
    "algorithm.prompts_per_step": 8,
    "algorithm.steps": 50,
    "simulate.interval": 0.03,
    "rollout.max_running": 8,
}
COLOCATED = {"policies.system": "colocated", "rollout.pool": "near", "rollout.replicas": 4}
FAR = {"cluster.pools.far.price": 20.0}
"""A price at which generating there is dear, however good the link."""


def some_run(changes: dict[str, Any] | None = None) -> Run:
    """Return a small run whose step time need not be known well."""
    return small_run({**SOME, **(changes or {})})


def disaggregated(changes: dict[str, Any] | None = None) -> Run:
    """Return a run on both pools."""
    return some_run({"policies.system": "stream-sync", **(changes or {})})


def colocated() -> Run:
    """Return a run that has the nearer pool alone."""
    return some_run(COLOCATED)


def render(against: Against) -> str:
    """Return the report of two runs as text."""
    output = StringIO()
    Console(width=200, file=output).print(against_report(against, ("one", "other")))
    return output.getvalue()
