"""Explain the words of a page that a reader may not know, in visible text below the part that has them first."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from markupsafe import Markup

from streamrl.report.words import PAGE_WORDS, with_pool_words

PARTS = re.compile(r"<code>.*?</code>|[^<]+|<[^>]*>")
WORDS = re.compile("|".join(rf"(?<![\w.=-])(?:{word})(?![\w=-]|\.\w)" for word in PAGE_WORDS))
"""No word is part of a longer one, of a key of the run file, or of a setting."""


class Term(NamedTuple):
    """A word, as the page writes it first, with its meaning."""

    anchor: str
    word: str
    meaning: str


class Terms:
    """The words that a page has used so far.

    Each part of a page links the first use of a word to its meaning. The meaning is below the part
    that uses the word first.
    """

    def __init__(self, pools: Mapping[str, str] | None = None) -> None:
        """Begin a page.

        Args:
            pools: what the page calls pools that are named after their GPU.
        """
        self._pools = pools or {}
        self._anchors: dict[str, str] = {}
        self._new: list[Term] = []
        self._linked: set[str] = set()

    def mark(self, text: Markup) -> Markup:
        """Return escaped text with links from the first use of each word in this part."""
        parts = (part[0] for part in PARTS.finditer(str(text)))
        return Markup("".join(part if part[0] == "<" else self._mark(part) for part in parts))

    def note(self, text: str) -> str:
        """Return the text with the words for pools, and take note of its terms, for a page that cannot link."""
        self.mark(Markup.escape(text))
        return self.named(text)

    def named(self, text: str) -> str:
        """Return the text with the words for pools."""
        return with_pool_words(text, self._pools)

    def take(self) -> list[Term]:
        """Return the words that the page had for the first time in this part, and begin the next part."""
        found, self._new, self._linked = self._new, [], set()
        return found

    def _mark(self, text: str) -> str:
        named = self.named(text)
        return WORDS.sub(lambda match: self._linked_word(match[0], named), named)

    def _linked_word(self, word: str, text: str) -> str:
        meaning = next(m for pattern, m in PAGE_WORDS.items() if re.fullmatch(pattern, word))
        if meaning in self._linked or Markup.escape(meaning) in text:  # the text has it already
            return word
        self._linked.add(meaning)
        if meaning not in self._anchors:
            self._anchors[meaning] = f"word-{len(self._anchors) + 1}"
            self._new.append(Term(self._anchors[meaning], word, meaning))
        return f'<a class="term" href="#{self._anchors[meaning]}">{word}</a>'
