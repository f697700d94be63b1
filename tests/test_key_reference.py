"""The reference of every key, `streamrl explain`, and the JSON Schema of run files."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from jinja2 import Environment
from jinja2.meta import find_undeclared_variables

from streamrl.doctor.invalid_keys import closest_first
from streamrl.runfile.errors import OneOf, RunError
from streamrl.runfile.field_checks import find_errors
from streamrl.runfile.key_reference import Key, Table, find, reference_markdown, tables
from streamrl.runfile.length_words import CATALOGUE
from streamrl.runfile.other_names import OTHER_NAMES, key_meant
from streamrl.runfile.run_file_schema import run_file_schema
from streamrl.runfile.short_forms import in_full
from tests.command_line import streamrl
from tests.runs import small_run

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
        elif "anyOf" in found:  # also in words
            found = found["anyOf"][0]["properties"][part]
        else:
            found = found["properties"][part]
    return found


def named_keys(table: object, key: str = "") -> Iterator[str]:
    """Yield the dotted names of the plain values in a run file. The names below `fields` and `arguments` are the user's own."""
    if isinstance(table, dict) and not key.endswith((".fields", ".arguments")):
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


def with_example(key: Key) -> dict[str, Any]:
    """Return a table with the example of one key, in the first place of a list and in the pool h20."""
    table: dict[str, Any] = {}
    *parents, last = key.name.split(".")
    place: Any = table
    for parent, after in pairwise([*parents, last]):
        if parent == "N":
            place = place[0]
        else:
            place = place.setdefault(
                "h20" if parent == "NAME" else parent, [{}] if after == "N" else {}
            )
    place.update(tomllib.loads(key.example))
    return table


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
def test_the_reader_of_run_files_takes_every_example(key: Key) -> None:
    name = key.name.replace(".N.", ".0.").replace(".NAME.", ".h20.")
    told = [error for error in find_errors(in_full(with_example(key))) if error.key == name]
    assert told == [], str(told[0])


def test_every_example_of_a_template_uses_a_field() -> None:
    for key in KEYS:
        if "Jinja" in key.text and not key.name.endswith(".system"):
            (text,) = tomllib.loads(key.example).values()
            assert find_undeclared_variables(Environment().parse(text)), (key.name, text)


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


COUNTS = ["32k", "32K", "32Ki", " 1.5 M ", "1,000k"]
DURATIONS = [
    "20 ms",
    "3 days",
    "1 day 2 h",
    "1 day, 2 h",
    "2 Hours and 5 minutes",
    "2h30min",
    "1e3 s",
]
BANDWIDTHS = ["80 Gbps", "400 GB/s", "3.2 Tbit/s", "10 GiB/s", "80gbps", "1_000 Mb/s"]
SIZES = ["96 GB", "80GiB", "1.5 TB", "512 B"]
LENGTHS = [
    "math reasoning",
    "Chat",
    "r1-distill-aime",
    {"mean": "6k"},
    {"mean": 6000, "p95": "20k", "max": "32k"},
    {"mean": "6000", "prompt_tokens": "2k", "scale": 2.0},
    {"kind": "histogram", "source": "servegen-r1"},
]
SHORT_FORMS: dict[str, list[Any]] = {
    "rollout.max_tokens": COUNTS,
    "algorithm.prompts_per_step": COUNTS,
    "policies.max_staleness": [1, "1k"],
    "plan.deadline": DURATIONS,
    "cluster.pools.h20.minimum_term": DURATIONS,
    "cluster.pools.h20.node_bandwidth": BANDWIDTHS,
    "cluster.pools.h20.host_memory": SIZES,
    "cluster.pools.h20.gpu": ["H20", "nvidia-h20"],
    "cluster.pools.h20.price": [2, 2.2],
    "cluster.pools.h20": [
        {"gpu": "h100", "price": "lambda/h100"},
        {"gpu": "H100-SXM", "nodes": 4, "price": "coreweave/h100/spot"},
    ],
    "model.name": ["Qwen/Qwen2.5-7B", "qwen2.5-7b"],
    "workload.lengths": LENGTHS,
}
WRONG: dict[str, list[Any]] = {
    "rollout.max_tokens": ["32", "k", "32 tokens", "-1k", ""],
    "plan.deadline": ["3", 3, "3 GB", "-3 s", "2026-01-01", "", "3 fortnights"],
    "cluster.pools.h20.node_bandwidth": ["80", 80, "80 GB", "80 kilo/s"],
    "cluster.pools.h20.host_memory": ["96", 96, "96 gb", "96 Gbps"],
    "cluster.pools.h20.price": ["2.20", True],
    "workload.lengths": [
        "",
        6000,
        {},
        {"p95": "20k"},
        {"mean": "6k", "median": 3},
        {"mean": "long"},
    ],
}


def with_value(name: str, value: Any) -> dict[str, Any]:
    """Return the run file of an example with another value of one key."""
    table = tomllib.loads((ROOT / "examples" / "plan-7b.toml").read_text())
    *parents, last = name.split(".")
    place = table
    for parent in parents:
        place = place.setdefault(parent, {})
    place[last] = value
    return table


def is_accepted(table: dict[str, Any]) -> bool:
    """Return whether an editor accepts a run file."""
    return jsonschema.Draft7Validator(SCHEMA).is_valid(table)


def is_readable(table: dict[str, Any]) -> bool:
    """Return whether keys and types are right as `load_run` reads them."""
    try:
        return not [*find_errors(in_full(table))]
    except ValueError:
        return False


@pytest.mark.parametrize("name", SHORT_FORMS)
def test_the_schema_accepts_short_forms_as_the_reader_does(name: str) -> None:
    for value in SHORT_FORMS[name]:
        table = with_value(name, value)
        assert is_accepted(table), value
        assert is_readable(table), value


@pytest.mark.parametrize("name", WRONG)
def test_the_schema_refuses_what_no_short_form_is(name: str) -> None:
    for value in WRONG[name]:
        assert not is_accepted(with_value(name, value)), value


def test_the_schema_accepts_all_lengths_in_words_with_their_completion() -> None:
    for words in CATALOGUE:
        assert is_accepted(with_value("workload.lengths", words))
    forms = SCHEMA["properties"]["workload"]["properties"]["lengths"]["anyOf"]
    assert {"enum": [*CATALOGUE]} in forms


def test_a_file_to_plan_for_needs_no_start_values() -> None:
    table = tomllib.loads((ROOT / "examples" / "plan-7b.toml").read_text())
    del table["trainer"], table["rollout"]["pool"], table["rollout"]["replicas"]
    assert is_accepted(table)
    del table["rollout"]["max_tokens"]
    assert not is_accepted(table)


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
    [
        ("max_running", "rollout.max_running"),
        ("plan.tolernce", "plan.tolerance"),
        ("Plan.Tolerence", "plan.tolerance"),
        ("trainer.changes", "trainer.resize"),
        ("algorithm.lr", "algorithm.learning_rate"),
        ("save_freq", "execute.checkpoint_every"),
        ("rollout.n", "algorithm.group_size"),
        ("rollout.val_kwargs.n", "evaluation.samples"),
        ("max_steps", "algorithm.steps"),
        ("gradient_accumulation_steps", "trainer.max_tokens_per_pass"),
        ("warmup_ratio", "algorithm.optimizer.warmup_steps"),
        ("total_epochs", "algorithm.steps"),
    ],
)
def test_an_unknown_key_names_the_likeliest(wrong: str, meant: str) -> None:
    with pytest.raises(RunError, match=f"did you mean {meant}"):
        find(wrong)


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("execute.save_steps", "execute.checkpoint_every"),
        ("execute.SAVE_STEPS", "execute.checkpoint_every"),
        ("algorithm.lr", "algorithm.learning_rate"),
        ("algorithm.Learning_Rate", "algorithm.learning_rate"),
        ("rollout.lr", "algorithm.learning_rate"),
    ],
)
def test_an_unknown_key_of_a_run_file_has_the_likeliest_key(wrong: str, meant: str) -> None:
    with pytest.raises(RunError, match="did you mean") as found:
        small_run({wrong: 5})
    allowed = found.value.allowed
    assert isinstance(allowed, OneOf) and allowed[0] == meant


def test_another_name_in_the_section_of_a_secondary_trainer_means_its_own_key() -> None:
    assert key_meant("trainer.1.algorithm.lr") == "trainer.1.algorithm.learning_rate"


def test_a_key_without_effect_says_what_the_same_name_means_elsewhere() -> None:
    with pytest.raises(RunError, match=r"another framework's beta is algorithm\.kl_coefficient$"):
        small_run({"algorithm.beta": 0.1})


def test_the_page_of_compared_options_has_all_other_names_beside_their_keys() -> None:
    rows = (ROOT / "docs" / "options-compared.md").read_text().splitlines()
    for name, key in OTHER_NAMES.items():
        last = key.removeprefix("algorithm.optimizer.").rpartition(".")[2]
        assert any(name in row and last in row for row in rows), (name, key)
        assert find(key).name == key


def test_a_fix_of_a_value_compares_names_without_case_first() -> None:
    assert closest_first("LoRA", ("full", "lora", "delta"))[0] == "lora"


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
