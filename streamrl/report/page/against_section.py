"""The section on a run set against another: whether it is worth it, and what would make them even."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from streamrl.report.against_report import break_even_lines, figures, notes, verdict
from streamrl.report.page.parts import PageSection, PageTable, cells
from streamrl.report.page.sources import RecordedComparison


def against_sections(comparisons: Sequence[RecordedComparison]) -> Iterator[PageSection]:
    """Yield a section for each two runs that were set against each other."""
    for index, recorded in enumerate(comparisons):
        names, against = recorded.found.names, recorded.found.against
        section = PageSection(f"against-{index}", f"Is it worth it? {recorded.name}")
        section.text.append(verdict(against))
        section.text += [f"{letter} is {name}." for letter, name in zip("AB", names, strict=True)]
        section.text += break_even_lines(against)
        rows = [cells(*row) for row in figures(against)]
        section.tables.append(PageTable("", ("", "A", "B", "A - B"), rows, numbers=(1, 2, 3)))
        first, last = against.counted_steps
        section.notes.append(
            f"Both simulated on the same prompts and lengths; steps {first} to {last} of both count. ± is half a 95 % interval."
        )
        section.notes += notes(against)
        yield section
