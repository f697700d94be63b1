"""Memory in huge pages, which a process that forks often copies and gives back in a fraction of the time."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from streamrl.executor.libc import madvise

HUGE_PAGE = 1 << 21  # bytes: of x86, and of ARM with pages of 4 KB
MAPS = Path("/proc/self/maps")
MADV_COLLAPSE = 25
"""Since Linux 6.1, and whatever the system says of transparent huge pages unless it never has them."""
_OWN_MEMORY = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p \S+ 00:00 0\s*(\[heap\])?\n")


def collapse() -> None:
    """Put what this process has allocated into huge pages, as far as the kernel does."""
    if sys.platform != "linux":
        return
    try:
        maps = MAPS.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for line in maps.splitlines(keepends=True):
        if (found := _OWN_MEMORY.fullmatch(line)) is not None:
            start = -(-int(found[1], 16) // HUGE_PAGE) * HUGE_PAGE
            size = int(found[2], 16) // HUGE_PAGE * HUGE_PAGE - start
            if size > 0:
                madvise(start, size, MADV_COLLAPSE)
