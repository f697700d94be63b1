"""Find keys and combinations of keys that `load_run` rejects, and the nearest values that it accepts."""

from __future__ import annotations

import copy
import difflib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple, assert_never, get_args, get_origin, get_type_hints

import msgspec

from streamrl.hardware.profiles import check_profiles, load_model
from streamrl.hardware.resolved import check_precision, resolve
from streamrl.runfile.checks import CHECKS
from streamrl.runfile.choices import choices_of
from streamrl.runfile.cluster_config import LinkConfig
from streamrl.runfile.config import Run
from streamrl.runfile.errors import Allowed, Bounds, OneOf, RunError
from streamrl.runfile.field_checks import find_errors, find_unused
from streamrl.runfile.files import convert_run
from streamrl.runfile.findings import Changes, Finding, changed, path_of, place_of, say, toml
from streamrl.runfile.keys import split_key
from streamrl.runfile.short_forms import in_full
from streamrl.runfile.units import Bandwidth, Duration, Size

EXAMPLES: dict[type, str] = {Bandwidth: "10 Gbps", Duration: "10 ms", Size: "1 GB"}
"""Proposed values for quantities that cannot be read. The bandwidth is also proposed for a missing link."""
MODEL, GPU = "qwen2.5-7b", "h800"
"""Proposed if no model or GPU is named."""
USUAL = {"name": MODEL, "gpu": GPU}
"""Proposed first for these keys if a name resembles no known one."""
SMALL, LARGE = 64, 4096
"""All whole numbers up to the first are tried, and powers of two up to the second."""
LIKE = 0.7
"""Similarity (difflib's ratio) above which a name comes before the others."""


def candidates_for(run: Run, error: RunError) -> Iterator[Changes]:
    """Yield changes to try against an error: first of its own key, then of the other keys that it names."""
    if error.key == "cluster.links":
        for rollout in run.rollout.kinds:
            ends = (rollout.pool, run.trainer.pool)
            link = LinkConfig(between=ends, bandwidth=Bandwidth.parse(EXAMPLES[Bandwidth]))
            yield {error.key: [*run.cluster.links, link]}
    yield from ({error.key: value} for value in _other_values(run, error.key, error.allowed))
    for key in error.others:
        yield from ({key: value} for value in _other_values(run, key, None))
    if error.key.startswith("cluster.links."):
        index = int(split_key(error.key)[2])
        yield {"cluster.links": [*run.cluster.links[:index], *run.cluster.links[index + 1 :]]}


def closest_first(name: object, names: Iterable[object], usual: str = "") -> list[object]:
    """Return names that resemble or contain `name` first, then the usual one, then the others in their order."""
    wanted, by_text = str(name).lower(), {str(each): each for each in names}
    same = [text for text in by_text if text.lower() == wanted]
    close = difflib.get_close_matches(wanted, list(by_text), n=3, cutoff=LIKE)
    parts = [text for text in by_text if wanted and text and (wanted in text or text in wanted)]
    first = [*same, *close, *parts, *([usual] if usual in by_text else [])]
    return [by_text[text] for text in dict.fromkeys([*first, *by_text])]


def _other_values(run: Run, key: str, allowed: Allowed | None) -> Iterator[object]:
    """Yield other values of a key; none if the run has no such key."""
    *parents, last = path_of(key)
    try:
        section = place_of(run, parents)
        now = place_of(section, [last])
    except LookupError:
        return
    kind = get_type_hints(type(section), include_extras=True)[last]
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
    """Yield the violated bound, the default, and other numbers within the bounds."""
    if type(now) in EXAMPLES:
        yield EXAMPLES[type(now)]
    if now > bounds.most:
        yield bounds.most
    if isinstance(default, int | float) and bounds.hold(default):
        yield default
    if not bounds.excludes_least:
        yield bounds.least
    yield from (number for number in _nearest_numbers(now) if bounds.hold(number))


def _of_type(now: object, names: Sequence[object], default: object) -> Iterator[object]:
    """Yield other values of the same type."""
    if isinstance(now, bool):
        yield not now
    elif type(now) in EXAMPLES:
        yield EXAMPLES[type(now)]
    elif isinstance(now, int | float):
        yield from _nearest_numbers(now)
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


def _nearest_numbers(now: float) -> list[float]:
    """Return numbers by their factor from `now`; only whole numbers for a whole one."""
    found: set[float] = {n / 20 for n in range(21)}
    if isinstance(now, int):
        powers = {1 << bits for bits in range(LARGE.bit_length())}
        found = {*range(SMALL + 1), *powers}
    return _by_distance(found - {now}, now)


def _by_distance(numbers: Iterable[float], now: float) -> list[float]:
    """Return numbers by their factor from `now`; if `now` is not positive, the smallest comes first."""
    now = now if math.isfinite(now) and now > 0 else 0.0
    return sorted(numbers, key=lambda number: (abs(math.log((1 + number) / (1 + now))), number))


def _default(section: msgspec.Struct, name: str) -> object:
    return next(field.default for field in msgspec.structs.fields(section) if field.name == name)


def _names(kind: Any) -> list[object]:
    """Return the names that a key of this type allows."""
    options = [kind, *get_args(kind)]
    named = [name for option in options if (found := choices_of(option)) for name in found.names()]
    return named + [
        name for option in options if get_origin(option) is Literal for name in get_args(option)
    ]


TomlTable = dict[str, Any]

MOST_WRONG_KEYS = 50
"""Reading stops after this many wrong keys."""
STAND_INS: TomlTable = {
    "model": {"name": MODEL},
    "rollout.replicas": 1,
    "rollout.max_tokens": 4096,
    "algorithm.steps": 100,
    "algorithm.prompts_per_step": 128,
}
"""Values for required keys that a run file lacks, so that the rest can be checked."""
SECTIONS = {
    "rollout": ("pool", "replicas", "max_tokens"),
    "trainer": ("pool",),
    "algorithm": ("steps", "prompts_per_step"),
}
"""Required content of these sections."""
UNITS: dict[type, str] = {Bandwidth: "Gbps", Duration: "ms", Size: "GB"}
"""Units for a quantity without one, or with an unknown one."""
FLAGS = {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}
BY_HAND = "write it as in examples/h20-h800.toml"


class Reading(NamedTuple):
    """The part of a run file that could be read."""

    run: Run | None
    """The run after repairs; None if it cannot be repaired."""
    findings: list[Finding]


def read_leniently(table: TomlTable, base: Path) -> Reading:
    """Read a run file's table key by key, and repair wrong keys and types."""
    findings: list[Finding] = []
    table = in_full(table)
    for _ in range(MOST_WRONG_KEYS):
        errors = _errors(table)
        if not errors:
            return Reading(convert_run(table, base), findings)
        mended = next(filter(None, (_fix_table(table, error) for error in errors)), None)
        if mended is None:
            break
        table = mended.table
        findings.append(mended.finding)
    return Reading(None, findings + [_key_finding(error, BY_HAND, {}) for error in _errors(table)])


def _errors(table: TomlTable) -> list[RunError]:
    """Return the errors of keys and types; if there are none, the keys that no code reads."""
    return list(find_errors(table)) or list(find_unused(table))


def _wrongness(table: TomlTable) -> tuple[bool, int]:
    """Return a sort key for tables: errors of keys and types weigh more than any number of unused keys."""
    wrong = sum(1 for _ in find_errors(table))
    return wrong > 0, wrong or sum(1 for _ in find_unused(table))


class _FixedTable(NamedTuple):
    table: TomlTable
    finding: Finding


def _fix_table(table: TomlTable, error: RunError) -> _FixedTable | None:
    """Return the first change that reduces the number of errors in the table."""
    for fix, changes in _candidates(table, error):
        after = _changed(table, changes)
        if after is not None and _wrongness(after) < _wrongness(table):
            return _FixedTable(after, _key_finding(error, fix, changes))
    return None


def _key_finding(error: RunError, fix: str, changes: Changes) -> Finding:
    return Finding(
        level="error",
        topic="run file",
        name="wrong-key",
        text=str(error),
        fix=fix,
        changes=changes,
    )


def _candidates(table: TomlTable, error: RunError) -> Iterator[tuple[str, Changes]]:
    """Yield candidate fixes of an error, in words and as changes."""
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
    """Yield values that may have been meant: the nearest name, or the same value as another type."""
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
        yield f"set {key}={toml(value)}, or the value that you need", {key: value}


def _stand_in(key: str, pools: list[str]) -> object:
    """Return a value for a required key, or None if there is no sensible one."""
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
    """Return a copy with keys set, or removed if their value is None; None if that is impossible."""
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


Check = Callable[[Run], None]
"""A check raises `RunError`."""

MOST_FIXES = 50
"""Repair stops after this many errors."""
_BY_HAND = "change one of the keys named above"
_NO_MODEL = "save a Hugging Face model there, or name a profile: model.name instead of model.path"


class Consistency(NamedTuple):
    """The result of the consistency checks."""

    run: Run | None
    """The repaired run; None if no repair was found."""
    findings: list[Finding]


def fix_contradictions(run: Run) -> Consistency:
    """Find every check that fails, and changes after which all checks pass together."""
    return _fix_run(run, CHECKS)


def fix_profile_names(run: Run) -> Consistency:
    """Find GPUs, models or lengths without a profile, with the closest names; missing files are not replaced."""
    checks = (*CHECKS, check_profiles, lambda each: check_precision(resolve(each)))
    mended, findings = _fix_run(run, checks)
    try:
        if run.model.path is not None:
            load_model(run.model)
    except RunError as error:
        findings = [each for each in findings if each.text != str(error)]
        findings.append(_contradiction_finding(error, _NO_MODEL))
    return Consistency(mended or run, findings)


def _fix_run(run: Run, checks: Sequence[Check]) -> Consistency:
    """Change a run, error by error, until all checks pass."""
    findings: list[Finding] = []
    seen: set[str] = set()
    for _ in range(MOST_FIXES):
        place, error = _first_error(run, checks)
        if error is None:
            return Consistency(run, findings)
        seen.add(str(error))
        changes = _find(run, checks, place, error, seen)
        if changes is None:
            return Consistency(None, [*findings, _contradiction_finding(error, _BY_HAND)])
        findings.append(_contradiction_finding(error, say(changes), changes))
        run = changed(run, changes)
    return Consistency(None, findings)


def _find(
    run: Run, checks: Sequence[Check], num_passed: int, error: RunError, seen: set[str]
) -> Changes | None:
    """Return the change after which most checks pass, the first one on a tie.

    If a check fails again, it must be for another key and with another message.
    """
    best: Changes | None = None
    furthest = num_passed
    for changes in candidates_for(run, error):
        try:
            after = changed(run, changes)
        except (ValueError, LookupError):  # wrong type for the key, or its section does not exist
            continue
        reached, again = _first_error(after, checks)
        if again is None:
            return changes
        is_new = again.key != error.key and str(again) not in seen
        if reached > furthest or (best is None and reached == num_passed and is_new):
            best, furthest = changes, reached
    return best


def _first_error(run: Run, checks: Sequence[Check]) -> tuple[int, RunError | None]:
    """Return the number of checks that pass, and the error of the next one."""
    for num_passed, check in enumerate(checks):
        try:
            check(run)
        except RunError as error:
            return num_passed, error
    return len(checks), None


def _contradiction_finding(error: RunError, fix: str, changes: Changes | None = None) -> Finding:
    return Finding(
        level="error",
        topic="run file",
        name="contradiction",
        text=str(error),
        fix=fix,
        changes=changes or {},
    )
