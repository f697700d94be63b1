"""Quantities with their unit: a run file says "80 Gbps" or "20 ms", the program holds bytes a second or seconds."""

from __future__ import annotations

import re
from fractions import Fraction
from math import isfinite
from typing import NamedTuple

BITS_PER_BYTE = 8
SECONDS_PER_HOUR, SECONDS_PER_DAY = 3600.0, 86_400.0
SECONDS_PER_YEAR = 365 * SECONDS_PER_DAY
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
    **dict.fromkeys(("week", "weeks"), 7 * SECONDS_PER_DAY),
    **dict.fromkeys(("year", "years"), SECONDS_PER_YEAR),
}
DURATION = "a duration such as '3 days', '1 day 2 h' or '20 ms'"
_BITS = re.compile(r"(?P<prefix>[kKmMgGtTpP]?)(?:bps|b/s|bit/s|bits/s)")
_DATE = re.compile(r"\d{4}-\d{1,2}(?:-\d{1,2})?\b.*|\d{1,2}[./]\d{1,2}[./]\d{2,4}\b.*")
_PART = re.compile(r"\s*(-?[\d_.]+(?:[eE][+-]?\d+)?\s*[A-Za-z/]+)\s*(?:,|and\b)?")
"""One number with its unit, of a duration that may have several."""
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
    """Seconds, written as "20 ms", "1.5 h", "3 days" or "1 day 2 h"."""

    @classmethod
    def parse(cls, text: object) -> Duration:
        """Read a duration; a bare number and a date are refused."""
        if isinstance(text, str) and _DATE.fullmatch(text.strip()):
            raise ValueError(f"{text!r} is a date: write {DURATION}, from the start of the run")
        parts = [_split(part, DURATION) for part in _parts_of(text)]
        sizes = [_seconds_of(unit, text) for _, unit in parts]
        if sizes != sorted(set(sizes), reverse=True):
            raise ValueError(
                f"{text!r} must have each unit once, the largest first, as '1 day 2 h'"
            )
        seconds = sum(number * size for (number, _), size in zip(parts, sizes, strict=True))
        return cls(_finite(seconds, text))


_AMOUNT = r"[0-9][0-9_]*\.?[0-9]*([eE][+-]?[0-9]+)?\s*"
_BYTES = r"([kKMGTP]|[KMGT]i)?B"


def quantity_pattern(kind: type) -> str:
    """Return the regular expression of a quantity's texts for JSON Schema, which knows no flags."""
    if kind is Bandwidth:
        return rf"^\s*{_AMOUNT}([kKmMgGtTpP]?(bps|b/s|bit/s|bits/s)|{_BYTES}/s)\s*$"
    if kind is Size:
        return rf"^\s*{_AMOUNT}{_BYTES}\s*$"
    words = ["".join(f"[{each}{each.upper()}]" for each in word) for word in _TIMES_IN_WORDS]
    part = rf"{_AMOUNT}({'|'.join([*_TIMES, *words])})(?![A-Za-z])\s*(,|and\b)?\s*"
    return rf"^\s*({part})+$"


def _parts_of(text: object) -> list[object]:
    """Return each number with its unit; the whole text if it is not made of those."""
    if not isinstance(text, str) or _PART.sub("", text).strip():
        return [text]
    return [*_PART.findall(text)] or [text]


def _seconds_of(unit: str, text: object) -> float:
    seconds = _TIMES.get(unit) or _TIMES_IN_WORDS.get(unit.lower())
    if seconds is None:
        raise ValueError(
            f"{text!r} is no duration: units are {', '.join(_TIMES)}, days, weeks and years"
        )
    return seconds


QUANTITIES: tuple[type[Bandwidth | Duration | Size], ...] = (Bandwidth, Duration, Size)


class _Unit(NamedTuple):
    """A unit that people write a quantity in."""

    name: str
    size: float
    """In base units."""
    is_whole: bool = False
    """Whether only whole numbers of it are written: "36 h", not "1.5 days"."""


_WRITTEN: dict[type, tuple[_Unit, ...]] = {
    Bandwidth: (
        _Unit("Gbps", 1e9 / BITS_PER_BYTE),
        _Unit("Mbps", 1e6 / BITS_PER_BYTE),
        _Unit("kbps", 1e3 / BITS_PER_BYTE),
    ),
    Duration: (
        _Unit("days", SECONDS_PER_DAY, is_whole=True),
        _Unit("h", SECONDS_PER_HOUR, is_whole=True),
        _Unit("min", 60.0, is_whole=True),
        *(_Unit("s", 1.0), _Unit("ms", 1e-3), _Unit("us", 1e-6), _Unit("ns", 1e-9)),
    ),
    Size: (
        *(_Unit("TB", 1e12), _Unit("GB", 1e9), _Unit("MB", 1e6), _Unit("kB", 1e3)),
        *(_Unit(f"{prefix}B", size) for prefix, size in reversed(_BINARY.items())),
    ),
}
"""The units of each kind of quantity, in the order in which they are tried."""
_BASE: dict[type, str] = {Bandwidth: "B/s", Duration: "s", Size: "B"}
MOST_CHARACTERS, LARGEST = 7, 1e5
"""Most characters and largest size of a number that a person would write; others are in the base unit."""


def quantity_text(value: Bandwidth | Duration | Size) -> str:
    """Return a quantity as people write it: "10 Gbps", "4 days", "96 GB".

    The text reads back as exactly the same value. A value without a short text has its base unit.
    """
    for unit in _WRITTEN[type(value)] if isfinite(value) else ():
        if unit.size <= value <= LARGEST * unit.size and (text := _in_unit(value, unit)):
            return text
    return f"{_short(value)} {_BASE[type(value)]}"


def _in_unit(value: Bandwidth | Duration | Size, unit: _Unit) -> str:
    """Return a quantity in a unit; empty if the text is long or another value."""
    number = _short(round(value / unit.size, MOST_CHARACTERS))
    name = "day" if unit.name == "days" and number == "1" else unit.name
    text = f"{number} {name}"
    is_apt = number.isdecimal() or not unit.is_whole
    is_same = len(number) <= MOST_CHARACTERS and type(value).parse(text) == value
    return text if is_apt and is_same else ""


def _short(number: float) -> str:
    return repr(float(number)).removesuffix(".0")


class Factor(NamedTuple):
    """A factor that few sources have: its lowest, its used and its highest value."""

    low: float
    middle: float
    high: float

    @property
    def spread(self) -> float:
        """Return by how much the used value may be off, as a share of it."""
        return max(1 - self.low / self.middle, self.high / self.middle - 1)


NO_FACTOR = Factor(1.0, 1.0, 1.0)


def read_quantity(kind: type, value: object) -> object:
    """Read a quantity of any kind; what msgspec calls for types that are not its own."""
    if kind in QUANTITIES:
        return kind.parse(value)
    raise NotImplementedError(f"no reader for {kind}")


def _split(text: object, example: str) -> tuple[float, str]:
    match = _NUMBER.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        has_number = not isinstance(text, str) or any(map(str.isdigit, text))
        lacks = "a unit" if has_number else "a number and a unit"
        raise ValueError(f"{text!r} needs {lacks}: write {example}")
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


_COUNT = re.compile(r"(\d+(?:\.\d+)?)\s*(k|m|ki|mi)?", re.IGNORECASE | re.ASCII)
_SCALES = {"": 1, "k": 1000, "m": 1_000_000, "ki": 1024, "mi": 1024**2}


_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])", re.ASCII)


def without_thousands_marks(text: str) -> str:
    """Return a text without the commas between groups of three digits. Others stay, such as a decimal comma."""
    return _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)


def count_of(text: str) -> int:
    """Return a whole number that may be short: 32,000 for "32k", 32,768 for "32Ki".

    Raises:
        ValueError: it is no number, or no whole one.
    """
    match = _COUNT.fullmatch(without_thousands_marks(text.strip()).replace("_", ""))
    if match is None:
        raise ValueError(f"{text!r} must be a whole number, such as 32000, '32k' or '32Ki'")
    number = Fraction(match[1]) * _SCALES[(match[2] or "").lower()]
    if number.denominator != 1:
        raise ValueError(f"{text!r} must be a whole number")
    return int(number)
