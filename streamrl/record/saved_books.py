"""What a trainer's book held at each checkpoint that a resume may still go back to."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

KEPT_BOOKS = 4
"""Checkpoints that are complete and whose books are kept: more than a run keeps on disk."""


class SavedBook(NamedTuple):
    """What a trainer's book held when a checkpoint was asked for."""

    groups_done: int
    done_ahead: frozenset[int]
    trained: int
    dropped: Counter[str]


class SavedBooks:
    """Keeps the book of each of the newest checkpoints, and of the one that the run was resumed from.

    What was asked for since the oldest of these is kept too: a checkpoint may be on disk though nobody said so.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self._books: dict[int, SavedBook] = {}
        """By version, in the order in which they were asked for."""
        self._complete: list[int] = []
        """Versions whose checkpoint is on disk, the newest last."""
        self._resumed: dict[int, SavedBook] = {}
        """The one that the run was resumed from, which stays on disk."""

    def __len__(self) -> int:
        """Return how many are kept."""
        return len(self._books.keys() | self._resumed.keys())

    def ask(self, version: int, book: SavedBook) -> None:
        """Enter that a checkpoint was asked for."""
        self._books.pop(version, None)
        self._books[version] = book

    def complete(self, version: int) -> None:
        """Enter that the checkpoint of `version` is on disk, and forget those that no run goes back to any more."""
        if version not in self._books:
            return  # nobody asked for it, so there is nothing to go back to
        kept = [*(other for other in self._complete if other != version), version]
        self._complete = kept[-KEPT_BOOKS:]
        if len(kept) > KEPT_BOOKS:
            asked = list(self._books)
            for old in asked[: asked.index(self._complete[0])]:
                del self._books[old]

    def resume(self, version: int) -> SavedBook | None:
        """Enter that the run goes on from a checkpoint; return its book, None where it was never asked for."""
        book = self._books.get(version, self._resumed.get(version))
        self._resumed = {} if book is None else {version: book}
        return book
