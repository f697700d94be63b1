"""Errors of a run file: one line in its own words for every key of every section, and the same as data."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import pytest

from streamrl.runfile.checks import CHECKS
from streamrl.runfile.choices import choices_of
from streamrl.runfile.config import Run
from streamrl.runfile.errors import Bounds, OneOf, RunError
from streamrl.runfile.field_checks import BOUNDS, check_bounds, find_errors, sections_of
from streamrl.runfile.files import make_run
from streamrl.runfile.keys import FOLLOWERS, join_key, split_key, split_trainers
from streamrl.runfile.section import Section
from streamrl.runfile.units import Bandwidth, Duration, Size, read_quantity
from tests.command_line import streamrl
from tests.runs import make_table, small_run

VALUES: dict[Any, list[Any]] = {
    int: [0.5, 3.0, "x", True, float("nan"), [1], {"a": 1}, 10**30],
    float: ["x", True, [0.5], {"a": 1}, 10**400],
    str: [3, 0.5, True, ["x"], {"a": 1}],
    bool: ["maybe", 1, 0.0, [True]],
    list: [3, "x", True, {"a": 1}],
    tuple: [3, "x", True, {"a": 1}, ["one", "two", "three"], [[0.5, 1]]],
    dict: [3, "x", True, ["x"]],
    Section: [3, "x", True, ["x"]],
    Bandwidth: [5, 0.5, "80", "80 parsecs", True, ["1 Gbps"]],
    Duration: [5, 0.5, "80", "80 parsecs", True, ["1 s"]],
    Size: [5, 0.5, "80", "80 parsecs", True, ["1 GB"]],
    Literal: ["no-such-name", "", 0.25, True, ["full"]],
    Annotated: ["no-such-name", "", 0.25, True, ["full"], "no_such_module:Class", "math:sin", ":"],
}
"""What no key of a type can be."""
MSGSPEC = ("Expected", "Object", "Invalid", "`", "$")
"""Words that a run file knows nothing of."""


def keys(kind: Any = Run, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every key with its type; of pools the one called far, of links the first."""
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if name == FOLLOWERS:
            continue  # a run file writes them as further trainers
        options = [each for each in get_args(hint) if each is not NoneType]
        inner = options[0] if NoneType in get_args(hint) else hint
        yield join_key(key, name), inner
        path = join_key(key, name)
        if get_origin(inner) in (dict, list) and is_section(get_args(inner)[-1]):
            path, inner = (
                join_key(path, "far" if get_origin(inner) is dict else 0),
                get_args(inner)[-1],
            )
        if is_section(inner):
            yield path, inner
            yield from keys(inner, path)


def is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def wrong_values(kind: Any) -> list[Any]:
    found = VALUES[Section if is_section(kind) else get_origin(kind) or kind]
    if kind == tuple[str, ...]:  # any list of texts is one of its values
        found = [each for each in found if each != ["one", "two", "three"]]
    pairs = tuple[tuple[float, float], ...]
    return found[:-1] if kind == pairs else found  # [[0.5, 1]] is a pair of numbers


KEYS = dict(keys())


def table_with(key: str, value: object) -> dict[str, Any]:
    """Return the small run file with one key replaced, in tables and lists too."""
    *parents, last = split_key(key)
    table = make_table()
    if parents == ["environment"]:
        table["environment"] = {"max_turns": 4, "max_context": 4096}
    place: Any = table
    for part in parents:
        place = place[int(part)] if isinstance(place, list) else place.setdefault(part, {})
    if isinstance(place, list):
        place[int(last)] = value
    else:
        place[last] = value
    return table


def error_of(table: dict[str, Any]) -> RunError:
    with pytest.raises(RunError) as caught:
        make_run(table)
    line = str(caught.value)
    assert len(line.splitlines()) == 1 and not any(word in line for word in MSGSPEC), line
    return caught.value


def test_the_walk_finds_optional_and_nested_sections() -> None:
    assert {"workload.lengths.kind", "cluster.pools.far.gpu", "cluster.links.0.latency"} <= set(
        KEYS
    )
    assert len(KEYS) > 100


@pytest.mark.parametrize("key", KEYS)
def test_a_value_of_a_wrong_type_is_refused_in_one_line_with_key_and_value(key: str) -> None:
    for value in wrong_values(KEYS[key]):
        if key == "workload.lengths" and isinstance(value, str):
            continue  # a name of profiles/lengths
        error = error_of(table_with(key, value))
        assert error.key.startswith(key) and error.key in str(error)
        assert repr(error.value)[:80] in str(error), str(error)


@pytest.mark.parametrize("key", [key for key, kind in KEYS.items() if get_origin(kind) is Literal])
def test_a_wrong_name_is_refused_with_all_names_in_their_order(key: str) -> None:
    error = error_of(table_with(key, "no-such-name"))
    assert error.allowed == OneOf(get_args(KEYS[key]))
    assert f"{key} must be one of {', '.join(map(str, error.allowed))}" in str(error) or (
        len(error.allowed) == 1 and f"must be {error.allowed[0]!r}" in str(error)
    )


SECTIONS = {key: kind for key, kind in KEYS.items() if is_section(kind)}


@pytest.mark.parametrize("section", ["", *SECTIONS])
def test_an_unknown_key_is_refused_with_the_nearest_one_of_its_section(section: str) -> None:
    kind = SECTIONS.get(section, Run)
    for name in kind.__struct_fields__:
        if name == FOLLOWERS:
            continue  # a run file writes them as further trainers
        key = join_key(section, f"{name}z")
        error = error_of(table_with(key, 1))
        assert (error.key, error.value, error.problem) == (key, 1, "unknown key")
        assert isinstance(error.allowed, OneOf) and join_key(section, name) in error.allowed
        assert f"{key} is not a key of a run file; did you mean " in str(error)


@pytest.mark.parametrize("section", ["", *SECTIONS])
def test_a_missing_key_is_named_with_what_it_may_be(section: str) -> None:
    kind = SECTIONS.get(section, Run)
    for field in msgspec.structs.fields(kind):
        if not field.required:
            continue
        table = table_with(join_key(section, field.name), None)
        place: Any = table
        for part in split_key(section) if section else []:
            place = place[int(part)] if isinstance(place, list) else place[part]
        del place[field.name]
        error = error_of(table)
        assert error.key == join_key(section, field.name) and error.problem == "missing key"
        assert f"{error.key} is missing: it must be " in str(error)


def test_the_kind_of_lengths_is_refused_with_its_choices() -> None:
    error = error_of(table_with("workload.lengths.kind", "lognormal"))
    assert str(error) == (
        "workload.lengths.kind must be one of histogram, empirical, groups, trace, stated, episodes, got 'lognormal'"
    )


def test_a_whole_number_that_may_be_absent_is_called_so() -> None:
    error = error_of(table_with("policies.max_replicas", 0.5))
    assert str(error) == "policies.max_replicas must be a whole number (or absent), got 0.5"
    assert error.allowed is int


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("rollout.virtual_stages", "trainer.virtual_stages"),
        ("replicas", "rollout.replicas"),
        ("workload.kind", "lengths.kind"),
        ("trainer.max_stalenes", "policies.max_staleness"),
    ],
)
def test_a_key_of_another_section_is_told_where_it_stands(key: str, meant: str) -> None:
    assert str(error_of(table_with(key, 1))).endswith(f"; did you mean {meant}?")


def test_a_table_without_errors_is_a_run_and_one_with_errors_is_none() -> None:
    values = [3, 0.5, float("nan"), 10**30, "x", "1 s", "1 GB/s", True, [], [1], ["x"], {"a": 1}]
    for key in KEYS:
        for value in values:
            table = table_with(key, value)
            try:
                msgspec.convert(split_trainers(table), Run, dec_hook=read_quantity)
            except (ValueError, NotImplementedError):
                assert list(find_errors(table)), (key, value)
            else:
                kinds = [KEYS[key], *get_args(KEYS[key])]
                is_choice = any(choices_of(kind) is not None for kind in kinds) and value != []
                is_refused = value == 10**30 or is_choice
                assert bool(list(find_errors(table))) == is_refused, (key, value)


# Bounds -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_what_is_no_finite_number_within_bounds_is_refused(value: float) -> None:
    floats = [key for key, kind in KEYS.items() if kind is float and bounds_of(key)]
    assert {"rollout.memory_utilization", "failures.per_gpu_day", "sync.changed_share"} <= set(
        floats
    )
    for key in floats:
        error = error_of(table_with(key, value))
        assert error.key == key and error.allowed == bounds_of(key)
        assert f"{key} must be {error.allowed}, got {value}" == str(error)


def test_a_bandwidth_past_all_bounds_is_refused() -> None:
    error = error_of(table_with("cluster.links.0.bandwidth", "1e999 Gbps"))
    assert str(error) == "cluster.links.0.bandwidth: '1e999 Gbps' is more than a number can hold"


@pytest.mark.parametrize("key", ["framework.step_time", "framework.switch_time"])
def test_a_framework_takes_no_less_than_no_time(key: str) -> None:
    assert str(error_of(table_with(key, "-1 s"))).startswith(f"{key}")
    assert make_run(table_with(key, "0 s"))


def test_only_a_pipeline_has_several_slices_of_the_model_on_a_stage() -> None:
    error = error_of(table_with("trainer.virtual_stages", 2))
    assert (error.key, error.value) == ("trainer.virtual_stages", 2)
    assert str(error) == (
        "trainer.virtual_stages must be 1 if trainer.pipeline_parallel is 1, got 2"
    )
    make_run(make_table({"trainer.pipeline_parallel": 2, "trainer.virtual_stages": 2}))


def bounds_of(key: str) -> Bounds | None:
    *parents, last = split_key(key)
    section = KEYS[".".join(parents)] if parents else Run
    return BOUNDS.get(section, {}).get(last)


def test_every_bounded_key_is_there() -> None:
    for section, bounds in BOUNDS.items():
        assert set(bounds) <= set(section.__struct_fields__), section


def test_counts_of_a_pool_and_a_side_are_at_least_one() -> None:
    for key in (
        *("cluster.pools.far.nodes", "trainer.data_parallel"),
        *("trainer.virtual_stages", "framework.optimizer_steps", "framework.epochs"),
    ):
        assert error_of(table_with(key, 0)).allowed == Bounds(1)
    assert error_of(table_with("execute.threads", 100_000)).allowed == Bounds(1, 1024)
    check_bounds(sections_of(small_run()))


@pytest.mark.parametrize("key", ["execute.output", "workload.prompts", "costs.profile"])
def test_an_empty_path_is_not_the_directory_of_the_run_file(key: str) -> None:
    assert str(error_of(table_with(key, ""))) == f"{key} must name a path, got ''"


# Data ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "key", "allowed", "others"),
    [
        ({"rollout.pool": "moon"}, "rollout.pool", OneOf(["far", "near"]), ()),
        ({"rollout.tensor_parallel": 3}, "rollout.tensor_parallel", OneOf([1, 2, 4, 8]), ()),
        (
            {"rollout.replicas": 9},
            "rollout.replicas",
            None,
            ("rollout.tensor_parallel", "cluster.pools.far.nodes"),
        ),
        (
            {"sync.mode": "delta", "model.dtype": "float32"},
            "sync.mode",
            OneOf(["full", "lora"]),
            ("model.dtype",),
        ),
        (
            {"workload.lengths.prompt_tokens": 3000},
            "workload.lengths.prompt_tokens",
            Bounds(1, 2048),
            ("workload.max_prompt_tokens",),
        ),
        ({"plan": {"max_staleness": [1, -1]}}, "plan.max_staleness", Bounds(0), ()),
    ],
)
def test_a_contradiction_says_as_data_what_its_line_says(
    changes: dict[str, Any], key: str, allowed: object, others: tuple[str, ...]
) -> None:
    error = error_of(make_table(changes))
    assert (error.key, error.allowed, error.others) == (key, allowed, others)


def test_an_error_crosses_to_another_process_whole() -> None:
    error = error_of(make_table({"rollout.replicas": 9}))
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_all_checks_pass_for_a_sound_run() -> None:
    for check in CHECKS:
        check(small_run())


# Keys ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names", [["cluster", "pools", "dc1.h20", "gpu"], ["a b"], ['"', "ä"], ["", "\n"], ["0", "-"]]
)
def test_a_key_is_split_into_what_it_was_joined_from(names: list[str]) -> None:
    key = ""
    for name in names:
        key = join_key(key, name)
    assert split_key(key) == names and len(key.splitlines()) == 1


@pytest.mark.parametrize("key", ["", ".", "a.", ".a", "a..b", 'a"b', '"a', 'a."b'])
def test_what_is_no_key_is_not_split(key: str) -> None:
    with pytest.raises(ValueError, match="is not a dotted key"):
        split_key(key)


def test_a_pool_whose_name_has_a_dot_is_named_and_reached() -> None:
    table = make_table({"rollout.pool": "dc1.far"})
    table["cluster"]["pools"]["dc1.far"] = {"gpu": "h20", "nodez": 1}
    assert error_of(table).key == 'cluster.pools."dc1.far".nodez'


def test_a_command_names_every_error_of_a_run_file(tmp_path: Path) -> None:
    text = (Path(__file__).parents[1] / "examples" / "plan-7b.toml").read_text()
    wrong = tmp_path / "wrong.toml"
    for changes, expected in (
        (
            {"max_running": "max_runing", '"ppo"': '"po"'},
            ("rollout.max_runing is not", "algorithm.name must be"),
        ),
        (
            {"= 256": "= 0", "0.001": "-1"},
            ("rollout.max_running must be", "algorithm.kl_coefficient must be"),
        ),
    ):
        changed = text
        for old, new in changes.items():
            changed = changed.replace(old, new)
        wrong.write_text(changed)
        result = streamrl("plan", wrong, "-o", tmp_path / "plan")
        lines = result.stderr.splitlines()
        assert result.returncode == 2
        assert len(lines) == len(expected)
        for line, begin in zip(lines, expected, strict=True):
            assert line.startswith(f"streamrl: {begin}")
