"""What a run has to say of itself while it goes on, on standard error: whoever does not hear it costs it nothing."""

from __future__ import annotations

import sys
from contextlib import suppress


def tell(what: str) -> None:
    """Print a line; a terminal or a pipe that is gone is no failure."""
    with suppress(OSError, ValueError):
        print(f"streamrl: {what}", file=sys.stderr)
