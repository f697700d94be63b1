"""Notebooks run from top to bottom, and hold no logic of their own."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from streamrl.runfile.files import load_run, write_run

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
EXAMPLES = NOTEBOOKS[0].parent.parent / "examples"
SHORT = {
    "02_bubbles": ["algorithm.prompts_per_step=8", "simulate.max_steps=6"],
    "03_plan_a_cluster": [
        *("algorithm.prompts_per_step=16", "simulate.max_steps=4", "plan.finalists=1"),
        *("plan.rollout_tensor_parallel=[1]", "plan.trainer_tensor_parallel=[4]"),
        *("plan.micro_batch=[2]", "plan.sync_modes=['full']"),
        *("cluster.pools.h20.nodes=2", "cluster.pools.h800.nodes=2", "plan.seeds=1"),
        *("plan.systems=['stream-async', 'colocated']", "plan.dispatch=['least-loaded']"),
        *("plan.rollout_gpus=[8]", "plan.trainer_gpus=[8]", "plan.order=['fifo']"),
    ],
}
"""What makes the run of a notebook small: that it runs does not depend on how much it simulates."""
LOGIC = (ast.FunctionDef, ast.ClassDef, ast.Lambda, ast.If, ast.For, ast.While, ast.Try)


def code_cells(path: Path) -> list[str]:
    notebook = nbformat.read(path, as_version=4)
    sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return [source.replace("%matplotlib inline\n", "") for source in sources]


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_with_its_pictures(path: Path) -> None:
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert any("image/png" in output.get("data", {}) for cell in cells for output in cell.outputs)
    assert all(cell.execution_count for cell in cells)
    assert not any(output.output_type == "error" for cell in cells for output in cell.outputs)
    assert not re.search(r"/(work|root|home|tmp)/", path.read_text(encoding="utf-8"))


def with_a_small_run(path: Path, directory: Path) -> nbformat.NotebookNode:
    """Return a notebook whose `RUN_FILE` is a smaller copy of the example that its first cell names."""
    notebook = nbformat.read(path, as_version=4)
    first = next(n for n, cell in enumerate(notebook.cells) if cell.cell_type == "code")
    (example,) = re.findall(r'([\w-]+\.toml)"', notebook.cells[first].source)
    small = directory / example
    write_run(load_run(EXAMPLES / example, SHORT.get(path.stem, [])), small)
    cell = nbformat.v4.new_code_cell(f"RUN_FILE = type(RUN_FILE)({str(small)!r})")
    notebook.cells.insert(first + 1, cell)
    return notebook


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_draws(path: Path, tmp_path: Path) -> None:
    notebook = with_a_small_run(path, tmp_path)
    resources = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, timeout=120, resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_holds_no_logic(path: Path) -> None:
    for source in code_cells(path):
        found = [type(n).__name__ for n in ast.walk(ast.parse(source)) if isinstance(n, LOGIC)]
        assert found == [], source


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_imports_nothing_of_the_project_but_its_api(path: Path) -> None:
    modules = [name for source in code_cells(path) for name in imported(ast.parse(source))]
    ours = [name for name in modules if name.split(".")[0] == "streamrl"]
    assert set(ours) == {"streamrl.api"}


def imported(tree: ast.Module) -> Iterator[str]:
    """Yield the module of every import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
