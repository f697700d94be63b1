"""Do the tests catch what they are there for? Each mutation in mutants.toml must fail the test files named with it.

    python -m tests.mutants [NAME ...]

Works on copies of what git tracks, as it stands in the working tree. First the test files must pass as they
are. Exit status 1 where a mutation survives, 2 where one cannot be applied or the tests fail without any.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec

ROOT = Path(__file__).parent.parent
DATA = Path(__file__).with_suffix(".toml")
PYTEST = ("-x", "--tb=no", "-p", "no:cacheprovider")
"""Beside what `pyproject.toml` asks for."""
PASSED, FAILED = 0, 1  # exit statuses of pytest; others mean that nothing was tested
MOST_SECONDS = 900


class Mutant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One mutation."""

    name: str
    file: str
    find: str
    """Text that is in the file exactly once."""
    replace: str
    breaks: str
    """What goes wrong with it, in a sentence."""
    caught_by: list[str]
    """Test files of which one must fail."""


class Outcome(NamedTuple):
    """What pytest said of some test files."""

    failed: str
    """The test that failed first; empty where all passed."""
    seconds: float


def main() -> None:
    """Run the mutants named on the command line, or all of them."""
    try:
        mutants = load(sys.argv[1:])
        with tempfile.TemporaryDirectory(prefix="mutants-") as name:
            survived = run(mutants, Path(name))
    except ValueError as error:
        print(f"mutants: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"{len(mutants) - len(survived)} of {len(mutants)} mutants caught")
    sys.exit(1 if survived else 0)


def load(names: list[str]) -> list[Mutant]:
    """Read the mutants, or those named.

    Raises:
        ValueError: a name is of none, or a text is not in its file exactly once.
    """
    mutants = msgspec.toml.decode(DATA.read_bytes(), type=dict[str, list[Mutant]])["mutant"]
    if unknown := set(names) - {mutant.name for mutant in mutants}:
        raise ValueError(f"no mutant is called {', '.join(sorted(unknown))}")
    for mutant in mutants:
        count = (ROOT / mutant.file).read_text().count(mutant.find)
        if count != 1:
            raise ValueError(f"{mutant.name}: {mutant.file} has {mutant.find!r} {count} times")
    return [mutant for mutant in mutants if not names or mutant.name in names]


def run(mutants: list[Mutant], directory: Path) -> list[Mutant]:
    """Return the mutants that no test catches.

    Raises:
        ValueError: a test file fails without any mutation.
    """
    tree = directory / "tree"
    copy_tracked(tree)
    files = dict.fromkeys(file for mutant in mutants for file in mutant.caught_by)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for file, outcome in zip(
            files, pool.map(lambda file: run_tests(tree, [file]), files), strict=True
        ):
            if outcome.failed:
                raise ValueError(f"without any mutation {outcome.failed} fails")
            say("passes", file, outcome.seconds)
        outcomes = pool.map(lambda mutant: try_out(tree, mutant), mutants)
        return list(report(mutants, outcomes))


def report(mutants: list[Mutant], outcomes: Iterable[Outcome]) -> Iterable[Mutant]:
    """Print what became of each mutant, and yield those that survived."""
    for mutant, outcome in zip(mutants, outcomes, strict=True):
        say(
            "caught" if outcome.failed else "SURVIVED", mutant.name, outcome.seconds, outcome.failed
        )
        if not outcome.failed:
            yield mutant


def try_out(tree: Path, mutant: Mutant) -> Outcome:
    """Apply a mutation to a copy of the tree, and run the tests that are to catch it there."""
    mutated = tree.with_name(mutant.name)
    shutil.copytree(tree, mutated, symlinks=True, ignore=shutil.ignore_patterns(".hypothesis"))
    file = mutated / mutant.file
    file.write_text(file.read_text().replace(mutant.find, mutant.replace))
    for compiled in file.parent.glob(f"__pycache__/{file.stem}.*.pyc"):
        compiled.unlink()  # its source may have kept its size and, to the second, its time
    outcome = run_tests(mutated, mutant.caught_by)
    shutil.rmtree(mutated)
    return outcome


def run_tests(tree: Path, files: list[str]) -> Outcome:
    """Run test files of a tree up to the first failure.

    Raises:
        ValueError: pytest could not run them.
    """
    began_at = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *PYTEST, *files],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        timeout=MOST_SECONDS,
    )
    lines = done.stdout.splitlines()
    failed = [line.split()[1] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    if done.returncode not in (PASSED, FAILED) or not all("::" in test for test in failed):
        raise ValueError(f"{' '.join(files)}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return Outcome(next(iter(failed), ""), time.monotonic() - began_at)


def copy_tracked(tree: Path) -> None:
    """Copy what git tracks, as it stands in the working tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file() or (ROOT / name).is_symlink():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name, follow_symlinks=False)


def say(verdict: str, what: str, seconds: float, by: str = "") -> None:
    """Print one line now."""
    print(f"{verdict:9}{what:46}{seconds:6.1f} s  {by}".rstrip(), flush=True)


if __name__ == "__main__":
    main()
