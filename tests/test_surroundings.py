"""Commands in odd surroundings: closed streams, low limits, odd masks, directories that are gone, full or read-only.

A command works as ever, or says in one line what is wrong and what to do.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from streamrl.runfile.files import write_run
from tests.report_directories import write_trace
from tests.runs import small_run
from tests.test_external import write_run as write_executable
from tests.test_plan import few

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits and mounts of Linux")


class Surrounding(NamedTuple):
    """What a shell does before a command, in a directory of its own."""

    shell: str
    says: str = ""
    """What `simulate` says; empty if it works."""
    status: int = 2
    mounts: bool = False


FULL = "mkdir -p {0} && mount -t tmpfs -o size=4k tmpfs {0} && head -c 4096 /dev/zero > {0}/x"
READ_ONLY = "mkdir -p {0} && mount -t tmpfs -o ro tmpfs {0}"
SURROUNDINGS = {
    "all streams closed": Surrounding("exec <&- >&- 2>&-"),
    "no input": Surrounding("exec <&-"),
    "no input, no errors": Surrounding("exec <&- 2>&-"),
    "no output": Surrounding("exec >&-", "standard output is closed"),
    "private mask": Surrounding("umask 077"),
    "open mask": Surrounding("umask 0"),
    "eight files": Surrounding("ulimit -n 8", "raise the limit of open files (ulimit -n)", 1),
    "20 files": Surrounding("ulimit -n 20"),
    "files of 512 bytes": Surrounding("ulimit -f 1", "raise the limit of file sizes", 1),
    "little memory": Surrounding("ulimit -v 600000"),
    "no directory": Surrounding(
        "mkdir d; cd d; rmdir ../d", "the working directory cannot be used"
    ),
    "unreadable directory": Surrounding("mkdir d; cd d; chmod 0 ../d"),
    "no home": Surrounding("unset HOME"),
    "absent home": Surrounding("export HOME=/nonexistent/home"),
    "no such locale": Surrounding("export LC_ALL=xx_YY.nope LANG=xx_YY.nope"),
    "ASCII": Surrounding("export LC_ALL=C PYTHONUTF8=0"),
    "absent TMPDIR": Surrounding("export TMPDIR=/nonexistent/tmp"),
    "full TMPDIR": Surrounding(f"{FULL.format('full')}; export TMPDIR=$PWD/full", mounts=True),
    "read-only TMPDIR": Surrounding(
        f"{READ_ONLY.format('ro')}; export TMPDIR=$PWD/ro", mounts=True
    ),
    "read-only home": Surrounding(f"{READ_ONLY.format('h')}; export HOME=$PWD/h", mounts=True),
    "read-only output": Surrounding(READ_ONLY.format("out"), "name another place", mounts=True),
    "full shared memory": Surrounding(FULL.format("/dev/shm"), mounts=True),
}
ENTRY = [sys.executable, "-c", "from streamrl.cli import main; main()"]
PROGRESS = ("plan: ", "study: ", "step: ")


@cache
def can_mount() -> bool:
    """Return whether this user may mount in a namespace of its own."""
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return subprocess.run(command, capture_output=True).returncode == 0


def run_in(
    surrounding: Surrounding, directory: Path, words: list[str]
) -> subprocess.CompletedProcess[str]:
    """Run a command in a surrounding."""
    if surrounding.mounts and not can_mount():
        pytest.skip("needs mounts")
    before = ["unshare", "--mount"] if surrounding.mounts else []
    shell = ["sh", "-c", f'{surrounding.shell}\nexec "$@"', "sh"]
    here = Path(__file__).parent.parent
    return subprocess.run(
        [*before, *shell, *ENTRY, *words],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(here)},
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_a_simulation_works_or_says_in_one_line_why_not(tmp_path: Path, name: str) -> None:
    surrounding = SURROUNDINGS[name]
    write_run(small_run({"simulate.max_steps": 3}), tmp_path / "run.toml")
    words = ["simulate", str(tmp_path / "run.toml"), "-o", str(tmp_path / "out")]
    done = run_in(surrounding, tmp_path, words)
    written = (tmp_path / "out" / "trace.jsonl").exists()
    if name == "all streams closed":
        assert (done.returncode, done.stdout, done.stderr, written) == (2, "", "", False)
    elif surrounding.says:
        assert done.returncode == surrounding.status and not written, done.stderr
        assert done.stderr.count("\n") == 1 and done.stderr.startswith("streamrl: "), done.stderr
        assert surrounding.says in done.stderr
    else:
        assert done.returncode == 0 and written, done.stderr
        assert not done.stderr or "Matplotlib" in done.stderr, done.stderr


def words_of(command: str, directory: Path) -> list[str]:
    """Write what a command needs; return its words."""
    match command:
        case "plan":
            write_run(few(seeds=1, finalists=1), directory / "offer.toml")
            return ["plan", str(directory / "offer.toml"), "-o", str(directory / "out")]
        case "report":
            write_trace(directory / "run", small_run())
            return ["report", str(directory / "run"), "-o", str(directory / "out" / "page.html")]
        case _:
            file = write_executable(directory, ["http://127.0.0.1:1"], api="sglang")
            file.write_text(file.read_text().partition("[rollout.external]")[0])
            changes = ["algorithm.steps=2", "rollout.replicas=1", f"execute.output={directory}/out"]
            return ["execute", str(file), *(word for each in changes for word in ("--set", each))]


@pytest.mark.signals
@pytest.mark.parametrize("name", SURROUNDINGS)
@pytest.mark.parametrize("command", ["plan", "report", "execute"])
def test_other_commands_work_or_say_in_one_line_why_not(
    tmp_path: Path, command: str, name: str
) -> None:
    words = words_of(command, tmp_path)
    done = run_in(SURROUNDINGS[name], tmp_path, words)
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode in (0, 1, 2)
    told = [line for line in done.stderr.splitlines() if line.startswith("streamrl: ")]
    is_silent = "2>&-" in SURROUNDINGS[name].shell
    assert len(told) == (done.returncode != 0 and not is_silent), done.stderr
