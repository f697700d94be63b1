"""The names for notebooks and scripts: where they are, and that each is imported when it is asked for."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamrl import api

ROOT = Path(__file__).parent.parent
RUN_FILE = ROOT / "examples" / "h20-h800.toml"
SMALL = ["algorithm.prompts_per_step=8", "algorithm.steps=2"]
IMPORTED = """
import sys
from streamrl import api
dir(api)
print(*sorted(n for n in sys.modules if n.split(".")[0] == "streamrl"))
print(*sorted({"numpy", "msgspec", "rich", "simpy", "matplotlib", "jinja2"} & set(sys.modules)))
api.load_run
print("streamrl.runfile.files" in sys.modules, "numpy" in sys.modules, "streamrl.sim" in sys.modules)
"""


def test_the_api_imports_a_name_when_it_is_asked_for_and_nothing_before() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines() == ["streamrl streamrl.api", "", "True False False"], (
        done.stderr
    )


def typed_places() -> Iterator[tuple[str, str]]:
    """Yield what the api imports for type checkers: its own name, and where it is."""
    for node in ast.walk(ast.parse(Path(api.__file__).read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("streamrl"):
            yield from ((a.asname or a.name, f"{node.module}:{a.name}") for a in node.names)


def test_type_checkers_know_every_name_of_the_api_from_where_it_is() -> None:
    assert dict(typed_places()) == api.PLACES
    assert api.__all__ == sorted(api.PLACES)
    assert set(api.PLACES) <= set(dir(api))


@pytest.mark.parametrize("name", api.PLACES)
def test_every_name_of_the_api_is_where_its_table_says(name: str) -> None:
    found = getattr(api, name)
    assert callable(found) and found.__doc__
    assert f"{found.__module__}:{found.__name__}" == api.PLACES[name]


def test_an_unknown_name_of_the_api_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'simulat'"):
        _ = api.simulat


def test_the_api_goes_from_a_run_file_to_its_figures_and_a_report(tmp_path: Path) -> None:
    trace = api.simulate(api.load_run(RUN_FILE, SMALL))
    (tmp_path / "trace.jsonl").write_bytes(trace.encode())
    assert api.measure(api.read_trace(tmp_path / "trace.jsonl")) == api.measure(trace)
    page = api.report([tmp_path])
    assert page.startswith("<!doctype html>") and tmp_path.name in page
