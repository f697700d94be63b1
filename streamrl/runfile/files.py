"""Read, change and write run files: TOML with `--set` overrides, and the JSON that traces and run directories hold.

Write a run file: what `load_run` reads, with every key that is not at its default.

What the framework that a run names fills in is its default there.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from math import isclose
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import tomli_w

from streamrl.runfile.bases import read_merged, with_variables
from streamrl.runfile.checks import check_run
from streamrl.runfile.config import ExecuteConfig, Run
from streamrl.runfile.errors import OneOf, RunError, raise_all
from streamrl.runfile.field_checks import drop_unused, find_errors, find_unused
from streamrl.runfile.frameworks import fill_in, settings_of
from streamrl.runfile.jobs_config import JOBS
from streamrl.runfile.keys import join_trainers, place_of, split_trainers
from streamrl.runfile.paths import paths_of, with_paths
from streamrl.runfile.plan_config import PlanConfig
from streamrl.runfile.python_values import Changes, apply_changes, plain_table
from streamrl.runfile.reading import read_regular
from streamrl.runfile.result_files import write_file
from streamrl.runfile.roles_config import SecondaryTrainerConfig
from streamrl.runfile.section import Section, fields_of
from streamrl.runfile.short_forms import in_full
from streamrl.runfile.staleness_study import read_staleness_model
from streamrl.runfile.start_values import differing_start, fill_start, with_fitting_start
from streamrl.runfile.units import Bandwidth, Duration, Size, quantity_text, read_quantity

OUTPUT = "execute.output"


def write_run(
    run: Run,
    path: Path | str,
    notes: Iterable[str] = (),
    stated: Iterable[str] = (),
    base: Path = Path(),
) -> None:
    """Write a run file; paths are written as seen from its directory. The arguments are those of `run_text`.

    Raises:
        OSError: the file cannot be written; the error names it.
    """
    write_file(Path(path), run_text(run, path, notes, stated, base))


def run_text(
    run: Run,
    path: Path | str,
    notes: Iterable[str] = (),
    stated: Iterable[str] = (),
    base: Path = Path(),
) -> str:
    """Return the text of a run file; paths in it are relative to the directory of `path`.

    Args:
        run: what to write.
        path: the path that the file will have.
        notes: comments at its head, a line each.
        stated: dotted keys that are written whatever their value.
        base: directory of the file that the run was read from; what was its default output is that of the
            written file.
    """
    path = Path(path)
    if run.execute.output == os.path.normpath(base / ExecuteConfig().output):
        execute = msgspec.structs.replace(run.execute, output=ExecuteConfig().output)
        run = msgspec.structs.replace(run, execute=execute)
    stated, paths = list(stated), paths_of(run)
    if run.execute.output == ExecuteConfig().output and OUTPUT not in stated:
        del paths[OUTPUT]  # a default that is not written stays
    run = with_paths(run, {key: os.path.relpath(each, path.parent) for key, each in paths.items()})
    table = run_table(run, stated)
    head = "".join(f"# {note}\n" for note in notes)
    return f"{head}\n{tomli_w.dumps(table)}"


def run_table(run: Run, stated: Iterable[str] = ()) -> dict[str, Any]:
    """Return a run as TOML gives its file.

    It has no key that the framework of the run fills in again, and each that it would fill in
    otherwise. Dotted keys that are `stated` are there whatever their value.
    """
    table = _table(run)
    for setting, own in settings_of(run):
        place, last = place_of(table, setting.key)
        if own == setting.value:
            place.pop(last, None)
        else:
            place[last] = _toml_value(own)
    for key in stated:
        _state(table, run, key)
    return join_trainers(table)


def _table(section: Section) -> dict[str, Any]:
    """Return a section as TOML has it."""
    found = {}
    for field in fields_of(type(section)):
        value = getattr(section, field.name)
        default = field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        if value is not None and (default is msgspec.NODEFAULT or value != default):
            found[field.name] = _toml_value(value)
    return found


def _state(table: Any, run: Any, key: str) -> None:
    *parents, last = key.split(".")
    section, place = run, table
    for parent in parents:
        if parent.isdigit():
            section, place = section[int(parent)], place[int(parent)]
        else:
            section, place = getattr(section, parent), place.setdefault(parent, {})
    place[last] = _toml_value(getattr(section, last))


def _toml_value(value: Any) -> Any:
    match value:
        case Section():
            return _table(value)
        case dict():
            return {key: _toml_value(each) for key, each in value.items()}
        case list() | tuple():
            return [_toml_value(each) for each in value]
        case Bandwidth() | Duration() | Size():
            return quantity_text(value)
        case _:
            return value


def load_run(source: Path | str | Mapping[str, Any], overrides: Changes = ()) -> Run:
    """Read a run file, or a dict that has its tables, with changes applied.

    Relative paths start at the directory of the file; those of a dict at the current directory.

    Args:
        source: the path of a run file, or its content as nested dicts.
        overrides: `key=value` texts, or a dict of dotted keys and values.

    Raises:
        RunError: one line that names the key, its value and what would be right.
        ValueError: there is no such file, or it is not TOML.
    """
    return make_run(*_read_source(source, overrides))


class Offer(NamedTuple):
    """A run file to plan for."""

    run: Run
    ignored: list[str]
    """Start values that do not fit, as `--set` takes them. The run has others."""
    absent: list[str]
    """Keys of start values that the file leaves out."""

    @property
    def has_layout(self) -> bool:
        """Whether the layout of the run is that of the file."""
        return not (self.ignored or self.absent)


def load_offer(source: Path | str | Mapping[str, Any], overrides: Changes = ()) -> Offer:
    """Read a run file to plan for; see `load_run` for arguments and errors.

    Start values that every plan replaces, such as replicas and degrees, need not fit or be there.
    """
    return make_offer(*_read_source(source, overrides))


def make_offer(table: dict[str, Any], base: Path = Path()) -> Offer:
    """Make an offer from a table as TOML gives it; relative paths start at `base`."""
    table = in_full(table)
    absent = fill_start(table)
    stated = convert_run(table, base)
    run = with_fitting_start(stated)
    raise_all(find_unused(table))
    return Offer(run, differing_start(stated, run), absent)


def _read_source(
    source: Path | str | Mapping[str, Any], overrides: Changes
) -> tuple[dict[str, Any], Path]:
    """Return a run file's table with changes applied, and the directory of its relative paths."""
    if isinstance(source, Mapping):
        table = plain_table(source)
        apply_changes(table, overrides)
        return with_variables(table), Path()
    return read_table(Path(source), overrides), Path(source).parent


def change_run(run: Run, overrides: Changes) -> Run:
    """Return a run with changes applied, as if its file had them; see `load_run` for changes and errors.

    What it has that nothing reads, as older versions took it, is left out.
    """
    table = run_table(run)
    drop_unused(table)
    apply_changes(table, overrides)
    return make_run(table)


def read_table(path: Path, overrides: Changes = ()) -> dict[str, Any]:
    """Read the run file at `path` and its bases, with changes applied; see `load_run` for the errors."""
    table = read_any_table(path, overrides)
    if isinstance(table.get(JOBS), list):
        raise ValueError(
            f"{path} is a cluster file with several jobs; only `streamrl plan` reads it"
        )
    return table


def read_any_table(path: Path, overrides: Changes = ()) -> dict[str, Any]:
    """Read a run file or a cluster file with its bases, with changes applied."""
    table = read_merged(path)
    apply_changes(table, overrides)
    changed: dict[str, Any] = with_variables(table)
    return changed


def make_run(table: dict[str, Any], base: Path = Path()) -> Run:
    """Make a run from a table as TOML gives it; relative paths start at `base`."""
    table = in_full(table)
    run = convert_run(table, base)
    check_run(run)
    raise_all(find_unused(table))
    return run


def convert_run(table: dict[str, Any], base: Path = Path()) -> Run:
    """Make a run of which only keys and types are checked, with what its framework fills in."""
    raise_all(find_errors(table))
    run = msgspec.convert(split_trainers(fill_in(table)), Run, dec_hook=read_quantity)
    run = with_paths(run, _resolved(paths_of(run), base))
    plan = _with_studied_cost(run.plan, run.algorithm.corrected_by or "none")
    found: Run = msgspec.structs.replace(run, plan=plan)
    return found


def _with_studied_cost(plan: PlanConfig, correction: str) -> PlanConfig:
    """Return the section with what its study of staleness says of `staleness_cost`, where it names one."""
    if plan.staleness_study is None:
        return plan
    model = read_staleness_model(plan.staleness_study, correction)
    cost, stated = max(0.0, model.percent), plan.staleness_cost
    if stated and not isclose(stated, cost, rel_tol=1e-6):
        raise RunError(
            "plan.staleness_cost",
            stated,
            OneOf([0.0]),
            f"plan.staleness_cost must be absent where plan.staleness_study says it ({cost:.3g}), got {stated:g}",
            ("plan.staleness_study",),
        )
    found: PlanConfig = msgspec.structs.replace(plan, staleness_cost=cost)
    return found


def decode_run(data: bytes) -> Run:
    """Read a run that `encode_run` wrote.

    Raises:
        ValueError: the data is not a run.
    """
    try:
        return msgspec.json.decode(data, type=Run, dec_hook=_restore_quantity)
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(str(error)) from None


def read_recorded_run(path: Path) -> Run:
    """Read a run from its file in a run directory.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a run, or no regular file; the message names the file.
    """
    data = read_regular(path)
    try:
        return decode_run(data)
    except ValueError as error:
        raise ValueError(f"{path}: not the run of a run directory: {error}") from None


def encode_run(run: Run) -> bytes:
    """Write a run as JSON, quantities in base units."""
    return msgspec.json.encode(run, enc_hook=float)


def values_by_key(run: Run) -> dict[str, object]:
    """Return every key of a run's file, dotted, with its value as JSON has it, quantities in base units."""
    return dict(_leaves(msgspec.json.decode(encode_run(run)), ""))


def _leaves(value: object, path: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict) and value:
        for key, each in value.items():
            yield from _leaves(each, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def with_secondary_trainer(run: Run, section: dict[str, Any]) -> Run:
    """Return a run with one more trainer that follows, whose section is as `secondary_trainer_section` gives it."""
    follower = msgspec.convert(section, SecondaryTrainerConfig, dec_hook=_restore_quantity)
    return msgspec.structs.replace(run, followers=(*run.followers, follower))


def secondary_trainer_section(follower: SecondaryTrainerConfig) -> dict[str, Any]:
    """Return the section of a trainer that follows as JSON has it, quantities in base units."""
    section: dict[str, Any] = msgspec.to_builtins(follower, enc_hook=float)
    return section


def _restore_quantity(kind: type, value: object) -> object:
    return kind(value)


def _resolved(paths: Mapping[str, str], base: Path) -> dict[str, str]:
    """Return paths by key as they start at `base`, which one of no letters would be itself."""
    for key, path in paths.items():
        if not path:
            raise RunError(key, path, None, f"{key} must name a path, got ''")
    return {key: os.path.normpath(base / path) for key, path in paths.items()}
