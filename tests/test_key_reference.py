"""The reference of every key, `streamrl explain`, and the JSON Schema of run files."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from streamrl.runfile.key_reference import Key, Table, find, reference_markdown, tables
from streamrl.runfile.run_file_schema import run_file_schema
from tests.command_line import streamrl

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted(
    path for folder in ("", "layouts") for path in (ROOT / "examples" / folder).glob("*.toml")
)
SCHEMA = run_file_schema()
KEYS = [key for table in tables() for key in table.keys]


def schema_of(name: str) -> dict[str, Any]:
    """Return the schema of one key, found by its dotted name."""
    found = SCHEMA
    for part in name.split("."):
        if "oneOf" in found:  # one trainer, or a list of them
            found = found["oneOf"][1]["items"]["anyOf"][1] if part == "N" else found["oneOf"][0]
            if part == "N":
                continue
        if part == "N":
            found = found["items"]
        elif part == "NAME":
            found = found["additionalProperties"]
        else:
            found = found["properties"][part]
    return found


def named_keys(table: object, key: str = "") -> Iterator[str]:
    """Yield the dotted names of the plain values in a run file."""
    if isinstance(table, dict):
        for name, value in table.items():
            yield from named_keys(value, f"{key}.{name}" if key else name)
    elif isinstance(table, list) and table and isinstance(table[0], dict):
        for place, value in enumerate(table):
            yield from named_keys(value, f"{key}.{place}")
    else:
        yield key


def test_every_key_has_a_meaning_and_each_table_a_text() -> None:
    assert [key.name for key in KEYS if not key.text] == []
    assert [table.name for table in tables() if not table.text] == []


def test_every_example_is_a_line_that_its_key_takes() -> None:
    for key in KEYS:
        ((name, value),) = tomllib.loads(key.example).items()
        assert name == key.name.rpartition(".")[2]
        errors = list(jsonschema.Draft7Validator(schema_of(key.name)).iter_errors(value))
        assert not errors, (key.name, errors)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_run_files_match_the_schema_and_the_reference(path: Path) -> None:
    table = tomllib.loads(path.read_text())
    jsonschema.validate(table, SCHEMA)
    for name in named_keys(table):
        found = find(name)
        assert found.name.rpartition(".")[2] in (name.rpartition(".")[2], "NAME", "fields")


def test_the_schema_refuses_what_a_run_file_must_not_have() -> None:
    table = tomllib.loads((ROOT / "examples" / "plan-7b.toml").read_text())
    table["rollout"]["max_runing"] = 8
    with pytest.raises(jsonschema.ValidationError, match="max_runing"):
        jsonschema.validate(table, SCHEMA)
    del table["rollout"]["max_runing"]
    table["policies"]["system"] = "stream"
    with pytest.raises(jsonschema.ValidationError, match="stream-async"):
        jsonschema.validate(table, SCHEMA)


def test_figures_of_a_key_are_those_of_the_program() -> None:
    key = find("rollout.max_running")
    assert isinstance(key, Key)
    assert (key.default, key.allowed, key.example) == ("256", "at least 1", "max_running = 256")
    price = find("cluster.pools.h20.price")
    assert isinstance(price, Key)
    assert price.name == "cluster.pools.NAME.price"
    patience = find("execute.patience")
    assert isinstance(patience, Key)
    assert (patience.default, patience.used_by) == ('"1 min"', ("execute",))
    table = find("[[faults]]")
    assert isinstance(table, Table)
    assert [each.name for each in table.keys][:2] == ["faults.N.kind", "faults.N.step"]


def test_a_key_that_execute_cannot_follow_says_so() -> None:
    key = find("rollout.kv_dtype")
    assert isinstance(key, Key)
    assert key.used_by == ("plan", "simulate")


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [("max_running", "rollout.max_running"), ("plan.tolernce", "plan.tolerance")],
)
def test_an_unknown_key_names_the_likeliest(wrong: str, meant: str) -> None:
    result = streamrl("explain", wrong)
    assert result.returncode == 2
    assert f"did you mean {meant}" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("rollout.max_running",), "used by  plan, simulate, execute"),
        (("simulate",), "max_steps"),
        ((), "[[verifier.reward]]"),
        (("plan.budget", "--json"), '"example":"budget = 2000"'),
    ],
)
def test_explain_prints_a_key_a_section_and_all_sections(
    arguments: tuple[str, ...], expected: str
) -> None:
    assert expected in streamrl("explain", *arguments).stdout


def test_the_stored_page_and_schema_are_those_of_this_version() -> None:
    """Mend with `streamrl explain --markdown > docs/keys.md` and `--schema > docs/run-file.schema.json`."""
    assert (ROOT / "docs" / "keys.md").read_text() == reference_markdown()
    stored = json.loads((ROOT / "docs" / "run-file.schema.json").read_text())
    assert stored == SCHEMA
