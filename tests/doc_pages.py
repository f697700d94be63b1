"""Read the Markdown pages of the project: links, headings, and the commands that they show."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("**/*.md"))
ALL = [*PAGES, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md", "llms.txt"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
BLOCK = re.compile(r"(?ms)^```(\w*)\n(.*?)^```$")
SPAN = re.compile(r"`(streamrl [^`]*)`")
COMMAND = re.compile(r"(?:\$ )?(?:\S+/)?streamrl( .*)?")
SHELL = {">", ">>", "|", "&", "&&", ";"}
COMMENT = re.compile(r"\s#\s.*")


def links(page: Path) -> list[str]:
    """Return the targets of the links and pictures of a page that are in the project."""
    prose = BLOCK.sub("", page.read_text())
    return [target for target in LINK.findall(prose) if not re.match(r"\w+:", target)]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, which GitHub and the site both have."""
    found = set()
    for heading in re.findall(r"(?m)^#+ (.*)$", BLOCK.sub("", page.read_text())):
        kept = re.sub(r"[^\w\s-]", "", heading).strip().lower()
        on_site, on_github = re.sub(r"[-\s]+", "-", kept), kept.replace(" ", "-")
        found |= {on_site} & {on_github}
    return found


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the words of each `streamrl` command of a page, without `streamrl` itself."""
    text = page.read_text()
    lines = [line for _, block in BLOCK.findall(text) for line in _joined(block).splitlines()]
    spans = [" ".join(span.split()) for span in SPAN.findall(BLOCK.sub("", text))]
    for line in (*lines, *spans):
        if match := COMMAND.fullmatch(COMMENT.sub("", line).strip()):
            words = takewhile(lambda word: word not in SHELL, shlex.split(match[1] or ""))
            yield [*_without_dots(words)]


def _without_dots(words: Iterable[str]) -> Iterator[str]:
    """Yield words without dots for what is left out; they stay as the value of an option."""
    before = ""
    for word in words:
        if word not in {"…", "..."} or before.startswith("-"):
            yield word
        before = word


def _joined(block: str) -> str:
    return re.sub(r"\\\n\s*", " ", block)
