"""Notebooks run from top to bottom, and hold no logic of their own."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
LOGIC = (ast.FunctionDef, ast.ClassDef, ast.Lambda, ast.If, ast.For, ast.While, ast.Try)


def code_cells(path: Path) -> list[str]:
    notebook = nbformat.read(path, as_version=4)
    sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return [source.replace("%matplotlib inline\n", "") for source in sources]


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_draws(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, timeout=120, resources={"metadata": {"path": str(path.parent)}}
    ).execute()
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
    ours = [name for name in modules if name.split(".")[0] in ("streamrl", "sim", "executor")]
    assert set(ours) == {"streamrl.api"}


def imported(tree: ast.Module) -> Iterator[str]:
    """Yield the module of every import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells)
