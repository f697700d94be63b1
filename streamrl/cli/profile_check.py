"""`streamrl profile check`: check every file in profiles/."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from streamrl.cli.shared import AsJson, print_json, stdout_console
from streamrl.export.option_table import OptionTable
from streamrl.hardware.measured_profile import read_measured
from streamrl.hardware.model_shape import ModelShape
from streamrl.hardware.operator_tables import OPERATORS, check_table, read_table
from streamrl.hardware.profiles import PROFILES, Gpu, load_gpu, read_profile
from streamrl.logs.log_formats import LogFormat
from streamrl.logs.recorded_rollouts import RolloutColumns
from streamrl.runfile.frameworks import USUAL, Framework, UsualSeconds
from streamrl.runfile.list_prices import KINDS, read_sheets
from streamrl.runfile.reading import read_text
from streamrl.runfile.workload_config import LengthsConfig
from streamrl.sim.costs.kernels import peak_of, table_path
from streamrl.sim.costs.overheads import ServingEngine
from streamrl.sim.costs.sync_profiles import Delta, HandOver, RankGroup, SyncBackend, Transport
from streamrl.sim.costs.training.profile import load_training_profile
from streamrl.workload.workload import load_source

DTYPES = ("bfloat16", "fp8", "nvfp4", "int4")
"""Dtypes of which a measured table needs at least one."""


class FileVerdict(msgspec.Struct, frozen=True):
    """The result of one file."""

    file: str
    is_good: bool
    notes: list[str]


def check(
    folder: Annotated[
        Path,
        typer.Argument(
            help="A folder with the layout of profiles/. Measured profiles of machines belong in its hosts/. "
            "Default: the shipped profiles.",
            show_default=False,
        ),
    ] = PROFILES,
    as_json: AsJson = False,
) -> None:
    """Check every profile: schema, units, sources and physical limits.

    Example: streamrl profile check
    """
    verdicts = list(check_all(folder))
    if not verdicts:
        raise ValueError(f"{folder} holds no profiles")
    if as_json:
        print_json(verdicts)
    else:
        _print(verdicts)
    bad = [verdict.file for verdict in verdicts if not verdict.is_good]
    if bad:
        raise ValueError(f"{len(bad)} of {len(verdicts)} profiles are wrong: {', '.join(bad)}")


def check_all(folder: Path) -> Iterator[FileVerdict]:
    """Yield the result of each file."""
    for pattern, read in _READERS:
        for path in sorted(folder.glob(pattern)):
            yield _check_file(path, path.relative_to(folder), read)


def _check_file(path: Path, name: Path, read: Callable[[Path], list[str]]) -> FileVerdict:
    try:
        return FileVerdict(str(name), True, read(path))
    except ValueError as error:
        return FileVerdict(str(name), False, [str(error)])


def _check_gpu(path: Path) -> list[str]:
    gpu = read_profile(path, Gpu)
    for key, place in gpu.tables.items():
        operator, _, only = key.partition(".")
        if operator not in OPERATORS:
            known = ", ".join(OPERATORS)
            raise ValueError(f"{path}: tables.{key} is not an operator; the operators are {known}")
        if not any(table_path(place, operator, dtype) for dtype in DTYPES if only in ("", dtype)):
            raise ValueError(f"{path}: tables.{key}: nothing was measured at {place!r}")
    return []


def _check_prices(path: Path) -> list[str]:
    found = read_sheets(path)
    for sheet in found:
        for kind in KINDS:
            for gpu, dollars in sheet.of_kind(kind).items():
                load_gpu(gpu)
                if not (math.isfinite(dollars) and dollars > 0):
                    text = f"{sheet.provider}: {kind}.{gpu} must be above 0, got {dollars}"
                    raise ValueError(f"{path}: {text}")
    return [f"{len(found)} pages of {len({sheet.provider for sheet in found})} providers"]


def _check_model(path: Path) -> list[str]:
    model = read_profile(path, ModelShape)
    return [f"{model.num_parameters / 1e9:.2f} B parameters"]


def _check_table(path: Path) -> list[str]:
    table = read_table(path)
    facts = table.facts
    expected = f"{facts.operator}.{facts.backend}.{facts.dtype}.csv"
    if (path.parent.name, path.name) != (facts.gpu, expected):
        raise ValueError(f"{path}: its facts belong to {facts.gpu}/{expected}")
    findings = check_table(table, peak_of(load_gpu(facts.gpu), facts.dtype))
    wrong = [finding.text for finding in findings if finding.is_wrong]
    if wrong:
        raise ValueError(f"{path}: {'; '.join(wrong)}")
    return [finding.text for finding in findings]


def _check_sync(path: Path) -> list[str]:
    tables: dict[str, type[Delta | HandOver | RankGroup]] = {
        "delta": Delta,
        "cuda-ipc": HandOver,
        "ranks-gloo": RankGroup,
        "ranks-nccl": RankGroup,
    }
    read_profile(path, tables.get(path.stem, SyncBackend))
    return []


def _check_transport(path: Path) -> list[str]:
    read_profile(path, Transport)
    return []


def _check_engine(path: Path) -> list[str]:
    return [read_profile(path, ServingEngine).fitted_on]


def _check_framework(path: Path) -> list[str]:
    if path.stem == USUAL:
        read_profile(path, UsualSeconds)
        return ["stands in where a framework's own seconds are unknown"]
    framework = read_profile(path, Framework)
    if framework.name != path.stem:
        raise ValueError(f"{path}: its name is {framework.name!r}")
    return [framework.head]


def _check_options(path: Path) -> list[str]:
    return [f"{len(read_profile(path, OptionTable).options)} options"]


def _check_training(path: Path) -> list[str]:
    load_training_profile(path)
    return []


def _check_log(path: Path) -> list[str]:
    return [read_profile(path, LogFormat).commit[:9]]


def _check_rollouts(path: Path) -> list[str]:
    read_profile(path, RolloutColumns)
    return []


def _check_host(path: Path) -> list[str]:
    profile = read_measured(path)
    return [f"{profile.model.name} on {profile.host.device}, {profile.date}"]


def _check_lengths(path: Path) -> list[str]:
    header = next(line for line in read_text(path).splitlines() if not line.startswith("#"))
    load_source(
        LengthsConfig(kind="histogram" if "density" in header else "empirical", source=str(path))
    )
    return []


_READERS: list[tuple[str, Callable[[Path], list[str]]]] = [
    ("gpus/*.toml", _check_gpu),
    ("prices.toml", _check_prices),
    ("models/*.toml", _check_model),
    ("lengths/*.csv", _check_lengths),
    ("transports/*.toml", _check_transport),
    ("sync/*.toml", _check_sync),
    ("engines/*.toml", _check_engine),
    ("frameworks/*.toml", _check_framework),
    ("frameworks/options/*.toml", _check_options),
    ("measured/training.toml", _check_training),
    ("logs/*.toml", _check_log),
    ("rollouts/*.toml", _check_rollouts),
    ("measured/*/*.csv", _check_table),
    ("hosts/*.toml", _check_host),
]


def _print(verdicts: list[FileVerdict]) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    for verdict in verdicts:
        mark = Text("ok", "green") if verdict.is_good else Text("wrong", "red")
        table.add_row(mark, verdict.file, "; ".join(verdict.notes))
    stdout_console().print(table)
