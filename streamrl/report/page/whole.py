"""The section on the whole run: what it takes of each pool, what it trains on, and the energy where that is known."""

from __future__ import annotations

from collections.abc import Iterator

from streamrl.report.page.options import Option
from streamrl.report.page.parts import PageCell, PageSection, PageTable
from streamrl.report.whole_text import facts, headline


def whole_section(chosen: Option | None) -> Iterator[PageSection]:
    """Yield the section of the option that a report is about, where its whole run is known."""
    if chosen is None or chosen.whole_run is None:
        return
    section = PageSection("whole", "The whole run")
    section.text.append(f"{headline(chosen.whole_run)}: {chosen.rent}.")
    section.notes.append(NOTE)
    rows = [
        [PageCell(name.strip()), PageCell(figure), PageCell(note)]
        for name, figure, note in facts(chosen.whole_run)
    ]
    section.tables.append(PageTable("", ("", "in all", ""), rows, numbers=(1,)))
    yield section


NOTE = (
    "All training steps with the start: steps before the steady state as they were, all others at its mean. The interval is that "
    "of the mean step; what the costs of kernels may be off by is not in it."
)
