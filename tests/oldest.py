"""The oldest versions that `pyproject.toml` allows, as constraints for pip: `python -m tests.oldest`.

torch is left out: its builds take gigabytes, and the Makefile names one.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

PYPROJECT = Path(__file__).parent.parent / "pyproject.toml"
EXTRAS = ("executor", "notebooks", "lora", "tensorboard", "wandb")
LEFT_OUT = ("torch",)


def main() -> None:
    """Print a constraint a line."""
    print(*oldest(PYPROJECT.read_text(encoding="utf-8")), sep="\n")


def oldest(pyproject: str) -> Iterator[str]:
    """Yield each package that a project needs, at the version from which on it is allowed."""
    project = tomllib.loads(pyproject)["project"]
    extras = project["optional-dependencies"]
    for text in (*project["dependencies"], *(each for name in EXTRAS for each in extras[name])):
        requirement = Requirement(text)
        (least,) = (each.version for each in requirement.specifier if each.operator == ">=")
        if requirement.name not in LEFT_OUT:
            yield f"{requirement.name}=={least}"


if __name__ == "__main__":
    main()
