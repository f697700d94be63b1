"""Read a run file that has wrong keys: each becomes a finding, is mended or left out, and reading goes on."""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from streamrl.doctor.changes import toml
from streamrl.doctor.finding import Changes, Finding
from streamrl.runfile.config import Run
from streamrl.runfile.reading import convert_run
from streamrl.runfile.section import Section

TomlTable = dict[str, Any]

MOST_WRONG_KEYS = 50
"""Wrong keys after which reading gives up."""
_WRONG = re.compile(
    r"(?P<key>[^\s:]+?)(?P<kind> is no key| is missing| must be one of|:) ?(?P<rest>.*)"
)
_ONE_OF = re.compile(r"(?P<names>.*), got ")
STAND_INS: TomlTable = {
    "model": {"name": "qwen2.5-7b"},
    "rollout.replicas": 1,
    "rollout.max_tokens": 4096,
    "algorithm.steps": 100,
    "algorithm.prompts_per_step": 128,
}
"""Values for what a run file must say and does not, so that the rest can be looked at."""
UNITS = ("Gbps", "ms", "GB")
"""Tried in turn on a number without a unit: what each key takes tells which."""


class Reading(NamedTuple):
    """What could be read of a run file."""

    run: Run | None
    """With what was mended or left out; None where nothing can be made of it."""
    findings: list[Finding]


def read_leniently(table: TomlTable, base: Path) -> Reading:
    """Read a run file's table key by key, up to what it says of keys and types."""
    table = copy.deepcopy(table)
    findings: list[Finding] = []
    for _ in range(MOST_WRONG_KEYS):
        message = _error_of(table, base)
        if message is None:
            return Reading(convert_run(table, base), findings)
        mended = _mend(table, base, message)
        if mended is None:
            findings.append(_finding(message, "write it as in examples/h20-h800.toml", {}))
            return Reading(None, findings)
        table, fix, changes = mended
        findings.append(_finding(message, fix, changes))
    return Reading(None, findings)


class _Mended(NamedTuple):
    table: TomlTable
    fix: str
    changes: Changes


def _mend(table: TomlTable, base: Path, message: str) -> _Mended | None:
    """Give the first change after which the run file is read, or something else is wrong with it."""
    wrong = _WRONG.fullmatch(message)
    if wrong is None or not _is_there(table, _path(wrong["key"])[:-1]):
        return None
    for candidate in _candidates(table, wrong):
        again = _error_of(candidate.table, base)
        touched = [_path(wrong["key"]), *map(_path, candidate.changes)]
        if again is None or _path(_key_of(again)) not in touched:
            return candidate
    return None


def _candidates(table: TomlTable, wrong: re.Match[str]) -> Iterator[_Mended]:
    key, kind, rest = wrong["key"], wrong["kind"], wrong["rest"]
    path = _path(key)
    if kind == " is missing":
        if (value := _stand_in(table, key)) is not None:
            yield _set(table, path, value, f"{_say(key, value)}, or what yours needs")
        return
    value = _look_up(table, path)
    if kind == " is no key":
        for name in _close(path[-1]):
            renamed = _put(_remove(table, path), [*path[:-1], name], value)
            new_key = ".".join([*path[:-1], name])
            yield _Mended(renamed, f"rename {key} to {new_key}", {key: None, new_key: value})
    for other in _values(value, kind, rest):
        yield _set(table, path, other, _say(key, other))
    yield _Mended(_remove(table, path), f"remove {key}", {key: None})
    if (other := _stand_in(table, key)) is not None:
        yield _set(table, path, other, f"{_say(key, other)}, or what yours needs")


def _values(value: object, kind: str, rest: str) -> Iterator[object]:
    """Yield values that may have been meant: the nearest name, or the same as another type."""
    if kind == " must be one of" and (found := _ONE_OF.match(rest)):
        names = found["names"].split(", ")
        yield from difflib.get_close_matches(str(value), names, n=1, cutoff=0.4) or names[:1]
    if kind != ":":
        return
    text = str(value).strip()
    for read in (int, float):
        try:
            yield read(text)
        except ValueError:
            continue
    if isinstance(value, float):
        yield round(value)
    if text.lower() in ("true", "false"):
        yield text.lower() == "true"
    yield text
    number = re.match(r"[\d.]+", text)
    yield from (f"{number[0] if number else text} {unit}" for unit in UNITS)
    yield [value]


def _stand_in(table: TomlTable, key: str) -> object:
    """Give a value for a missing key, or None where none can be thought of."""
    if key.endswith(".pool"):
        return next(iter(table.get("cluster", {}).get("pools", {})), None)
    if key.endswith(".gpu"):
        return "h800"
    if key.endswith(".bandwidth"):
        return "10 Gbps"
    return STAND_INS.get(key)


def _close(name: str) -> list[str]:
    names = {key for section in Section.__subclasses__() for key in section.__struct_fields__}
    return difflib.get_close_matches(name, sorted(names), n=3)


def _error_of(table: TomlTable, base: Path) -> str | None:
    try:
        convert_run(table, base)
    except ValueError as error:
        return str(error)
    return None


def _key_of(message: str) -> str:
    wrong = _WRONG.fullmatch(message)
    return wrong["key"] if wrong else ""


def _path(key: str) -> list[str]:
    """Split `cluster.links[0].latency`, or the same as `--set` has it, into its parts."""
    return re.findall(r"[^.\[\]]+", key)


def _finding(message: str, fix: str, changes: Changes) -> Finding:
    return Finding(
        level="error", topic="run file", name="wrong-key", text=message, fix=fix, changes=changes
    )


def _say(key: str, value: object) -> str:
    return f"set {'.'.join(_path(key))}={toml(value)}"


# Tables -------------------------------------------------------------------------------------------


def _set(table: TomlTable, path: list[str], value: object, fix: str) -> _Mended:
    return _Mended(_put(table, path, value), fix, {".".join(path): value})


def _is_there(table: TomlTable, path: list[str]) -> bool:
    try:
        return isinstance(_look_up(table, path), dict | list)
    except (LookupError, TypeError, ValueError):
        return False


def _look_up(place: Any, path: list[str]) -> Any:
    for part in path:
        place = place[int(part)] if isinstance(place, list) else place[part]
    return place


def _put(table: TomlTable, path: list[str], value: object) -> TomlTable:
    changed = copy.deepcopy(table)
    *parents, last = path
    place: Any = changed
    for part in parents:
        place = place[int(part)] if isinstance(place, list) else place.setdefault(part, {})
    if isinstance(place, list):
        place[int(last)] = value
    else:
        place[last] = value
    return changed


def _remove(table: TomlTable, path: list[str]) -> TomlTable:
    changed = copy.deepcopy(table)
    *parents, last = path
    place = _look_up(changed, parents)
    if isinstance(place, list):
        place.pop(int(last))
    else:
        place.pop(last, None)
    return changed
