"""A what-if study's grid: which keys of a run file take which values, and the run of every combination.

An axis is written like `--set`, with commas between its values: `rollout.replicas=8,16,32`. Keys that
change side by side share an axis, and have equally many values: `rollout.replicas=8,16; trainer.data_parallel=4,2`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from math import isfinite
from typing import Literal, NamedTuple, TypeAlias

from streamrl.runfile.config import Run
from streamrl.runfile.errors import shown
from streamrl.runfile.python_values import value_text
from streamrl.runfile.units import Bandwidth, Duration, Size

BRACKETS = {"[": "]", "{": "}", "(": ")"}
QUOTES = "\"'"
SPANS_SCALES = 16.0
"""Largest over smallest value from which an axis is drawn logarithmically."""

Scale: TypeAlias = Literal["auto", "linear", "log", "even"]
"""Spacing of the points on an axis. even: one step apart, whatever their values. auto: linear or
logarithmic, chosen from the values.
"""


@dataclass(frozen=True)
class Axis:
    """One thing that varies: a key and its values, or keys that change side by side."""

    keys: tuple[str, ...]
    points: tuple[tuple[str, ...], ...]
    """For each point a value of every key, as `--set` takes it."""
    name: str = ""
    """What figures call it; its keys where empty."""
    labels: tuple[str, ...] = ()
    """What figures call its points; their values where empty."""
    scale: Scale = "auto"

    @property
    def places(self) -> list[float]:
        """Return the values of its first key in base units; none where they are no rising numbers."""
        found = [number for point in self.points for number in _numbers(point[0])]
        is_rising = all(a < b for a, b in pairwise(found))
        return found if len(found) == len(self.points) and is_rising else []

    @property
    def is_plain(self) -> bool:
        """Whether its points are called by numbers without a unit, so that there is a name between two."""
        return not self.labels and len(self.keys) == 1 and _is_number(self.points[0][0])

    @property
    def drawn_as(self) -> Scale:
        """Return the scale that `auto` comes to."""
        places = self.places
        if not places or (self.scale == "log" and places[0] <= 0):
            return "even"
        if self.scale != "auto":
            return self.scale
        is_wide = places[0] > 0 and places[-1] / places[0] >= SPANS_SCALES
        return "log" if is_wide else "linear"

    @property
    def title(self) -> str:
        """Name it in a figure."""
        return self.name or " and ".join(self.keys)

    @property
    def point_labels(self) -> tuple[str, ...]:
        """Name its points in a figure."""
        return self.labels or tuple(" / ".join(map(plain, point)) for point in self.points)

    def overrides(self, point: int) -> list[str]:
        """Return what `--set` would be told for a point."""
        return [f"{key}={value}" for key, value in zip(self.keys, self.points[point], strict=True)]


class GridCell(NamedTuple):
    """One combination."""

    place: tuple[int, ...]
    """Its point on every axis."""
    run: Run


class RejectedCell(NamedTuple):
    """A combination that is no valid run, or one that does not finish."""

    place: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class Grid:
    """Every combination of a study."""

    axes: tuple[Axis, ...]
    cells: list[GridCell] = field(default_factory=list)
    refused: list[RejectedCell] = field(default_factory=list)
    unfinished: list[RejectedCell] = field(default_factory=list)
    """Those that stop before their last step, on one seed or more: they have no figures."""

    def name(self, place: tuple[int, ...]) -> str:
        """Name a combination by its keys and values."""
        return ", ".join(_named(self.axes, place))

    def values(self, place: tuple[int, ...]) -> dict[str, str]:
        """Return the value of every swept key at a combination."""
        found: dict[str, str] = {}
        for axis, point in zip(self.axes, place, strict=True):
            found.update(zip(axis.keys, map(plain, axis.points[point]), strict=True))
        return found


def parse_axis(
    text: str, name: str = "", labels: Sequence[str] = (), scale: Scale = "auto"
) -> Axis:
    """Read `KEY=V1,V2`, or `KEY=V1,V2; KEY=W1,W2` for keys that change side by side.

    A value is TOML, or text: one that has commas is quoted or bracketed.

    Raises:
        ValueError: the text, or the key and its values, and what is wrong with them.
    """
    columns: dict[str, list[str]] = {}
    for part in _split(text, ";", text):
        key, separator, values = part.partition("=")
        key = key.strip()
        if not separator or not key:
            raise ValueError(f"--sweep {text!r} must read key=value,value")
        if key in columns:
            raise ValueError(f"--sweep {text!r} names {key} twice")
        columns[key] = [value.strip() for value in _split(values, ",", text)]
        if "" in columns[key]:
            raise ValueError(f"--sweep {key}={values.strip()} has an empty value")
    counts = {key: len(values) for key, values in columns.items()}
    if len(set(counts.values())) > 1:
        raise ValueError(
            "--sweep: keys of one axis need equal numbers of values, got "
            + " and ".join(f"{count} of {key}" for key, count in counts.items())
        )
    points = tuple(zip(*columns.values(), strict=True))
    axis = Axis(tuple(columns), points, name, tuple(labels), scale)
    _check_points(axis)
    return axis


Values: TypeAlias = Mapping[str | tuple[str, ...], Iterable[object]]
"""Values of a key to sweep; of several keys that change side by side, a value of each."""


def axes_of(values: Values) -> tuple[Axis, ...]:
    """Return an axis for each key and its values, or for keys that change side by side.

    Raises:
        ValueError: values are missing, come twice, or cannot be in a run file.
    """
    if not values:
        raise ValueError("sweep: no key is given; write {'rollout.replicas': [8, 16]}")
    return tuple(_axis_of(key, points) for key, points in values.items())


def _axis_of(key: str | tuple[str, ...], points: Iterable[object]) -> Axis:
    keys = (key,) if isinstance(key, str) else tuple(key)
    name = ", ".join(keys)
    if isinstance(points, str | Mapping) or not isinstance(points, Iterable):
        raise ValueError(f"sweep {name}: {shown(points)} must be a list of values")
    found = tuple(_point_of(keys, each) for each in points)
    if not found:
        raise ValueError(f"sweep {name}: the list is empty; name the values to simulate")
    axis = Axis(keys, found)
    _check_points(axis)
    return axis


def _point_of(keys: tuple[str, ...], point: object) -> tuple[str, ...]:
    values = (point,) if len(keys) == 1 else point
    if not isinstance(values, tuple | list) or len(values) != len(keys):
        text = f"must have a value of each of {len(keys)} keys"
        raise ValueError(f"sweep {', '.join(keys)}: {shown(point)} {text}")
    return tuple(value_text(value, key) for key, value in zip(keys, values, strict=True))


def make_grid(
    load: Callable[[list[str]], Run],
    overrides: Iterable[str],
    axes: Sequence[Axis],
    *,
    skips: bool = False,
) -> Grid:
    """Make and check the run of every combination, before any is simulated.

    Args:
        load: makes the run with `key=value` changes, such as `partial(load_run, run_file)`.
        overrides: changes of every combination.
        axes: what varies.
        skips: whether those that are no valid run are kept apart, with the reason.

    Raises:
        ValueError: a key is swept twice, or the first combination that is no valid run, by its values.
    """
    overrides = list(overrides)
    _check_keys(axes, overrides)
    grid = Grid(tuple(axes))
    for place in product(*(range(len(axis.points)) for axis in axes)):
        try:
            grid.cells.append(GridCell(place, load([*overrides, *_named(axes, place)])))
        except ValueError as error:
            grid.refused.append(RejectedCell(place, str(error)))
            if not skips:
                reason = _blame(load, overrides, grid.name(place), str(error))
                raise ValueError(reason) from None
    return grid


def plain(value: str) -> str:
    """Return a value without the quotes around it."""
    quoted = len(value) > 1 and value[0] == value[-1] and value[0] in QUOTES
    return value[1:-1] if quoted else value


def _named(axes: Sequence[Axis], place: tuple[int, ...]) -> list[str]:
    return [each for axis, at in zip(axes, place, strict=True) for each in axis.overrides(at)]


def _is_number(text: str) -> bool:
    try:
        return isfinite(float(text))
    except ValueError:
        return False


def _numbers(text: str) -> list[float]:
    """Return the number that a value is, in base units; none where it is none."""
    if _is_number(text):
        return [float(text)]
    for kind in (Bandwidth, Duration, Size):
        try:
            return [float(kind.parse(plain(text)))]
        except ValueError:
            continue
    return []


def _blame(
    load: Callable[[list[str]], Run], overrides: Sequence[str], name: str, reason: str
) -> str:
    """Name the combination, unless the run file is as wrong without it."""
    try:
        load([*overrides])
    except ValueError as error:
        if str(error) == reason:
            return reason
    return f"--sweep {name}: {reason}"


def _check_points(axis: Axis) -> None:
    labels = axis.labels
    for index, point in enumerate(axis.points):
        if point in axis.points[:index]:
            raise ValueError(f"--sweep has {' and '.join(axis.overrides(index))} twice")
    if labels and len(labels) != len(axis.points):
        raise ValueError(
            f"{' and '.join(axis.keys)}: {len(labels)} labels for {len(axis.points)} points"
        )
    if len(set(labels)) < len(labels):
        raise ValueError(
            f"{' and '.join(axis.keys)}: two points have the same label, got {list(labels)}"
        )


def _check_keys(axes: Sequence[Axis], overrides: Sequence[str]) -> None:
    """Refuse a key that two things set, one of which would go unheard."""
    taken = {override.partition("=")[0].strip(): "--set" for override in overrides}
    for axis in axes:
        for key in axis.keys:
            if key == "seed":
                raise ValueError("--sweep seed: seeds are not an axis; use --seeds NUMBER")
            if key in taken:
                raise ValueError(f"--sweep {key}: {taken[key]} also sets it")
            taken[key] = "another --sweep"


def _split(text: str, separator: str, whole: str) -> list[str]:
    """Split at separators that are in no quotes and no brackets."""
    return list(_parts(text, separator, whole))


def _parts(text: str, separator: str, whole: str) -> Iterator[str]:
    closing: list[str] = []
    start = 0
    for at, char in enumerate(text):
        if closing and char == closing[-1]:
            closing.pop()
        elif closing and closing[-1] in QUOTES:
            continue
        elif char in QUOTES:
            closing.append(char)
        elif char in BRACKETS:
            closing.append(BRACKETS[char])
        elif char == separator and not closing:
            yield text[start:at]
            start = at + 1
    if closing:
        raise ValueError(f"--sweep {whole!r}: {closing[-1]} is missing at the end")
    yield text[start:]
