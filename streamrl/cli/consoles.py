"""Consoles of rich that escape what texts contain, so that names cannot act on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import IO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from streamrl.runfile.escaping import visible


class SafeConsole(Console):
    """A console of rich that escapes what texts contain; its own colours and movements stay.

    Brackets and colons of a text are shown as they are, because names of the user contain them. A `Text` has colours.
    """

    def __init__(
        self,
        *,
        file: IO[str] | None = None,
        width: int | None = None,
        stderr: bool = False,
        quiet: bool = False,
        highlight: bool = True,
    ) -> None:
        super().__init__(
            markup=False,
            emoji=False,
            file=file,
            width=width,
            stderr=stderr,
            quiet=quiet,
            highlight=highlight,
        )

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Yield the segments of something to show."""
        return self._escaped(super().render(renderable, options))

    def _escaped(self, segments: Iterable[Segment]) -> Iterator[Segment]:
        for segment in segments:
            yield segment if segment.control else segment._replace(text=visible(segment.text))
