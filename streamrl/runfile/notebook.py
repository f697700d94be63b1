"""Show results in a notebook: as an HTML table and as a pandas data frame.

A result has `__repr__` (one line), `_repr_html_` and `to_frame`. Jupyter asks for the HTML itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pandas import DataFrame

CELL = "text-align:left"
"""No colours are set, so that the table is readable in light and in dark themes."""


def html_table(
    title: str,
    rows: Iterable[Sequence[object]],
    head: Sequence[str] = (),
    notes: Iterable[str] = (),
) -> str:
    """Return a small HTML table with a title above it and notes below it. All texts are escaped."""
    lines = [_html_row(head, "th")] if head else []
    lines += [_html_row(row, "td") for row in rows]
    below = "".join(f'<div style="opacity:.75">{escape(note)}</div>' for note in notes if note)
    table = f"<table>{''.join(lines)}</table>"
    return f"<div><strong>{escape(title)}</strong>{table}{below}</div>"


def _html_row(cells: Iterable[object], tag: str) -> str:
    texts = (f'<{tag} style="{CELL}">{escape(str(cell))}</{tag}>' for cell in cells)
    return f"<tr>{''.join(texts)}</tr>"


def frame_of(rows: Iterable[Mapping[str, object]], columns: Sequence[str] = ()) -> DataFrame:
    """Return a data frame with a row for each mapping.

    Args:
        rows: values by column; a missing value is empty.
        columns: the first columns, which are there even without rows.
    """
    from pandas import DataFrame

    found = list(rows)
    names = dict.fromkeys([*columns, *(name for row in found for name in row)])
    return DataFrame(found, columns=list(names))
