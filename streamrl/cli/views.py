"""What people look at of a run: a timeline, and a trace for Chrome's and Perfetto's viewer."""

from __future__ import annotations

from pathlib import Path

from streamrl.record.chrome_trace import chrome_trace
from streamrl.record.trace import Trace
from streamrl.report.figures import timeline_figure


def write_views(trace: Trace, directory: Path) -> None:
    """Write `timeline.png` and `chrome_trace.json`."""
    (directory / "chrome_trace.json").write_bytes(chrome_trace(trace))
    timeline_figure(trace, directory / "timeline.png")
