"""A digest of the cost model: the code that computes seconds, and the figures that it reads.

Two versions with one digest compute the same seconds. Comments, docstrings and formatting do not count.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from streamrl.runfile.profile_folder import PROFILES, SHIPPED

CODE = (SHIPPED.parent / "sim" / "costs", Path(__file__).parent)
"""Folders of the code that computes seconds and memory."""
FIGURES = (
    "efficiency",
    "engine_memory",
    "engines",
    "frameworks",
    "gpus",
    "measured",
    "models",
    "sync",
    "transports",
)
"""Folders of profiles that this code reads. Errors of predictions and published rows are no part of it."""


@cache
def cost_model_digest() -> str:
    """Return the digest in 8 hexadecimal digits. It takes 0.2 s."""
    found = hashlib.blake2b(digest_size=4)
    for folder in CODE:
        for path in sorted(folder.rglob("*.py")):
            found.update(_meaning(path.read_text(encoding="utf-8")).encode())
    for name in FIGURES:
        for path in sorted((PROFILES / name).rglob("*")):
            if path.is_file():
                found.update(path.relative_to(PROFILES).as_posix().encode())
                found.update(path.read_bytes())
    return found.hexdigest()


def _meaning(code: str) -> str:
    """Return what code does, without its docstrings, comments and line numbers."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = list(_without_texts(node.body))
    return ast.dump(tree)


def _without_texts(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        value = statement.value if isinstance(statement, ast.Expr) else None
        if not (isinstance(value, ast.Constant) and isinstance(value.value, str)):
            yield statement
