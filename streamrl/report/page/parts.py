"""The structure of a page; the templates turn it into HTML and Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

from streamrl.report.page.answer import Tile
from streamrl.report.pictures.drawing import Picture


@dataclass(frozen=True)
class PageCell:
    """A table cell: a text, and a small note below it."""

    text: str
    note: str = ""


@dataclass(frozen=True)
class PageTable:
    """Rows under a head; columns of numbers are right-aligned."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[PageCell]]
    numbers: Sequence[int] = ()
    """Columns of numbers."""
    strong_row: int | None = None
    """The row of the chosen option."""
    is_cards: bool = False
    """Whether a small screen shows each row as a card."""
    is_grid: bool = False
    """Whether the cells of a card, without the first one, are side by side under their heads."""


@dataclass
class PageSection:
    """One part of the page."""

    name: str
    title: str
    text: list[str] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    tables: list[PageTable] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    is_pair: bool = False
    """Whether its pictures are side by side if there is room."""
    is_folded: bool = False
    """Whether readers open it on request. Print shows it."""


@dataclass(frozen=True, kw_only=True)
class NextStep:
    """Something to do after reading the page, with the command for it if there is one."""

    text: str
    command: str = ""


@dataclass(frozen=True, kw_only=True)
class Page:
    """The whole report."""

    kind: str
    """Such as "Plan" or "Executed run"."""
    title: str
    subtitle: str
    answer: str
    tiles: list[Tile]
    rental: PageSection | None
    """What to rent and where, if the page is about a plan. It is part of the decision."""
    steps: list[NextStep]
    sections: list[PageSection]
    explorer: Markup | None = None
    """Data for the what-if part, as JSON."""
    explorer_note: str = ""
    """How far the estimates of the what-if part are from a simulation, if that is far."""
    facts: list[tuple[str, str]]
    """When and from what the page was made: a name and a value each."""
    pools: Mapping[str, str] = field(default_factory=dict)
    """What the page calls pools that are named after their GPU, by the pool."""


def cells(*texts: str) -> list[PageCell]:
    """Return a row of plain cells."""
    return [PageCell(text) for text in texts]
