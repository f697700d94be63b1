"""Each constant of the cost model is on one page, with the sources that it rests on."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.sim.costs.training.profile import load_training_profile
from streamrl.sim.fidelity import constants
from streamrl.sim.fidelity.constants import (
    PAGE,
    ROOT,
    Constant,
    entry_of,
    module_constants,
    page_lines,
    profile_files,
    profile_numbers,
    registry,
    training_sources,
)
from streamrl.sim.fidelity.published_rows import publisher

LISTED = (
    *sorted((ROOT / "streamrl" / "sim" / "costs").rglob("*.py")),
    *(
        ROOT / "streamrl" / "hardware" / f"{name}.py"
        for name in ("activations", "memory", "engine_memory")
    ),
)
"""Modules whose constants are all listed."""


@pytest.mark.parametrize("file", profile_files())
def test_every_constant_of_a_profile_says_what_it_rests_on(file: str) -> None:
    numbers = list(profile_numbers(file))
    missing = [key for key, _ in numbers if entry_of(file, key) is None]
    assert not missing, f"add an entry to profiles/constants.toml for {missing} of {file}"
    page = (ROOT / "docs" / PAGE).read_text()
    assert not [key for key, _ in numbers if f"| `{key}`, " not in page]


def test_every_constant_of_the_cost_model_in_code_is_listed() -> None:
    listed = {(entry.file, name) for entry in registry().code for name in entry.names}
    for path in LISTED:
        file = str(path.relative_to(ROOT))
        missing = [name for name in module_constants(path) if (file, name) not in listed]
        assert not missing, f"add an entry to profiles/constants.toml for {missing} of {file}"


def test_the_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / PAGE).read_text().splitlines() == list(page_lines()), (
        "run streamrl validate --output docs"
    )


def test_no_entry_is_about_nothing() -> None:
    keys = [(file, key) for file in profile_files() for key, _ in profile_numbers(file)]
    used = {id(entry_of(file, key)) for file, key in keys}
    assert not [entry for entry in registry().profile if id(entry) not in used]


@pytest.mark.parametrize(
    ("kind", "sources", "standing"),
    [
        ("published", ("a", "b"), "verified"),
        ("fitted", ("a",), "**unverified**: one source"),
        ("published", (), "**unverified**: assumption"),
        ("assumption", ("a", "b"), "**unverified**: assumption"),
        ("code", (), "exact"),
    ],
)
def test_one_source_does_not_verify_a_constant(
    kind: constants.Kind, sources: tuple[str, ...], standing: str
) -> None:
    made = Constant(where="", key="", value="1", what="", kind=kind, sources=sources)
    assert made.standing == standing


def test_a_fitted_constant_rests_on_the_rows_that_move_with_it() -> None:
    sources = training_sources()
    assert "llm-foundry" not in sources["permutation_traffic"], "it trained no mixtures"
    assert "llm-foundry" in sources["collective"] and len(sources["collective"]) > 1


def test_pages_of_one_repository_are_one_source() -> None:
    assert publisher("Megatron-Bridge 067f987 sft") == publisher("Megatron-Bridge 067f987 pretrain")
    assert publisher("NVIDIA/Megatron-LM PR 5728 (2026-07-09)") == publisher("Megatron-LM dev")
    assert publisher("NeMo Automodel docs/x") == "NeMo Automodel"


def test_docstrings_of_constants_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text('A, B = 1, 2.5\n"""Two numbers (X et al. 2020). More."""\nNAMES = ("a",)\n')
    assert module_constants(path) == {
        "A": ("1", "Two numbers (X et al. 2020)"),
        "B": ("2.5", "Two numbers (X et al. 2020)"),
    }


def test_a_rate_whose_source_names_no_table_is_an_assumption() -> None:
    profile = load_training_profile()
    standing = {each.key: each.standing for each in constants.all_constants()}
    for kind, rates in (("experts", profile.experts), ("experts_fp8", profile.experts_fp8)):
        for gpu, rate in rates.items():
            is_measured = "profiles/measured/" in rate.source
            expected = constants.ONE_TABLE if is_measured else "**unverified**: assumption"
            assert standing[f"{kind}.{gpu}.flops"] == expected
            assert is_measured or rate.tier == "roofline"
