"""Check the wheel: install it into an empty environment beside PyPI's `executor`, and use both.

    make test-wheel

A wheel that installs a top-level package of its own beside `streamrl` overwrites somebody else's. This check
builds the wheel, installs it with `executor`, and fails when either of the two is broken by the other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
NEIGHBOUR = "executor==23.2"
"""A package of PyPI that has the name of one of our folders."""
EXAMPLE = "h20-h800"
SMALL = ("algorithm.steps=1", "algorithm.prompts_per_step=8")
IMPORTED = """
import executor, json, pkgutil, sys
import streamrl.executor, streamrl.sim.world
from streamrl.hardware.profiles import PROFILES, load_gpu
load_gpu("h20")
for _, name, _ in pkgutil.iter_modules(streamrl.__path__, "streamrl."):
    __import__(name)
files = [m.__file__ for name, m in sys.modules.items() if name.startswith(("streamrl", "sim", "exec"))]
files = [file for file in files if file and "/streamrl/" in file]
print(json.dumps({
    "neighbour": hasattr(executor, "execute"),
    "twice": sorted({file for file in files if files.count(file) > 1}),
    "alone": "sim" not in sys.modules,
}))
"""


def call(*command: str | Path, cwd: Path) -> str:
    """Run a command, and return what it prints; its own errors reach the terminal."""
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env=clean, text=True, stdout=subprocess.PIPE, check=True
    )
    return done.stdout


def top_level(listed: str) -> set[str]:
    """Return the top-level folders of a package that `pip show -f` lists, without its metadata."""
    files = listed.partition("Files:")[2].split()
    tops = {file.split("/")[0] for file in files if not file.startswith("..")}
    return {top for top in tops if not top.endswith(".dist-info")}


def main(folder: Path) -> None:
    """Build, install and use the wheel in `folder`, which must be empty or absent."""
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    call(*pip, "wheel", "--no-deps", "--wheel-dir", folder, ROOT, cwd=ROOT)
    (wheel,) = folder.glob("streamrl-*.whl")
    venv.create(folder / "env", with_pip=True)
    python = folder / "env" / "bin" / "python"
    install = (python, "-m", "pip", "install", "--quiet", "--no-compile")
    call(*install, NEIGHBOUR, wheel, cwd=folder)
    folders = top_level(call(python, "-m", "pip", "show", "-f", "streamrl", cwd=folder))
    assert folders == {"streamrl"}, folders
    found = json.loads(call(python, "-c", IMPORTED, cwd=folder))
    assert found == {"neighbour": True, "twice": [], "alone": True}, found
    settings = [word for change in SMALL for word in ("--set", change)]
    command = folder / "env" / "bin" / "streamrl"
    call(command, "examples", "copy", EXAMPLE, cwd=folder)
    copied = Path("examples", f"{EXAMPLE}.toml")
    result = json.loads(call(command, "simulate", copied, "--json", *settings, cwd=folder))
    assert result["step_time"] > 0
    print(f"{wheel.name}: one top-level folder, its examples run, and {NEIGHBOUR} works beside it")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
