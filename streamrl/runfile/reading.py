"""Read a run file: TOML, overrides, paths, and checks that need more than one key."""

from __future__ import annotations

import copy
import difflib
import os
import re
import tomllib
from collections.abc import Callable, Iterable
from math import isfinite
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints, overload

import msgspec

from streamrl.runfile.config import Run
from streamrl.runfile.failures_config import check_failures
from streamrl.runfile.plan_checks import check_plan
from streamrl.runfile.policy_checks import check_policies
from streamrl.runfile.pools import check_pools
from streamrl.runfile.section import Section
from streamrl.runfile.units import read_quantity
from streamrl.workload.ranker import TAIL_SHARE

_UNKNOWN = re.compile(r"Object contains unknown field `(?P<key>[^`]+)`(?: - at `\$(?P<path>.*)`)?")
_MISSING = re.compile(r"Object missing required field `(?P<key>[^`]+)`(?: - at `\$(?P<path>.*)`)?")
_AT = re.compile(r"(?P<what>.*) - at `\$(?P<path>.*)`", re.DOTALL)


def load_run(path: Path, overrides: Iterable[str] = ()) -> Run:
    """Read the run file at `path` with `key=value` overrides applied.

    Raises:
        ValueError: one line that names the key, its value and what would be right.
    """
    return make_run(read_table(path, overrides), path.parent)


def read_table(path: Path, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """Read the run file at `path` as TOML gives it, with overrides applied; see `load_run` for the errors."""
    try:
        table = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path}: no such run file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{path}: not a TOML file: {error}") from None
    for override in overrides:
        _override(table, override)
    return table


def make_run(table: dict[str, Any], base: Path = Path()) -> Run:
    """Make a run from a table as TOML gives it; relative paths start at `base`."""
    run = convert_run(table, base)
    check_run(run)
    return run


def convert_run(table: dict[str, Any], base: Path = Path()) -> Run:
    """Make a run of which only keys and types are checked."""
    try:
        run = msgspec.convert(table, Run, dec_hook=read_quantity)
    except msgspec.ValidationError as error:
        raise ValueError(_say(str(error), table)) from None
    return _resolve_paths(run, base)


def decode_run(data: bytes) -> Run:
    """Read a run that `encode_run` wrote."""
    return msgspec.json.decode(data, type=Run, dec_hook=_restore_quantity)


def encode_run(run: Run) -> bytes:
    """Write a run as JSON, quantities in base units."""
    return msgspec.json.encode(run, enc_hook=float)


def check_run(run: Run) -> None:
    """Raise `ValueError` where values contradict each other."""
    for check in run_checks():
        check(run)


def run_checks() -> tuple[Callable[[Run], None], ...]:
    """Give the checks that need more than one key, each of which raises `ValueError`; later ones rely on earlier ones."""
    return (
        _check_model,
        _check_positive,
        check_pools,
        _check_algorithm,
        _check_verifier,
        _check_lengths,
        _check_sync,
        _check_latency,
        _check_shares,
        check_policies,
        check_plan,
        lambda run: check_failures(run.failures),
    )


def _check_model(run: Run) -> None:
    if (run.model.name is None) == (run.model.path is None):
        raise ValueError("model needs exactly one of name and path")


def _check_positive(run: Run) -> None:
    for section in (
        run.rollout,
        run.trainer,
        run.algorithm,
        run.workload,
        run.verifier,
        run.sync,
        run.execute,
    ):
        for key, kind in get_type_hints(type(section)).items():
            value = getattr(section, key)
            if kind is int and value < 1:
                raise ValueError(f"{_name(run, section)}.{key} must be at least 1, got {value}")
    for name, pool in run.cluster.pools.items():
        for key, value in (("nodes", pool.nodes), ("gpus_per_node", pool.gpus_per_node)):
            if value < 1:
                raise ValueError(f"cluster.pools.{name}.{key} must be at least 1, got {value}")
    if not 0 < run.rollout.memory_utilization <= 1:
        raise ValueError(
            f"rollout.memory_utilization must be in (0, 1], got {run.rollout.memory_utilization}"
        )
    for name, factor in (
        ("generation_factor", run.costs.generation_factor),
        ("training_factor", run.costs.training_factor),
    ):
        if not (isfinite(factor) and factor > 0):
            raise ValueError(f"costs.{name} must be above 0, got {factor}")
    for name, number, least in (
        ("seed", run.seed, 0),
        ("warm_up_steps", run.warm_up_steps, 0),
        ("policies.max_staleness", run.policies.max_staleness, 0),
        ("policies.max_attempts", run.policies.max_attempts, 1),
        ("policies.max_restarts", run.policies.max_restarts, 0),
        ("policies.resize_unit", run.policies.resize_unit, 1),
        ("policies.max_replicas", run.policies.max_replicas, 1),
        ("policies.resize_window", run.policies.resize_window, 1),
        ("policies.tail_every", run.policies.tail_every, 2),
        ("policies.shrink_after", run.policies.shrink_after, 1),
    ):
        if number is not None and number < least:
            raise ValueError(f"{name} must be {least} or more, got {number}")


def _check_algorithm(run: Run) -> None:
    algorithm = run.algorithm
    if algorithm.trains_whole_groups and algorithm.group_size < 2:
        raise ValueError(
            f"algorithm.group_size must be at least 2 for {algorithm.name}, "
            f"got {algorithm.group_size}"
        )
    if algorithm.rollouts_per_step < run.trainer.data_parallel:
        raise ValueError(
            f"algorithm.prompts_per_step x group_size gives {algorithm.rollouts_per_step} rollouts, "
            f"fewer than trainer.data_parallel={run.trainer.data_parallel}"
        )


def _check_verifier(run: Run) -> None:
    limits = {"time_limit": run.verifier.time_limit, "memory_limit": run.verifier.memory_limit}
    for key, limit in limits.items():
        if not (isfinite(limit) and limit > 0):
            raise ValueError(f"verifier.{key} must be above 0, got {limit:g}")


def _check_lengths(run: Run) -> None:
    share = run.workload.informative_share
    if not 0 <= share <= 1:
        raise ValueError(f"workload.informative_share must be in [0, 1], got {share}")
    lengths = run.workload.lengths
    if lengths is None:
        return
    for key, scale in (("scale", lengths.scale), ("scale_to", lengths.scale_to)):
        if scale is not None and not (isfinite(scale) and scale > 0):
            raise ValueError(f"workload.lengths.{key} must be above 0, got {scale}")
    if lengths.drift_steps is not None and lengths.drift_steps < 2:
        raise ValueError(
            f"workload.lengths.drift_steps must be 2 or more, got {lengths.drift_steps}"
        )
    most = run.workload.max_prompt_tokens
    if not 1 <= lengths.prompt_tokens <= most:
        raise ValueError(
            f"workload.lengths.prompt_tokens must be between 1 and workload.max_prompt_tokens="
            f"{most}, got {lengths.prompt_tokens}"
        )


def _check_latency(run: Run) -> None:
    points = run.policies.latency
    if points is None:
        return
    batches = [batch for batch, _ in points]
    if not batches or batches != sorted(set(batches)) or batches[0] < 1:
        raise ValueError(
            f"policies.latency must hold batches in rising order from 1, got {batches}"
        )
    for batch, seconds in points:
        if not (isfinite(seconds) and seconds > 0):
            raise ValueError(f"policies.latency at batch {batch} must be positive, got {seconds}")


def _check_shares(run: Run) -> None:
    """Raise `ValueError` where a share of the tail's dispatch, or of a ranker, is out of bounds."""
    shares: list[tuple[str, float | None, float]] = [
        ("policies.tail_share", run.policies.tail_share, 0)
    ]
    if (lengths := run.workload.lengths) is not None:
        shares += [
            ("workload.lengths.ranker_recall", lengths.ranker_recall, TAIL_SHARE),
            ("workload.lengths.ranker_recall_to", lengths.ranker_recall_to, TAIL_SHARE),
            ("workload.lengths.ranker_correlation", lengths.ranker_correlation, 0),
        ]
        if lengths.ranker_history < 1:
            raise ValueError(
                f"workload.lengths.ranker_history must be at least 1, got {lengths.ranker_history}"
            )
    for name, share, least in shares:
        if share is not None and not least <= share <= 1:
            raise ValueError(f"{name} must be in [{least:g}, 1], got {share}")


def _check_sync(run: Run) -> None:
    sync = run.sync
    if not sync.bucket_size > 0:
        raise ValueError(f"sync.bucket_size must be above 0, got {sync.bucket_size:g} bytes")
    if not 0 < sync.changed_share <= 1:
        raise ValueError(f"sync.changed_share must be in (0, 1], got {sync.changed_share}")
    if sync.mode == "delta" and run.model.dtype == "float32":
        raise ValueError(
            "sync.mode 'delta' needs a model.dtype of 16 bits, got 'float32', "
            "in which a step changes nearly every value"
        )
    if sync.backend == "nccl-reshard" and sync.mode != "full":
        raise ValueError(
            f"sync.backend 'nccl-reshard' moves shards of all weights, so sync.mode must be 'full', "
            f"got {sync.mode!r}"
        )


def _name(run: Run, section: Section) -> str:
    return next(key for key in run.__struct_fields__ if getattr(run, key) is section)


def _restore_quantity(kind: type, value: object) -> object:
    return kind(value)


def _override(table: dict[str, Any], override: str) -> None:
    """Set one dotted key, such as `rollout.replicas=8` or `cluster.links.0.latency=20 ms`."""
    key, separator, text = override.partition("=")
    *parents, last = key.strip().split(".")
    if not separator or not all([*parents, last]):
        raise ValueError(f"--set {override!r} must read key=value")
    place: Any = table
    for depth, part in enumerate(parents):
        place = _enter(place, part, ".".join(parents[: depth + 1]))
    if not isinstance(place, dict):
        raise ValueError(f"--set {key}: name a key inside an entry of this list")
    place[last] = _read_value(text.strip())


def _enter(place: Any, part: str, path: str) -> Any:
    if isinstance(place, list):
        if not part.isdigit() or int(part) >= len(place):
            raise ValueError(f"--set {path}: no entry {part!r} in a list of {len(place)}")
        return place[int(part)]
    inner = place.setdefault(part, {})
    if not isinstance(inner, dict | list):
        raise ValueError(f"--set {path}: {inner!r} is no table")
    return inner


def _read_value(text: str) -> object:
    """Read a TOML value; what is none is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _resolve_paths(run: Run, base: Path) -> Run:
    """Let every path in the run file start at `base`."""
    replace = msgspec.structs.replace
    lengths = run.workload.lengths
    if lengths is not None:
        source = _from(base, lengths.source) if lengths.names_a_file else lengths.source
        scores = _from(base, lengths.ranker_scores)
        lengths = replace(lengths, source=source, ranker_scores=scores)
    return replace(
        run,
        model=replace(run.model, path=_from(base, run.model.path)),
        workload=replace(run.workload, prompts=_from(base, run.workload.prompts), lengths=lengths),
        costs=replace(run.costs, profile=_from(base, run.costs.profile)),
        execute=replace(run.execute, output=_from(base, run.execute.output)),
    )


@overload
def _from(base: Path, path: str) -> str: ...
@overload
def _from(base: Path, path: None) -> None: ...
def _from(base: Path, path: str | None) -> str | None:
    return None if path is None else os.path.normpath(base / path)


def _say(error: str, table: dict[str, Any]) -> str:
    """Say what msgspec found, with the key's path as a run file has it."""
    if match := _UNKNOWN.fullmatch(error):
        close = difflib.get_close_matches(match["key"], _all_keys(), n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        path = _name_entry(match["path"] or "", error, table)
        return f"{_dotted(path, match['key'])} is no key of a run file{hint}"
    if match := _MISSING.fullmatch(error):
        path = _name_entry(match["path"] or "", error, table)
        return f"{_dotted(path, match['key'])} is missing"
    if match := _AT.fullmatch(error):
        path = _name_entry(match["path"], error, table)
        value = _look_up(table, path)
        if choices := _choices(path):
            return f"{_dotted(path)} must be one of {', '.join(choices)}, got {value!r}"
        return f"{_dotted(path)}: {match['what']}, got {value!r}"
    return error


def _choices(path: str) -> list[str]:
    """Give the names that the key at `path` may have, none where it takes no name."""
    kind: Any = Run
    for part in re.findall(r"[^.\[\]]+", path):
        is_section = isinstance(kind, type) and issubclass(kind, Section)
        kind = get_type_hints(kind)[part] if is_section else _entries_of(kind)
    options = [kind, *get_args(kind)]
    return [
        str(name)
        for option in options
        if get_origin(option) is Literal
        for name in get_args(option)
    ]


def _entries_of(kind: Any) -> Any:
    """Give the type of the entries of a table or list, which may also be absent."""
    *_, last = (each for each in get_args(kind) if each is not NoneType)
    return _entries_of(last) if NoneType in get_args(kind) else last


def _all_keys() -> list[str]:
    return [key for section in Section.__subclasses__() for key in section.__struct_fields__]


def _dotted(path: str | None, key: str = "") -> str:
    return ".".join(part for part in ((path or "").lstrip("."), key) if part)


def _name_entry(path: str, error: str, table: dict[str, Any]) -> str:
    """Replace msgspec's "[...]" by the entry of the table that is wrong."""
    before, found, after = path.partition("[...]")
    if not found:
        return path
    entries = _look_up(table, before)
    if not isinstance(entries, dict):
        return path
    for name, entry in entries.items():
        alone = copy.deepcopy(table)
        _override_table(alone, before, {name: entry})
        try:
            msgspec.convert(alone, Run, dec_hook=read_quantity)
        except msgspec.ValidationError as again:
            if str(again) == error:
                return f"{before}.{name}{after}"
    return path


def _override_table(table: dict[str, Any], path: str, value: object) -> None:
    *parents, last = _dotted(path).split(".")
    place: Any = table
    for part in parents:
        place = place[part]
    place[last] = value


def _look_up(table: Any, path: str) -> object:
    for part in re.findall(r"[^.\[\]]+", path):
        try:
            table = table[int(part)] if isinstance(table, list) else table[part]
        except (KeyError, IndexError, ValueError, TypeError):
            return "nothing there"
    return table
