"""Plans, runs and studies as the text of one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from streamrl.report.page.page import make_page, read_report, render_html


def report_html(directories: Sequence[Path]) -> str:
    """Return what directories hold as one self-contained page, as `streamrl report` writes it.

    Raises:
        ValueError: a directory or a file in it, and why it cannot be reported.
    """
    return render_html(make_page(read_report(directories)))
