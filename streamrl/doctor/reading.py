"""Read a run file that has wrong keys: each becomes a finding, is mended or left out, and reading goes on."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, assert_never

from streamrl.doctor.candidates import EXAMPLES, GPU, MODEL, closest_first
from streamrl.doctor.changes import say, toml
from streamrl.doctor.finding import Changes, Finding
from streamrl.runfile.config import Run
from streamrl.runfile.errors import Allowed, OneOf, RunError
from streamrl.runfile.keys import split_key
from streamrl.runfile.reading import convert_run
from streamrl.runfile.table_errors import find_errors
from streamrl.runfile.units import Bandwidth, Duration, Size
from streamrl.runfile.unused_keys import find_unused

TomlTable = dict[str, Any]

MOST_WRONG_KEYS = 50
"""Wrong keys after which reading gives up."""
STAND_INS: TomlTable = {
    "model": {"name": MODEL},
    "rollout.replicas": 1,
    "rollout.max_tokens": 4096,
    "algorithm.steps": 100,
    "algorithm.prompts_per_step": 128,
}
"""Values for what a run file must say and does not, so that the rest can be looked at."""
SECTIONS = {
    "rollout": ("pool", "replicas", "max_tokens"),
    "trainer": ("pool",),
    "algorithm": ("steps", "prompts_per_step"),
}
"""What these sections must say."""
UNITS: dict[type, str] = {Bandwidth: "Gbps", Duration: "ms", Size: "GB"}
"""Of a number that has none, or one that cannot be."""
FLAGS = {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}
BY_HAND = "write it as in examples/h20-h800.toml"


class Reading(NamedTuple):
    """What could be read of a run file."""

    run: Run | None
    """With what was mended or left out; None where nothing can be made of it."""
    findings: list[Finding]


def read_leniently(table: TomlTable, base: Path) -> Reading:
    """Read a run file's table key by key, up to what it says of keys and types."""
    findings: list[Finding] = []
    for _ in range(MOST_WRONG_KEYS):
        errors = _errors(table)
        if not errors:
            return Reading(convert_run(table, base), findings)
        mended = next(filter(None, (_mend(table, error) for error in errors)), None)
        if mended is None:
            break
        table = mended.table
        findings.append(mended.finding)
    return Reading(None, findings + [_finding(error, BY_HAND, {}) for error in _errors(table)])


def _errors(table: TomlTable) -> list[RunError]:
    """Return what is wrong with keys and types, or where nothing is, which keys are read by nobody."""
    return list(find_errors(table)) or list(find_unused(table))


def _wrongness(table: TomlTable) -> tuple[bool, int]:
    """Return what sorts tables by what is wrong with them: any key or type is worse than all that is read by nobody."""
    wrong = sum(1 for _ in find_errors(table))
    return wrong > 0, wrong or sum(1 for _ in find_unused(table))


class _Mended(NamedTuple):
    table: TomlTable
    finding: Finding


def _mend(table: TomlTable, error: RunError) -> _Mended | None:
    """Return the first change after which fewer things are wrong with the table."""
    for fix, changes in _candidates(table, error):
        after = _changed(table, changes)
        if after is not None and _wrongness(after) < _wrongness(table):
            return _Mended(after, _finding(error, fix, changes))
    return None


def _finding(error: RunError, fix: str, changes: Changes) -> Finding:
    return Finding(
        level="error",
        topic="run file",
        name="wrong-key",
        text=str(error),
        fix=fix,
        changes=changes,
    )


def _candidates(table: TomlTable, error: RunError) -> Iterator[tuple[str, Changes]]:
    """Yield what may mend an error, in words and as changes."""
    key = error.key
    match error.problem:
        case "unknown key":
            for meant in error.allowed if isinstance(error.allowed, OneOf) else ():
                yield f"rename {key} to {meant}", {key: None, str(meant): error.value}
            yield f"remove {key}", {key: None}
        case "unused key":
            for value in error.allowed if isinstance(error.allowed, OneOf) else ():
                changes = dict.fromkeys(error.others, value)
                yield say(changes), changes
            yield f"remove {key}", {key: None}
        case "missing key":
            yield from _stand_ins(table, key)
        case "wrong value":
            for value in _values(error.value, error.allowed):
                yield f"set {key}={toml(value)}", {key: value}
            yield f"remove {key}", {key: None}
            yield from _stand_ins(table, key)
        case _:
            assert_never(error.problem)


def _values(value: object, allowed: Allowed | None) -> Iterator[object]:
    """Yield values that may have been meant: the nearest name, or the same as another type."""
    text = str(value).strip()
    if isinstance(allowed, OneOf):
        yield from closest_first(value, allowed)
    elif allowed is int or allowed is float:
        yield from _numbers(text, allowed)
    elif allowed is bool and text.lower() in FLAGS:
        yield FLAGS[text.lower()]
    elif allowed is str and not isinstance(value, dict | list):
        yield text
    elif allowed is list:
        yield [value]
    elif allowed in UNITS and (number := re.match(r"[0-9.]+", text)):
        yield f"{number[0]} {UNITS[allowed]}"


def _numbers(text: str, kind: type[int | float]) -> Iterator[float]:
    try:
        number = float(text)
    except ValueError:
        return
    if math.isfinite(number):
        yield round(number) if kind is int else number


def _stand_ins(table: TomlTable, key: str) -> Iterator[tuple[str, Changes]]:
    value = _stand_in(key, _pools(table))
    if value is not None:
        yield f"set {key}={toml(value)}, or what yours needs", {key: value}


def _stand_in(key: str, pools: list[str]) -> object:
    """Return a value for a key that must be there, or None where none can be thought of."""
    match split_key(key):
        case [*_, "pool"]:
            return pools[0] if pools else None
        case [*_, "between"]:
            return pools[:2]
        case [*_, "gpu"]:
            return GPU
        case [*_, "bandwidth"]:
            return EXAMPLES[Bandwidth]
        case [section] if section in SECTIONS:
            return {name: _stand_in(f"{key}.{name}", pools) for name in SECTIONS[section]}
    return STAND_INS.get(key)


def _pools(table: TomlTable) -> list[str]:
    cluster = table.get("cluster")
    pools = cluster.get("pools") if isinstance(cluster, dict) else None
    return list(pools) if isinstance(pools, dict) else []


def _changed(table: TomlTable, changes: Changes) -> TomlTable | None:
    """Return a copy with keys set, or taken away where their value is None; None where that cannot be."""
    after = copy.deepcopy(table)
    for key, value in changes.items():
        *parents, last = split_key(key)
        place: Any = after
        for part in parents:
            place = place[int(part)] if isinstance(place, list) else place.setdefault(part, {})
            if not isinstance(place, dict | list):
                return None
        name = int(last) if isinstance(place, list) else last
        if value is None:
            del place[name]
        else:
            place[name] = value
    return after
