"""Write docs/constants.md: each constant of the cost model, and how many independent sources it rests on.

`profiles/constants.toml` says what each key of a profile rests on. The sources of a fitted constant are counted:
those of published rows whose prediction moves with it.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec

from streamrl.hardware.profile_table import ProfileTable
from streamrl.hardware.profiles import PROFILES, read_profile
from streamrl.runfile.result_files import write_file
from streamrl.sim.costs.training.profile import load_training_profile
from streamrl.sim.costs.training.training import rates_of
from streamrl.sim.fidelity.published_rows import publisher
from streamrl.sim.fidelity.serving import read_serving
from streamrl.sim.fidelity.training_steps import (
    PublishedStep,
    even_step_time,
    is_fitted,
    read_steps,
)

PAGE = "constants.md"
PATH = PROFILES / "constants.toml"
ROOT = Path(__file__).parents[3]
FOLDERS = ("frameworks", "engines", "engine_memory", "sync", "transports", "gpus")
TRAINING = "measured/training.toml"
ASIDE = (
    "rows",
    "version",
    "spread",
    "held_out*",
    "left_out",
    "served",
    "other_versions",
    "without",
    "triton_without",
    "releases",
)
"""Begins of keys that are no constants: errors, spreads, the constants of fits without a model, and the
defaults of releases, which docs/frameworks.md lists."""
SHIFT, MOVED = 1.2, 0.005
"""A row supports a constant if 20 % more of it move the prediction of the row by at least half a percent."""
ROWS_OF_SOURCE = 8
"""Most rows of one source that are tried, spread over its table."""
UNITS = ("s", "ms", "us", "ns", "GB/s", "MB/s", "TB/s", "GiB", "MiB", "GB")
Kind = Literal[
    "fitted", "published", "code", "datasheet", "derived", "table", "assumption", "numerics"
]


class ProfileConstant(ProfileTable, frozen=True, kw_only=True):
    """What one key of some profiles rests on."""

    files: str
    """Pattern of files below profiles/."""
    key: str
    """Pattern of the dotted key."""
    what: str
    kind: Kind
    unit: str = ""
    """Unit of values that are written without one."""
    rows: Literal["training", "serving"] | None = None
    rests_on: dict[str, list[str]] = msgspec.field(default_factory=dict)
    """Independent sources, by pattern of the file's name."""


class CodeConstant(ProfileTable, frozen=True, kw_only=True):
    """What constants of a module rest on."""

    file: str
    names: list[str]
    kind: Kind
    unit: str = ""
    rests_on: list[str] = msgspec.field(default_factory=list)


class RestingSeconds(ProfileTable, frozen=True, kw_only=True):
    """How much longer published RL steps take with worse unverified constants (benchmarks/check_constants.py)."""

    constants: int
    """Unverified constants that take part in seconds."""
    worse: float
    """Share by which all of them are changed."""
    steps: int
    median: float
    p90: float


class Registry(ProfileTable, frozen=True, kw_only=True):
    """The file profiles/constants.toml."""

    unverified: RestingSeconds

    profile: list[ProfileConstant]
    code: list[CodeConstant]


class Constant(msgspec.Struct, frozen=True, kw_only=True):
    """One constant as the page shows it."""

    where: str
    key: str
    value: str
    what: str
    kind: Kind
    sources: tuple[str, ...]

    @property
    def standing(self) -> str:
        """Return whether the constant is verified: by two independent sources, or because it is exact."""
        if self.kind in ("code", "datasheet", "derived"):
            return "exact"
        if self.kind == "table":
            return ONE_TABLE
        if self.kind == "assumption" or not self.sources:
            return "**unverified**: assumption"
        return "verified" if len(self.sources) > 1 else "**unverified**: one source"


@cache
def registry() -> Registry:
    """Read profiles/constants.toml."""
    return read_profile(PATH, Registry)


def profile_numbers(file: str) -> Iterator[tuple[str, str]]:
    """Yield each number of a profile that is a constant: its dotted key, and its text."""
    for key, value in _leaves(_read_table(file)):
        if not any(fnmatchcase(key.partition(".")[0], aside) for aside in ASIDE):
            yield key, value


@cache
def _read_table(file: str) -> dict[str, Any]:
    return tomllib.loads((PROFILES / file).read_text(encoding="utf-8"))


def _leaves(table: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        match value:
            case bool():
                continue
            case dict():
                yield from _leaves(value, f"{before}{key}.")
            case list():
                tables = (each for each in value if isinstance(each, dict))
                for each in tables:
                    name = f"{key}.{each['key']}" if "key" in each else key
                    yield from _leaves(each, f"{before}{name}.")
                if any(isinstance(each, float) for each in value):
                    yield f"{before}{key}", " to ".join(f"{each:g}" for each in value)
            case int() | float():
                yield f"{before}{key}", f"{value:g}"
            case str():
                number, _, unit = value.partition(" ")
                if unit in UNITS and number.replace(".", "").replace("e+", "").isdigit():
                    yield f"{before}{key}", value


def entry_of(file: str, key: str) -> ProfileConstant | None:
    """Return the first entry for a key of a profile; None if there is none."""
    for entry in registry().profile:
        if fnmatchcase(file, entry.files) and fnmatchcase(key, entry.key):
            return entry
    return None


def profile_files() -> list[str]:
    """Return the profiles with constants, relative to profiles/."""
    found = [f"{folder}/{path.name}" for folder in FOLDERS for path in _sorted(PROFILES / folder)]
    return [*found, TRAINING]


def _sorted(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.toml"))


def all_constants() -> list[Constant]:
    """Return every constant of the profiles and of the code.

    Raises:
        ValueError: profiles/constants.toml has no entry for a key.
    """
    found = []
    for file in profile_files():
        for key, value in profile_numbers(file):
            entry = entry_of(file, key)
            if entry is None:
                raise ValueError(f"{PATH} has no entry for {key} of profiles/{file}")
            found.append(_of_profile(entry, file, key, value))
    return [*_joined(found), *(each for entry in registry().code for each in _of_code(entry))]


def _of_profile(entry: ProfileConstant, file: str, key: str, value: str) -> Constant:
    name = Path(file).stem
    match entry.rows:
        case "training":
            sources = training_sources()[key.rpartition(".")[2]]
        case "serving":
            sources = tuple(
                sorted({publisher(r.source) for r in read_serving() if r.engine == name})
            )
        case None:
            own = (of for pattern, of in entry.rests_on.items() if fnmatchcase(name, pattern))
            sources = tuple(next(own, ()))
    unit = f" {entry.unit}" if entry.unit and " " not in value else ""
    lacks_table = entry.kind == "table" and not _names_a_table(file, key)
    return Constant(
        where=f"profiles/{file}",
        key=key,
        value=f"{value}{unit}",
        what=entry.what,
        kind="assumption" if lacks_table else entry.kind,
        sources=sources,
    )


def _names_a_table(file: str, key: str) -> bool:
    """Return whether the `source` beside a key of a profile names an operator table."""
    table: Any = _read_table(file)
    for name in key.split(".")[:-1]:
        table = table[name]
    return f"{PROFILES.name}/measured/" in table["source"]


def _joined(constants: Sequence[Constant]) -> Iterator[Constant]:
    """Join the same key of all GPUs with one entry: their profiles have one line together."""
    by_key: dict[tuple[str, str, str], list[Constant]] = defaultdict(list)
    for each in constants:
        folder = str(Path(each.where).parent)
        where = f"{folder}/*.toml" if folder.endswith("gpus") else each.where
        by_key[where, each.key, each.what].append(each)
    for (where, key, _), some in by_key.items():
        where = where if len(some) > 1 else some[0].where
        counted = Counter(each.value for each in some).most_common()
        value = ", ".join(f"{value} ({n} times)" if n > 1 else value for value, n in counted[:3])
        if len(counted) > 3:
            value = f"{len(counted)} values in {len(some)} files"
        yield msgspec.structs.replace(some[0], where=where, key=key, value=value)


def _of_code(entry: CodeConstant) -> Iterator[Constant]:
    values = module_constants(ROOT / entry.file)
    for name in entry.names:
        value, text = values[name]
        unit = f" {entry.unit}" if entry.unit else ""
        yield Constant(
            where=entry.file,
            key=name,
            value=f"`{value}`{unit}",
            what=text,
            kind=entry.kind,
            sources=tuple(entry.rests_on),
        )


def module_constants(path: Path) -> dict[str, tuple[str, str]]:
    """Return the constants of a module that have numbers: by name its value, and the first sentence of its docstring."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    found: dict[str, tuple[str, str]] = {}
    for place, node in enumerate(body):
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                pairs = list(zip(names, values, strict=True))
            case ast.Assign(targets=[name], value=value):
                pairs = [(name, value)]
            case ast.AnnAssign(target=name, value=ast.expr() as value):
                pairs = [(name, value)]
            case _:
                continue
        for name, value in pairs:
            if isinstance(name, ast.Name) and name.id.isupper() and _has_number(value):
                found[name.id] = ast.unparse(value), _first_sentence(body[place + 1 : place + 2])
    return found


def _has_number(value: ast.expr) -> bool:
    numbers = (n.value for n in ast.walk(value) if isinstance(n, ast.Constant))
    return any(isinstance(n, int | float) and not isinstance(n, bool) for n in numbers)


def _first_sentence(after: Sequence[ast.stmt]) -> str:
    match after:
        case [ast.Expr(value=ast.Constant(value=str() as text))]:
            return re.split(r"(?<!et al)\.(?: |$)", " ".join(text.split()))[0]
        case _:
            return ""


@cache
def training_sources() -> dict[str, tuple[str, ...]]:
    """Return by constant of training the publishers of fitted steps whose seconds move with it."""
    profile, found = load_training_profile(), {}
    steps = _spread_over_sources([step for step in read_steps() if is_fitted(step)])
    rates = rates_of(profile, "bfloat16")

    def seconds(step: PublishedStep, **changes: float) -> float:
        constants = msgspec.structs.replace(profile.constants, **changes)
        return even_step_time(step, rates, constants, profile.triton_attention)

    usual = [seconds(step) for step in steps]
    for name in profile.constants.__struct_fields__:
        more = {name: getattr(profile.constants, name) * SHIFT}
        moved = [
            abs(seconds(s, **more) / t - 1) >= MOVED for s, t in zip(steps, usual, strict=True)
        ]
        rests = {
            publisher(step.source) for step, is_moved in zip(steps, moved, strict=True) if is_moved
        }
        found[name] = tuple(sorted(rests))
    return found


def _spread_over_sources(steps: Sequence[PublishedStep]) -> list[PublishedStep]:
    by_source: dict[str, list[PublishedStep]] = defaultdict(list)
    for step in steps:
        by_source[step.source].append(step)
    return [
        step for some in by_source.values() for step in some[:: max(1, len(some) // ROWS_OF_SOURCE)]
    ]


def page_lines() -> Iterator[str]:
    """Yield the lines of the page."""
    found = [each for each in all_constants() if each.kind != "numerics"]
    count, resting = Counter(each.standing for each in found), registry().unverified
    yield from (
        "# Constants of the cost model, and their sources",
        "",
        "Each constant is listed with its value, its place in the tree, and the independent sources that it rests on. `streamrl",
        "validate --output docs` writes this page from `profiles/constants.toml` and from the published rows.",
        "",
        f"**{count['verified']} constants rest on two independent sources or more. {count['**unverified**: one source']} rest on one",
        f"source, and {count['**unverified**: assumption']} on an assumption: they are marked as unverified.** The other",
        f"{count['exact']} are defaults that were read in a program, figures of a datasheet, or arithmetic. {count[ONE_TABLE]} are fits to an",
        "operator table of one GPU.",
        "",
        f"**If {resting.constants} of the unverified constants were {resting.worse:.0%}",
        f"worse at once, a published RL step would take {resting.median:.1%} longer (median of {resting.steps} steps; {resting.p90:.1%} at p90).** `python -m",
        f"benchmarks.check_constants steps` measures this. The {resting.worse:.0%} is one step size for all constants, and no estimate of their errors.",
        "A constant without a second source can be off by a factor of two or more. For few of them a range is recorded: `sending.error`",
        "is 0.91 to 3.5 times, and `layouts.slowdown` is 1.1 to 1.3. So this figure ranks what steps rest on. It is no bound of their error.",
        "",
        "The limit of a fitted rate may exceed the peak of the datasheet: no product is large enough to reach it.",
        "",
        "One publication, repository or log is one source, however many rows it has. For a constant that was fitted to published",
        f"steps, a source counts if a change of the constant by {SHIFT - 1:.0%} moves one of its steps by {MOVED:.1%}. Nothing is fitted to",
        "served points. They count for a constant of an engine if their mean error is least at 0.75 to 1.5 times its value, and rises by",
        "0.5 points without it (`python -m benchmarks.check_constants engines`). Two sources do not make a constant right: errors of",
        "predictions are on [fidelity](fidelity.md).",
    )
    groups: dict[str, list[Constant]] = defaultdict(list)
    for each in found:
        groups[_group(each)].append(each)
    for title, some in groups.items():
        yield from ("", f"## {title}", "", "| constant | value | what it is | sources | standing |")
        yield "|---|---|---|---|---|"
        for each in some:
            name = f"`{each.key}`, {each.where.removeprefix('profiles/')}"
            told = (
                f"{len(each.sources)}: {', '.join(each.sources)}"
                if each.sources
                else KINDS[each.kind]
            )
            cells = (name, each.value, each.what, told, each.standing)
            yield f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


ONE_TABLE = "fitted to one table"
"""The standing of rates that were fitted to an operator table of one GPU."""
KINDS: dict[Kind, str] = {
    "fitted": "none",
    "published": "none",
    "code": "read in the program",
    "datasheet": "datasheet",
    "derived": "arithmetic",
    "table": "operator table",
    "assumption": "none",
}
"""The cell of a constant without sources."""
TITLES = {
    "frameworks": "Frameworks",
    "engines": "Inference engines",
    "engine_memory": "Memory of engines",
    "sync": "Weight sync",
    "transports": "Networks",
    "gpus": "GPUs",
    "measured": "Training",
}


def _group(constant: Constant) -> str:
    folder = Path(constant.where).parent.name
    return TITLES[folder] if constant.where.startswith("profiles/") else "In the code"


def write_constants(folder: Path) -> None:
    """Write the page to a directory."""
    write_file(folder / PAGE, "\n".join(page_lines()) + "\n")
