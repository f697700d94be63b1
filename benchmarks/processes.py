"""Find the processes of a run by their roles."""

from __future__ import annotations

from pathlib import Path

DRIVER = "driver"
WORKERS = ("replica", "trainer")
ROLES = {
    "replica": "ReplicaWorker",
    "trainer": "TrainerWorker",
    "verifier": "verifier.fork_server",
    "prefork_server": "launchers.prefork_server",
}
"""Text in the command line of each role's process. Workers are forked from a prefork server. The
driver is given.
"""


def processes_of(driver: int) -> dict[str, list[int]]:
    """Return the processes of a run by role, with the driver."""
    found = {DRIVER: [driver]}
    for entry in Path("/proc").iterdir():
        words = _command_line(entry) if entry.name.isdigit() else ""
        for role, word in ROLES.items():
            if word in words and _is_below(int(entry.name), driver):
                found.setdefault(role, []).append(int(entry.name))
    return found


def _command_line(entry: Path) -> str:
    try:
        return (entry / "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""  # the process has ended


def _is_below(pid: int, driver: int) -> bool:
    """Return whether a process is a descendant of the driver."""
    while pid > 1:
        if pid == driver:
            return True
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            return False
    return False
