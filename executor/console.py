"""Print a line about the run to standard error; a closed terminal is no failure."""

from __future__ import annotations

import sys
from contextlib import suppress


def tell(what: str) -> None:
    """Print a line; a terminal or a pipe that is gone is no failure."""
    with suppress(OSError, ValueError):
        print(f"streamrl: {what}", file=sys.stderr)
