"""Write what this project is made of: NOTICE, an SBOM, and known vulnerabilities of the locked packages.

python -m tests.supply_chain notice            print NOTICE
python -m tests.supply_chain sbom FILE PYTHON  write a CycloneDX list of the packages of an environment
python -m tests.supply_chain audit             check requirements.lock against advisories

`cyclonedx-py` and `pip-audit` must be on the path; `make sbom` and `make audit` install them.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROFILES = ROOT / "profiles"
LOCK = ROOT / "requirements.lock"
HEAD_CHARS = 2000
"""Characters at the beginning of a file in which its source is searched."""
SOURCE = re.compile(r"^#.*?[Ss]ources?: *(.+)", re.MULTILINE)
FACTS = "facts of a published document, quoted with their source"
UNCHECKED = "facts, quoted with their source; the source's licence was not checked"
OWN = "Apache-2.0 (this project)"
LICENCES = (
    ("aiconfigurator", "Apache-2.0 (NVIDIA, metadata of aiconfigurator-core 0.12.0)"),
    ("Apache-2.0", "Apache-2.0"),
    ("(MIT)", "MIT"),
    ("splitwise-sim", "MIT"),
    ("flashinfer", "Apache-2.0"),
    ("config.json of", "facts of a model's config.json; its weights are not here"),
    ("datasheet", FACTS),
    ("whitepaper", FACTS),
    ("arXiv", FACTS),
    ("benchmarks/", OWN),
    ("this project", OWN),
    ("measured in", OWN),
    ("assumption", OWN),
)
"""Licence by what a source contains; the first that applies."""
HEAD = """streamrl
Licensed under the Apache License, Version 2.0; see LICENSE.

The files in profiles/ are tables, model shapes and GPU profiles. This list has the source and licence of each.
`python -m tests.supply_chain notice > NOTICE` writes it, and a test compares it with the files.
"""


def source_of(path: Path) -> str:
    """Return where the figures of a file come from, in one line; "each entry names its source" for lists of sources."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".toml" and isinstance(source := tomllib.loads(text).get("source"), str):
        return " ".join(source.split())
    found = SOURCE.search(text[:HEAD_CHARS])
    return " ".join(found[1].split()) if found else "each entry names its source"


def licence_of(source: str) -> str:
    """Return the licence of a source."""
    found = [licence for part, licence in LICENCES if part in source]
    is_mixed = {"Apache-2.0", "MIT"} <= {*found}
    return "Apache-2.0 and MIT" if is_mixed else next(iter(found), UNCHECKED)


def notice() -> str:
    """Return the text of NOTICE: each file under profiles/, by licence and source."""
    by_source: dict[tuple[str, str], list[str]] = defaultdict(list)
    for path in sorted(PROFILES.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            source = source_of(path)
            by_source[licence_of(source), source].append(path.relative_to(ROOT).as_posix())
    lines = [HEAD]
    for (licence, source), files in sorted(by_source.items()):
        lines += [f"Source: {source}", f"Licence: {licence}", *(f"  {each}" for each in files), ""]
    return "\n".join(lines)


def sbom(file: Path, python: str) -> None:
    """Write a CycloneDX list of the packages that are installed for an interpreter."""
    file.parent.mkdir(parents=True, exist_ok=True)
    command = ["cyclonedx-py", "environment", python, "--output-format", "JSON", "-o", str(file)]
    subprocess.run([*command, "--pyproject", str(ROOT / "pyproject.toml")], check=True)


def audit() -> int:
    """Print known vulnerabilities of the locked packages; return the exit status."""
    command = [
        "pip-audit",
        "--requirement",
        str(LOCK),
        "--disable-pip",
        "--progress-spinner",
        "off",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    num_locked = len(re.findall(r"^\S+==", LOCK.read_text(), re.MULTILINE))
    num_skipped = done.stdout.count("could not be audited")
    if num_skipped >= num_locked or (done.returncode and not done.stdout.strip()):
        print("audit skipped: no advisories can be reached from this machine")
        return 0
    print(done.stdout.strip() or "no known vulnerabilities")
    return done.returncode


def main() -> None:
    """Run one of the three."""
    match sys.argv[1:]:
        case ["notice"]:
            print(notice(), end="")
        case ["sbom", file, python]:
            sbom(Path(file), python)
        case ["audit"]:
            sys.exit(audit())
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
