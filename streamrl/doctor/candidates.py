"""Values that may mend a key: what its error allows, or else what its type allows, the nearest first."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator, Sequence
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from streamrl.doctor.changes import path_of, place_of
from streamrl.doctor.finding import Changes
from streamrl.runfile.cluster_config import LinkConfig
from streamrl.runfile.config import Run
from streamrl.runfile.errors import Allowed, Bounds, OneOf, RunError
from streamrl.runfile.keys import split_key
from streamrl.runfile.units import Bandwidth, Duration, Size

EXAMPLES: dict[type, str] = {Bandwidth: "10 Gbps", Duration: "10 ms", Size: "1 GB"}
"""Proposed for quantities that cannot be; the bandwidth for a link that is missing too."""
MODEL, GPU = "qwen2.5-7b", "h800"
"""Stand in where no model or GPU is named."""
USUAL = {"name": MODEL, "gpu": GPU}
"""Proposed first for these keys where a name is like none that there is."""
SMALL, LARGE = 64, 4096
"""Whole numbers up to the first are all tried, powers of two up to the second."""
LIKE = 0.7
"""How like a name must be, by difflib's ratio, to come before the others."""


def candidates_for(run: Run, error: RunError) -> Iterator[Changes]:
    """Yield changes to try against an error: of its own key, then of the others that it names."""
    if error.key == "cluster.links":
        for rollout in run.rollout.kinds:
            ends = (rollout.pool, run.trainer.pool)
            link = LinkConfig(between=ends, bandwidth=Bandwidth.parse(EXAMPLES[Bandwidth]))
            yield {error.key: [*run.cluster.links, link]}
    yield from ({error.key: value} for value in _values(run, error.key, error.allowed))
    for key in error.others:
        yield from ({key: value} for value in _values(run, key, None))
    if error.key.startswith("cluster.links."):
        index = int(split_key(error.key)[2])
        yield {"cluster.links": [*run.cluster.links[:index], *run.cluster.links[index + 1 :]]}


def closest_first(name: object, names: Iterable[object], usual: str = "") -> list[object]:
    """Return names in their order, but those first that are like another one, or part of it, then a usual one."""
    wanted, by_text = str(name), {str(each): each for each in names}
    close = difflib.get_close_matches(wanted, list(by_text), n=3, cutoff=LIKE)
    parts = [text for text in by_text if wanted and text and (wanted in text or text in wanted)]
    first = [*close, *parts, *([usual] if usual in by_text else [])]
    return [by_text[text] for text in dict.fromkeys([*first, *by_text])]


def _values(run: Run, key: str, allowed: Allowed | None) -> Iterator[object]:
    """Yield other values of a key; none where the run has no such key."""
    *parents, last = path_of(key)
    try:
        section = place_of(run, parents)
        now = place_of(section, [last])
    except LookupError:
        return
    kind = get_type_hints(type(section))[last]
    match allowed:
        case _ if isinstance(now, tuple | list):
            yield from _lists(list(now), allowed)
        case OneOf():
            yield from _nearest(now, allowed, USUAL.get(last, ""))
        case Bounds() if isinstance(now, int | float):
            yield from _within(now, allowed, _default(section, last))
        case _:
            names = [*run.cluster.pools] if last == "pool" else _names(kind)
            yield from _of_type(now, names, _default(section, last))
    if NoneType in get_args(kind):
        yield None if now is not None else USUAL.get(last)


def _nearest(now: object, allowed: OneOf, usual: str) -> Sequence[object]:
    numbers = [each for each in allowed if isinstance(each, int | float)]
    if isinstance(now, int | float) and numbers:
        return _by_distance(numbers, now)
    return closest_first(now, allowed, usual)


def _within(now: float, bounds: Bounds, default: object) -> Iterator[object]:
    """Yield the bound that is passed, the default, and other numbers within."""
    if type(now) in EXAMPLES:
        yield EXAMPLES[type(now)]
    if now > bounds.most:
        yield bounds.most
    if isinstance(default, int | float) and bounds.hold(default):
        yield default
    if not bounds.excludes_least:
        yield bounds.least
    yield from (number for number in _numbers(now) if bounds.hold(number))


def _of_type(now: object, names: Sequence[object], default: object) -> Iterator[object]:
    """Yield other values of a type."""
    if isinstance(now, bool):
        yield not now
    elif type(now) in EXAMPLES:
        yield EXAMPLES[type(now)]
    elif isinstance(now, int | float):
        yield from _numbers(now)
    elif names:
        yield from (name for name in closest_first(now, names) if name != now)
    elif isinstance(default, str):
        yield default


def _lists(entries: list[object], allowed: Allowed | None) -> Iterator[list[object]]:
    """Yield the list with its first wrong entry replaced, then without its wrong entries."""
    match allowed:
        case OneOf():
            wrong = [entry for entry in entries if entry not in allowed]
            others = [each for each in allowed if each not in entries]
        case Bounds():
            wrong = [each for each in entries if isinstance(each, int) and not allowed.hold(each)]
            others = []
        case _:
            return
    if wrong:
        place = entries.index(wrong[0])
        yield from ([*entries[:place], other, *entries[place + 1 :]] for other in others)
        yield [entry for entry in entries if entry not in wrong]


def _numbers(now: float) -> list[float]:
    """Return numbers by how near they are, as factors; whole ones for a key that has a whole one."""
    found: set[float] = {n / 20 for n in range(21)}
    if isinstance(now, int):
        powers = {1 << bits for bits in range(LARGE.bit_length())}
        found = {*range(SMALL + 1), *powers}
    return _by_distance(found - {now}, now)


def _by_distance(numbers: Iterable[float], now: float) -> list[float]:
    """Return numbers by how far they are from another, as factors; from what no key may be, the least comes first."""
    now = now if math.isfinite(now) and now > 0 else 0.0
    return sorted(numbers, key=lambda number: (abs(math.log((1 + number) / (1 + now))), number))


def _default(section: msgspec.Struct, name: str) -> object:
    return next(field.default for field in msgspec.structs.fields(section) if field.name == name)


def _names(kind: Any) -> list[object]:
    """Return the names that a key of this type may have."""
    options = [kind, *get_args(kind)]
    return [
        name for option in options if get_origin(option) is Literal for name in get_args(option)
    ]
