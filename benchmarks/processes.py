"""Find the processes of a run by their roles."""

from __future__ import annotations

from pathlib import Path

DRIVER = "driver"
WORKERS = ("replica", "trainer", "relay", "Ray actor")
ROLES = {
    "replica": "ReplicaWorker",
    "trainer": "TrainerWorker",
    "relay": "RelayWorker",
    "verifier": "verifier.fork_server",
    "prefork_server": "launchers.prefork_server",
    "Ray actor": "ray::RayRole",
}
"""Text in the command line of each role's process. Workers are forked from a prefork server. Those of a Ray cluster all
have the same name. The driver is given.
"""


def processes_of(driver: int, *clusters: int) -> dict[str, list[int]]:
    """Return the processes of a run by role, with the driver.

    Args:
        driver: the process of `streamrl execute`.
        clusters: processes whose descendants also belong to the run, such as the head of a Ray cluster.
    """
    found = {DRIVER: [driver]}
    for entry in Path("/proc").iterdir():
        words = _command_line(entry) if entry.name.isdigit() else ""
        for role, word in ROLES.items():
            if word in words and _is_below(int(entry.name), {driver, *clusters}):
                found.setdefault(role, []).append(int(entry.name))
    return found


def _command_line(entry: Path) -> str:
    try:
        return (entry / "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""  # the process has ended


def _is_below(pid: int, roots: set[int]) -> bool:
    """Return whether a process is one of the roots, or a descendant of one."""
    while pid > 1:
        if pid in roots:
            return True
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            return False
    return False
