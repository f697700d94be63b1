"""The names for notebooks and scripts: `from streamrl.api import load_run, simulate`.

Each is imported when it is first asked for, so that a script loads what it uses. Beside `streamrl.cli` this is
the only place that knows the core, simulation and execution alike, and nothing of theirs imports it.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streamrl.api.plans import plan
    from streamrl.api.questions import first_answer
    from streamrl.api.studies import sweep
    from streamrl.engine.trace import Trace, read_trace
    from streamrl.executor.subscribers.stream_client import read_stream
    from streamrl.hardware.profiles import load_model
    from streamrl.record.metrics import Metrics, measure
    from streamrl.record.timeline import read_timeline
    from streamrl.report.against_report import against_report
    from streamrl.report.bubbles import bubble_notes, bubble_table, read_bubbles
    from streamrl.report.figures import bubble_figure, jobs_figure, timeline_figure
    from streamrl.report.jobs_report import jobs_report
    from streamrl.report.page.page import report_html as report
    from streamrl.report.plan_report import plan_report
    from streamrl.report.profile_report import comparison_table as generation_comparison
    from streamrl.report.profile_report import generation_figure, generation_notes, share_figure
    from streamrl.report.run_tables import metrics_table
    from streamrl.report.study_report import write_study
    from streamrl.runfile.config import Run
    from streamrl.runfile.files import change_run, load_offer, load_run, write_run
    from streamrl.runfile.jobs_file import load_jobs
    from streamrl.sim.jobs.plan import read_cluster_plan
    from streamrl.sim.jobs.planner import plan_jobs
    from streamrl.sim.planner.plan import Plan, read_plan, write_plan
    from streamrl.sim.steady_state import simulate_steady as simulate
    from streamrl.sim.studies.comparison import compare_runs
    from streamrl.sim.studies.hardware_efficiency import (
        operator_efficiency,
        study_generation,
        training_mfu,
    )
    from streamrl.sim.studies.rerun import rerun

PLACES = {
    "Run": "streamrl.runfile.config:Run",
    "load_run": "streamrl.runfile.files:load_run",
    "load_offer": "streamrl.runfile.files:load_offer",
    "change_run": "streamrl.runfile.files:change_run",
    "write_run": "streamrl.runfile.files:write_run",
    "load_model": "streamrl.hardware.profiles:load_model",
    "first_answer": "streamrl.api.questions:first_answer",
    "Plan": "streamrl.sim.planner.plan:Plan",
    "plan": "streamrl.api.plans:plan",
    "read_plan": "streamrl.sim.planner.plan:read_plan",
    "write_plan": "streamrl.sim.planner.plan:write_plan",
    "plan_report": "streamrl.report.plan_report:plan_report",
    "load_jobs": "streamrl.runfile.jobs_file:load_jobs",
    "plan_jobs": "streamrl.sim.jobs.planner:plan_jobs",
    "read_cluster_plan": "streamrl.sim.jobs.plan:read_cluster_plan",
    "jobs_report": "streamrl.report.jobs_report:jobs_report",
    "jobs_figure": "streamrl.report.figures:jobs_figure",
    "simulate": "streamrl.sim.steady_state:simulate_steady",
    "sweep": "streamrl.api.studies:sweep",
    "write_study": "streamrl.report.study_report:write_study",
    "compare_runs": "streamrl.sim.studies.comparison:compare_runs",
    "against_report": "streamrl.report.against_report:against_report",
    "rerun": "streamrl.sim.studies.rerun:rerun",
    "read_stream": "streamrl.executor.subscribers.stream_client:read_stream",
    "Trace": "streamrl.engine.trace:Trace",
    "read_trace": "streamrl.engine.trace:read_trace",
    "read_timeline": "streamrl.record.timeline:read_timeline",
    "timeline_figure": "streamrl.report.figures:timeline_figure",
    "Metrics": "streamrl.record.metrics:Metrics",
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
    "Metrics",
    "Plan",
    "Run",
    "Trace",
    "against_report",
    "bubble_figure",
    "bubble_notes",
    "bubble_table",
    "change_run",
    "compare_runs",
    "first_answer",
    "generation_comparison",
    "generation_figure",
    "generation_notes",
    "jobs_figure",
    "jobs_report",
    "load_jobs",
    "load_model",
    "load_offer",
    "load_run",
    "measure",
    "metrics_table",
    "operator_efficiency",
    "plan",
    "plan_jobs",
    "plan_report",
    "read_bubbles",
    "read_cluster_plan",
    "read_plan",
    "read_stream",
    "read_timeline",
    "read_trace",
    "report",
    "rerun",
    "share_figure",
    "simulate",
    "study_generation",
    "sweep",
    "timeline_figure",
    "training_mfu",
    "write_plan",
    "write_run",
    "write_study",
]

if not TYPE_CHECKING:  # which knows the names from above, and that there are no others

    def __getattr__(name: str) -> object:
        """Import a name; Python asks here once, for it stays."""
        if name not in PLACES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        checked = resolve_name("streamrl.api.arguments:checked")
        globals()[name] = checked(name, resolve_name(PLACES[name]))
        return globals()[name]

    def __dir__() -> list[str]:
        """Return what there is, imported or not."""
        return sorted({*globals(), *PLACES})
