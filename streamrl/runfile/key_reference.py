"""Describe every key of a run file: meaning, type, unit, default, allowed values and the commands that use it.

All of it is read from the structs of the run file: the text below a field is the meaning of its key.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import re
import sys
from collections.abc import Iterator
from functools import cache
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from streamrl.runfile.algorithm_config import AlgorithmConfig
from streamrl.runfile.choices import choices_of
from streamrl.runfile.config import Run
from streamrl.runfile.errors import OneOf, RunError, say
from streamrl.runfile.field_checks import allowed_by, bounds_of, is_section, origin_of, without_none
from streamrl.runfile.jobs_config import ClusterFile
from streamrl.runfile.keys import FOLLOWERS, TRAINER, join_key, split_key
from streamrl.runfile.other_names import key_meant
from streamrl.runfile.roles_config import AlgorithmChanges
from streamrl.runfile.section import Section, fields_of
from streamrl.runfile.units import QUANTITIES, Bandwidth, Duration, Size, quantity_text

NAME, PLACE = "NAME", "N"
"""Parts of a key that the user chooses: the name of an entry of a table, and the place of an entry of a list."""
ALL = ("plan", "simulate", "execute")
USED_BY: dict[str, tuple[str, ...]] = {
    "plan": ("plan",),
    "simulate": ("plan", "simulate"),
    "costs": ("plan", "simulate"),
    "failures": ("plan", "simulate"),
    "faults": ("simulate", "execute"),
    "execute": ("execute",),
    "jobs": ("plan",),
    "schedule": ("plan",),
}
"""Commands that use the keys of a section; all of `ALL` for other sections."""
SIMULATED = re.compile(r"Simulated\b")
"""Begin of the text of a key that `execute` does not use."""
EXAMPLE = re.compile(r'such as "([^"]+)"')
EXAMPLES: dict[type, str] = {Bandwidth: '"80 Gbps"', Duration: '"30 min"', Size: '"96 GB"'}
"""Example of each kind of quantity."""
OF_NAMES: dict[str, str] = {
    "stop": '["</answer>"]',
    "set": '["algorithm.steps=500"]',
    "top_k": "20",
    "implementation": '"python:game.py:Game"',
    "arguments": "{ max_attempts = 3 }",
    "tools": '["python:tools.py:search"]',
    "export": '"build/model"',
    "top_p": "0.95",
    "min_p": "0.05",
    "memory_utilization": "0.6",
    "temperature": "0.6",
    "template_arguments": "{ enable_thinking = false }",
    "path": '"models/Qwen3-8B"',
    "gpu": '"h100"',
    "pool": '"h20"',
    "between": '["h20", "h800"]',
    "price": "2.20",
    "price_source": '"contract of May 2026"',
    "acceptance": "0.8",
    "acceptance_to": "0.5",
    "share": "0.5",
    "latency": "[[1, 0.012], [64, 0.019], [256, 0.041]]",
    "steps": "200",
    "prompts_per_step": "64",
    "max_tokens": "8192",
    "replicas": "8",
    "nodes": "2",
    "prompts": '"prompts.jsonl"',
    "subset": '"main"',
    "split": '"train"',
    "fields": '{ prompt = "question", answer = "final_answer" }',
    "group_rewards": "[[0.3, 1.0], [0.7, 0.5]]",
    "user": '"Solve: {{ prompt }}"',
    "system": '"You answer with a number."',
    "name": '"judge"',
    "ranker_scores": '"scores.csv"',
    "scorer": '"exact"',
    "families": '["math", "code"]',
    "pattern": "'\\d+$'",
    "template": '"Grade from {{ least }} to {{ most }}: {{ completion }}"',
    "key_variable": '"JUDGE_API_KEY"',
    "endpoints": '["http://127.0.0.1:8000"]',
    "key": '"${SERVER_API_KEY}"',
    "certificate": '"ca.pem"',
    "directory": '"/shared/weights"',
    "beyond": "4096",
    "until": "8192",
    "profile": '"profile.toml"',
    "calibration": '"calibration.toml"',
    "promote": '"second"',
    "max_staleness": "1",
    "context_time": "1e-8",
    "efficiency": "0.45",
    "clip_high": "0.28",
    "critic_learning_rate": "1e-5",
    "drift_steps": "100",
    "budget": "2000",
    "budget_per_hour": "60",
    "budget_per_step": "5",
    "budget_per_day": "1500",
    "rollout_pools": '["h20", "h800"]',
    "trainer_pools": '["h800"]',
    "reward_pools": '["h20"]',
    "staleness_study": '"staleness.csv"',
    "factor": "4",
    "per_gpu_day": "0.0005",
    "spot_failures_per_gpu_day": "0.05",
    "on_demand_price": "2.50",
    "model": '"qwen3-0.6b"',
    "source": '"lengths.csv"',
    "ranker_recall_to": "0.6",
    "gae_lambda": "0.95",
    "min_reward": "0.2",
    "max_reward": "0.8",
    "stream_port": "0",
}
"""Examples of keys by their last name, where neither their text, their default nor their type has one."""
UNITS: dict[type, str] = {
    Bandwidth: "bandwidth with its unit",
    Duration: "duration with its unit",
    Size: "size with its unit",
}


MOST_NEAR = 3
"""Maximum suggestions for an unknown key."""


class Key(NamedTuple):
    """One key of a run file."""

    name: str
    """Dotted; `NAME` and `N` stand for what the user chooses."""
    type: str
    default: str
    """As TOML writes it; "required", or "absent" if nothing is set."""
    allowed: str
    """Allowed numbers or names; empty if every value of the type is allowed."""
    used_by: tuple[str, ...]
    """Commands that use it."""
    example: str
    """A line of a run file."""
    text: str
    """What it means."""


class Table(NamedTuple):
    """One table of a run file, with its keys."""

    name: str
    """Dotted; empty for the top level."""
    header: str
    """How a run file begins the table: `[rollout]`, or `[[faults]]` for an entry of a list."""
    text: str
    keys: tuple[Key, ...]


@cache
def tables() -> tuple[Table, ...]:
    """Return every table of a run file, each before the tables in it."""
    return tuple(_tables(Run, "", ""))


@cache
def cluster_tables() -> tuple[Table, ...]:
    """Return the tables that only a cluster file has; its `[cluster]` is that of a run file."""
    found = _tables(ClusterFile, "", "")
    return tuple(table for table in found if table.name and not table.name.startswith("cluster"))


def find(name: str) -> Table | Key:
    """Return what a dotted key names, such as `rollout.max_running`, `cluster.pools.h20.price` or `rollout`.

    Raises:
        RunError: no table and no key has this name. The error has the nearest names.
    """
    try:
        parts = split_key(name.strip("[]"))
    except ValueError:
        parts = [name]
    found: list[Table | Key] = [
        each for each in _everything() if _is_named(split_key(each.name or "."), parts)
    ]
    if found:
        return found[0]
    raise _unknown(name)


def _everything() -> Iterator[Table | Key]:
    for table in (*tables(), *cluster_tables()):
        if table.name:
            yield table
        yield from table.keys


def _is_named(own: list[str], parts: list[str]) -> bool:
    """Return whether parts of a key name a table or key. The place in a list may be left out."""
    if len(own) == len(parts):
        return all(
            a in (b, NAME) or (a == PLACE and b.isdigit()) for a, b in zip(own, parts, strict=True)
        )
    return PLACE in own and _is_named([part for part in own if part != PLACE], parts)


def _unknown(name: str) -> RunError:
    names = [each.name for each in _everything()]
    last = name.rpartition(".")[2]
    same = [each for each in names if each.rpartition(".")[2] == last]
    called = key_meant(name)
    if called is not None and name.lower() not in names:
        same = [called]
    near = same[:MOST_NEAR] or difflib.get_close_matches(name.lower(), names, n=1)
    hint = f"did you mean {' or '.join(near)}?" if near else "`streamrl explain` lists all sections"
    text = f"{name} is not a key of a run file; {hint}"
    return RunError(name, None, OneOf(near), text, problem="unknown key")


def _tables(kind: type[Section], name: str, header: str) -> Iterator[Table]:
    texts, bounds, inner = (
        field_texts(kind),
        bounds_of(kind),
        list[tuple[type[Section], str, str]](),
    )
    keys = []
    for field in fields_of(kind):
        key = join_key(name, TRAINER if field.name == FOLLOWERS else field.name)
        found = _section_in(field.type)
        if found is None:
            keys.append(_key(field, key, texts[field.name], bounds))
        else:
            inner.append((found, *_place_of(field.type, key)))
    yield Table(name, header, _paragraph(inspect.getdoc(kind) or ""), tuple(keys))
    for each in inner:
        yield from _tables(*each)


def _place_of(kind: Any, key: str) -> tuple[str, str]:
    """Return the name and header of the tables that a key holds."""
    origin = origin_of(without_none(kind))
    if origin is dict:
        return join_key(key, NAME), f"[{key}.{NAME}]"
    if origin in (list, tuple):
        return join_key(key, PLACE), f"[[{key}]]"
    return key, f"[{key}]"


def _section_in(kind: Any) -> type[Section] | None:
    """Return the section that a type is or holds; None for plain values."""
    kind = without_none(kind)
    if is_section(kind):
        return kind
    return next((each for each in map(_section_in, get_args(kind)) if each is not None), None)


def _key(field: msgspec.structs.FieldInfo, key: str, text: str, bounds: dict[str, Any]) -> Key:
    limits = bounds.get(field.name)
    allowed = allowed_by(without_none(field.type))
    names = ", ".join(map(_written, allowed)) if isinstance(allowed, OneOf) else ""
    numbers = "" if limits is None else limits.text(lambda bound: _bound(field.type, bound))
    return Key(
        name=key,
        type=_type_text(field.type),
        default=_default(field),
        allowed=names or numbers,
        used_by=_used_by(key, text),
        example=f"{key.rpartition('.')[2]} = {_example(field, text)}",
        text=text,
    )


def _bound(kind: Any, bound: float) -> str:
    kind = without_none(kind)
    return quantity_text(kind(bound)) if kind in QUANTITIES else f"{bound:g}"


def _type_text(kind: Any) -> str:
    kind = without_none(kind)
    if kind in QUANTITIES:
        return UNITS[kind]
    if origin_of(kind) in (list, tuple):
        inner = get_args(kind)
        many = Ellipsis in inner or origin_of(kind) is list
        return (
            f"list of {_type_text(inner[0])}"
            if many
            else f"list of {len(inner)}: {', '.join(map(_type_text, inner))}"
        )
    if origin_of(kind) is dict:
        return f"table of {_type_text(get_args(kind)[1])}"
    if choices_of(kind) is not None or origin_of(kind) is Literal:
        return (
            "a name"
            if all(isinstance(each, str) for each in get_args(kind) or ("",)) or choices_of(kind)
            else "a number"
        )
    parts = [each for each in get_args(kind) if each is not NoneType]
    return " or ".join(map(_type_text, parts)) if parts else say(kind)


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    value = _default_value(field)
    return "absent" if value is None else _written(value)


def _default_value(field: msgspec.structs.FieldInfo) -> Any:
    if field.required:
        return None
    return field.default if field.default is not msgspec.NODEFAULT else field.default_factory()


def _written(value: object) -> str:
    """Return a value as TOML has it."""
    if isinstance(value, Bandwidth | Duration | Size):
        return f'"{quantity_text(value)}"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_written, value))}]"
    if isinstance(value, dict):
        return (
            f"{{ {', '.join(f'{key} = {_written(each)}' for key, each in value.items())} }}"
            if value
            else "{}"
        )
    return repr(value)


def _used_by(key: str, text: str) -> tuple[str, ...]:
    if SIMULATED.match(text):
        return ("plan", "simulate")
    return USED_BY.get(key.partition(".")[0], ALL)


def field_texts(kind: type[Section]) -> dict[str, str]:
    """Return the text below each field of a section, those of its base classes included; empty where there is none."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if issubclass(base, Section) and base is not Section:
            found.update(_own_texts(base))
    if kind is AlgorithmChanges:
        found = {
            **field_texts(AlgorithmConfig),
            **{name: text for name, text in found.items() if text},
        }
    return found


@cache
def _own_texts(kind: type) -> dict[str, str]:
    tree = ast.parse(inspect.getsource(sys.modules[kind.__module__]))
    body = next(
        n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == kind.__name__
    )
    found = {}
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = _paragraph(_string_of(after))
    return found


def _string_of(node: ast.AST | None) -> str:
    match node:
        case ast.Expr(value=ast.Constant(value=str(text))):
            return text
    return ""


def _paragraph(text: str) -> str:
    """Return a docstring without line breaks, except before the entries of a list."""
    return re.sub(r"\s*\n\s*(?!- )", " ", inspect.cleandoc(text)).strip()


def _example(field: msgspec.structs.FieldInfo, text: str) -> str:
    """Return a valid value of a key: one from its text, a choice, its default, or one of its type."""
    kind, named = without_none(field.type), EXAMPLE.search(text)
    allowed, default = allowed_by(kind), _default_value(field)
    if isinstance(allowed, OneOf):
        return _written(default if default in allowed else allowed[0])
    if kind in EXAMPLES:
        return _written(default) if default else EXAMPLES[kind]
    if kind is str and named is not None:
        return f'"{named[1]}"'
    if default not in (None, (), {}) and not isinstance(default, bool):
        return _written(default)
    is_list = origin_of(kind) in (list, tuple)
    known = OF_NAMES.get(field.name, "")
    return known if known and known.startswith("[") == is_list else _of_type(kind, default)


def _of_type(kind: Any, default: object) -> str:
    """Return a value of a type: the other one of a switch, one or two entries of a list."""
    if kind is bool:
        return _written(not default)
    if origin_of(kind) in (list, tuple):
        inner = allowed_by(get_args(kind)[0])
        return _written(list(inner[:2])) if isinstance(inner, OneOf) else "[1, 2]"
    return "2"


INTRODUCTION = """# Keys of a run file

Every key, from the program's own structs; `streamrl explain KEY` prints the same for one key. `streamrl explain --markdown`
writes this page. `NAME` is a name that you choose, such as a pool's. `streamrl explain` also takes names of verl, TRL and
prime-rl, such as `num_generations`, and names the key here; [options-compared.md](options-compared.md) has them in tables.

A quantity has its unit: `"20 ms"`, `"1 day 2 h"`, `"80 Gbps"`, `"96 GB"`. A whole number may be short: `"32k"`. Paths
are relative to the run file.

A run file may build on another one: `base = "other.toml"`, above all tables. Tables are merged key by key. Other values,
lists included, replace those of the base. A base may have a base. Paths are relative to the file that wrote them.

`${NAME}` in a text is replaced by the environment variable NAME when the run file is loaded, and records of the run have
the value. A variable that has KEY, TOKEN, SECRET, PASSWORD or CREDENTIAL as a word of its name (`SERVER_API_KEY`) is
refused, except in `rollout.external.key`: there, records have `${NAME}`. Nothing in a record is replaced.

For completion and checks in an editor, begin a run file with `#:schema FILE`, where `streamrl explain --schema > FILE`
wrote FILE. The extensions Even Better TOML and Taplo read it.
"""


OF_CLUSTER_FILES = """## Keys of a cluster file

A cluster file has several jobs that share GPUs ([jobs.md](jobs.md)). Its `[cluster]` is that of a run file. Paths are relative
to the cluster file.
"""


def reference_markdown() -> str:
    """Return the page of all keys, as Markdown."""
    lines = (line for table in tables() for line in _table_lines(table))
    others = (line for table in cluster_tables() for line in _table_lines(table))
    return "\n".join([INTRODUCTION, *lines, OF_CLUSTER_FILES, *others])


def _table_lines(table: Table) -> Iterator[str]:
    yield f"## `{table.header}`\n" if table.name else "## Top level\n"
    yield f"{table.text}\n"
    for key in table.keys:
        allowed = f"; {key.allowed}" if key.allowed else ""
        used = "" if key.used_by == ALL else f" Used by {' and '.join(key.used_by)}."
        is_word = key.default in ("required", "absent")
        default = key.default if is_word else f"default: `{key.default}`"
        yield f"- **`{key.name}`** ({key.type}{allowed}; {default}). {_listed(key.text)}{used} Example: `{key.example}`"
    yield ""


def _listed(text: str) -> str:
    """Return a text as part of an entry of a list: its own list in one line."""
    return text.replace("\n- ", " ").removeprefix("- ")
