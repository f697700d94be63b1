"""Values that contradict each other: what `load_run` would refuse, one check after the other."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec

from streamrl.doctor.changes import changed, say, value_of
from streamrl.doctor.finding import Changes, Finding
from streamrl.hardware.profiles import load_gpu, load_model
from streamrl.runfile.cluster_config import LinkConfig
from streamrl.runfile.config import Run
from streamrl.runfile.reading import run_checks
from streamrl.runfile.units import Bandwidth, Duration, Size

Check = Callable[[Run], None]

MOST_FIXES = 5
"""Changes that one check is given, each of which may bring its next error to light."""
MOST_NUMBER = 4096
"""Largest number that is tried for a key, beside those that an error names."""
_KEY = re.compile(r"[a-z_]+(?:\.[A-Za-z0-9_-]+)+")
_TOP = re.compile(r"^[a-z_]+(?= must)")
_NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?")
_WORD = re.compile(r"'([^']+)'|([\w.-]+)")
EXAMPLES: dict[type, str] = {Bandwidth: "10 Gbps", Duration: "10 ms", Size: "1 GB"}
"""Proposed for quantities that cannot be; the bandwidth for a link that is missing too."""


class Consistency(NamedTuple):
    """What the checks found."""

    run: Run | None
    """With what mends it; None where nothing was found that does."""
    findings: list[Finding]


def mend_contradictions(run: Run) -> Consistency:
    """Find every check that fails, with changes after which all of them pass together."""
    findings: list[Finding] = []
    mended: Run | None = run
    checks = run_checks()
    for number, check in enumerate(checks):
        found, mended = _mend(run, check, checks[:number])
        findings += found
        if mended is None:
            return Consistency(None, findings)
        run = mended
    if any(_error_of(check, run) for check in run_checks()):  # a later change undid an earlier one
        findings = [msgspec.structs.replace(f, fix=_BY_HAND, changes={}) for f in findings]
        return Consistency(None, findings)
    return Consistency(run, findings)


def mend_profiles(run: Run) -> Consistency:
    """Find GPUs, or a model, that there is no profile of, with the closest names; files are not made up."""
    findings: list[Finding] = []
    for check in [_checks_gpu(name) for name in run.cluster.pools] + [_check_model]:
        message = _error_of(check, run)
        if message is None:
            continue
        is_file = check is _check_model and run.model.path is not None
        changes = None if is_file else _find(run, check, message)
        findings.append(_finding(message, _NO_MODEL if is_file else _fix(changes), changes))
        run = changed(run, changes or {})
    return Consistency(run, findings)


_NO_MODEL = "save a Hugging Face model there, or name a profile: model.name instead of model.path"


def _check_model(run: Run) -> None:
    try:
        load_model(run.model)
    except ValueError as error:
        if run.model.path is not None:
            raise  # it names the key
        raise ValueError(f"model.name: {error}") from None


def _checks_gpu(pool: str) -> Check:
    def check(run: Run) -> None:
        try:
            load_gpu(run.cluster.pools[pool].gpu)
        except ValueError as error:
            raise ValueError(f"cluster.pools.{pool}.gpu: {error}") from None

    return check


_BY_HAND = "change one of the keys that it names"


def _mend(run: Run, check: Check, passed: Sequence[Check]) -> tuple[list[Finding], Run | None]:
    findings: list[Finding] = []
    for _ in range(MOST_FIXES):
        message = _error_of(check, run)
        if message is None:
            return findings, run
        changes = _find(run, check, message, passed)
        findings.append(_finding(message, _fix(changes), changes))
        if changes is None:
            return findings, None
        run = changed(run, changes)
    return findings, None


def _fix(changes: Changes | None) -> str:
    return _BY_HAND if changes is None else say(changes)


def _finding(message: str, fix: str, changes: Changes | None) -> Finding:
    return Finding(
        level="error",
        topic="run file",
        name="contradiction",
        text=message,
        fix=fix,
        changes=changes or {},
    )


def _find(run: Run, check: Check, message: str, passed: Sequence[Check] = ()) -> Changes | None:
    """Give a change after which the check passes, or else finds something new wrong; the first keys named come first.

    Checks that passed already must pass again.
    """
    for candidates in _candidates(run, message):
        second_best: Changes | None = None
        for changes in candidates:
            again = _error_after(run, changes, check, passed)
            if again is None:
                return changes
            if second_best is None and _keys(run, again)[:1] != _keys(run, message)[:1]:
                second_best = changes if again != _BROKEN else None
        if second_best is not None:
            return second_best
    return None


_BROKEN = "cannot be"


def _error_after(run: Run, changes: Changes, check: Check, passed: Sequence[Check]) -> str | None:
    """Give what a check says of a changed run; `_BROKEN` where it does not come so far."""
    try:
        run = changed(run, changes)
    except (ValueError, LookupError):
        return _BROKEN
    if any(_error_of(earlier, run) for earlier in passed):
        return _BROKEN
    return _error_of(check, run)


def _candidates(run: Run, message: str) -> Iterator[Iterator[Changes]]:
    """Yield changes to try, key by key."""
    if message.startswith("cluster.links has no link"):
        ends = (run.rollout.pool, run.trainer.pool)
        link = LinkConfig(between=ends, bandwidth=Bandwidth.parse(EXAMPLES[Bandwidth]))
        yield iter([{"cluster.links": [*run.cluster.links, link]}])
    if message.startswith("model needs exactly one"):
        has_both = run.model.name is not None
        yield iter([{"model.name": None if has_both else "qwen2.5-7b"}])
    for key in _keys(run, message):
        yield ({key: value} for value in _values(run, key, message))


def _keys(run: Run, message: str) -> list[str]:
    """Give the keys of the run file that a message names, in its order, as `--set` has them."""
    text = re.sub(r"\[(\d+)\]", r".\1", message)
    found = dict.fromkeys([*_TOP.findall(text), *_KEY.findall(text)])
    for side in ("rollout", "trainer"):  # "rollout.replicas=9 x tensor_parallel=1"
        if f"{side}." in text:
            found |= dict.fromkeys(f"{side}.{name}" for name in re.findall(r" ([a-z_]+)=", text))
    for pool in run.cluster.pools:
        if f"pool {pool!r}" in text:
            found[f"cluster.pools.{pool}.nodes"] = None
    return [key for key in found if _has(run, key)]


def _has(run: Run, key: str) -> bool:
    try:
        value_of(run, key)
    except LookupError:
        return False
    return True


def _values(run: Run, key: str, message: str) -> Iterator[object]:
    """Yield other values of a key: names that the message or its type lists, numbers from the nearest on, none."""
    *parents, last = key.split(".")
    now = value_of(run, key)
    kind = get_type_hints(type(value_of(run, ".".join(parents)) if parents else run))[last]
    names = _names(kind)
    if key.endswith("pool"):
        names = list(run.cluster.pools)
    if isinstance(now, bool):
        yield not now
    elif type(now) in EXAMPLES:
        yield EXAMPLES[type(now)]
    elif isinstance(now, int | float):
        yield from _numbers(now, message)
    elif isinstance(now, tuple | list):
        yield from _with_pools(list(now), list(run.cluster.pools))
    elif names or isinstance(now, str):
        words = [quoted or word for quoted, word in _WORD.findall(message)]
        named = [name for name in words if name in names] if names else words
        close = difflib.get_close_matches(str(now), [w for w in named if w != now], n=3, cutoff=0.3)
        yield from dict.fromkeys([*close, *named, *names])
    if NoneType in get_args(kind):
        yield None


def _numbers(now: float, message: str) -> Iterator[float]:
    """Yield numbers by how near they are, as factors; whole ones for a key that has a whole one."""
    said = [float(text) for text in _NUMBER.findall(message)]
    if isinstance(now, int):
        found = {int(number) for number in said} | set(range(65)) | {2**n for n in range(13)}
        found |= {int(number) + 1 for number in said}
        whole = sorted(n for n in found if n != now and n <= max(MOST_NUMBER, *map(int, said), now))
        yield from sorted(whole, key=lambda n: _distance(n, now))
        return
    shares = {round(n / 20, 2) for n in range(21)} | set(said)
    yield from sorted((n for n in shares if n != now), key=lambda n: _distance(n, now))


def _with_pools(entries: list[object], pools: list[str]) -> Iterator[list[object]]:
    """Yield the list with an entry that is no pool replaced by one that is not in it."""
    for index, entry in enumerate(entries):
        if entry not in pools:
            for pool in pools:
                if pool not in entries:
                    yield [*entries[:index], pool, *entries[index + 1 :]]


def _distance(other: float, now: float) -> float:
    """Give how far apart two numbers are as factors; from what no key may be, the least comes first."""
    now = now if math.isfinite(now) and now > 0 else 0.0
    return abs(math.log((1 + other) / (1 + now)))


def _names(kind: Any) -> list[str]:
    """Give the names that a key of this type may have."""
    options = [kind, *get_args(kind)]
    return [
        name for option in options if get_origin(option) is Literal for name in get_args(option)
    ]


def _loads(gpu: str) -> Callable[[], object]:
    return lambda: load_gpu(gpu)


def _error_of(check: Check, run: Run) -> str | None:
    try:
        check(run)
    except ValueError as error:
        return str(error)
    return None
