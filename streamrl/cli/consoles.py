"""Consoles of rich that escape what texts contain, so that names cannot act on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from streamrl.runfile.escaping import visible


class SafeConsole(Console):
    """A console of rich that escapes what texts contain; its own colours and movements stay."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Yield the segments of something to show."""
        return self._escaped(super().render(renderable, options))

    def _escaped(self, segments: Iterable[Segment]) -> Iterator[Segment]:
        for segment in segments:
            yield segment if segment.control else segment._replace(text=visible(segment.text))
