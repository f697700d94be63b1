"""The example run files and scripts: in a checkout the folder `examples`, in an installed wheel a folder of the package."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path

from streamrl.runfile.result_files import write_files

PACKAGE = Path(__file__).parents[1]
SCHEMA = re.compile(r"\A#:schema .*\n")
"""The line for editors, which names a file of the checkout."""
COPIED = ("", "layouts", "studies", "clusters")
"""Folders of the run files and scripts that can be copied."""


def examples_folder() -> Path:
    """Return the folder of the examples.

    Raises:
        RuntimeError: this installation has none.
    """
    for folder in (PACKAGE / "examples", PACKAGE.parent / "examples"):
        if folder.is_dir():
            return folder
    raise RuntimeError(
        f"this installation of streamrl has no examples: {PACKAGE} has no folder examples"
    )


def example_names() -> list[str]:
    """Return the names of all run files, studies and cluster files: `plan-7b`, `studies/bandwidth`."""
    return [_name_of(path) for path in _files() if path.suffix == ".toml"]


def describe_example(name: str) -> str:
    """Return the title of a study, or the first sentence of a run file's comment, without its period."""
    text = _text_of(find_example(name))
    if isinstance(title := tomllib.loads(text).get("title"), str):
        return title
    comment = takewhile(lambda line: line.startswith("# "), text.splitlines())
    sentence = re.split(r"(?<=[.?])\s", " ".join(line[2:] for line in comment))[0]
    return sentence.removesuffix(".")


def find_example(name: str) -> Path:
    """Return the file of an example.

    Raises:
        ValueError: no example has this name. The error has the nearest one.
    """
    names = example_names()
    name = name.removeprefix("examples/").removesuffix(".toml")
    if name not in names:
        near = get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
        raise ValueError(f"no example {name!r}; {hint}")
    return examples_folder() / f"{name}.toml"


def copy_example(name: str, target: Path) -> list[Path]:
    """Copy an example, and the examples and scripts that it names, to a folder; return the new files.

    Raises:
        ValueError: no example has this name, or a file with other content is already there.
    """
    folder = examples_folder()
    needed = {
        target / path.relative_to(folder): _text_of(path)
        for path in _with_named(find_example(name))
    }
    for path, text in needed.items():
        if path.exists() and (path.is_dir() or path.read_bytes() != text.encode()):
            raise ValueError(f"{path} is already there; name another folder with --output")
    write_files(needed)
    return [*needed]


def _files() -> Iterator[Path]:
    for folder in COPIED:
        yield from sorted(
            path
            for path in (examples_folder() / folder).iterdir()
            if path.suffix in (".toml", ".py")
        )


def _name_of(path: Path) -> str:
    return path.relative_to(examples_folder()).with_suffix("").as_posix()


def _text_of(path: Path) -> str:
    return SCHEMA.sub("", path.read_text(encoding="utf-8"))


def _with_named(path: Path) -> list[Path]:
    """Return an example with all files that it names, and all that these name."""
    found = [path]
    for each in found:
        text = each.read_text(encoding="utf-8")
        found += [other for other in _files() if other not in found and _is_named(other, text)]
    return found


def _is_named(path: Path, text: str) -> bool:
    """Return whether a text has the name of a file, or imports it."""
    name, module = re.escape(path.name), re.escape(path.stem)
    found = rf"(?<![\w-]){name}\b|^(?:from|import) {module}\b"
    return re.search(found, text, re.MULTILINE) is not None
