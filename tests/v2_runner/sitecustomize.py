"""Let vLLM take its V2 model runner on a CPU: Triton's interpreter computes its kernels.

Python imports this module at its start if its directory is on PYTHONPATH. `TRITON_INTERPRET` must be 1. vLLM uses Triton on
CPUs only if Triton has a back end for them (0.32.0, triton_utils/importing.py). The interpreter needs none.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

LOOKS = "vllm.triton_utils.importing"
"""The module that looks at Triton's back ends."""


class Driver:
    """A back end's driver, as far as vLLM looks at it."""

    @staticmethod
    def is_active() -> bool:
        return True


class AddBackEnd(MetaPathFinder):
    """Adds a back end for CPUs just before vLLM looks."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == LOOKS:
            from triton.backends import backends

            sys.meta_path.remove(self)
            backends["cpu"] = SimpleNamespace(driver=Driver, compiler=None)
        return None


sys.meta_path.insert(0, AddBackEnd())
