"""Findings on a run file, changes of its keys, and fixes: a change is proposed only after the run with it passes the same examination."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, get_type_hints

import msgspec

from streamrl.runfile.checks import check_run
from streamrl.runfile.config import Run
from streamrl.runfile.keys import FOLLOWERS, TRAINER, join_key, read_value, split_key
from streamrl.runfile.section import Section
from streamrl.runfile.units import Bandwidth, Duration, Size, quantity_text, read_quantity

Level = Literal["error", "warning", "ok"]
Topic = Literal[
    "run file", "memory", "divisibility", "batch", "staleness", "link", "versions", "files"
]
TOPICS: tuple[Topic, ...] = (
    *("run file", "memory", "divisibility", "batch"),
    *("staleness", "link", "versions", "files"),
)
"""In the order in which they are shown."""

Changes: TypeAlias = Mapping[str, object]
"""Dotted keys of a run file and their new values; None removes a key."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One result of a check, with its numbers."""

    level: Level
    topic: Topic
    name: str
    """Kind of the finding, for scripts: "trainer-memory"."""
    text: str
    fix: str = ""
    """What to do; empty if nothing has to be done."""
    changes: Changes = {}
    """The fix as keys and values, which was tested; empty if no change of the run file fixes it."""


def of_part(finding: Finding, side: str, name: str, who: str, own: Callable[[str], str]) -> Finding:
    """Return a finding of a side that was looked at alone as one of the part of the run that it stood for.

    Args:
        finding: of the side.
        side: what its name and text call the side.
        name: what findings of the part begin with.
        who: what texts call the part.
        own: gives a text with the part's own keys.
    """
    text = own(finding.text.removeprefix(f"{side}: "))
    own_name = f"{name}-{finding.name.removeprefix(f'{side}-')}"
    return msgspec.structs.replace(finding, name=own_name, text=f"{who}: {text}")


def is_error(finding: Finding) -> bool:
    """Whether the run cannot work as the run file is."""
    return finding.level == "error"


def changed(run: Run, changes: Changes) -> Run:
    """Return the run with dotted keys replaced, unchecked.

    Raises:
        ValueError: a value is not of its key's type.
    """
    for key, value in changes.items():
        run = _put(run, path_of(key), value)
    return run


def value_of(run: Run, key: str) -> Any:
    """Return the value of a dotted key.

    Raises:
        LookupError: the run file has no such key.
    """
    return place_of(run, path_of(key))


def place_of(place: Any, names: Iterable[str]) -> Any:
    """Return what is at the end of a path through sections, tables and lists; `LookupError` where there is none."""
    for name in names:
        place = _enter(place, name)
    return place


def path_of(key: str) -> list[str]:
    """Return where a dotted key of a run file is in a `Run`, which has trainers that follow apart."""
    parts = split_key(key)
    if parts[0] != TRAINER or len(parts) == 1 or not parts[1].isdecimal():
        return parts
    number, rest = int(parts[1]), parts[2:]
    return [FOLLOWERS, str(number - 1), *rest] if number else [TRAINER, *rest]


def say(changes: Changes) -> str:
    """Write changes for people: "set rollout.replicas=4 rollout.tensor_parallel=2"."""
    settings = [f"{key}={toml(value)}" for key, value in changes.items() if value is not None]
    removed = [key for key, value in changes.items() if value is None]
    parts = ["set " + " ".join(settings)] if settings else []
    parts += ["remove " + " and ".join(removed)] if removed else []
    return " and ".join(parts)


def toml(value: object) -> str:
    """Write a value as `--set` reads it; a plain word needs no quotes."""
    if isinstance(value, str):
        is_word = bool(value) and all(c.isalnum() or c in "-_./" for c in value)
        return value if is_word and read_value(value) == value else _inline(value)
    return _inline(value)


def _inline(value: object) -> str:
    match value:
        case Section():
            found = {key: getattr(value, key) for key in value.__struct_fields__}
            return _inline(found)
        case Mapping():
            pairs = (f"{join_key('', key)} = {_inline(each)}" for key, each in value.items())
            return "{" + ", ".join(pairs) + "}"
        case list() | tuple():
            return "[" + ", ".join(map(_inline, value)) + "]"
        case Bandwidth() | Duration() | Size():
            return f'"{quantity_text(value)}"'
        case float():
            return repr(value)
        case datetime.date() | datetime.time():
            return value.isoformat()
        case _:
            return json.dumps(value, ensure_ascii=False)


def _enter(place: Any, part: str) -> Any:
    match place:
        case dict():
            return place[part]
        case list() | tuple() if part.isdecimal():
            return place[int(part)]
        case Section() if part in place.__struct_fields__:
            return getattr(place, part)
        case _:
            raise KeyError(part)


def _put(place: Any, path: list[str], value: object) -> Any:
    name, *rest = path
    if isinstance(place, list | tuple):
        entries = list(place)
        entries[int(name)] = _put(entries[int(name)], rest, value)
        return type(place)(entries)
    if isinstance(place, dict):
        if value is None and not rest:
            return {key: each for key, each in place.items() if key != name}
        return {**place, name: _put(place[name], rest, value)}
    if rest:
        return msgspec.structs.replace(place, **{name: _put(getattr(place, name), rest, value)})
    kind = get_type_hints(type(place))[name]
    value = msgspec.convert(value, kind, dec_hook=read_quantity)
    return msgspec.structs.replace(place, **{name: value})


Examine = Callable[[Run], Iterable[Finding]]
"""Returns the findings of a run, without fixes; raises nothing."""

MOST_TRIALS = 400
"""Maximum candidates tried for one finding. Each takes a few milliseconds, so the command stays
fast.
"""


class Fix(NamedTuple):
    """Possible fixes for one kind of finding."""

    candidates: Callable[[Run], Iterator[Changes]]
    """Yields changes to try, the best first."""
    otherwise: str
    """What to do if none of them helps."""
    effect: Callable[[Run], str] = lambda run: ""
    """Describes the changed run in a few words."""


def fix_of_part(
    fix: Fix, see: Callable[[Run], Run], own_key: Callable[[str], str], otherwise: str
) -> Fix:
    """Return what mends a part of a run as another fix mends the run that has that part alone.

    Args:
        fix: of the run that has it alone.
        see: gives that run.
        own_key: gives the key that stands for one of that run's in the whole run.
        otherwise: what to do where nothing helps.
    """
    return Fix(
        lambda run: (
            {own_key(key): value for key, value in changes.items()}
            for changes in fix.candidates(see(run))
        ),
        otherwise,
        lambda run: fix.effect(see(run)),
    )


def propose_fix(run: Run, finding: Finding, fix: Fix, examine: Examine) -> Finding:
    """Return a finding with the first candidate that removes it and adds no other finding.

    A candidate that adds warnings is used only if all others fail. A candidate that adds errors is
    never used.
    """
    mended = _first_that_works(run, finding, fix, examine)
    if mended is None:
        return msgspec.structs.replace(finding, fix=fix.otherwise)
    changes, after = mended
    effect = fix.effect(after)
    said = say(changes) + (f": {effect}" if effect else "")
    return msgspec.structs.replace(finding, fix=said, changes=changes)


def passes(run: Run) -> bool:
    """Whether `load_run` would take the run."""
    try:
        check_run(run)
    except ValueError:
        return False
    return True


def _first_that_works(
    run: Run, finding: Finding, fix: Fix, examine: Examine
) -> tuple[Changes, Run] | None:
    before = list(examine(run))
    second_best: tuple[Changes, Run] | None = None
    for number, changes in enumerate(fix.candidates(run)):
        if number == MOST_TRIALS:
            break
        after = changed(run, changes)
        if not passes(after):
            continue
        found = list(examine(after))
        if finding.name in _bad(found):
            continue
        if not _bad(filter(is_error, found)) <= _bad(filter(is_error, before)):
            continue
        if _bad(found) < _bad(before):
            return changes, after
        second_best = second_best or (changes, after)
    return second_best


def _bad(findings: Iterable[Finding]) -> set[str]:
    return {finding.name for finding in findings if finding.level != "ok"}
