"""The JSON Schema of run files, for editors: completion, the meaning of a key under the cursor, misspelt keys and names."""

from __future__ import annotations

from types import NoneType
from typing import Any, Literal, get_args, get_origin

import msgspec

from streamrl.runfile.bases import BASE
from streamrl.runfile.choices import choices_of
from streamrl.runfile.cluster_config import PoolConfig
from streamrl.runfile.config import Run
from streamrl.runfile.errors import Bounds
from streamrl.runfile.field_checks import bounds_of, is_section, without_none
from streamrl.runfile.key_reference import field_texts
from streamrl.runfile.keys import FOLLOWERS, TRAINER
from streamrl.runfile.length_words import CATALOGUE, FIGURES
from streamrl.runfile.roles_config import RolloutConfig, TrainerConfig
from streamrl.runfile.section import Section
from streamrl.runfile.units import QUANTITIES, quantity_pattern
from streamrl.runfile.workload_config import WorkloadConfig

DIALECT = "http://json-schema.org/draft-07/schema#"
"""The dialect that editors' TOML extensions know (Taplo, Even Better TOML)."""
SHORT_NUMBER = r"^\s*[0-9][0-9.,_]*\s*[kKmM][iI]?\s*$"
"""Whole numbers as texts, such as "32k"; see `short_forms`."""
FIGURE = r"^\s*[0-9][0-9.,_]*\s*([kKmM][iI]?)?\s*$"
"""Figures of lengths in words, which need no unit; see `length_words`."""
LIST_PRICE = r"^\s*[A-Za-z]"
"""Names of list prices, such as "runpod/h100"; see `list_prices`."""
TYPES: dict[object, str] = {bool: "boolean", int: "integer", float: "number", str: "string"}

START: dict[type[Section], tuple[str, ...]] = {
    Run: (TRAINER,),
    RolloutConfig: ("pool", "replicas"),
    TrainerConfig: ("pool",),
}
"""Keys that a run file for `streamrl plan` may leave out; see `fill_start`. Other commands ask for them."""

Schema = dict[str, Any]
BASE_TEXT = "Path of a run file that this one builds on, as seen from this file."


def run_file_schema() -> Schema:
    """Return the schema of a run file. It has every key, and refuses others."""
    schema = _section_schema(Run)
    properties = schema["properties"]
    properties[BASE] = {"type": "string", "minLength": 1, "description": BASE_TEXT}
    followers = properties.pop(FOLLOWERS)
    one = properties[TRAINER]
    properties[TRAINER] = {"oneOf": [one, {"type": "array", "items": _anyone(one, followers)}]}
    return {"$schema": DIALECT, "title": "Run file of streamrl", **schema}


def _anyone(leader: Schema, followers: Schema) -> Schema:
    return {"anyOf": [leader, followers["items"]]}


def _section_schema(kind: type[Section]) -> Schema:
    texts, bounds = field_texts(kind), bounds_of(kind)
    properties = {}
    required = []
    for field in msgspec.structs.fields(kind):
        of_key = _schema(field.type, bounds.get(field.name))
        if kind is PoolConfig and field.name == "price":
            of_key = {"anyOf": [of_key, {"type": "string", "pattern": LIST_PRICE}]}
        if kind is WorkloadConfig and field.name == "lengths":
            of_key = {"anyOf": [of_key, _stated_lengths(of_key), *_NAMES_OF_LENGTHS]}
        if texts.get(field.name):
            of_key["description"] = texts[field.name]
        properties[field.name] = of_key
        if field.required and field.name not in START.get(kind, ()):
            required.append(field.name)
    found: Schema = {"type": "object", "additionalProperties": False, "properties": properties}
    return {**found, "required": required} if required else found


_NAMES_OF_LENGTHS: list[Schema] = [
    {"enum": [*CATALOGUE]},
    {"type": "string", "minLength": 1},
]


def _stated_lengths(full: Schema) -> Schema:
    """Return the schema of lengths such as { mean = "6k", p95 = "20k", max = "32k" }."""
    one = {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": FIGURE}]}
    rest = {key: each for key, each in full["properties"].items() if key not in ("kind", "source")}
    properties = {**dict.fromkeys(FIGURES, one), **rest}
    return {**full, "properties": properties, "required": ["mean"]}


def _schema(kind: Any, bounds: Bounds | None = None) -> Schema:
    if len([each for each in get_args(kind) if each is not NoneType]) == 1:
        kind = without_none(kind)
    inner, origin = get_args(kind), get_origin(kind)
    if kind in QUANTITIES:
        return {"type": "string", "pattern": quantity_pattern(kind)}
    if is_section(kind):
        return _section_schema(kind)
    if choices := choices_of(kind):
        return {"anyOf": [{"enum": [*choices.names()]}, {"type": "string", "pattern": ":"}]}
    if origin is Literal:
        return {"enum": [*inner]}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema(inner[1])}
    if origin in (list, tuple):
        return _list_schema(inner)
    if kind in TYPES:
        return _plain_schema(kind, bounds)
    return {"anyOf": [_schema(each, bounds) for each in inner if each is not NoneType]}


def _list_schema(inner: tuple[Any, ...]) -> Schema:
    is_fixed = len(inner) > 1 and Ellipsis not in inner
    if is_fixed:
        size = len(inner)
        items: Any = [_schema(each) for each in inner]
        return {"type": "array", "items": items, "minItems": size, "maxItems": size}
    return {"type": "array", "items": _schema(inner[0])}


def _plain_schema(kind: Any, bounds: Bounds | None) -> Schema:
    found: Schema = {"type": TYPES[kind]}
    if bounds is not None:
        found["exclusiveMinimum" if bounds.excludes_least else "minimum"] = bounds.least
        if bounds.most < float("inf"):
            found["maximum"] = bounds.most
    if kind is int:
        return {"anyOf": [found, {"type": "string", "pattern": SHORT_NUMBER}]}
    return found
