"""Return the commands of a plan's page, for the folder in which `streamrl plan` was called."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from streamrl.report.page.sources import PlanMade
from streamrl.sim.planner.plan import PLAN_TOML

SOURCE = re.compile(
    r"^# (?:Chosen by|Option \d+ of) `streamrl plan (?P<words>[^`\n]*)`", re.MULTILINE
)
"""The comment of a plan file with the command that made it."""


def command_words(made: PlanMade) -> list[str]:
    """Return the words of the command that made a plan, without its directory; empty if the plan file has none."""
    words, _ = _recorded(made)
    return words


def directory_of(made: PlanMade) -> str:
    """Return the directory of a plan as the command that made it names it.

    A plan that was moved, or whose file has no command, has the directory that is reported.
    """
    reported = made.path.parent
    _, recorded = _recorded(made)
    is_same = recorded is not None and Path(recorded).name == reported.resolve().name
    return recorded if recorded is not None and is_same else str(reported)


def directory_beside(made: PlanMade, suffix: str) -> str:
    """Return a directory for another plan of the same question: "plans/7b-verl"."""
    own = Path(directory_of(made))
    return str(own.with_name(f"{own.name}-{suffix}")) if own.name not in ("", "..") else suffix


def plan_command(made: PlanMade, changes: list[str], suffix: str) -> str:
    """Return the command that plans again into a directory of its own.

    Args:
        made: the plan.
        changes: further words, such as "--set" and "plan.unit=1".
        suffix: the end of the directory's name.
    """
    words = command_words(made) or ["RUN.toml"]
    return shlex.join(["streamrl", "plan", *words, *changes, "-o", directory_beside(made, suffix)])


def _recorded(made: PlanMade) -> tuple[list[str], str | None]:
    """Return the words of the command in the plan file, and its directory; None if it names none."""
    found = SOURCE.search((made.path.parent / PLAN_TOML).read_text(encoding="utf-8"))
    try:
        words = shlex.split(found["words"]) if found is not None else []
    except ValueError:  # a quote without its end
        return [], None
    if "-o" not in words[:-1]:
        return words, None
    place = words.index("-o")
    return words[:place] + words[place + 2 :], words[place + 1]
