"""Quantities with their unit: a run file says "80 Gbps" or "20 ms", the program holds bytes a second or seconds."""

from __future__ import annotations

import re
from math import isfinite

BITS_PER_BYTE = 8
SECONDS_PER_HOUR, SECONDS_PER_DAY = 3600.0, 86_400.0
_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_TIMES = {
    **{"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0},
    **{"h": SECONDS_PER_HOUR, "d": SECONDS_PER_DAY},
}
_TIMES_IN_WORDS = {
    **{"sec": 1.0, "second": 1.0, "seconds": 1.0, "mins": 60.0, "minute": 60.0, "minutes": 60.0},
    **dict.fromkeys(("hr", "hrs", "hour", "hours"), SECONDS_PER_HOUR),
    **dict.fromkeys(("day", "days"), SECONDS_PER_DAY),
}
_BITS = re.compile(r"(?P<prefix>[kKmMgGtTpP]?)(?:bps|b/s|bit/s|bits/s)")
_NUMBER = re.compile(r"\s*(-?[0-9][0-9_]*\.?[0-9]*(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z/]+)\s*")


class Bandwidth(float):
    """Bytes per second, written as "80 Gbps" (bits) or "400 GB/s" (bytes)."""

    @classmethod
    def parse(cls, text: object) -> Bandwidth:
        """Read a bandwidth; a bare number is refused."""
        value, unit = _split(text, "a bandwidth such as '80 Gbps' or '400 GB/s'")
        if bits := _BITS.fullmatch(unit):
            return cls(_finite(value * _PREFIXES[bits["prefix"].upper()] / BITS_PER_BYTE, text))
        if unit.endswith("B/s"):
            return cls(_finite(value * _scale(unit[:-3], text), text))
        raise ValueError(f"{text!r} is no bandwidth: write '80 Gbps' or '400 GB/s'")


class Size(float):
    """Bytes, written as "96 GB" or "80 GiB"."""

    @classmethod
    def parse(cls, text: object) -> Size:
        """Read a size; a bare number is refused."""
        value, unit = _split(text, "a size such as '96 GB'")
        if not unit.endswith("B"):
            raise ValueError(f"{text!r} is no size: write '96 GB' or '80 GiB'")
        return cls(_finite(value * _scale(unit[:-1], text), text))


class Duration(float):
    """Seconds, written as "20 ms", "1.5 h" or "3 d"."""

    @classmethod
    def parse(cls, text: object) -> Duration:
        """Read a duration; a bare number is refused."""
        value, unit = _split(text, "a duration such as '20 ms'")
        seconds = _TIMES.get(unit) or _TIMES_IN_WORDS.get(unit.lower())
        if seconds is None:
            raise ValueError(f"{text!r} is no duration: units are {', '.join(_TIMES)}")
        return cls(_finite(value * seconds, text))


QUANTITIES: tuple[type[Bandwidth | Duration | Size], ...] = (Bandwidth, Duration, Size)


def read_quantity(kind: type, value: object) -> object:
    """Read a quantity of any kind; what msgspec calls for types that are not its own."""
    if kind in QUANTITIES:
        return kind.parse(value)
    raise NotImplementedError(f"no reader for {kind}")


def _split(text: object, example: str) -> tuple[float, str]:
    match = _NUMBER.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f"{text!r} needs a unit: write {example}")
    if match[1].startswith("-"):
        raise ValueError(f"{text!r} is below 0: write {example}")
    return float(match[1]), match[2]


def _finite(number: float, text: object) -> float:
    if not isfinite(number):
        raise ValueError(f"{text!r} is more than a number can hold")
    return number


def _scale(prefix: str, text: object) -> float:
    scale = _PREFIXES.get(prefix) or _BINARY.get(prefix)
    if scale is None:
        raise ValueError(f"{text!r} has an unknown prefix {prefix!r}")
    return scale
