"""Draw the histogram of output lengths as lines of text."""

from __future__ import annotations

from collections.abc import Iterator

from streamrl.workload.length_statistics import LengthStatistics

BAR = "█"
PARTS = " ▏▎▍▌▋▊▉"
"""Eighths of a character."""
WIDTH = 40
"""Characters of the longest bar."""


def histogram_lines(found: LengthStatistics) -> Iterator[str]:
    """Yield the statistics and a bar for each range of lengths."""
    yield (
        f"mean {found.mean:,.0f}, median {found.median:,.0f}, p95 {found.p95:,.0f}, max {found.longest:,} tokens; "
        f"{found.share_at_cap:.1%} at the cap of {found.cap:,}"
    )
    highest = max(each.share for each in found.bins)
    size = len(f"{found.bins[-1].most:,}")
    for each in found.bins:
        label = f"{each.above + 1:>{size},} to {each.most:>{size},}"
        yield f"{label}  {each.share:>6.1%}  {_bar(each.share / highest)}".rstrip()


def _bar(share: float) -> str:
    eighths = round(share * WIDTH * 8)
    whole, part = divmod(max(eighths, 1) if share else 0, 8)
    return BAR * whole + (PARTS[part] if part else "")
