"""Write durations, counts, dollars, shares and lists for people."""

from __future__ import annotations

from math import floor, log10
from typing import TypeAlias

from streamrl.runfile.units import SECONDS_PER_DAY, SECONDS_PER_HOUR

OptionalInterval: TypeAlias = tuple[float, float] | None
"""Bounds of a 95 % interval; None if there is none."""
IN_DAYS = 2 * SECONDS_PER_DAY
"""Seconds from which the time of a run is shown in days."""
DIGITS = 2
"""Significant digits of half an interval; the value is shown to the same decimal place."""
UNSURE = 3
"""Significant digits of a value without an interval."""


def long_time(
    seconds: float, interval: OptionalInterval = None, band: OptionalInterval = None
) -> str:
    """Format the seconds of a whole run in a suitable unit: "15.7 h (12.6 to 21.4)".

    Args:
        seconds: the seconds.
        interval: their 95 % interval, to show half of it as well.
        band: the range in which they may truly be.
    """
    for unit, size in (("d", SECONDS_PER_DAY), ("h", SECONDS_PER_HOUR), ("min", 60.0)):
        if seconds >= (IN_DAYS if unit == "d" else size):
            break
    else:
        unit, size = "s", 1.0
    text = _with_half(seconds, interval, size)
    value, *half = text.split(" ")
    text = " ".join([f"{value} {unit}", *half])
    if ends := band_text(_scaled(band, 1 / size)):
        return f"{text} {ends}"
    return f"{text} ({seconds / SECONDS_PER_HOUR:,.1f} h)" if unit == "d" else text


def long_dollars(
    dollars: float, interval: OptionalInterval = None, band: OptionalInterval = None
) -> str:
    """Write the dollars of a whole run: "$893 (717 to 1,214)"."""
    return f"${_with_half(dollars, interval, 1.0)} {band_text(band)}".rstrip()


def band_text(band: OptionalInterval) -> str:
    """Write a band behind its figure: "(717 to 1,214)". A band without a visible width is empty."""
    ends = band_ends(band)
    return f"({ends})" if ends else ""


def band_ends(band: OptionalInterval) -> str:
    """Write the ends of a band with three digits each: "717 to 1,214"; empty without a visible width."""
    if band is None:
        return ""
    low, high = (f"{end:,.{_decimals(end, UNSURE)}f}" for end in band)
    return f"{low} to {high}" if low != high else ""


def _scaled(band: OptionalInterval, factor: float) -> OptionalInterval:
    return None if band is None else (band[0] * factor, band[1] * factor)


def _with_half(value: float, interval: OptionalInterval, size: float) -> str:
    """Format a value in units of `size`, with half its interval and the digits that the interval justifies."""
    value /= size
    half = 0.0 if interval is None else (interval[1] - interval[0]) / 2 / size
    if half <= 0:
        return f"{value:,.{_decimals(value, UNSURE)}f}"
    decimals = _decimals(half, DIGITS)
    return f"{value:,.{decimals}f} ± {half:,.{decimals}f}"


def _decimals(value: float, digits: int) -> int:
    """Return the number of decimal places that gives a number `digits` significant digits."""
    if value <= 0:
        return 0
    return max(0, digits - 1 - floor(log10(value)))


def format_duration(seconds: float) -> str:
    """Write seconds for people: "13.5 ms", "111.2 s", "3 h 12 min"."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 600:
        return f"{seconds:.4g} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def format_step_time(
    step_time: float, interval: OptionalInterval, band: OptionalInterval = None
) -> str:
    """Write the seconds of a step: "164.7 s (132 to 224)", "13.5 ms ± 0.2", "12 min ± 0.9 %".

    Args:
        step_time: the seconds.
        interval: their 95 % interval, to show half of it as well.
        band: the range in which they may truly be.
    """
    text = f"{format_duration(step_time)}{_half_of_step(step_time, interval)}"
    if band is None or band[0] == band[1]:
        return text
    if step_time >= SECONDS_PER_HOUR:
        return f"{text} ({' to '.join(map(format_duration, band))})"
    size = (
        60.0 if step_time >= 600 else 1.0 if step_time >= 1 else 1e-3 if step_time >= 1e-3 else 1e-6
    )
    return f"{text} {band_text(_scaled(band, 1 / size))}".rstrip()


def _half_of_step(step_time: float, interval: OptionalInterval) -> str:
    if interval is None:
        return ""
    half = (interval[1] - interval[0]) / 2
    if 1 <= step_time < 600:
        return f" ± {half:.2g}"
    if 1e-3 <= step_time < 1:
        return f" ± {half * 1e3:.2g}"
    return f" ± {half / step_time * 100:.2g} %"


def format_count(value: float) -> str:
    """Write a number for people: "9.21", "44.2 k", "1.84 M"."""
    for scale, prefix in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= scale:
            return f"{value / scale:.3g}{prefix}"
    return f"{value:.3g}"


def format_dollars(value: float, band: OptionalInterval = None) -> str:
    """Write dollars with as many digits as matter: "$0.381 (0.306 to 0.518)"."""
    text = f"${value:,.2f}" if value >= 1 else f"${value:.3g}"
    return f"{text} {band_text(band)}".rstrip()


def format_share(share: float, digits: int = 1) -> str:
    """Write a share in percent."""
    return f"{share * 100:.{digits}f} %"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, which has an s unless it is one: "1 rank", "2,000 ranks"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def listing(parts: list[str], last: str = "and") -> str:
    """Join with commas and a last "and", or another word."""
    return f" {last} ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
