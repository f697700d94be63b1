"""Show names and texts of others without letting them act: in a terminal, on a page, in a table.

A name in a run file, a prompt or a line of a log may hold terminal escapes, characters that reverse the direction of
text, HTML, or a formula. All output of commands passes through these functions:

| output | function | where it is called |
|---|---|---|
| terminal, logs, errors | `visible` | `streamrl.cli.output`, `streamrl.cli.log_output`, `streamrl.cli.main` |
| JSON | `visible_json` | `streamrl.cli.output` |
| report and its Markdown | `visible`, then HTML and Markdown | `streamrl.report.page.page` |
| CSV | `csv_rows` | the writers of tables |
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

ACTING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff"
    "\ud800-\udfff\ufff9-\ufffb\U000e0000-\U000e007f]"
)
"""Control characters but tabulator and line break, characters without width, of direction, and halves of pairs."""
FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""First characters of a cell that spreadsheets evaluate (OWASP, CSV Injection)."""
NUMBER = re.compile(r"[+-]?((\d+\.?\d*|\.\d+)([eE][+-]?\d+)?%?|inf|nan)")


def visible(text: str) -> str:
    """Return a text whose acting characters are escaped as in Python."""
    return ACTING.sub(lambda found: repr(found[0])[1:-1], text)


def visible_json(text: str) -> str:
    """Return a JSON text whose acting characters are escaped as in JSON; its value is the same."""
    return ACTING.sub(_json_escape, text)


def _json_escape(found: re.Match[str]) -> str:
    data = found[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{data[at : at + 2].hex()}" for at in range(0, len(data), 2))


def csv_rows(rows: Iterable[Iterable[object]]) -> Iterator[list[object]]:
    """Yield rows whose texts are no formulas to a spreadsheet: a quote stands before such a text."""
    for row in rows:
        yield [_csv_cell(each) if isinstance(each, str) else each for each in row]


def _csv_cell(text: str) -> str:
    shown = visible(text)
    is_formula = text.startswith(FORMULA) and not NUMBER.fullmatch(text)
    return f"'{shown}" if is_formula else shown
