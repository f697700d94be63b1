"""What holds for the tests of every file."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def ray_ends_with_its_file() -> Iterator[None]:
    """Leave the Ray cluster that a file's tests joined: a process can join one, and files share processes."""
    yield
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        ray.shutdown()
