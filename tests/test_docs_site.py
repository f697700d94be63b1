"""The documentation site: its pages, links and pictures, checked without building it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.commands_page import commands_page
from tests.doc_pages import ALL, BLOCK, DOCS, PAGES, ROOT, anchors, links
from tests.framework_tables import page_with_tables

SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
PICTURES = sorted(DOCS.glob("pictures/*.svg"))


def nav_pages(entry: Any) -> Iterator[str]:
    """Yield the pages below an entry of the navigation."""
    for within in entry.values() if isinstance(entry, dict) else entry:
        if isinstance(within, str):
            yield within
        else:
            yield from nav_pages(within)


def test_every_page_is_in_the_navigation_once() -> None:
    assert sorted(nav_pages(SITE["nav"])) == sorted(str(page.relative_to(DOCS)) for page in PAGES)


@pytest.mark.parametrize("page", ALL, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    for target in links(page):
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_of_the_site_link_to_nothing_outside_of_it(page: Path) -> None:
    for target in links(page):
        assert (page.parent / target.partition("#")[0]).resolve().is_relative_to(DOCS), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lists_within_lists_have_four_spaces_which_the_site_needs(page: Path) -> None:
    assert not re.search(r"(?m)^ {1,3}([-*]|\d+\.) ", BLOCK.sub("", page.read_text()))


def test_the_site_loads_nothing_from_other_hosts() -> None:
    assert SITE["theme"]["font"] is False and SITE["strict"] is True
    assert "extra_javascript" not in SITE
    # The offline plugin adds a script of another host unless there is one of this name.
    assert SITE["extra"]["polyfills"] == ["style/iframe-worker.js"]
    for name in (*SITE["extra"]["polyfills"], *SITE["extra_css"]):
        assert not re.search(r"https?:|url\(|@import", (DOCS / name).read_text()), name


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_a_picture_has_dark_colours_words_for_readers_and_no_links(picture: Path) -> None:
    text = picture.read_text()
    light, dark = text.split("@media (prefers-color-scheme: dark)")
    named = set(re.findall(r'class="([\w ]+)"', text))
    coloured = {"generate", "train", "weights", "plain"} & {
        w for each in named for w in each.split()
    }
    assert all(f".{name} {{" in light and f".{name} {{" in dark for name in coloured)
    assert "<title" in text and "<desc" in text
    assert re.findall(r"https?://[^\"]*", text) == ["http://www.w3.org/2000/svg"]


def test_llms_txt_names_every_page_but_the_home_page_and_plans() -> None:
    named = {(ROOT / target).resolve() for target in links(ROOT / "llms.txt")}
    left_out = {DOCS / "index.md", DOCS / "plans.md"}
    assert {page.resolve() for page in PAGES} - named == left_out


def test_each_picture_is_on_a_page() -> None:
    shown = {(page.parent / target).resolve() for page in PAGES for target in links(page)}
    assert PICTURES and shown >= set(PICTURES)


def test_the_page_of_commands_is_current() -> None:
    """Mend with `python -m tests.commands_page > docs/commands.md`."""
    assert (DOCS / "commands.md").read_text() == commands_page()


def test_tables_of_frameworks_have_the_predictions_of_today() -> None:
    """Mend with `python -m tests.framework_tables`."""
    page = (DOCS / "frameworks.md").read_text()
    assert page == page_with_tables(page)
