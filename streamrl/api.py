"""The names for notebooks and scripts: `from streamrl.api import load_run, simulate`.

Each is imported when it is first asked for, so that a script loads what it uses. Beside `streamrl.cli` this is
the only place that knows the core, simulation and execution alike, and nothing of theirs imports it.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streamrl.engine.trace import read_trace
    from streamrl.executor.subscribers.stream_client import read_stream
    from streamrl.hardware.profiles import load_model
    from streamrl.record.metrics import measure
    from streamrl.report.against_report import against_report
    from streamrl.report.bubbles import bubble_notes, bubble_table, read_bubbles
    from streamrl.report.figures import bubble_figure, timeline_figure
    from streamrl.report.page.page import report_html as report
    from streamrl.report.plan_report import plan_report
    from streamrl.report.profile_report import comparison_table as generation_comparison
    from streamrl.report.profile_report import generation_figure, generation_notes, share_figure
    from streamrl.report.run_tables import metrics_table
    from streamrl.runfile.files import load_run
    from streamrl.sim.planner.planner import make_plan as plan
    from streamrl.sim.steady_state import simulate_steady as simulate
    from streamrl.sim.studies.comparison import compare_runs
    from streamrl.sim.studies.hardware_efficiency import (
        operator_efficiency,
        study_generation,
        training_mfu,
    )
    from streamrl.sim.studies.rerun import rerun

PLACES = {
    "load_run": "streamrl.runfile.files:load_run",
    "load_model": "streamrl.hardware.profiles:load_model",
    "plan": "streamrl.sim.planner.planner:make_plan",
    "plan_report": "streamrl.report.plan_report:plan_report",
    "simulate": "streamrl.sim.steady_state:simulate_steady",
    "compare_runs": "streamrl.sim.studies.comparison:compare_runs",
    "against_report": "streamrl.report.against_report:against_report",
    "rerun": "streamrl.sim.studies.rerun:rerun",
    "read_stream": "streamrl.executor.subscribers.stream_client:read_stream",
    "read_trace": "streamrl.engine.trace:read_trace",
    "timeline_figure": "streamrl.report.figures:timeline_figure",
    "measure": "streamrl.record.metrics:measure",
    "metrics_table": "streamrl.report.run_tables:metrics_table",
    "read_bubbles": "streamrl.report.bubbles:read_bubbles",
    "bubble_table": "streamrl.report.bubbles:bubble_table",
    "bubble_notes": "streamrl.report.bubbles:bubble_notes",
    "bubble_figure": "streamrl.report.figures:bubble_figure",
    "report": "streamrl.report.page.page:report_html",
    "study_generation": "streamrl.sim.studies.hardware_efficiency:study_generation",
    "generation_comparison": "streamrl.report.profile_report:comparison_table",
    "generation_notes": "streamrl.report.profile_report:generation_notes",
    "generation_figure": "streamrl.report.profile_report:generation_figure",
    "operator_efficiency": "streamrl.sim.studies.hardware_efficiency:operator_efficiency",
    "training_mfu": "streamrl.sim.studies.hardware_efficiency:training_mfu",
    "share_figure": "streamrl.report.profile_report:share_figure",
}
"""Where each name is, as module:name."""

__all__ = [
    "against_report",
    "bubble_figure",
    "bubble_notes",
    "bubble_table",
    "compare_runs",
    "generation_comparison",
    "generation_figure",
    "generation_notes",
    "load_model",
    "load_run",
    "measure",
    "metrics_table",
    "operator_efficiency",
    "plan",
    "plan_report",
    "read_bubbles",
    "read_stream",
    "read_trace",
    "report",
    "rerun",
    "share_figure",
    "simulate",
    "study_generation",
    "timeline_figure",
    "training_mfu",
]

if not TYPE_CHECKING:  # which knows the names from above, and that there are no others

    def __getattr__(name: str) -> object:
        """Import a name; Python asks here once, for it stays."""
        if name not in PLACES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = resolve_name(PLACES[name])
        return globals()[name]

    def __dir__() -> list[str]:
        """Return what there is, imported or not."""
        return sorted({*globals(), *PLACES})
