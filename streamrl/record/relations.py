"""Say the ratios of two plans in words: "11.5 % dearer, 1.8 times as fast"."""

from __future__ import annotations

from math import inf, log

TIMES = 1.2
"""Ratio of times from which words are "times as fast" and not a percentage."""
EQUAL = 0.0005
"""Smallest difference that words mention: 0.05 %."""
FINE = 0.01
"""Half of an interval below which a percentage has a decimal place."""


def relation_text(cost_ratio: float | None, time_ratio: float, width: float | None = None) -> str:
    """Return two ratios to the recommended plan in words: "11.5 % dearer, 1.8 times as fast".

    Args:
        cost_ratio: ratio of the dollars; None if all GPUs are free, infinite if the recommended
            plan's are.
        time_ratio: ratio of the times.
        width: half the 95 % interval of both ratios. If it is None, the words begin with "about".
    """
    parts = [] if cost_ratio is None else [_cost_text(cost_ratio, width)]
    return ", ".join([*parts, _time_text(time_ratio, width)])


def may_be_chance(ratio: float, limit: float, width: float | None) -> bool:
    """Return whether a ratio is above or below a limit only within its interval."""
    return width is not None and ratio > 0 and abs(log(ratio / limit)) <= width


def percent_text(share: float, width: float | None) -> str:
    """Return a share in percent, no finer than its interval allows: "11.5 %"."""
    is_fine = width is not None and width < FINE
    about = "about " if width is None else ""
    return f"{about}{abs(share) * 100:.{1 if is_fine else 0}f} %"


def _cost_text(ratio: float, width: float | None) -> str:
    if abs(ratio - 1) < EQUAL:
        return "costs the same"
    if ratio == inf:
        return "not free"
    told = f"{percent_text(ratio - 1, width)} {'dearer' if ratio > 1 else 'cheaper'}"
    return told + _doubt(ratio, width)


def _time_text(ratio: float, width: float | None) -> str:
    about = "about " if width is None else ""
    if abs(ratio - 1) < EQUAL:
        return "as fast"
    if ratio >= TIMES:
        return f"takes {about}{ratio:.1f} times as long{_doubt(ratio, width)}"
    if 1 / ratio >= TIMES:
        return f"{about}{1 / ratio:.1f} times as fast{_doubt(ratio, width)}"
    told = f"takes {percent_text(ratio - 1, width)} {'longer' if ratio > 1 else 'less time'}"
    return told + _doubt(ratio, width)


def _doubt(ratio: float, width: float | None) -> str:
    return " (may be chance)" if may_be_chance(ratio, 1.0, width) else ""
